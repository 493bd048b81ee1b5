"""Carrying out a conversion: what every writer shares.

A writer plans: which files there will be, and for each the bytes and tensors it consists of, in order.
Everything but the tensors' own bytes is known before the first is written, so a plan can be shown, measured
and checked against the free disk. `carry_out` then streams it.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from converters.errors import CheckpointError, OptimizerStateError
from converters.options import EXPANSION
from converters.storage.bytes import Memory
from converters.storage.object_store import RemotePath
from converters.tensors.casting import BLOCK_BYTES, cast_blocks, cast_dtype, parse_dtype
from converters.tensors.dtypes import itemsize
from converters.tensors.tensor import Tensor
from converters.writers.draft import check_output, new_output
from converters.writers.parallel import in_parallel, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from converters.checkpoint import Checkpoint, Scalar
    from converters.storage.bytes import Touched
    from converters.storage.path_or_url import Place
    from converters.writers.draft import Draft, OutPiece
    from converters.writers.parallel import Job, Progress


# So much is written however little SRC's files hold.
FREE_BYTES = 64 << 20
# A thread that reads from an object store waits most of the time.
_REMOTE_THREADS = 4


@dataclass(frozen=True)
class Entry:
    """One tensor of the output, in the type it is written in; `name` is unique within the output."""

    name: str
    dtype: str
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class Trailer:
    """`nbytes` bytes that follow a tensor and depend on the CRC32 of its bytes."""

    nbytes: int
    make: Callable[[int], bytes]


Part = bytes | Entry | Trailer


@dataclass(frozen=True)
class PlannedFile:
    """One file to be written: literal bytes, tensors, and what follows from them, in order."""

    name: str
    parts: tuple[Part, ...]

    @property
    def entries(self) -> list[Entry]:
        """The tensors of the file."""
        return [part for part in self.parts if isinstance(part, Entry)]

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.parts))


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will write.

    Attributes:
        files: the files that hold tensors.
        documents: small files: name -> content.
        companions: files copied as they are: name -> path.
        reopen: the written folder -> the tensors in it by `Entry.name`, for comparing with the source.
    """

    files: tuple[PlannedFile, ...]
    documents: Mapping[str, bytes]
    companions: Mapping[str, Place]
    reopen: Callable[[Place], Mapping[str, Tensor]]

    @property
    def names(self) -> set[str]:
        """Of every file that will be there."""
        return {*(file.name for file in self.files), *self.documents, *self.companions}

    @property
    def nbytes(self) -> int:
        """Bytes of the files that hold tensors."""
        return sum(file.nbytes for file in self.files)

    @property
    def buffer(self) -> int:
        """Peak bytes of tensor data in memory."""
        casts = any(entry.dtype != entry.tensor.dtype for file in self.files for entry in file.entries)
        return BLOCK_BYTES * (3 if casts else 1) * threads()


def _nbytes(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.nbytes


def model_entries(checkpoint: Checkpoint, dtype: str) -> list[Entry]:
    """The model's tensors in the type `--dtype` asks for; CheckpointError if there are none."""
    target = parse_dtype(dtype)
    if not checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.root}: holds no model tensors")
    for name in checkpoint.tensors:
        _check_name(name, checkpoint.root)
    return [Entry(name, cast_dtype(tensor, target), tensor) for name, tensor in checkpoint.tensors.items()]


def _check_name(name: str, where: Place) -> None:
    """Refuse a name that is no Unicode text: half of a pair of surrogates, which no reader of OUT takes."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: the tensor {name!r} has a name that is no text") from None


def optimizer_entries(checkpoint: Checkpoint) -> list[tuple[str, str, Entry]]:
    """(parameter, state name, entry) of all optimizer state, numbers as 0-d tensors, never cast."""
    optimizer = checkpoint.optimizer
    if optimizer is None:
        raise OptimizerStateError(f"{checkpoint.root}: holds no optimizer state")
    found = []
    for name, values in optimizer.state.items():
        for what, value in values.items():
            _check_name(f"{name}.{what}", checkpoint.root)
            tensor = value if isinstance(value, Tensor) else _scalar(f"{name}.{what}", value)
            found.append((name, what, Entry(f"{name}.{what}", tensor.dtype, tensor)))
    return found


def shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Cut into runs of at most `limit` bytes; a larger tensor gets a run of its own."""
    if limit < 1:
        raise CheckpointError(f"max_shard_size {limit} is not a positive number of bytes")
    made: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if made[-1] and size + entry.nbytes > limit:
            made.append([])
            size = 0
        made[-1].append(entry)
        size += entry.nbytes
    return made


def carry_out(
    checkpoint: Checkpoint,
    make_plan: Callable[[], Plan],
    out: Place,
    *,
    overwrite: bool,
    progress: bool,
    verify: bool,
    expand: bool,
    facts: Mapping[str, Any] | None = None,
) -> Plan:
    """Write a plan into `out`, which appears whole or stays as it was.

    Args:
        expand: write however much the tensors come to: see `check_expansion`.
        facts: what the marker of an `out` in an object store is to tell besides.

    Raises:
        CheckpointError: `out` is refused, the source is damaged, or the disk is full.
    """
    target = check_output(out, [checkpoint.root], overwrite=overwrite)
    plan = make_plan()
    check_expansion(checkpoint, plan, allowed=expand)
    from tqdm import tqdm  # not at the top: it takes as long to import as the rest of this package

    # disable=None: no bar where stderr is no terminal
    total = plan.nbytes * (2 if verify else 1)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=target.name, disable=None if progress else True)
    output = new_output(target, needed=plan.nbytes, overwrite=overwrite, names=plan.names, facts=facts or {})
    with bar, output as draft:
        workers = draft.threads or (_REMOTE_THREADS if isinstance(checkpoint.root, RemotePath) else None)
        touched: Touched = set()
        in_parallel(_write_jobs(draft, plan, touched), bar.update, workers)
        for span in touched:
            span.verify()
        draft.settle()
        for name, data in plan.documents.items():
            draft.write(name, data)
        for name, path in plan.companions.items():
            draft.copy(path, name)
        if verify:
            in_parallel(_verify_jobs(draft.folder, plan), bar.update, workers)
    return plan


