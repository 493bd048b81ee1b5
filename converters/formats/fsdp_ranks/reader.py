"""Read FSDP checkpoints with one `torch.save` file per rank, as verl and derived programs write them.

`model_world_size_<n>_rank_<r>.pt` contains the model's `state_dict()`. Its sharded tensors are
DTensors (FSDP2, or FSDP1 with a mesh) or ShardedTensors (FSDP1 without a mesh). Their placements or
offsets define the part that each rank has. If several ranks have the same part, the part is read
from the first of these ranks. The copies of an unsharded tensor of the model must be equal on all
ranks. `optim_world_size_...` in the same folder contains `optimizer.state_dict()`.

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions
from portable.converters.containers.pickle_reader import format_untrusted_value, to_json_value
from portable.converters.containers.shard_index import check_rank_files_complete
from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MixedCheckpointError,
    OptimizerStateError,
    prefix_checkpoint_errors,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.fsdp_ranks.flat import RankCopies, build_flat_optimizer, is_flat_optimizer
from portable.converters.formats.fsdp_ranks.sharded import ShardedRecord, load_rank_file, locate_rank_parts
from portable.converters.formats.torch_save.optimizer import TensorLeaf, build_named_optimizer
from portable.converters.formats.torch_save.reader import (
    deduplicate_tied_names,
    find_tied_aliases,
    split_state_dict,
)
from portable.converters.names.canonical import check_no_flat_parameters, strip_common_prefixes
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import (
    list_entry_names,
    list_subfolder_names,
    map_with_prefetch,
)
from portable.converters.storage.path_or_url import make_absolute
from portable.converters.storage.safe_open import get_child_inside
from portable.converters.tensors.tensor import Box, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.converters.checkpoint import Aliases, OptimizerState, Scalar
    from portable.converters.storage.path_or_url import AnyPath

_FILE = re.compile(
    r"(?P<kind>model|optim|extra_state)_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt"
)
_STEP = re.compile(r"global_step_?(\d{1,18})")


def _has_rank_files(path: AnyPath) -> bool:
    """Return whether a folder contains rank files, such as `model_world_size_8_rank_0.pt`."""
    return any(map(_FILE.fullmatch, list_entry_names(path)))


def _list_model_folders(path: AnyPath) -> list[str]:
    """List the folders in a step folder that contain one model each (`actor`, `critic`)."""
    return [name for name in list_subfolder_names(path) if _has_rank_files(path / name)]


def _find_rank_file_folders(source: CheckpointPath) -> list[AnyPath] | None:
    """Find the folders with rank files.

    For the path of a rank file, this is the file's folder. For a folder that contains rank files,
    it is the folder itself. For any other folder, these are its subfolders that contain the rank
    files of one model each, such as `actor` and `critic`.

    Returns:
        The folders, or None if there are no rank files.
    """
    path = source.path
    if path.is_file():
        return [path.parent] if _FILE.fullmatch(path.name) else None
    return [path] if _has_rank_files(path) else [path / name for name in _list_model_folders(path)] or None


def _open_fsdp_ranks_checkpoint(source: CheckpointPath, folders: list[AnyPath]) -> Checkpoint:
    """Open the files that the FSDP ranks of a model saved as one checkpoint.

    Args:
        source: Requested path. It becomes the root of the `Checkpoint`.
        folders: Folders with rank files, one per model. Only a single folder can be opened.

    Raises:
        CheckpointError: If there are several folders, or if the files are damaged.
    """
    path = folders[0]
    if len(folders) > 1:
        names = ", ".join(format_untrusted_value(folder.name) for folder in folders[:8])
        raise CheckpointError(
            f"{source.path}: contains several models; specify one of these folders: {names}"
        )
    if path.parent == source.path:
        path = get_child_inside(source.path, path.name)
    return _FsdpRankFiles(CheckpointFolder(path)).build_checkpoint(source.path)


class RankParts:
    """Sharded tensor whose parts are collected from all ranks.

    Args:
        first: Record of the first rank, with the dtype and shape of the tensor.
        location: Name of the tensor, used in error messages.

    Attributes:
        first_part: First part that has elements. None if all parts are empty.
        boxes: One `Box` for each distinct nonempty part. It consists of the region of the tensor
            that the part covers and the data of this region. Replicas on other ranks are skipped.
        num_parts: Number of nonempty parts on all ranks, including replicas.
    """

    def __init__(self, first: ShardedRecord, location: str) -> None:
        self.dtype, self.shape, self.location = first.dtype, first.shape, location
        self.first_part: TensorLeaf | None = None
        self.boxes: dict[str, Box] = {}
        self.num_parts = 0

    def add_rank(self, value: Any, rank: int) -> None:
        """Add one rank's parts of the tensor.

        Args:
            value: Record of the tensor in the rank's file.
            rank: Rank of the file.

        Raises:
            CheckpointError: If the value is not sharded, or if its dtype or shape differs from that
                in `first`, the record that the constructor received.
        """
        if not isinstance(value, ShardedRecord):
            raise DamagedCheckpointError(
                f"{self.location}: is a sharded tensor on some ranks and an ordinary tensor on others"
            )
        if (value.dtype, value.shape) != (self.dtype, self.shape):
            raise DamagedCheckpointError(f"{self.location}: the dtype or shape differs between the ranks")
        for offsets, stored in locate_rank_parts(value, rank, self.location):
            if prod(stored.shape):
                self.num_parts += 1
                self.first_part = self.first_part or stored
                # Use text as the key, because a file could contain numbers whose hashes collide.
                view = stored.to_byte_view if isinstance(stored, StoredTensor) else stored.boxes[0].view
                self.boxes.setdefault(repr((offsets, stored.shape)), Box(offsets, stored.shape, view))

    def to_tensor(self) -> Tensor:
        """Build the full tensor from the parts of all ranks. Its elements are read lazily.

        Raises:
            CheckpointError: If the parts leave gaps or overlap.
        """
        if not prod(self.shape):
            return Tensor.from_source(self.location, self.dtype, self.shape, InMemorySource(b""))
        return Tensor(self.location, self.dtype, self.shape, list(self.boxes.values()))


class _FsdpRankFiles:
    """Files of one FSDP checkpoint in a folder, such as `model_world_size_<n>_rank_<r>.pt`.

    There is one file per rank and kind. The kinds are `model`, `optim` and `extra_state`. The files
    of the model are required. Files of the optimizer are optional, but if there are any, every rank
    must have one. Any file of the extra state may be missing.

    Args:
        folder: Folder of the files.

    Raises:
        CheckpointError: If files are missing or belong to two runs.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self.location = str(folder.path)
        self.names_by_kind: dict[str, dict[int, str]] = {}
        names_by_world_size: dict[int, str] = {}
        for name in list_entry_names(folder.path):
            match = _FILE.fullmatch(name)
            if match is not None:
                names_by_world_size.setdefault(int(match["world"]), name)
                self.names_by_kind.setdefault(match["kind"], {})[int(match["rank"])] = name
        if len(names_by_world_size) > 1:
            first, other = sorted(names_by_world_size.values())[:2]
            raise CheckpointError(
                f"{self.location}: contains files of runs with different numbers of ranks, such as {first} "
                f"and {other}; keep only the files of one run"
            )
        (self.world_size,) = names_by_world_size
        for kind, ranks in self.names_by_kind.items():
            if kind != "extra_state":  # extra states are optional
                check_rank_files_complete(folder.path, ranks, self.world_size, kind)
        if "model" not in self.names_by_kind:
            raise DamagedCheckpointError(
                f"{self.location}: the model files (model_world_size_*_rank_*.pt) are missing"
            )

    def _iter_rank_contents(self, kind: str) -> Iterator[tuple[int, Any]]:
        """Yield the rank and the content of each file of one kind, in rank order.

        Raises:
            CheckpointError: If a file is damaged, was renamed, or does not contain a dict.
        """
        files = dict(sorted(self.names_by_kind[kind].items()))
        contents = map_with_prefetch(
            self.folder.path, lambda name: load_rank_file(self.folder.get_file(name)), files.values()
        )
        for (rank, name), content in zip(files.items(), contents, strict=True):
            if not isinstance(content, dict):
                location = str(self.folder.path / name)
                raise CheckpointError(
                    f"{location}: does not contain a state dict; save the state_dict() of the model or "
                    "the optimizer"
                )
            yield rank, content

    def merge_rank_contents(self, kind: str) -> dict[Any, Any]:
        """Merge all ranks' files of one kind.

        Args:
            kind: `model` or `optim`.

        Returns:
            The nested content, with `RankParts` for sharded tensors and `RankCopies` for other
            tensors.

        Raises:
            CheckpointError: If a file is damaged or was renamed, or if the files of two ranks
                contradict each other.
        """
        merged: dict[Any, Any] = {}
        for rank, content in self._iter_rank_contents(kind):
            _merge_rank_into(merged, content, rank, f"{self.location}: {kind}", "")
        return merged

    def build_checkpoint(self, root: AnyPath) -> Checkpoint:
        """Build the checkpoint from the files of all ranks.

        The model files are opened now. The optimizer files are read only when the optimizer state
        is needed. An unsupported optimizer then raises OptimizerStateError. For example,
        HYBRID_SHARD is not supported for the flat optimizer of FSDP1.

        Args:
            root: Path that the user specified, which becomes `Checkpoint.root`.

        Raises:
            CheckpointError: If the model files are damaged, contradict each other, or contain flat
                parameters of FSDP1.
        """
        merged = self.merge_rank_contents("model")
        check_no_flat_parameters(merged, self.location)
        parts_by_id: dict[int, RankParts] = {}
        leaves, _, counters = split_state_dict(_replace_with_tensors(merged, parts_by_id), self.location)
        tensors: dict[str, Tensor] = strip_common_prefixes(leaves, location=self.location)
        sharded = {
            name: parts_by_id[id(tensor)] for name, tensor in tensors.items() if id(tensor) in parts_by_id
        }
        views = {
            name: part.first_part
            for name, part in sharded.items()
            if isinstance(part.first_part, StoredTensor)
        }
        has_replicas = any(part.num_parts > len(part.boxes) for part in sharded.values())

        def open_optimizer(aliases: Aliases) -> OptimizerState | None:
            if "optim" not in self.names_by_kind:
                return None
            location = f"{self.location}: the optimizer"
            saved = self.merge_rank_contents("optim")
            order = deduplicate_tied_names(sharded or tensors, aliases)
            with prefix_checkpoint_errors(self.folder.path):
                if not is_flat_optimizer(saved):
                    return build_named_optimizer(
                        _replace_with_tensors(saved, {}), tensors, order, location=location
                    )
                if has_replicas:
                    raise OptimizerStateError(
                        f"{location} was written by FSDP1 with replicated shards (HYBRID_SHARD), which is "
                        "not supported"
                    )
                return build_flat_optimizer(saved, order, tensors, self.world_size, location)

        return Checkpoint(
            format="fsdp-ranks",
            root=root,
            tensors=tensors,
            aliases=find_tied_aliases(views, tensors),
            optimizer=open_optimizer,
            metadata={**counters, "world_size": self.world_size, **_parse_step(self.folder.path)},
            companions=find_companions(self.folder.path),
            counters=self._read_counters,
        )

    def _read_counters(self) -> dict[str, Scalar]:
        """Read the scheduler's step counter from rank 0's extra state.

        Returns:
            Dict with the single key `lr_scheduler.last_epoch`. Empty if the counter is not
            recorded.
        """
        name = self.names_by_kind.get("extra_state", {}).get(0)
        extra = load_rank_file(self.folder.get_file(name)) if name is not None else None
        schedule = extra.get("lr_scheduler") if isinstance(extra, dict) else None
        last = schedule.get("last_epoch") if isinstance(schedule, dict) else None
        return {"lr_scheduler.last_epoch": last} if type(last) is int else {}


