"""The rank files of one ZeRO run, read, compared, and put together.

With tensor or pipeline parallelism, these are the files of one tensor or pipeline parallel rank. Names are
those of the files.
"""

from __future__ import annotations

from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.containers.pickle_reader import format_value, to_json_value
from portable.converters.containers.shard_index import check_ranks
from portable.converters.errors import CheckpointError
from portable.converters.formats.deepspeed.checks import check_against_module
from portable.converters.formats.deepspeed.deferred_files import (
    MASTERS,
    SliceLengths,
    defer_model,
    defer_optim,
)
from portable.converters.formats.deepspeed.flat_layout import (
    EqualSlices,
    Flat,
    FlatPiece,
    Layout,
    ParameterShare,
    SwapFiles,
    WholeParameters,
    check_distinct,
    join_pieces,
    to_piece,
)
from portable.converters.formats.deepspeed.optimizer import build_optimizer, read_optimizer_steps
from portable.converters.formats.deepspeed.rank_files import (
    TIED,
    ModelFile,
    OptimFile,
    Weights,
    check_same,
    partition_counts,
    read_fragment,
    read_models,
    read_optim,
    require_flat,
    with_model_states,
)
from portable.converters.storage.folder_operations import map_ahead

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.checkpoint import OptimizerState
    from portable.converters.formats.deepspeed.expert_files import Experts
    from portable.converters.storage.folder import Folder
    from portable.converters.tensors.tensor import Tensor

_FP32_GROUPS = "fp32_flat_groups"


