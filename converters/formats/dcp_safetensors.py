"""DCP's sharded safetensors, from torch's `HuggingFaceStorageWriter(save_distributed=True)`.

`shard-<rank + 1>-model-<k>-of-<n>.safetensors` holds one rank's parts, and in its header where each begins in
its tensor (`DCP_SHARDING_INFO`). With consolidation, the shards lie in `sharded/` and whole files above. The
shards are read, since torch's consolidation writes zeros for a part that it does not find. No record holds
the number of ranks or the shapes: a missing last shard shows only where consolidated files lie above.

Source: torch/distributed/checkpoint/hf_storage.py, _hf_utils.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.converters.checkpoint import Checkpoint, OptimizerState
from portable.converters.config_and_tokenizer_files import find_companions, read_trainer_metadata
from portable.converters.containers.shard_index import INDEX, INFO, OFFSETS, read_index
from portable.converters.errors import CheckpointError, prefix_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.safetensors import read_file
from portable.converters.names.canonical import assign_roles, split_flat_keys, strip_prefixes, strip_wrappers
from portable.converters.storage.byte_sources import Memory, read_json
from portable.converters.storage.folder import Folder
from portable.converters.storage.folder_operations import map_ahead, names_in
from portable.converters.storage.path_or_url import make_absolute
from portable.converters.storage.safe_open import child
from portable.converters.tensors.tensor import Box, Tensor, View, is_shape

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import SourceFile
    from portable.converters.storage.path_or_url import Place

_SHARD = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_FOLDER = "sharded"
_NOTHING = View(Memory(b""), 0, ())


def _list_shards(path: Place) -> list[str]:
    return [name for name in names_in(path) if _SHARD.fullmatch(name)]


def _find_folder(path: Place) -> Place | None:
    """The folder of the shards for a path: of one of them, of all, or above it."""
    if path.is_file():
        return path.parent if _SHARD.fullmatch(path.name) else None
    if _list_shards(path):
        return path
    return child(path, _FOLDER) if _FOLDER in names_in(path) and _list_shards(path / _FOLDER) else None


def _open(source: CheckpointPath, path: Place) -> Checkpoint:
    folder, location = Folder(path), str(path)
    names = _list_shards(path)
    _check_complete(names, path)
    boxes: dict[str, list[Box]] = {}
    kinds: dict[str, tuple[str, list[int]]] = {}
    files = [folder.file(name) for name in names]
    for file, (part_tensors, header) in zip(files, map_ahead(path, read_file, files), strict=True):
        offsets = _read_offsets(header.get(INFO), file)
        for key, part in part_tensors.items():
            low = offsets.get(key)
            if low is None or len(low) != len(part.shape):
                raise CheckpointError(f"{file.path}: damaged, {INFO} does not say where {key!r} begins")
            dtype, size = kinds.setdefault(key, (part.dtype, [0] * len(low)))
            if part.dtype != dtype or len(size) != len(low):
                raise CheckpointError(f"{file.path}: {key!r} has another type or shape than in other shards")
            size[:] = [max(n, start + count) for n, start, count in zip(size, low, part.shape, strict=True)]
            (whole,) = part.boxes or (None,)
            boxes.setdefault(key, []).append(Box(low, part.shape, whole.view if whole else _NOTHING))
    with prefix_errors(path):
        stored = {key: Tensor(key, *kinds[key], part_tensors) for key, part_tensors in boxes.items()}
    _check_consolidated(path, stored)
    roles = assign_roles(split_flat_keys(stored, location=location), frozenset(stored), location=location)
    state = {
        strip_wrappers(name): {state_name: stored[key] for state_name, key in keys.items()}
        for name, keys in roles.state.items()
    }
    return Checkpoint(
        format="dcp-safetensors",
        root=source.path,
        tensors=strip_prefixes({name: stored[key] for name, key in roles.model.items()}, location=location),
        optimizer=OptimizerState(state, [{"params": list(state)}]) if state else None,
        metadata=read_trainer_metadata(path),
        companions=find_companions(source.path),
    )


def _check_complete(names: list[str], path: Place) -> None:
    """Refuse a gap in the numbers of the shards: a tensor that is not cut lies in one of them only."""
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    counts = {int(match[3]) for match in matches}
    if len(counts) > 1:
        raise CheckpointError(
            f"{path}: holds shards of two saves, of {min(counts)} and {max(counts)} files each"
        )
    # A rank has a part of nearly every tensor, and one would end where its last part is missing.
    numbers = {(int(match[1]), int(match[2])) for match in matches}
    shards, models = max(shard for shard, _ in numbers), max(counts)
    wanted = ((shard, model) for shard in range(1, shards + 1) for model in range(1, models + 1))
    lost = next((pair for pair in wanted if pair not in numbers), None)
    if lost is not None:
        raise CheckpointError(f"{path}: the file of shard {lost[0]:05d}, model {lost[1]:05d} is missing")
    if len(numbers) != shards * models:
        raise CheckpointError(f"{path}: holds files with other numbers than 1 to {shards} of {models}")


def _read_offsets(text: str | None, file: SourceFile) -> dict[str, tuple[int, ...]]:
    """Tensor -> where the part in this file begins."""
    table = read_json(file.path, text.encode("utf-8", "surrogatepass")) if text is not None else None
    if not isinstance(table, dict):
        raise CheckpointError(f"{file.path}: holds no {INFO}, so it is no shard of DCP's")
    offsets: dict[str, tuple[int, ...]] = {}
    for key, entry in table.items():
        low = entry.get(OFFSETS) if isinstance(entry, dict) else None
        if not is_shape(low):
            raise CheckpointError(f"{file.path}: damaged, {INFO} does not say where {key!r} begins")
        offsets[key] = tuple(low)
    return offsets


def _check_consolidated(path: Place, stored: dict[str, Tensor]) -> None:
    """Compare the shapes with those of the consolidated files above, where there are any."""
    above = make_absolute(path).parent
    if path.name != _FOLDER or not (above / INDEX).is_file():
        return
    index = read_index(Folder(above), INDEX, lambda file: read_file(file)[0])
    for name, tensor in index.items():
        stored_tensor = stored.get(name)
        if stored_tensor is None or stored_tensor.shape != tensor.shape:
            lost = "is missing" if stored_tensor is None else f"is {list(stored_tensor.shape)}"
            raise CheckpointError(
                f"{path}: {name!r} {lost}, and {list(tensor.shape)} in the files above: a shard is missing"
            )


FORMAT = Format(
    "dcp-safetensors",
    lambda source: _find_folder(source.path),
    _open,
)