def _merge_rank_into(
    merged: dict[Any, Any], content: dict[Any, Any], rank: int, location: str, prefix: str
) -> None:
    """Merge the content of one rank's file into the merged content of the previous ranks.

    Args:
        merged: Merged content of the previous ranks. Modified in place.
        content: Content of the rank's file, or a dict nested in it.
        rank: Rank that wrote the file.
        location: Path of the checkpoint, used in error messages.
        prefix: Path of `content` in the file, such as `state.0.`. It precedes the keys in error
            messages, and is empty at the top level.

    Raises:
        CheckpointError: If a key has values of different types on different ranks, or if a value
            that is not a tensor differs between them.
    """
    for key, value in content.items():
        name = f"{prefix}{key}" if type(key) in (str, int) else format_untrusted_value(key)
        is_new = key not in merged  # a stored None is a value
        previous = merged.get(key)
        if isinstance(value, dict) and (is_new or isinstance(previous, dict)):
            if previous is None:
                previous = merged[key] = {}
            _merge_rank_into(previous, value, rank, location, f"{name}.")
        elif isinstance(value, (ShardedRecord, StoredTensor)):
            if is_new:
                about = f"{location}: {name}"
                previous = RankParts(value, about) if isinstance(value, ShardedRecord) else RankCopies(about)
                merged[key] = previous
            if not isinstance(previous, (RankParts, RankCopies)):
                raise DamagedCheckpointError(f"{location}: {name} is a tensor only on some ranks")
            previous.add_rank(value, rank)
        elif isinstance(value, dict) or isinstance(previous, (dict, RankParts, RankCopies)):
            raise DamagedCheckpointError(f"{location}: the type of {name} differs between the ranks")
        elif is_new:
            merged[key] = value
        elif to_json_value(previous) != to_json_value(value):
            raise MixedCheckpointError(f"{location}: the value of {name} differs between the ranks")


