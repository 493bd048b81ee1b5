"""One torch.save file a rank of FSDP-sharded state, as verl and its descendants save it.

`model_world_size_<n>_rank_<r>.pt` holds the model's `state_dict()` with DTensors (FSDP2, or FSDP1 with a
mesh) or ShardedTensors (FSDP1 without), whose placements say what part each rank has; `optim_world_size_...`
beside holds `optimizer.state_dict()`. Parts that several ranks hold are taken from the first of them.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions
from portable.converters.containers.pickle_reader import format_value, to_json_value
from portable.converters.containers.shard_index import check_ranks
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import CheckpointError, OptimizerStateError, prefix_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.fsdp_ranks.flat import RankCopies, is_flat, read_flat
from portable.converters.formats.fsdp_ranks.sharded import Sharded, load, locate_parts
from portable.converters.formats.torch_save.optimizer import Leaf, read_optimizer
from portable.converters.formats.torch_save.reader import drop_aliases, find_aliases, split_tensors
from portable.converters.names.canonical import refuse_flat_parameters, strip_prefixes
from portable.converters.storage.byte_sources import Memory
from portable.converters.storage.folder import Folder
from portable.converters.storage.folder_operations import folders_inside, map_ahead, names_in
from portable.converters.storage.path_or_url import make_absolute
from portable.converters.storage.safe_open import child
from portable.converters.tensors.tensor import Box, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.converters.checkpoint import Aliases, OptimizerState, Scalar
    from portable.converters.storage.path_or_url import Place

_FILE = re.compile(
    r"(?P<kind>model|optim|extra_state)_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt"
)
_STEP = re.compile(r"global_step_?(\d{1,18})")


def _has_rank_files(path: Place) -> bool:
    return any(map(_FILE.fullmatch, names_in(path)))


def _list_model_folders(path: Place) -> list[str]:
    """The folders of a step that hold a model each (`actor`, `critic`)."""
    return [name for name in folders_inside(path) if _has_rank_files(path / name)]


def _find(source: CheckpointPath) -> list[Place] | None:
    """The folders with rank files: that of a file, the one given, or those of a step's models."""
    path = source.path
    if path.is_file():
        return [path.parent] if _FILE.fullmatch(path.name) else None
    return [path] if _has_rank_files(path) else [path / name for name in _list_model_folders(path)] or None


def _open(source: CheckpointPath, folders: list[Place]) -> Checkpoint:
    path = folders[0]
    if len(folders) > 1:
        names = ", ".join(format_value(folder.name) for folder in folders[:8])
        raise CheckpointError(f"{source.path}: holds several models; give one of {names}")
    if path.parent == source.path:
        path = child(source.path, path.name)
    return _RankFiles(Folder(path)).build_checkpoint(source.path)


class RankParts:
    """One sharded tensor, rank by rank."""

    def __init__(self, first: Sharded, location: str) -> None:
        self.dtype, self.shape, self.where = first.dtype, first.shape, location
        self.view: Leaf | None = None
        self.boxes: dict[str, Box] = {}
        # Of all ranks: more than the boxes where there are replicas.
        self.parts = 0

    def add(self, value: Any, rank: int) -> None:
        if not isinstance(value, Sharded) or (value.dtype, value.shape) != (self.dtype, self.shape):
            raise CheckpointError(f"{self.where}: the ranks disagree about its type or shape")
        for offsets, stored in locate_parts(value, rank, self.where):
            if prod(stored.shape):
                self.parts += 1
                self.view = self.view or stored
                # As text: numbers can be chosen to collide.
                view = stored.to_view if isinstance(stored, StoredTensor) else stored.boxes[0].view
                self.boxes.setdefault(repr((offsets, stored.shape)), Box(offsets, stored.shape, view))

    def to_tensor(self) -> Tensor:
        if not prod(self.shape):
            return Tensor.from_source(self.where, self.dtype, self.shape, Memory(b""))
        return Tensor(self.where, self.dtype, self.shape, list(self.boxes.values()))


