"""Stream a checkpoint into safetensors files that `from_pretrained` loads.

Source: https://github.com/huggingface/safetensors ("Format"); the index is transformers' `save_pretrained`'s.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.casting import BLOCK_BYTES, cast_blocks, cast_dtype, parse_dtype
from converters.dtypes import itemsize
from converters.errors import CheckpointError
from converters.formats.safetensors import GROUPS, MAX_HEADER, OPTIMIZER, read_file
from converters.output import check_output, new_folder
from converters.pickles import plain
from converters.storage import Folder, Memory, Touched
from converters.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.checkpoint import Checkpoint, Scalar

Bar = Any  # a tqdm bar; its class is imported late
# Bytes the kernel copies in one call, so that the progress bar moves and Ctrl-C is heard.
_KERNEL_COPY = 64 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of an output file, in the type it is written in."""

    name: str
    dtype: str
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file to be written: its header and its tensors in the order of their bytes."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will write.

    Attributes:
        files: the safetensors files.
        documents: small JSON files: name -> content.
        companions: files copied as they are: name -> path.
        buffer: peak bytes of tensor data in memory.
    """

    files: tuple[PlannedFile, ...]
    documents: Mapping[str, bytes]
    companions: Mapping[str, Path]
    buffer: int

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data and headers."""
        return sum(file.nbytes for file in self.files)


def plan_safetensors(
    checkpoint: Checkpoint,
    *,
    dtype: str = "keep",
    max_shard_size: int = 5_000_000_000,
    optimizer: bool = False,
) -> Plan:
    """What `write_safetensors` would write, without writing it. Arguments and errors are the same."""
    target = parse_dtype(dtype)
    if max_shard_size < 1:
        raise CheckpointError(f"max_shard_size {max_shard_size} is not a positive number of bytes")
    if not checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.root}: holds no model tensors")
    entries = [Entry(name, cast_dtype(tensor, target), tensor) for name, tensor in checkpoint.tensors.items()]
    shards = _shards(entries, max_shard_size)
    documents: dict[str, bytes] = {}
    if len(shards) == 1:
        files = [_planned("model.safetensors", shards[0])]
    else:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        files = [_planned(name, shard) for name, shard in zip(names, shards, strict=True)]
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
            "weight_map": {
                entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard
            },
        }
        documents["model.safetensors.index.json"] = _document(index)
    if optimizer:
        state, groups = _optimizer(checkpoint)
        files.append(_planned(OPTIMIZER, state))
        documents[GROUPS] = groups
    companions = {name: path for name, path in checkpoint.companions.items() if name not in documents}
    casts = any(entry.dtype != entry.tensor.dtype for entry in entries)
    return Plan(tuple(files), documents, companions, BLOCK_BYTES * (3 if casts else 1))


def write_safetensors(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: int = 5_000_000_000,
    optimizer: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    verify: bool = False,
) -> Plan:
    """Write `out/model.safetensors` (or numbered shards with an index) and the companions.

    Args:
        dtype: keep, float32, bfloat16 or float16, for floating tensors of at least one dimension.
        max_shard_size: bytes; a tensor larger than that gets a shard of its own.
        optimizer: also write `optimizer.safetensors` (`<name>.<state>`, never cast) and `optimizer.json`.
        overwrite: replace `out` where it exists.
        progress: a bar in bytes on a terminal's stderr.
        verify: read everything back and compare before `out` appears.

    Returns:
        The plan that was carried out.

    Raises:
        CheckpointError: `out` refused, the source damaged, or the disk full. `out` is then as it was.
    """
    target = check_output(Path(out), [checkpoint.root], overwrite=overwrite)
    plan = plan_safetensors(checkpoint, dtype=dtype, max_shard_size=max_shard_size, optimizer=optimizer)
    total = plan.nbytes * (2 if verify else 1)
    from tqdm import tqdm  # not at the top: it takes as long to import as the rest of this package

    # disable=None: no bar where stderr is no terminal
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=target.name, disable=None if progress else True)
    with bar, new_folder(target, needed=plan.nbytes, overwrite=overwrite) as folder:
        touched: Touched = set()
        for file in plan.files:
            _write_file(folder / file.name, file, touched, bar)
        for span in touched:
            span.verify()
        for name, data in plan.documents.items():
            _write_bytes(folder / name, data)
        for name, path in plan.companions.items():
            _write_bytes(folder / name, path.read_bytes())
        if verify:
            _verify(folder, plan, bar)
    return plan