class SavedRun:
    """The files of all data parallel ranks.

    Args:
        optim, names: data parallel rank -> file of optimizer states, of model states.
        model: the first file of model states, or with `rank` that of this rank, read already.
        experts: the files of single experts, if there are any.
        rank: data parallel rank of the reader, which opens the files of the others only to read their values;
            None to open all files.

    Raises:
        CheckpointError: files are missing, damaged or of several runs, or the layout is not supported.
    """

    def __init__(
        self,
        folder: Folder,
        optim: Mapping[int, str],
        names: Mapping[int, str],
        model: ModelFile,
        *,
        per_rank_model: bool,
        experts: Experts | None = None,
        rank: int | None = None,
    ) -> None:
        self.rank = rank
        self.folder = folder
        self.where = location = str(folder.path)
        self.experts = experts
        self.model = model
        self.optim = self._read_optim(optim)
        first = self.optim[0]
        self.bf16_optimizer = "zero_stage" not in first.state and MASTERS in first.state
        stage = 1 if self.bf16_optimizer else first.state.get("zero_stage")
        if type(stage) is not int or stage not in (1, 2, 3):
            raise CheckpointError(f"{first.where}: unknown ZeRO stage {format_value(stage)}")
        self.stage: int = stage
        if experts is not None and stage == 3:
            raise CheckpointError(f"{location}: expert parallel checkpoints of ZeRO-3 are not supported")
        self.counts = partition_counts(first.state, first.where)
        self.world = max(self.counts)
        check_ranks(folder.path, optim, self.world, "optimizer")
        self._check_options(first)
        if per_rank_model != (self.stage == 3):
            raise CheckpointError(
                f"{location}: its model states are not of ZeRO stage {self.stage}; the files are from two "
                "runs"
            )
        check_ranks(folder.path, names, self.world if self.stage == 3 else 1, "model")
        self._check_one_run()
        if self.rank is None or self.stage != 3:
            self.models = read_models(folder, model, [name for rank, name in names.items() if rank])
        else:
            self.models = [
                model if rank == self.rank else defer_model(folder, name, model)
                for rank, name in names.items()
            ]
        if self.model.groups is None:
            why = "; pipelines in bf16 without ZeRO are not supported" if self.model.pipeline else ""
            raise CheckpointError(f"{self.model.where}: has no param_shapes{why}")
        self.shapes = self.model.groups
        self.shares = [share for group in range(len(self.shapes)) for share in self._find_shares(group)]
        self.flats = self._join_masters()
        # Stages 1 and 2 only.
        self.slices = [] if self.stage == 3 else [self._build_slices(*pair) for pair in self._with_flats()]
        self.layouts: Sequence[Layout] = self.slices
        if self.stage == 3:
            self.layouts = [WholeParameters(shapes, self.world, location) for shapes in self.shapes]

    def _read_optim(self, names: Mapping[int, str]) -> list[OptimFile]:
        """Read the files of optimizer states, with `rank` only that of this rank."""
        if self.rank is not None:
            own = read_optim(self.folder, names[self.rank])
            stage = own.state.get("zero_stage")
            if stage == 3 or (stage in (1, 2) and self.model.groups):
                slices = None if stage == 3 else self._list_slices(own)
                return [
                    own if rank == self.rank else self._defer_optim(own, name, rank, slices)
                    for rank, name in names.items()
                ]
            self.rank = None
        return list(map_ahead(self.folder.path, partial(read_optim, self.folder), names.values()))

    def _defer_optim(
        self, own: OptimFile, name: str, rank: int, slices: list[EqualSlices] | None
    ) -> OptimFile:
        """Describe the file of another rank by this rank's file `own`."""
        assert self.rank is not None
        lengths = None
        if slices is not None:
            lengths = [
                SliceLengths(layout.count_unpadded(self.rank), layout.count_unpadded(rank), layout.slice)
                for layout in slices
            ]
        return defer_optim(self.folder, name, own, lengths)

    def _list_slices(self, own: OptimFile) -> list[EqualSlices]:
        """Return the layout of each group of parameters in the slices of all ranks."""
        slices = []
        masters = own.state.get(MASTERS)
        for group, shapes in enumerate(self.model.groups or ()):
            if not isinstance(masters, list) or group >= len(masters):
                raise CheckpointError(f"{own.where}: damaged, it lacks a parameter group")
            size = prod(require_flat(masters[group], f"{own.where}: {MASTERS}").shape) + own.get_padding(
                group
            )
            world = max(partition_counts(own.state, own.where))
            slices.append(EqualSlices(shapes, own.get_gaps(group, len(shapes)), world, size, self.where))
        return slices

    def _find_shares(self, group: int) -> list[ParameterShare]:
        """The sets of ranks that hold a group: one of all ranks, or one for each set of experts."""
        location, shapes = self.optim[0].where, self.shapes[group]
        if len(self.counts) not in (1, len(self.shapes)):
            raise CheckpointError(f"{location}: damaged, its partition_count does not match the groups")
        count = self.counts[group if len(self.counts) > 1 else 0]
        local = self.experts is not None and self.experts.are_expert_parameters(shapes)
        if not local and count != self.world:
            raise CheckpointError(
                f"{location}: a group is partitioned over {count} of {self.world} ranks, and the files of "
                "its expert parallel parameters are missing"
            )
        if not local:
            return [ParameterShare(group, tuple(range(self.world)), {name: name for name in shapes})]
        assert self.experts is not None
        if self.world % count:
            raise CheckpointError(f"{location}: damaged, a group on {count} of {self.world} ranks")
        sets = self.world // count
        # DeepSpeed's topologies: neighboring ranks have different experts, or the same.
        together = self.optim[0].config.get("use_data_before_expert_parallelism") is True
        return [
            ParameterShare(
                group,
                tuple(
                    range(index * count, (index + 1) * count) if together else range(index, self.world, sets)
                ),
                self.experts.map_to_complete_names(shapes, index),
            )
            for index in range(sets)
        ]

    def _check_options(self, first: OptimFile) -> None:
        """Refuse options that change the data layout."""
        options = first.config.get("zero_optimization")
        self.options: dict[str, Any] = options if isinstance(options, dict) else {}
        shards = self.options.get("mics_shard_size", -1)
        # MiCS: each group of so many ranks holds the whole, and all write the same files.
        self.mics = type(shards) is int and shards > 0
        if self.mics and (self.stage, self.world) != (3, shards):
            raise CheckpointError(
                f"{first.where}: MiCS checkpoints of {shards} shards with {self.world} ranks in a group, in "
                f"stage {self.stage}, are not supported"
            )
        if self.options.get("zero_quantized_nontrainable_weights") is True:
            raise CheckpointError(f"{first.where}: quantized frozen weights are not supported")

    def _check_one_run(self) -> None:
        """Compare the files of optimizer states with the first one, and with the model states."""
        model, first = self.model, self.optim[0].get_shared_records()
        for rank in self.optim:
            for record, value in rank.get_shared_records().items():
                check_same(rank.where, record, value, first[record])
        for record, value in model.get_shared_records().items():
            if record in ("ds_version", "ds_config"):
                check_same(model.where, record, value, first[record])
        count = model.get_counter("dp_world_size")
        if count is not None and (count % self.world if self.mics else count != self.world):
            raise CheckpointError(
                f"{model.where}: has a world size of {count}, the optimizer states {self.world}"
            )

    def _join_masters(self) -> list[Flat]:
        """The fp32 masters, one flat buffer per share."""
        key = _FP32_GROUPS if self.stage == 3 else MASTERS

        def locate(rank: OptimFile) -> list[FlatPiece]:
            groups = rank.state.get(key)
            if not isinstance(groups, (list, tuple)) or len(groups) != len(self.shapes):
                count = len(groups) if isinstance(groups, (list, tuple)) else 0
                raise CheckpointError(
                    f"{rank.where}: holds {count} parameter groups, the model states {len(self.shapes)}"
                )
            stored = [require_flat(group, f"{rank.where}: {key}") for group in groups]
            check_distinct(stored, rank.where)
            return [to_piece(group) for group in stored]

        by_rank = list(map_ahead(self.folder.path, locate, self.optim))
        if self.stage == 3:
            self._fill_from_swap(by_rank)
        return [
            join_pieces([by_rank[rank][share.group] for rank in share.ranks], self.where)
            for share in self.shares
        ]

    def _fill_from_swap(self, by_rank: list[list[FlatPiece]]) -> None:
        """Replace buffers that were pickled empty by their swap files."""
        layouts = [WholeParameters(shapes, self.world, self.where) for shapes in self.shapes]
        for rank, pieces in enumerate(by_rank):
            for group, (piece, layout) in enumerate(zip(pieces, layouts, strict=True)):
                if not piece.numel and layout.length:
                    pieces[group] = self.swap.open_piece(rank, layout, piece.dtype)

    @cached_property
    def swap(self) -> SwapFiles:
        buffers = {*self.model.buffers, *self.model.shared}
        return SwapFiles(self.folder, [name for name in self.model.module if name not in buffers])

    def _with_flats(self) -> list[tuple[ParameterShare, Flat]]:
        return list(zip(self.shares, self.flats, strict=True))

    def _build_slices(self, share: ParameterShare, masters: Flat) -> EqualSlices:
        """The layout of one group of stages 1 and 2, checked against every record of it."""
        group, ranks = share.group, [self.optim[rank] for rank in share.ranks]
        sizes = [piece.numel for piece in masters]
        paddings = [rank.get_padding(group) for rank in ranks]
        whole = [
            count if self.bf16_optimizer else count + padding
            for count, padding in zip(sizes, paddings, strict=True)
        ]
        if len(set(whole)) != 1:
            raise CheckpointError(f"{self.where}: damaged, the ranks' slices of group {group} differ in size")
        gaps = self.optim[0].get_gaps(group, len(self.shapes[group]))
        layout = EqualSlices(self.shapes[group], gaps, len(ranks), whole[0], self.where)
        total = layout.slice * len(ranks) - layout.used
        for index, (rank, padding) in enumerate(zip(ranks, paddings, strict=True)):
            expected = layout.count_padding(index)
            if self.bf16_optimizer:  # it records all padding on the last rank
                expected = total if index == len(ranks) - 1 else 0
            if padding != expected:
                raise CheckpointError(
                    f"{rank.where}: has a padding of {padding} in group {group}, not {expected}"
                )
        self._check_mappings(share, layout)
        return layout

    def _check_mappings(self, share: ParameterShare, layout: EqualSlices) -> None:
        """`param_slice_mappings` of each rank must match the layout."""
        group = share.group
        if self.options.get("round_robin_gradients") is True and not any(layout.gaps):
            return  # DeepSpeed records the order from before it shuffled; values are compared anyway
        for number, rank in enumerate(self.optim[rank] for rank in share.ranks):
            mappings = rank.state.get("param_slice_mappings")
            if mappings is None:  # before DeepSpeed 0.7
                continue
            table = mappings[group] if isinstance(mappings, list) and group < len(mappings) else None
            if not isinstance(table, dict):
                raise CheckpointError(f"{rank.where}: damaged, its param_slice_mappings lack a group")
            recorded = {name: read_fragment(value, rank.where) for name, value in table.items()}
            expected = layout.find_fragments(number)
            if recorded != expected:
                name = next(
                    (name for name in {**expected, **recorded} if recorded.get(name) != expected.get(name)),
                    "",
                )
                raise CheckpointError(
                    f"{rank.where}: damaged, its param_slice_mappings disagree with param_shapes about "
                    f"{name!r} on rank {number} of {layout.world}"
                )

    def build_weights(self) -> Weights:
        """Everything but the optimizer, checked against the second copies in the model states."""
        masters: dict[str, Tensor] = {}
        for layout, (share, flat_) in zip(self.layouts, self._with_flats(), strict=True):
            for name, tensor in layout.split_flat(flat_).items():
                name = share.names[name]
                if name in masters:
                    raise CheckpointError(f"{self.model.where}: {name!r} is in two parameter groups")
                masters[name] = tensor
        compared = self.stage != 3 and self._check_module()
        weights = with_model_states(masters, self.models, self._module, self.stage, self.world)
        steps = read_optimizer_steps(self.folder.path, self.stage, self.optim, len(self.shapes))
        self._check_steps(steps, compared or len(weights.tensors) == len(masters))
        return weights

    def build_optimizer(self) -> OptimizerState | None:
        """The optimizer's state and groups; None if the files hold none."""
        return build_optimizer(self.stage, self.optim, self.layouts, self.shares, self.swap)

    @cached_property
    def _module(self) -> dict[str, Any]:
        """The state dict, with the experts of all files."""
        return {**self.model.module, **({} if self.experts is None else self.experts.stored)}

    def _check_module(self) -> bool:
        """Compare the masters with the weights in the model states: shapes, and a sample of values."""
        compared = 0
        for layout, (share, flat_) in zip(self.slices, self._with_flats(), strict=True):
            compared += check_against_module(
                layout,
                share,
                flat_,
                self._module,
                self.model.where,
                # A pipeline's files have other names for tied layers, which are compared with them later.
                elsewhere=[name for name in share.names if self.model.pipeline and name.startswith(TIED)],
                zenflow="zenflow" in self.options,
                ranks=None if self.rank is None else [self.rank],
            )
        return compared > 0

    def _check_steps(self, steps: int | None, compared: bool) -> None:
        """The optimizer's step must match the engine's, where no values were compared."""
        total, skipped = self.model.get_counter("global_steps"), self.model.get_counter("skipped_steps") or 0
        if steps is None or total is None or compared:
            return
        if steps != total - skipped:
            raise CheckpointError(
                f"{self.model.where}: is at step {total - skipped}, the optimizer states are at step {steps}"
            )


def check_same_run(runs: Sequence[SavedRun]) -> None:
    """CheckpointError unless the tensor or pipeline parallel ranks are of one run and step."""
    first = _get_shared_records(runs[0])
    for run in runs[1:]:
        for record, value in _get_shared_records(run).items():
            check_same(run.model.where, record, value, first[record])


def _get_shared_records(run: SavedRun) -> dict[str, Any]:
    """What the tensor or pipeline parallel ranks of a run have alike."""
    model = run.model
    return {
        **{
            counter: model.get_counter(counter)
            for counter in ("global_steps", "skipped_steps", "global_samples")
        },
        "ds_version": run.optim[0].version,
        "ds_config": to_json_value(model.content.get("ds_config")),
        "ZeRO stage": run.stage,
        "world size": run.world,
        "parallel degrees": model.degrees,
    }