def _replace_with_tensors(value: Any, parts_by_id: dict[int, RankParts]) -> Any:
    """Replace each `RankParts` and `RankCopies` in nested dicts with a lazy tensor.

    Args:
        value: Merged content of the ranks' files.
        parts_by_id: Dict to which the `RankParts` of each sharded tensor are added. The key is the
            `id` of the new `Tensor`.

    Returns:
        A copy of the content with the lazy tensors.
    """
    if isinstance(value, dict):
        return {key: _replace_with_tensors(item, parts_by_id) for key, item in value.items()}
    if isinstance(value, RankParts):
        tensor = value.to_tensor()
        parts_by_id[id(tensor)] = value
        return tensor
    return value.to_tensor() if isinstance(value, RankCopies) else value


def _parse_step(path: AnyPath) -> dict[str, int]:
    """Parse the step from the name of the folder or of its parent folder.

    Returns:
        `{"step": step}`, or an empty dict if neither name has a form such as `global_step_100`.
    """
    for name in (path.name, make_absolute(path).parent.name):
        match = _STEP.fullmatch(name)
        if match is not None:
            return {"step": int(match[1])}
    return {}


FORMAT = Format(
    "fsdp-ranks",
    _find_rank_file_folders,
    _open_fsdp_ranks_checkpoint,
)