class _RankFiles:
    """The files of all ranks."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.where = str(folder.path)
        self.files: dict[str, dict[int, str]] = {}
        worlds: dict[int, str] = {}
        for name in names_in(folder.path):
            match = _FILE.fullmatch(name)
            if match is not None:
                worlds.setdefault(int(match["world"]), name)
                self.files.setdefault(match["kind"], {})[int(match["rank"])] = name
        if len(worlds) > 1:
            first, other = sorted(worlds.values())[:2]
            raise CheckpointError(f"{self.where}: holds files of two runs, {first} and {other}")
        (self.world,) = worlds
        for kind, ranks in self.files.items():
            if kind != "extra_state":  # of which any may be missing
                check_ranks(folder.path, ranks, self.world, kind)
        if "model" not in self.files:
            raise CheckpointError(
                f"{self.where}: the model files are missing, only optimizer files were found"
            )

    def _rank(self, kind: str) -> Iterator[tuple[int, Any]]:
        """(rank, content) of each file of a kind."""
        files = dict(sorted(self.files[kind].items()))
        contents = map_ahead(self.folder.path, lambda name: load(self.folder.file(name)), files.values())
        for (rank, name), content in zip(files.items(), contents, strict=True):
            if not isinstance(content, dict):
                location = str(self.folder.path / name)
                raise CheckpointError(f"{location}: not a state dict but a {type(content).__name__}")
            yield rank, content

    def merge_ranks(self, kind: str) -> dict[Any, Any]:
        """What all ranks' files of a kind hold together, with `RankParts` and `RankCopies` for tensors."""
        merged: dict[Any, Any] = {}
        for rank, content in self._rank(kind):
            _add_rank(merged, content, rank, f"{self.where}: {kind}", "")
        return merged

    def build_checkpoint(self, root: Place) -> Checkpoint:
        merged = self.merge_ranks("model")
        refuse_flat_parameters(merged, self.where)
        parts_by_id: dict[int, RankParts] = {}
        leaves, _, counted = split_tensors(_build_tensors(merged, parts_by_id), self.where)
        tensors: dict[str, Tensor] = strip_prefixes(leaves, location=self.where)
        sharded = {
            name: parts_by_id[id(tensor)] for name, tensor in tensors.items() if id(tensor) in parts_by_id
        }
        views = {name: part.view for name, part in sharded.items() if isinstance(part.view, StoredTensor)}
        replicas = any(part.parts > len(part.boxes) for part in sharded.values())

        def open_optimizer(aliases: Aliases) -> OptimizerState | None:
            if "optim" not in self.files:
                return None
            location = f"{self.where}: the optimizer"
            saved = self.merge_ranks("optim")
            order = drop_aliases(sharded or tensors, aliases)
            with prefix_errors(self.folder.path):
                if not is_flat(saved):
                    return read_optimizer(_build_tensors(saved, {}), tensors, order, location=location)
                if replicas:
                    raise OptimizerStateError(
                        f"{location} is that of FSDP1 with replicas, which is not supported"
                    )
                return read_flat(saved, order, tensors, self.world, location)

        return Checkpoint(
            format="fsdp-ranks",
            root=root,
            tensors=tensors,
            aliases=find_aliases(views, tensors),
            optimizer=open_optimizer,
            metadata={**counted, "world_size": self.world, **_read_step(self.folder.path)},
            companions=find_companions(self.folder.path),
            counters=self._read_counters,
        )

    def _read_counters(self) -> dict[str, Scalar]:
        """The schedule's step, in rank 0's extra state."""
        name = self.files.get("extra_state", {}).get(0)
        extra = load(self.folder.file(name)) if name is not None else None
        schedule = extra.get("lr_scheduler") if isinstance(extra, dict) else None
        last = schedule.get("last_epoch") if isinstance(schedule, dict) else None
        return {"lr_scheduler.last_epoch": last} if type(last) is int else {}


def _add_rank(merged: dict[Any, Any], content: dict[Any, Any], rank: int, location: str, prefix: str) -> None:
    """Add one rank's content to that of the ranks before it."""
    for key, value in content.items():
        name = f"{prefix}{key}" if type(key) in (str, int) else format_value(key)
        previous = merged.get(key)
        if isinstance(value, dict) and (previous is None or isinstance(previous, dict)):
            if previous is None:
                previous = merged[key] = {}
            _add_rank(previous, value, rank, location, f"{name}.")
        elif isinstance(value, (Sharded, StoredTensor)):
            if previous is None:
                about = f"{location}: {name}"
                previous = RankParts(value, about) if isinstance(value, Sharded) else RankCopies(about)
                merged[key] = previous
            if not isinstance(previous, (RankParts, RankCopies)):
                raise CheckpointError(f"{location}: {name} is a tensor on some ranks only")
            previous.add(value, rank)
        elif isinstance(value, dict) or isinstance(previous, (dict, RankParts, RankCopies)):
            raise CheckpointError(f"{location}: {name} is not of one kind on all ranks")
        elif key not in merged:
            merged[key] = value
        elif to_json_value(previous) != to_json_value(value):
            raise CheckpointError(
                f"{location}: the ranks have different values of {name}; files of two runs?"
            )


def _build_tensors(value: Any, by_id: dict[int, RankParts]) -> Any:
    """The same content with a `Tensor` for each tensor; `by_id` receives the `id` of each sharded one."""
    if isinstance(value, dict):
        return {key: _build_tensors(item, by_id) for key, item in value.items()}
    if isinstance(value, RankParts):
        tensor = value.to_tensor()
        by_id[id(tensor)] = value
        return tensor
    return value.to_tensor() if isinstance(value, RankCopies) else value


def _read_step(path: Place) -> dict[str, int]:
    """The step in the name of the folder or the one above it."""
    for name in (path.name, make_absolute(path).parent.name):
        match = _STEP.fullmatch(name)
        if match is not None:
            return {"step": int(match[1])}
    return {}


FORMAT = Format(
    "fsdp-ranks",
    _find,
    _open,
)
