"""Format the names of safetensors files, and read the index of a checkpoint's numbered shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from portable.converters.errors import CheckpointError, DamagedCheckpointError
from portable.converters.storage.byte_sources import read_json_object
from portable.converters.storage.folder_operations import map_with_prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.converters.storage.byte_sources import CheckpointFile
    from portable.converters.storage.folder import CheckpointFolder
    from portable.converters.storage.path_or_url import AnyPath

V = TypeVar("V")
SINGLE_FILE_NAME, INDEX_FILE_NAME = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE_NAME = "adapter_model.safetensors"
OPTIMIZER_FILE_NAME, OPTIMIZER_GROUPS_FILE_NAME = "optimizer.safetensors", "optimizer.json"
DCP_INFO_KEY, DCP_OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys that DCP uses in safetensors headers.

The first key is in the metadata of the header, and its value is a JSON object with an entry for each stored
tensor. The second key is in each of these entries, and its value is the offset of the stored tensor in the
unsharded tensor.
"""


def read_indexed_shards(
    folder: CheckpointFolder, index_name: str, read_shard: Callable[[CheckpointFile], dict[str, V]]
) -> dict[str, V]:
    """Read all shards that an index lists.

    Args:
        folder: Folder that contains the files.
        index_name: Name of the index, `<stem>.index.json`.
        read_shard: Function that reads one shard and returns its content, keyed by tensor name. It
            must be thread-safe, because shards in an object store are read concurrently.

    Returns:
        Content of all shards, keyed by tensor name. The shards are sorted by file name. Within a
        shard, the tensors keep the order in which `read_shard` returns them.

    Raises:
        CheckpointError: If `index_name` is not a valid index, if a shard is missing, or if a shard
            does not contain exactly the tensors that the index lists for it.
    """
    file = folder.get_file(index_name)
    weight_map = read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise DamagedCheckpointError(
            f"{file.path}: is not a shard index, because its weight_map is missing or invalid"
        )
    files = {shard: folder.get_file(shard) for shard in sorted(set(weight_map.values()))}
    _check_distinct_files(folder, index_name, files)
    shards = dict(zip(files, map_with_prefetch(folder.path, read_shard, files.values()), strict=True))
    for key, shard in weight_map.items():
        if key not in shards[shard]:
            raise DamagedCheckpointError(
                f"{folder.path / shard}: does not contain {key!r}, although {index_name} maps it to this file"
            )
    index: dict[str, V] = {}
    for shard, entries in shards.items():
        for key, value in entries.items():
            if weight_map.get(key) != shard:
                raise DamagedCheckpointError(
                    f"{folder.path / shard}: contains {key!r}, which {index_name} does not map to this file"
                )
            index[key] = value
    return index


def check_rank_files_complete(
    path: AnyPath, files_by_rank: Mapping[int, str], world_size: int, description: str
) -> None:
    """Check that there is exactly one file per rank.

    Args:
        path: Folder that contains the files, used in error messages.
        files_by_rank: Names of the files, keyed by rank.
        world_size: Expected number of ranks.
        description: Noun for the content of the files, used in error messages, such as `"optimizer"`.

    Raises:
        CheckpointError: If the file of a rank is missing, or if a file belongs to a rank of
            `world_size` or higher.
    """
    missing = world_size - sum(rank < world_size for rank in files_by_rank)
    if missing:
        # Do not iterate over the world size, because it is untrusted and may be huge.
        first = next(rank for rank in range(len(files_by_rank) + 1) if rank not in files_by_rank)
        raise DamagedCheckpointError(
            f"{path}: the {description} states of {missing:,} of the {world_size:,} ranks are missing (the "
            f"first missing rank is {first})"
        )
    extra = [name for rank, name in files_by_rank.items() if rank >= world_size]
    if extra:
        raise CheckpointError(
            f"{path / extra[0]}: belongs to another run, because the number of ranks that saved the other "
            f"files is only {world_size:,}; remove the files of other runs"
        )


def _check_distinct_files(folder: CheckpointFolder, name: str, files: Mapping[str, CheckpointFile]) -> None:
    """Check that a shard index lists each file only once, so that no file is read several times.

    Different names can refer to the same file, for example `a/b` and `a//b`, or a symbolic link and
    its target.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the index, used in error messages.
        files: Files in the index, keyed by the name that the index contains.

    Raises:
        CheckpointError: If a file is listed twice.
    """
    names_by_path: dict[object, str] = {}
    for shard, file in files.items():
        other = names_by_path.setdefault(file.get_file_identity(), shard)
        if other != shard:
            raise DamagedCheckpointError(
                f"{folder.path / name}: lists one file twice, as {other!r} and {shard!r}"
            )
