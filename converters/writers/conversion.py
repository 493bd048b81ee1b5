"""Plans of what to write, and carrying them out: shared by all writers.

A writer makes a plan of the files, each a sequence of literal bytes and tensors. Everything but the tensor
data is known before writing starts, so a plan can be printed, measured and checked against the free disk
space. `carry_out` then streams it.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypedDict

from isal import isal_zlib

from converters.containers.pickle_reader import plain
from converters.errors import CheckpointError, OptimizerStateError
from converters.limits import MAX_GROUP_VALUES
from converters.options import EXPANSION
from converters.storage.bytes import Memory
from converters.storage.output_file import FLUSH_BYTES
from converters.storage.path_or_url import in_store
from converters.storage.places import files_below, side_by_side
from converters.storage.safe_open import open_regular
from converters.tensors.casting import BLOCK_BYTES, Losses, cast_blocks, cast_dtype, parse_dtype
from converters.tensors.dtypes import QUANTIZED, itemsize
from converters.tensors.tensor import Tensor
from converters.writers.draft import check_output, new_output
from converters.writers.parallel import in_parallel, interleaved, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Unpack

    from converters.checkpoint import Checkpoint, OptimizerState, ParamGroups, Scalar
    from converters.storage.bytes import FileSpan, Touched
    from converters.storage.output_file import Piece
    from converters.storage.path_or_url import Place
    from converters.writers.draft import FolderOutput
    from converters.writers.parallel import Job, Progress
    from converters.writers.remote_draft import StoreOutput, UploadedPiece

    Output = FolderOutput | StoreOutput
    OutPiece = Piece | UploadedPiece


# Outputs up to this size are never refused as an expansion.
FREE_BYTES = 64 << 20
# The bytes that `st_blocks` counts in.
_BLOCK = 512


@dataclass(frozen=True)
class Choices:
    """What to write of a checkpoint.

    Attributes:
        dtype: keep, float32, bfloat16 or float16 (fp32, bf16, fp16), for floating model tensors of at least
            one dimension; for GGUF also q8_0, q4_0 and mxfp4.
        max_shard_size: bytes of a file, where the format has several; a larger tensor gets a file of its own.
        optimizer: also write the optimizer's state and parameter groups.
    """

    dtype: str = "keep"
    max_shard_size: int = 5_000_000_000
    optimizer: bool = False


@dataclass(frozen=True)
class Entry:
    """One tensor of the output and the dtype to write; `name` is unique within the output."""

    name: str
    dtype: str
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class Trailer:
    """`nbytes` bytes after a tensor, computed from the CRC32 of its data; `late` once all else is written."""

    nbytes: int
    make: Callable[[int], bytes]
    late: bool = False


Part = bytes | Entry | Trailer


@dataclass(frozen=True)
class PlannedFile:
    """One file to write: literal bytes, tensors and trailers, in order."""

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
    """All output of a conversion.

    Attributes:
        files: the files that hold tensors.
        documents: small files: name -> content.
        companions: files copied unchanged: name -> path.
        reopen: the written folder -> its tensors by `Entry.name`, for `--verify`.
        losses: what its casts changed beyond rounding, once it is carried out.
    """

    files: tuple[PlannedFile, ...]
    documents: Mapping[str, bytes]
    companions: Mapping[str, Place]
    reopen: Callable[[Place], Mapping[str, Tensor]]
    losses: Losses = field(default_factory=Losses)

    @property
    def names(self) -> set[str]:
        """The names of all files."""
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


def model_entries(checkpoint: Checkpoint, dtype: str, *, aliases: bool = False) -> list[Entry]:
    """The model's tensors in the dtype of `--dtype`, on demand under every name of tied ones.

    Raises:
        CheckpointError: there are none.
    """
    target = parse_dtype(dtype)
    if not checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.root}: holds no model tensors")
    for name in checkpoint.tensors:
        _check_name(name, checkpoint.root)
    tensors = dict(checkpoint.tensors)
    if aliases:
        tensors |= {alias: tensors[owner] for alias, owner in checkpoint.aliases.items()}
    # What lies in a module of quantized weights, or below such a weight: scales keep their dtypes.
    packed = [name for name, tensor in tensors.items() if tensor.dtype in QUANTIZED and tensor.shape]
    quantized = {*packed, *(name.rpartition(".")[0] for name in packed)}

    def kind(name: str, tensor: Tensor) -> str:
        module, _, leaf = name.rpartition(".")
        return cast_dtype(tensor, None if module in quantized and leaf != "bias" else target)

    return [Entry(name, kind(name, tensor), tensor) for name, tensor in tensors.items()]


def _check_name(name: str, where: Place) -> None:
    """Refuse a name with a lone surrogate, which cannot be written as UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: the tensor {name!r}: its name is not valid Unicode") from None


def required_optimizer(checkpoint: Checkpoint) -> OptimizerState:
    """The checkpoint's optimizer; CheckpointError if it has none."""
    optimizer = checkpoint.optimizer
    if optimizer is None:
        raise OptimizerStateError(f"{checkpoint.root}: holds no optimizer state")
    return optimizer