def _shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _planned(name: str, entries: Iterable[Entry]) -> PlannedFile:
    # Wide types first: readers view the bytes as elements, so tensors must start at multiples of their width.
    ordered = sorted(entries, key=lambda entry: -itemsize(entry.dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in ordered:
        if entry.name in header:
            raise CheckpointError(f"{name}: two tensors would be called {entry.name!r}")
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.tensor.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"{name}: too many tensors for one file; lower --max-shard-size")
    return PlannedFile(name, len(text).to_bytes(8, "little") + text, tuple(ordered))


def _optimizer(checkpoint: Checkpoint) -> tuple[list[Entry], bytes]:
    state = checkpoint.optimizer
    if state is None:
        raise CheckpointError(f"{checkpoint.root}: holds no optimizer state; convert without --optimizer")
    entries = []
    for name, values in state.state.items():
        for what, value in values.items():
            tensor = value if isinstance(value, Tensor) else _scalar(f"{name}.{what}", value)
            entries.append(Entry(f"{name}.{what}", tensor.dtype, tensor))
    return entries, _document({"param_groups": plain(state.param_groups, limit=10_000_000)})


def _scalar(name: str, value: Scalar) -> Tensor:
    if isinstance(value, bool):
        return Tensor.contiguous(name, "BOOL", (), Memory(bytes([value])))
    if isinstance(value, int):
        return Tensor.contiguous(name, "I64", (), Memory(value.to_bytes(8, "little", signed=True)))
    return Tensor.contiguous(name, "F64", (), Memory(struct.pack("<d", value)))


def _document(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_file(path: Path, file: PlannedFile, touched: Touched, bar: Bar) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(fd, memoryview(file.header))
        bar.update(len(file.header))
        for entry in file.entries:
            if entry.dtype == entry.tensor.dtype and _kernel_copy(fd, entry.tensor, bar):
                continue
            for block in cast_blocks(entry.tensor, entry.dtype, touched):
                _write_all(fd, block.view("u1").data)
                bar.update(block.nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _kernel_copy(fd: int, tensor: Tensor, bar: Bar) -> bool:
    """Let the kernel copy a tensor that lies whole in one file and has no checksum to compute on the way."""
    span = tensor.whole_span()
    if span is None or not hasattr(os, "copy_file_range"):
        return False
    descriptor = span.file.folder.descriptor(span.file)
    start = os.lseek(fd, 0, os.SEEK_CUR)
    at, left = span.offset, span.nbytes
    while left:
        try:
            count = os.copy_file_range(descriptor.fd, fd, min(left, _KERNEL_COPY), offset_src=at)
        except OSError:
            count = 0  # across filesystems, or an old kernel: copy by hand, from the start
        if count == 0:
            os.ftruncate(fd, start)
            os.lseek(fd, start, os.SEEK_SET)
            bar.update(left - span.nbytes)
            return False
        at, left = at + count, left - count
        bar.update(count)
    return True


def _verify(folder: Path, plan: Plan, bar: Bar) -> None:
    """Compare the written files with the source, tensor by tensor."""
    written = Folder(folder)
    for file in plan.files:
        tensors, _ = read_file(written.file(file.name))
        touched: Touched = set()
        for entry in file.entries:
            copy = tensors.get(entry.name)
            if copy is None or copy.shape != entry.tensor.shape or copy.dtype != entry.dtype:
                raise CheckpointError(f"{file.name}: {entry.name!r} did not come out as planned")
            step = BLOCK_BYTES // itemsize(entry.tensor.dtype) * itemsize(entry.dtype)
            ours = cast_blocks(entry.tensor, entry.dtype, touched)
            for left, right in zip(ours, copy.blocks(step, touched), strict=True):
                if left.tobytes() != right.tobytes():
                    raise CheckpointError(
                        f"{file.name}: {entry.name!r} differs from its source after writing"
                    )
            bar.update(entry.nbytes)
        bar.update(len(file.header))
