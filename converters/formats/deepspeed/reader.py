"""DeepSpeed: ZeRO stages 1 to 3, BF16_Optimizer, and runs without ZeRO.

`latest` names a folder with one file of optimizer states per rank and one file of model states (stage 3: one
per rank). Redundant records are compared, and the layout computed from the parameters' shapes must match all
records of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from converters.checkpoint import Aliases, Checkpoint, OptimizerState
from converters.companions import find_companions, trainer_metadata
from converters.containers.pickle_reader import shown
from converters.containers.torchzip import StoredTensor
from converters.errors import CheckpointError
from converters.formats import Format, Source
from converters.formats.deepspeed.crosscheck import check_against_module
from converters.formats.deepspeed.flat_layout import (
    EqualSlices,
    Flat,
    Layout,
    Piece,
    WholeParameters,
    check_distinct,
    join,
    piece_of,
)
from converters.formats.deepspeed.nvme_swap import SwapFiles
from converters.formats.deepspeed.optimizer import build_optimizer, optimizer_steps
from converters.formats.deepspeed.rank_files import (
    Names,
    OptimFile,
    check_ranks,
    check_same,
    config_of,
    find_names,
    flat,
    fragment,
    read_model,
    read_optim,
)
from converters.formats.deepspeed.unsharded import open_unsharded
from converters.formats.torch_save.optimizer import as_tensor
from converters.names.canonical import plain_names
from converters.storage.folder import Folder
from converters.storage.guarded import child, read_small

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.storage.path_or_url import Place
    from converters.tensors.tensor import Tensor

LATEST = "latest"
_FP32_SLICES, _FP32_GROUPS = "single_partition_of_fp32_groups", "fp32_flat_groups"
_ACCELERATE_MODEL = "pytorch_model"


def _latest(path: Place) -> str | None:
    """The content of `latest`; None where there is no such file."""
    try:
        return read_small(path / LATEST, limit=1024, head=True).decode("utf-8", "replace").strip()
    except OSError:
        return None


def _below(path: Place, tag: str) -> Place | None:
    """The folder of a tag, if the tag is a plain name and the folder has rank files."""
    if tag in ("", ".", "..") or any(mark in tag for mark in "/\\\0"):
        return None
    return child(path, tag) if _holds(path / tag) else None


def _shard_folder(source: Source) -> Place | None:
    """The folder of rank files to open for `source`."""
    path = source.path
    if path.is_file():
        return path.parent if path.name.endswith(("_model_states.pt", "_optim_states.pt")) else None
    if source.tag is not None:
        return _below(path, source.tag) or _below(path, f"global_step{source.tag}")
    if _holds(path):
        return path
    tag, tags = _latest(path), _tags(path)
    if tag is None:
        return child(path, tags[0]) if len(tags) == 1 else None
    found = _below(path, tag)
    if found is None and tags:
        # Another tag is another step; do not guess.
        raise CheckpointError(
            f"{path / LATEST}: names {shown(tag)}, which holds no DeepSpeed files; choose with --tag: "
            + ", ".join(map(shown, tags[:8]))
        )
    return found


def _tags(path: Place) -> list[str]:
    """The folders with rank files in `path`."""
    try:
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and _holds(entry))
    except OSError:
        return []


def _holds(path: Place) -> bool:
    """Whether `path` has rank files. A universal checkpoint has model files too, beside its `zero/`."""
    names = find_names(path)
    return names is not None and bool(names.optim or not (path / "zero").is_dir())


def _detect(source: Source) -> bool:
    return _shard_folder(source) is not None


def _incomplete(source: Source) -> str | None:
    tag = _latest(source.path)
    if tag is not None:
        return f"{source.path / LATEST}: names {shown(tag)}, which holds no DeepSpeed files"
    return None


def _refuse_several_models(given: Place, found: Place) -> None:
    """Accelerate saves several models into folders side by side; `latest` names only the last."""
    if given == found or not found.name.startswith(_ACCELERATE_MODEL):
        return
    models = [
        entry for entry in given.iterdir() if entry.name.startswith(_ACCELERATE_MODEL) and _holds(entry)
    ]
    if len(models) > 1:
        raise CheckpointError(f"{given}: holds several models; give one of its {_ACCELERATE_MODEL}* folders")


def _open(source: Source) -> Checkpoint:
    path = _shard_folder(source)
    names = find_names(path) if path is not None else None
    if path is None or names is None:
        raise CheckpointError(f"{source.path}: not a DeepSpeed checkpoint")
    _refuse_several_models(source.path, path)
    if not names.model:
        raise CheckpointError(f"{path}: the model states are missing, only optimizer states were found")
    folder = Folder(path, verify=source.verify)
    if not names.optim:
        if names.per_rank_model or list(names.model) != [0]:
            raise CheckpointError(f"{path}: the optimizer states of all ranks are missing")
        return open_unsharded(folder, names.model[0], source.path)
    return _Run(folder, names).checkpoint(source.path)


class _Run:
    """The rank files of one ZeRO checkpoint, read and compared."""

    def __init__(self, folder: Folder, names: Names) -> None:
        self.folder = folder
        self.where = where = str(folder.path)
        self.optim = [read_optim(folder, name) for name in names.optim.values()]
        first = self.optim[0]
        self.bf16_optimizer = "zero_stage" not in first.state and _FP32_SLICES in first.state
        stage = 1 if self.bf16_optimizer else first.state.get("zero_stage")
        if type(stage) is not int or stage not in (1, 2, 3):
            raise CheckpointError(f"{first.where}: unknown ZeRO stage {shown(stage)}")
        self.stage: int = stage
        self.world = self._world(first)
        check_ranks(folder.path, names.optim, self.world, "optimizer")
        self._check_options(first)
        if names.per_rank_model != (self.stage == 3):
            raise CheckpointError(
                f"{where}: its model states are not of ZeRO stage {self.stage}; the files are from two runs"
            )
        check_ranks(folder.path, names.model, self.world if self.stage == 3 else 1, "model")
        self.model = read_model(folder, names.model[0])
        self.models = [self.model]
        self._check_one_run([name for rank, name in names.model.items() if rank])
        if self.model.groups is None:
            raise CheckpointError(f"{self.model.where}: has no param_shapes")
        self.shapes = self.model.groups
        self.flats = self._flats()
        # Stages 1 and 2 only.
        self.slices = [] if self.stage == 3 else [self._slices(group) for group in range(len(self.shapes))]
        self.layouts: Sequence[Layout] = self.slices
        if self.stage == 3:
            self.layouts = [WholeParameters(shapes, self.world, where) for shapes in self.shapes]

    @staticmethod
    def _world(first: OptimFile) -> int:
        counts = first.state.get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise CheckpointError(f"{first.where}: damaged, no partition_count")
        if any(count != counts[0] for count in counts):
            raise CheckpointError(f"{first.where}: expert parallel checkpoints are not supported")
        return int(counts[0])

    def _check_options(self, first: OptimFile) -> None:
        """Refuse options that change the data layout."""
        options = first.config.get("zero_optimization")
        self.options: dict[str, Any] = options if isinstance(options, dict) else {}
        shards = self.options.get("mics_shard_size", -1)
        if type(shards) is int and shards > 0:
            raise CheckpointError(f"{first.where}: MiCS checkpoints are not supported")
        if self.options.get("zero_quantized_nontrainable_weights") is True:
            raise CheckpointError(f"{first.where}: quantized frozen weights are not supported")

    def _check_one_run(self, other_models: list[str]) -> None:
        """Compare all files with the first ones; keep only the fragments of the other model files."""
        first, model = self.optim[0], self.model
        config = config_of({"ds_config": first.config})
        records = ("zero_stage", "partition_count", "param_alignment_paddings", "ds_version", "clip_grad")
        for rank in self.optim:
            check_same(rank.where, "ds_version", rank.version, first.version)
            check_same(rank.where, "ds_config", config_of({"ds_config": rank.config}), config)
            for record in records:
                check_same(rank.where, record, rank.state.get(record), first.state.get(record))
        check_same(model.where, "ds_version", model.content.get("ds_version"), first.version)
        check_same(model.where, "ds_config", config_of(model.content), config)
        count = model.count("dp_world_size")
        if count is not None and count != self.world:
            raise CheckpointError(
                f"{model.where}: has a world size of {count}, the optimizer states {self.world}"
            )
        for name in other_models:
            other = read_model(self.folder, name)
            check_same(other.where, "ds_version", other.content.get("ds_version"), first.version)
            check_same(other.where, "ds_config", config_of(other.content), config)
            for record in ("global_steps", "skipped_steps", "global_samples", "dp_world_size"):
                check_same(other.where, record, other.content.get(record), model.content.get(record))
            check_same(other.where, "param_shapes", _ordered(other.groups), _ordered(model.groups))
            check_same(other.where, "frozen_param_shapes", other.frozen, model.frozen)
            check_same(other.where, "frozen parameters", set(other.fragments), set(model.fragments))
            check_same(other.where, "buffer_names", other.buffers, model.buffers)
            self.models.append(replace(other, module={}, content={}, groups=None))

    def _flats(self) -> list[Flat]:
        """The fp32 masters, one flat buffer per group."""
        key = _FP32_GROUPS if self.stage == 3 else _FP32_SLICES
        by_rank: list[list[Piece]] = []
        for rank in self.optim:
            groups = rank.state.get(key)
            if not isinstance(groups, (list, tuple)) or len(groups) != len(self.shapes):
                count = len(groups) if isinstance(groups, (list, tuple)) else 0
                raise CheckpointError(
                    f"{rank.where}: holds {count} parameter groups, the model states {len(self.shapes)}"
                )
            stored = [flat(group, f"{rank.where}: {key}") for group in groups]
            check_distinct(stored, rank.where)
            by_rank.append([piece_of(group) for group in stored])
        if self.stage == 3:
            self._fill_from_swap(by_rank)
        return [join(pieces, self.where) for pieces in zip(*by_rank, strict=True)]

    def _fill_from_swap(self, by_rank: list[list[Piece]]) -> None:
        """Replace buffers that were pickled empty by their swap files."""
        layouts = [WholeParameters(shapes, self.world, self.where) for shapes in self.shapes]
        for rank, pieces in enumerate(by_rank):
            for group, (piece, layout) in enumerate(zip(pieces, layouts, strict=True)):
                if not piece.numel and layout.length:
                    pieces[group] = self.swap.piece(rank, layout, piece.dtype)

    @cached_property
    def swap(self) -> SwapFiles:
        buffers = {*self.model.buffers, *self.model.shared}
        return SwapFiles(self.folder, [name for name in self.model.module if name not in buffers])

    def _slices(self, group: int) -> EqualSlices:
        """The layout of one group of stages 1 and 2, checked against every record of it."""
        shapes = self.shapes[group]
        held = [piece.numel for piece in self.flats[group].pieces]
        paddings = [self._padding(rank, group) for rank in self.optim]
        whole = [
            count if self.bf16_optimizer else count + padding
            for count, padding in zip(held, paddings, strict=True)
        ]
        if len(set(whole)) != 1:
            raise CheckpointError(f"{self.where}: damaged, the ranks' slices of group {group} differ in size")
        layout = EqualSlices(shapes, self._gaps(group), self.world, whole[0], self.where)
        total = layout.slice * self.world - layout.used
        for rank, padding in enumerate(paddings):
            expected = layout.padding(rank)
            if self.bf16_optimizer:  # it records all padding on the last rank
                expected = total if rank == self.world - 1 else 0
            if padding != expected:
                raise CheckpointError(
                    f"{self.optim[rank].where}: has a padding of {padding} in group {group}, not {expected}"
                )
        self._check_mappings(group, layout)
        return layout

    def _gaps(self, group: int) -> list[int]:
        count = len(self.shapes[group])
        gaps = self.optim[0].state.get("param_alignment_paddings")
        if gaps is None:
            return [0] * count
        found = gaps[group] if isinstance(gaps, list) and group < len(gaps) else None
        if (
            not isinstance(found, list)
            or len(found) != count
            or any(type(n) is not int or n < 0 for n in found)
        ):
            raise CheckpointError(
                f"{self.optim[0].where}: damaged, its param_alignment_paddings do not match the groups"
            )
        return found

    @staticmethod
    def _padding(rank: OptimFile, group: int) -> int:
        paddings = rank.state.get("group_paddings")
        if not isinstance(paddings, list) or group >= len(paddings) or type(paddings[group]) is not int:
            raise CheckpointError(f"{rank.where}: damaged, no group_paddings")
        return int(paddings[group])

    def _check_mappings(self, group: int, layout: EqualSlices) -> None:
        """`param_slice_mappings` of each rank must match the layout."""
        shuffled = self.options.get("round_robin_gradients") is True and not any(self._gaps(group))
        starts = layout.starts_before_round_robin() if shuffled else None
        for number, rank in enumerate(self.optim):
            mappings = rank.state.get("param_slice_mappings")
            if mappings is None:  # before DeepSpeed 0.7
                continue
            table = mappings[group] if isinstance(mappings, list) and group < len(mappings) else None
            if not isinstance(table, dict):
                raise CheckpointError(f"{rank.where}: damaged, its param_slice_mappings lack a group")
            recorded = {name: fragment(value, rank.where) for name, value in table.items()}
            expected = layout.fragments(number, starts)
            if recorded != expected:
                name = next(
                    (name for name in {**expected, **recorded} if recorded.get(name) != expected.get(name)),
                    "",
                )
                raise CheckpointError(
                    f"{rank.where}: damaged, its param_slice_mappings disagree with param_shapes about "
                    f"{name!r} on rank {number} of {self.world}"
                )

    def checkpoint(self, root: Place) -> Checkpoint:
        masters: dict[str, Tensor] = {}
        for layout, flat_ in zip(self.layouts, self.flats, strict=True):
            for name, tensor in layout.tensors(flat_).items():
                if name in masters:
                    raise CheckpointError(f"{self.model.where}: {name!r} is in two parameter groups")
                masters[name] = tensor
        compared = self.stage != 3 and self._check_module(masters)
        tensors = {**masters, **self._frozen()}
        aliases = self._aliases(tensors)
        others = [name for name in self.model.module if name not in tensors and name not in aliases]
        if self.stage == 3:
            held = [name for name in others if _has_elements(self.model.module[name])]
            lost = [
                name
                for name in others
                if name not in held and name not in self.model.buffers and _is_tensor(self.model.module[name])
            ]
            if lost:
                raise CheckpointError(f"{self.model.where}: names {lost[0]!r}, whose values were not saved")
        for name in others:
            value = self.model.module[name]
            if isinstance(value, StoredTensor):
                tensors[name] = as_tensor(value, name)
        missing = [name for name in self.model.buffers if name not in tensors and name not in aliases]
        if missing:
            raise CheckpointError(f"{self.model.where}: the buffer {missing[0]!r} is named but missing")
        steps = optimizer_steps(self.stage, self.optim, len(self.shapes))
        self._check_steps(steps, compared or len(tensors) == len(masters))
        plain = plain_names(tensors, where=self.where)
        short = dict(zip(tensors, plain, strict=True))
        known = {
            alias: short[owner]
            for alias, owner in zip(plain_names(aliases, where=self.where), aliases.values(), strict=True)
        }

        def optimizer(_: Aliases) -> OptimizerState | None:
            return build_optimizer(self.stage, self.optim, self.layouts, short, self.swap)

        return Checkpoint(
            format="deepspeed",
            root=root,
            tensors=plain,
            aliases=known,
            optimizer=optimizer,
            metadata={**trainer_metadata(root), **self._metadata()},
            companions=find_companions(self.folder.path),
            counters=self.model.counters,
        )

    def _check_module(self, masters: dict[str, Tensor]) -> bool:
        """Compare the masters with the weights in the model states: shapes, and a sample of values."""
        compared = 0
        for layout, flat_ in zip(self.slices, self.flats, strict=True):
            compared += check_against_module(layout, flat_, self.model, zenflow="zenflow" in self.options)
        return compared > 0

    def _frozen(self) -> dict[str, Tensor]:
        """Parameters outside the optimizer: frozen, or without elements."""
        frozen = self.model.frozen or {}
        check_same(self.model.where, "frozen parameters", set(self.model.fragments), set(frozen))
        made: dict[str, Tensor] = {}
        for name, shape in frozen.items():
            where = f"{self.model.where}: {name!r}"
            if self.stage < 3:
                stored = self.model.fragments[name]
                if stored.shape != shape:
                    raise CheckpointError(f"{where}: is {list(stored.shape)}, recorded as {list(shape)}")
                made[name] = as_tensor(stored, name)
                continue
            pieces = [flat(model.fragments[name], model.where) for model in self.models]
            whole = join([piece_of(piece) for piece in pieces], where)
            made |= WholeParameters({name: shape}, self.world, where).tensors(whole)
        return made

    def _aliases(self, tensors: dict[str, Tensor]) -> dict[str, str]:
        aliases = {}
        for alias, owner in self.model.shared.items():
            # Parameters without elements share an address without being tied.
            if owner not in tensors or not tensors[owner].numel:
                continue
            if alias in tensors:
                raise CheckpointError(f"{self.model.where}: {alias!r} is tied to {owner!r} and also stored")
            stored = self.model.module.get(alias)
            if self.stage < 3 and isinstance(stored, StoredTensor) and stored.shape != tensors[owner].shape:
                raise CheckpointError(
                    f"{self.model.where}: {alias!r} is tied to {owner!r}, which has another shape"
                )
            aliases[alias] = owner
        return aliases

    def _check_steps(self, steps: int | None, compared: bool) -> None:
        """The optimizer's step must match the engine's, where no values were compared."""
        total, skipped = self.model.count("global_steps"), self.model.count("skipped_steps") or 0
        if steps is None or total is None or compared:
            return
        if steps != total - skipped:
            raise CheckpointError(
                f"{self.model.where}: is at step {total - skipped}, the optimizer states are at step {steps}"
            )

    def _metadata(self) -> dict[str, Any]:
        metadata = {
            "step": self.model.count("global_steps"),
            "world_size": self.world,
            "ds_version": self.optim[0].version,
            "zero_stage": self.stage,
            "tag": self.folder.path.name,
        }
        return {key: value for key, value in metadata.items() if isinstance(value, (int, str))}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, StoredTensor)


def _has_elements(value: Any) -> bool:
    return isinstance(value, StoredTensor) and prod(value.shape) > 0


def _ordered(groups: Any) -> Any:
    """Group tables as lists, since their order is the layout."""
    return None if groups is None else [list(group.items()) for group in groups]


FORMAT = Format(
    "deepspeed",
    _detect,
    _open,
    _incomplete,
    tags=True,
    written_by="DeepSpeed ZeRO 0 to 3, alone or inside Accelerate and the Trainer",
    recognised_by="`*_optim_states.pt` and `*_model_states.pt`; `latest`",
)
