"""Read DCP's sharded safetensors, written by `HuggingFaceStorageWriter(save_distributed=True)`.

`shard-<rank + 1>-model-<k>-of-<n>.safetensors` contains the shards of one rank. The header entry
`DCP_SHARDING_INFO` records the offsets of each shard in its tensor. With consolidation, these files
are in `sharded/`, and the consolidated files, which contain complete tensors, are in its parent
folder. This reader uses the sharded files, because torch's consolidation writes zeros for a missing
shard.

No file records the number of ranks or the full shapes of the tensors. Without consolidated files,
the reader therefore cannot detect that all files of the last rank are missing.

Source: torch/distributed/checkpoint/hf_storage.py, _hf_utils.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.converters.checkpoint import Aliases, Checkpoint, OptimizerState
from portable.converters.config_and_tokenizer_files import find_companions, read_trainer_metadata
from portable.converters.containers.shard_index import (
    DCP_INFO_KEY,
    DCP_OFFSETS_KEY,
    INDEX_FILE_NAME,
    read_indexed_shards,
)
from portable.converters.errors import CheckpointError, DamagedCheckpointError, prefix_checkpoint_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.safetensors import read_safetensors_file
from portable.converters.formats.torch_save.optimizer import check_state_shapes
from portable.converters.names.canonical import (
    classify_state_dict_keys,
    find_plain_name,
    infer_key_paths,
    strip_common_prefixes,
)
from portable.converters.storage.byte_sources import InMemorySource, parse_json
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_entry_names, map_with_prefetch
from portable.converters.storage.path_or_url import make_absolute
from portable.converters.storage.safe_open import get_child_inside
from portable.converters.tensors.tensor import Box, Tensor, View, is_shape

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import CheckpointFile
    from portable.converters.storage.path_or_url import AnyPath

_SHARD = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_FOLDER = "sharded"
_EMPTY_VIEW = View(InMemorySource(b""), 0, ())


def _list_shard_names(path: AnyPath) -> list[str]:
    """List the names of the shards in a folder.

    Shards are the files with names such as `shard-00001-model-00001-of-00002.safetensors`.
    """
    return [name for name in list_entry_names(path) if _SHARD.fullmatch(name)]


def _find_shard_folder(path: AnyPath) -> AnyPath | None:
    """Find the folder of the shards. The path may be a shard, its folder, or the parent folder.

    In the parent folder, only the subfolder `sharded` is searched.

    Returns:
        The folder, or None if there are no shards.

    Raises:
        LinkError: If `sharded` is a link to a target outside the parent folder.
    """
    if path.is_file():
        return path.parent if _SHARD.fullmatch(path.name) else None
    if _list_shard_names(path):
        return path
    return (
        get_child_inside(path, _FOLDER)
        if _FOLDER in list_entry_names(path) and _list_shard_names(path / _FOLDER)
        else None
    )


def _open_sharded_safetensors(source: CheckpointPath, path: AnyPath) -> Checkpoint:
    """Open the shards in the folder `path` as a checkpoint.

    The files do not record the unsharded shape of a tensor, so the shape is derived from the
    offsets and shapes of its shards. If the files contain optimizer state, all parameters with
    state form one group without settings such as `lr`.

    Raises:
        CheckpointError: If a shard is missing or damaged, if shards disagree about a dtype or a
            number of dimensions, if the folder contains shards of two checkpoints, or if the shards
            contradict the consolidated files.
    """
    folder, location = CheckpointFolder(path), str(path)
    names = _list_shard_names(path)
    _check_shard_numbers(names, path)
    boxes: dict[str, list[Box]] = {}
    dtypes_and_shapes: dict[str, tuple[str, list[int]]] = {}
    files = [folder.get_file(name) for name in names]
    for file, (part_tensors, header) in zip(
        files, map_with_prefetch(path, read_safetensors_file, files), strict=True
    ):
        offsets = _parse_shard_offsets(header.get(DCP_INFO_KEY), file)
        for key, part in part_tensors.items():
            part_offsets = offsets.get(key)
            if part_offsets is None or len(part_offsets) != len(part.shape):
                raise DamagedCheckpointError(
                    f"{file.path}: damaged: the header entry {DCP_INFO_KEY} has no valid offsets for the "
                    f"tensor {key!r}"
                )
            dtype, size = dtypes_and_shapes.setdefault(key, (part.dtype, [0] * len(part_offsets)))
            if part.dtype != dtype or len(size) != len(part_offsets):
                raise DamagedCheckpointError(
                    f"{file.path}: the dtype or number of dimensions of {key!r} differs between the shards"
                )
            size[:] = [
                max(n, start + count) for n, start, count in zip(size, part_offsets, part.shape, strict=True)
            ]
            (part_box,) = part.boxes or (None,)
            boxes.setdefault(key, []).append(
                Box(part_offsets, part.shape, part_box.view if part_box else _EMPTY_VIEW)
            )
    with prefix_checkpoint_errors(path):
        stored = {
            key: Tensor(key, *dtypes_and_shapes[key], part_tensors) for key, part_tensors in boxes.items()
        }
    _check_consolidated_shapes(path, stored)
    roles = classify_state_dict_keys(
        infer_key_paths(stored, location=location), frozenset(stored), location=location
    )
    tensors = strip_common_prefixes(
        {name: stored[key] for name, key in roles.model.items()}, location=location
    )

    def open_optimizer(_: Aliases) -> OptimizerState:
        state = {
            find_plain_name(name, tensors): {state_name: stored[key] for state_name, key in keys.items()}
            for name, keys in roles.optimizer_state.items()
        }
        for name, values in state.items():
            check_state_shapes(name, values, tensors, location)
        return OptimizerState(state, [{"params": list(state)}])

    return Checkpoint(
        format="dcp-safetensors",
        root=source.path,
        tensors=tensors,
        optimizer=open_optimizer if roles.optimizer_state else None,
        metadata=read_trainer_metadata(path),
        companions=find_companions(source.path),
    )


def _check_shard_numbers(names: list[str], path: AnyPath) -> None:
    """Check that the numbers in the names of the shard files have no gaps.

    Without this check, a missing file would not be noticed. The checkpoint would only have fewer
    tensors, or tensors with smaller shapes. A missing last rank does not leave a gap, so this check
    does not detect it.

    Raises:
        CheckpointError: If a file is missing, or if the folder contains files of two saves.
    """
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    counts = {int(match[3]) for match in matches}
    if len(counts) > 1:
        raise CheckpointError(
            f"{path}: contains shards of two checkpoints, one with {min(counts)} and one with {max(counts)} "
            "files per rank; remove the shards of one checkpoint"
        )
    # Every rank has parts of nearly all tensors, so it has a file. A missing last rank is not detected here,
    # because its tensors would only appear shorter.
    numbers = {(int(match[1]), int(match[2])) for match in matches}
    shards, models = max(shard for shard, _ in numbers), max(counts)
    expected_pairs = ((shard, model) for shard in range(1, shards + 1) for model in range(1, models + 1))
    missing_pair = next((pair for pair in expected_pairs if pair not in numbers), None)
    if missing_pair is not None:
        raise DamagedCheckpointError(
            f"{path}: the file "
            f"shard-{missing_pair[0]:05d}-model-{missing_pair[1]:05d}-of-{models:05d}.safetensors is missing"
        )
    if len(numbers) != shards * models:
        raise CheckpointError(
            f"{path}: contains shard files with a shard number outside 1 to {shards} or a model number "
            f"outside 1 to {models}; remove these files"
        )


def _parse_shard_offsets(text: str | None, file: CheckpointFile) -> dict[str, tuple[int, ...]]:
    """Parse the tensor offsets that the header of a shard records.

    Args:
        text: JSON in the header entry `DCP_SHARDING_INFO`, or None if the header does not have it.
        file: The shard, used in error messages.

    Returns:
        The offsets in the unsharded tensor, keyed by tensor name.

    Raises:
        CheckpointError: If the header entry is missing or damaged.
    """
    table = parse_json(file.path, text.encode("utf-8", "surrogatepass")) if text is not None else None
    if not isinstance(table, dict):
        raise CheckpointError(
            f"{file.path}: the header has no valid {DCP_INFO_KEY}, so the file is not a shard that "
            "torch.distributed.checkpoint wrote; move the file out of the checkpoint, or copy the checkpoint "
            "again"
        )
    offsets: dict[str, tuple[int, ...]] = {}
    for key, entry in table.items():
        low = entry.get(DCP_OFFSETS_KEY) if isinstance(entry, dict) else None
        if not is_shape(low):
            raise DamagedCheckpointError(
                f"{file.path}: damaged: the header entry {DCP_INFO_KEY} has no valid offsets for the tensor "
                f"{key!r}"
            )
        offsets[key] = tuple(low)
    return offsets


def _check_consolidated_shapes(path: AnyPath, stored: dict[str, Tensor]) -> None:
    """Compare the shapes of the tensors with the consolidated files, if there are any.

    The consolidated files are in the parent folder of the shards. Nothing is checked if the folder
    of the shards is not named `sharded`, or if its parent has no `model.safetensors.index.json`.

    Args:
        path: Folder of the shards.
        stored: Tensors assembled from the shards, keyed by name.

    Raises:
        CheckpointError: If a tensor in the consolidated files is missing from `stored`, or has a
            different shape in `stored`. In both cases, a shard is missing.
    """
    above = make_absolute(path).parent
    if path.name != _FOLDER or not (above / INDEX_FILE_NAME).is_file():
        return
    index = read_indexed_shards(
        CheckpointFolder(above), INDEX_FILE_NAME, lambda file: read_safetensors_file(file)[0]
    )
    for name, tensor in index.items():
        stored_tensor = stored.get(name)
        if stored_tensor is None or stored_tensor.shape != tensor.shape:
            problem = (
                f"{name!r} is missing from the shards, although the consolidated files in {above} contain "
                "the tensor"
                if stored_tensor is None
                else f"{name!r} has shape {list(stored_tensor.shape)} in the shards, but "
                f"{list(tensor.shape)} in the consolidated files in {above}"
            )
            raise DamagedCheckpointError(f"{path}: {problem}, so a shard is missing")


FORMAT = Format(
    "dcp-safetensors",
    lambda source: _find_shard_folder(source.path),
    _open_sharded_safetensors,
)