def check_expansion(checkpoint: Checkpoint, plan: Plan, *, allowed: bool) -> None:
    """Refuse a plan that writes far more than SRC's files hold, unless that is asked for.

    A pickled tensor may be a view that repeats its storage (a stride of 0, or a thousand names for one
    storage), so a kilobyte can be a tensor of gigabytes.
    """
    if allowed or plan.nbytes <= FREE_BYTES:
        return
    held = _bytes_below(checkpoint.root)
    # Nothing there: a checkpoint that was made in memory.
    if held and plan.nbytes > EXPANSION * held:
        most = max((entry for file in plan.files for entry in file.entries), key=lambda entry: entry.nbytes)
        raise CheckpointError(
            f"{checkpoint.root}: its files hold {held:,} bytes, its tensors repeat them to {plan.nbytes:,} "
            f"({most.name!r} alone {most.nbytes:,}), more than {EXPANSION} times as many; "
            "give --expand to write them all"
        )


def _bytes_below(root: Place) -> int:
    """Bytes of the files of a checkpoint: all below its folder, or beside a file."""
    if isinstance(root, RemotePath):
        folder = root.parent if root.is_file() else root
        return sum(found.size for found in folder.objects().values())
    total = 0
    for where, _, names in os.walk(root.parent if root.is_file() else root):
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(where, name))  # noqa: PTH116, PTH118 - a Path for each is slow
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _scalar(name: str, value: Scalar) -> Tensor:
    if isinstance(value, bool):
        return Tensor.contiguous(name, "BOOL", (), Memory(bytes([value])))
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return Tensor.contiguous(name, "I64", (), Memory(value.to_bytes(8, "little", signed=True)))
    return Tensor.contiguous(name, "F64", (), Memory(struct.pack("<d", value)))


def _write_jobs(draft: Draft, plan: Plan, touched: Touched) -> Iterator[Job]:
    """The plan in runs of parts, in order; each file is made when its first run is drawn."""
    for file in plan.files:
        runs = list(_runs(file.parts, draft.run_bytes(file.nbytes)))
        out = draft.file(file.name, [nbytes for nbytes, _ in runs])
        for number, (_, run) in enumerate(runs):
            yield partial(_write_run, out.piece(number), run, touched)


def _runs(parts: Iterable[Part], least: int) -> Iterator[tuple[int, list[Part]]]:
    """(bytes, parts) of each run, of at least `least` but for the last; a trailer stays with its tensor."""
    run: list[Part] = []
    size = 0
    for part in parts:
        if size >= least and not isinstance(part, Trailer):
            yield size, run
            run, size = [], 0
        run.append(part)
        size += _nbytes(part)
    yield size, run


def _write_run(piece: OutPiece, run: list[Part], touched: Touched, progress: Progress) -> None:
    crc = 0
    for i, part in enumerate(run):
        if isinstance(part, Entry):
            summed = i + 1 < len(run) and isinstance(run[i + 1], Trailer)
            crc = _write_entry(piece, part, touched, progress, summed=summed)
        else:
            data = part if isinstance(part, bytes) else part.make(crc)
            piece.write(data)
            progress(len(data))
    piece.finish()


def _write_entry(piece: OutPiece, entry: Entry, touched: Touched, progress: Progress, *, summed: bool) -> int:
    """Stream one tensor; its CRC32 where `summed`."""
    if not summed and entry.dtype == entry.tensor.dtype:
        span = entry.tensor.whole_span()
        if span is not None and piece.copy(span, progress):
            return 0
    crc = 0
    spans: Touched = set()
    for block in cast_blocks(entry.tensor, entry.dtype, spans):
        data = block.view("u1").data
        if summed:
            crc = isal_zlib.crc32(data, crc)
        piece.write(data)
        progress(len(data))
    for span in spans:
        # A file of its own can be settled at once; what several tensors share waits for the last of them.
        if span.read_through:
            span.verify()
            touched.discard(span)
        else:
            touched.add(span)
    entry.tensor.release()
    return crc


def _verify_jobs(folder: Place, plan: Plan) -> Iterator[Job]:
    """Compare the written files with the source, tensor by tensor."""
    copies = plan.reopen(folder)
    for file in plan.files:
        for entry in file.entries:
            copy = copies.get(entry.name)
            if copy is None or copy.shape != entry.tensor.shape or copy.dtype != entry.dtype:
                raise CheckpointError(f"{file.name}: {entry.name!r} did not come out as planned")
            yield partial(_compare, file.name, entry, copy)


def _compare(file: str, entry: Entry, copy: Tensor, progress: Progress) -> None:
    touched: Touched = set()
    step = BLOCK_BYTES // itemsize(entry.tensor.dtype) * itemsize(entry.dtype)
    ours = cast_blocks(entry.tensor, entry.dtype, set())
    for left, right in zip(ours, copy.blocks(step, touched), strict=True):
        if left.tobytes() != right.tobytes():
            raise CheckpointError(f"{file}: {entry.name!r} is not what was written")
        progress(left.nbytes)
    for span in touched:
        span.verify()