def plain_groups(optimizer: OptimizerState) -> ParamGroups:
    """The parameter groups as plain values; `betas` as the tuple that torch uses, not a list."""
    listed: ParamGroups = plain(optimizer.param_groups, limit=MAX_GROUP_VALUES)
    return [
        {
            key: tuple(value) if key == "betas" and isinstance(value, list) else value
            for key, value in group.items()
        }
        for group in listed
    ]


def optimizer_entries(optimizer: OptimizerState, root: Place) -> list[tuple[str, str, Entry]]:
    """(parameter, state name, entry) of all optimizer state: numbers become 0-d tensors, nothing is cast."""
    found = []
    for name, values in optimizer.state.items():
        for what, value in values.items():
            _check_name(f"{name}.{what}", root)
            tensor = value if isinstance(value, Tensor) else _scalar(f"{name}.{what}", value)
            found.append((name, what, Entry(f"{name}.{what}", tensor.dtype, tensor)))
    return found


def shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Split into shards of at most `limit` bytes; a larger tensor gets a shard of its own."""
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


class Options(TypedDict, total=False):
    """How to carry a plan out.

    Attributes:
        overwrite: replace the output where it exists.
        progress: show a progress bar if stderr is a terminal; the default.
        verify: read everything back and compare before the output appears.
        expand: allow an output much larger than the source, where tensors share bytes: see `check_expansion`.
        facts: extra fields for the completion marker of an output in an object store.
    """

    overwrite: bool
    progress: bool
    verify: bool
    expand: bool
    facts: Mapping[str, Any] | None


def carry_out(
    checkpoint: Checkpoint,
    make_plan: Callable[[], Plan],
    out: Place,
    *,
    single: bool = False,
    **options: Unpack[Options],
) -> Plan:
    """Write a plan into `out`, atomically.

    Args:
        single: `out` is the plan's only file, and no folder.
        options: see `Options`.

    Raises:
        CheckpointError: `out` is refused, the source is damaged, or the disk is full.
    """
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)}")  # misspelt, it would have no effect
    overwrite, verify = options.get("overwrite", False), options.get("verify", False)
    target = check_output(
        out, [checkpoint.root], overwrite=overwrite, single=single, companions=checkpoint.companions
    )
    plan = make_plan()
    check_expansion(checkpoint, plan, allowed=options.get("expand", False))
    from tqdm import tqdm  # not at the top: slow to import

    # disable=None: no bar if stderr is not a terminal
    compared = sum(entry.nbytes for file in plan.files for entry in file.entries) if verify else 0
    bar = tqdm(
        total=plan.nbytes + compared,
        unit="B",
        unit_scale=True,
        desc=target.name.removeprefix(".").removesuffix(".new"),
        disable=None if options.get("progress", True) else True,
    )
    output = new_output(
        target,
        needed=plan.nbytes,
        overwrite=overwrite,
        names=plan.names,
        single=single,
        facts=options.get("facts"),
        copied=lambda: _copied(plan),
    )
    with bar, output as draft:
        workers = draft.threads or side_by_side(checkpoint.root)
        touched: Touched = set()
        late: list[Job] = []
        in_parallel(_write_jobs(draft, plan, touched, late), bar.update, workers)
        in_parallel(iter(late), bar.update, workers)
        for span in touched:
            span.verify()
        draft.commit()
        for name, data in plan.documents.items():
            draft.write(name, data)
        for name, path in plan.companions.items():
            draft.copy(path, name)
        if verify:
            in_parallel(_verify_jobs(draft.folder, plan), bar.update, workers)
    return plan


def _copied(plan: Plan) -> Iterator[FileSpan]:
    """The spans that `_write_entry` lets the kernel copy."""
    for file in plan.files:
        for part, after in zip_longest(file.parts, file.parts[1:]):
            if isinstance(part, Entry) and part.dtype == part.tensor.dtype and not isinstance(after, Trailer):
                span = part.tensor.whole_span(located=True)
                if span is not None:
                    yield span


def check_expansion(checkpoint: Checkpoint, plan: Plan, *, allowed: bool) -> None:
    """Refuse a plan that writes far more bytes than SRC's files hold, unless allowed.

    A pickled tensor can be a view that repeats its storage (a stride of 0, or many names for one storage), so
    a kilobyte can become gigabytes.
    """
    if allowed or plan.nbytes <= FREE_BYTES:
        return
    held = _bytes_below(checkpoint.root)
    # 0 for a checkpoint made in memory.
    if held and plan.nbytes > EXPANSION * held:
        most = max((entry for file in plan.files for entry in file.entries), key=lambda entry: entry.nbytes)
        raise CheckpointError(
            f"{checkpoint.root}: its files hold {held:,} bytes, its tensors {plan.nbytes:,} "
            f"({most.name!r} alone {most.nbytes:,}), more than {EXPANSION} times as many; "
            "give --expand to write them all"
        )


def _bytes_below(root: Place) -> int:
    """Bytes of all files below the folder of a checkpoint, or beside its file."""
    folder = root.parent if root.is_file() else root
    files = files_below(folder).items()
    return sum(
        found.size if in_store(folder) else _stored(folder / name, found.size) for name, found in files
    )


def _stored(path: Path, size: int) -> int:
    """The bytes of a file that are not in holes; its blocks do not tell, since some systems compress them."""
    stored, at = 0, 0
    try:
        if path.stat().st_blocks * _BLOCK >= size:
            return size
        descriptor = open_regular(path.resolve())
    except OSError:  # it is gone, or is another user's
        return 0
    try:
        while at < size:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, begin, os.SEEK_HOLE)
            stored += at - begin
    except OSError as error:
        if error.errno != errno.ENXIO:  # that nothing follows but a hole
            return size
    finally:
        os.close(descriptor)
    return stored


def _scalar(name: str, value: Scalar) -> Tensor:
    if isinstance(value, bool):
        return Tensor.contiguous(name, "BOOL", (), Memory(bytes([value])))
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return Tensor.contiguous(name, "I64", (), Memory(value.to_bytes(8, "little", signed=True)))
    return Tensor.contiguous(name, "F64", (), Memory(struct.pack("<d", value)))


def _write_jobs(draft: Output, plan: Plan, touched: Touched, late: list[Job]) -> Iterator[Job]:
    """The plan as jobs, by turns of a few files; each file is created when its first job is drawn.

    `late` receives those that may begin when all others have ended.
    """

    def jobs(file: PlannedFile) -> Iterator[Job]:
        runs = list(_runs(file.parts, FLUSH_BYTES))
        out = draft.file(file.name, [nbytes for nbytes, _ in runs])
        for number, (_, run) in enumerate(runs):
            job = partial(_write_run, out.piece(number), run, touched, plan.losses)
            if run and isinstance(run[-1], Trailer) and run[-1].late:
                late.append(job)
            else:
                yield job

    # In an object store a file is sent in order, and its parts are made side by side.
    return interleaved(map(jobs, plan.files), 1 if draft.threads else threads())


def _runs(parts: Iterable[Part], least: int) -> Iterator[tuple[int, list[Part]]]:
    """(bytes, parts) of runs of at least `least` bytes except the last; a trailer stays with its tensor."""
    run: list[Part] = []
    size = 0
    for part in parts:
        if size >= least and not isinstance(part, Trailer):
            yield size, run
            run, size = [], 0
        run.append(part)
        size += _nbytes(part)
    yield size, run


def _write_run(
    piece: OutPiece, run: list[Part], touched: Touched, losses: Losses, progress: Progress
) -> None:
    crc = 0
    for i, part in enumerate(run):
        if isinstance(part, Entry):
            summed = i + 1 < len(run) and isinstance(run[i + 1], Trailer)
            crc = _write_entry(piece, part, touched, losses, progress, summed=summed)
        else:
            data = part if isinstance(part, bytes) else part.make(crc)
            piece.write(data)
            progress(len(data))
    piece.finish(progress)


def _write_entry(
    piece: OutPiece,
    entry: Entry,
    touched: Touched,
    losses: Losses,
    progress: Progress,
    *,
    summed: bool,
) -> int:
    """Stream one tensor; its CRC32 where `summed`."""
    if not summed and entry.dtype == entry.tensor.dtype:
        span = entry.tensor.whole_span()
        if span is not None and piece.copy(span, progress):
            return 0
    crc = 0
    spans: Touched = set()
    for block in cast_blocks(entry.tensor, entry.dtype, spans, losses=losses):
        data = block.view("u1").data
        if summed:
            crc = isal_zlib.crc32(data, crc)
        piece.write(data)
        progress(len(data))
    for span in spans:
        # Verify a span that was read completely; one shared by several tensors waits for the last of them.
        if span.next_gap() is None:
            span.verify()
            touched.discard(span)
        else:
            touched.add(span)
    entry.tensor.release()
    return crc


def _verify_jobs(folder: Place, plan: Plan) -> Iterator[Job]:
    """Jobs that compare the written files with the source, tensor by tensor."""
    copies = plan.reopen(folder)
    for file in plan.files:
        for entry in file.entries:
            copy = copies.get(entry.name)
            if copy is None or copy.shape != entry.tensor.shape or copy.dtype != entry.dtype:
                raise CheckpointError(
                    f"{file.name}: {entry.name!r} was not written as planned; this is a bug"
                )
            yield partial(_compare, file.name, entry, copy)


def _compare(file: str, entry: Entry, copy: Tensor, progress: Progress) -> None:
    step = BLOCK_BYTES // itemsize(entry.tensor.dtype) * itemsize(entry.dtype)
    ours = cast_blocks(entry.tensor, entry.dtype, set())
    for left, right in zip(ours, copy.verified_blocks(step), strict=True):
        if left.tobytes() != right.tobytes():
            raise CheckpointError(f"{file}: {entry.name!r} differs from the source")
        progress(left.nbytes)
