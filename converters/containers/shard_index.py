"""The names of safetensors files, and which belong together: numbered shards and the index beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from portable.converters.errors import CheckpointError
from portable.converters.storage.byte_sources import read_table
from portable.converters.storage.folder_operations import map_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.converters.storage.byte_sources import SourceFile
    from portable.converters.storage.folder import Folder
    from portable.converters.storage.path_or_url import Place

V = TypeVar("V")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
OPTIMIZER, GROUPS = "optimizer.safetensors", "optimizer.json"
INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""DCP's key in the header of a safetensors file, and in its value the key of where a part begins."""


def read_index(folder: Folder, name: str, read: Callable[[SourceFile], dict[str, V]]) -> dict[str, V]:
    """The content of all shards, in the order of the shards and of the tensors within each.

    Args:
        name: the index, `<stem>.index.json`.
        read: one shard's content by tensor name.

    Raises:
        CheckpointError: not an index, a shard is missing, or its content differs from the index.
    """
    file = folder.file(name)
    weight_map = read_table(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file.path}: not a shard index (no weight_map)")
    files = {shard: folder.file(shard) for shard in sorted(set(weight_map.values()))}
    _check_distinct(folder, name, files)
    shards = dict(zip(files, map_ahead(folder.path, read, files.values()), strict=True))
    for key, shard in weight_map.items():
        if key not in shards[shard]:
            raise CheckpointError(f"{folder.path / shard}: does not hold {key!r}, which {name} places there")
    index: dict[str, V] = {}
    for shard, entries in shards.items():
        for key, value in entries.items():
            if weight_map.get(key) != shard:
                raise CheckpointError(
                    f"{folder.path / shard}: holds {key!r}, which {name} does not place there"
                )
            index[key] = value
    return index


def check_ranks(path: Place, ranks: Mapping[int, str], world: int, description: str) -> None:
    """CheckpointError unless there is exactly one file for every rank of `world`.

    Args:
        description: the files are of, for messages ("optimizer").
    """
    missing = world - sum(rank < world for rank in ranks)
    if missing:
        first = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)  # `world` is untrusted
        raise CheckpointError(
            f"{path}: the {description} states of rank {first} are missing ({missing} of {world})"
        )
    extra = [name for rank, name in ranks.items() if rank >= world]
    if extra:
        raise CheckpointError(f"{path / extra[0]}: a file of another run; this one had {world} ranks")


def _check_distinct(folder: Folder, name: str, files: Mapping[str, SourceFile]) -> None:
    """Refuse one file under two names (a link, `a//b`), which would be read several times."""
    names_by_path: dict[object, str] = {}
    for shard, file in files.items():
        other = names_by_path.setdefault(file.identity(), shard)
        if other != shard:
            raise CheckpointError(f"{folder.path / name}: lists one file twice, as {other!r} and {shard!r}")
