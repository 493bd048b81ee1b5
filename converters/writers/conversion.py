"""Conversion plans and the code that carries them out, shared by all writers.

A writer builds a `ConversionPlan` that describes the output files. Each file is a sequence of literal bytes,
tensors, and trailers. Everything except the tensor data and its checksums is known before writing starts, so
a plan can be printed, measured, and checked against the free disk space. `carry_out` then streams the tensor
data to the files.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from isal import isal_zlib

from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.errors import CheckpointError, OptimizerStateError
from portable.converters.limits import MAX_GROUP_VALUES
from portable.converters.names.code_names import find_quantized_modules
from portable.converters.options import EXPANSION
from portable.converters.storage.byte_sources import Memory
from portable.converters.storage.folder_operations import files_below, side_by_side
from portable.converters.storage.output_file import FLUSH_BYTES
from portable.converters.storage.path_or_url import in_store, resolve_links
from portable.converters.storage.safe_open import open_regular
from portable.converters.tensors.casting import BLOCK_BYTES, CastLosses, cast_blocks, cast_dtype, parse_dtype
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.entry import OutputTensor
from portable.converters.tensors.tensor import Tensor
from portable.converters.writers.atomic_output import check_output, join_output, open_output
from portable.converters.writers.parallel_jobs import count_threads, interleave_jobs, run_jobs
from portable.converters.writers.plan import ConversionPlan, Part, PlannedFile, Trailer, count_bytes
from portable.converters.writers.writer_group import check_same_plan, compute_plan_digest, deal_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Unpack

    from portable.converters.checkpoint import Checkpoint, OptimizerState, ParamGroups, Scalar
    from portable.converters.storage.byte_sources import FileSpan, Touched
    from portable.converters.storage.output_file import Piece
    from portable.converters.storage.path_or_url import Place
    from portable.converters.writers.atomic_output import FolderOutput
    from portable.converters.writers.parallel_jobs import Job, Progress
    from portable.converters.writers.store_output import StoreOutput, StoreUploads, UploadedPiece
    from portable.converters.writers.writer_group import WriterGroup

    Output = FolderOutput | StoreOutput | StoreUploads
    OutputPiece = Piece | UploadedPiece


# Outputs up to this size in bytes are always allowed, regardless of the size of the source.
_MAX_UNCHECKED_BYTES = 64 << 20
# Block size of `st_blocks` in `os.stat` results, in bytes.
_STAT_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Choices:
    """Options that determine the contents of the output.

    Attributes:
        dtype: Target dtype for floating-point model tensors: `"float32"`, `"bfloat16"`, or `"float16"`
            (`"fp32"`, `"bf16"`, or `"fp16"` for short), or `"keep"` to leave the dtypes unchanged. GGUF also
            supports `"q8_0"`, `"q4_0"`, and `"mxfp4"`. 8-bit floats and 0-D tensors are never cast.
        max_shard_size: Maximum file size in bytes for formats that split the tensors into several files. Any
            tensor larger than this is written to a separate file.
        optimizer: Whether to also write the optimizer state and the parameter groups.
    """

    dtype: str = "keep"
    max_shard_size: int = 5_000_000_000
    optimizer: bool = False


def list_model_entries(checkpoint: Checkpoint, dtype: str, *, aliases: bool = False) -> list[OutputTensor]:
    """List the model tensors to write, with their output dtypes.

    Args:
        checkpoint: Checkpoint to convert.
        dtype: Target dtype. See `Choices` for the supported values.
        aliases: Whether to also write tied tensors under each of their aliases.

    Returns:
        One entry per tensor name to write.

    Raises:
        CheckpointError: If the checkpoint does not contain any model tensors, if a tensor name is not valid
            Unicode, or if `dtype` is unknown.
    """
    target_dtype = parse_dtype(dtype)
    if not checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.root}: the checkpoint has no model tensors; "
            "choose a checkpoint that contains a model"
        )
    for name in checkpoint.tensors:
        _check_tensor_name(name, checkpoint.root)
    tensors = dict(checkpoint.tensors)
    if aliases:
        tensors |= {alias: tensors[owner] for alias, owner in checkpoint.aliases.items()}
    # Except for biases, do not cast tensors that are next to or nested under a quantized weight, because they
    # may be its scales.
    quantized_modules = find_quantized_modules(tensors)

    def choose_dtype(name: str, tensor: Tensor) -> str:
        module, _, leaf = name.rpartition(".")
        return cast_dtype(tensor, None if module in quantized_modules and leaf != "bias" else target_dtype)

    return [OutputTensor(name, choose_dtype(name, tensor), tensor) for name, tensor in tensors.items()]


def _check_tensor_name(name: str, root: Place) -> None:
    """Raise CheckpointError if a name contains lone surrogates, which cannot be encoded as UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{root}: the tensor name {name!r} is not valid Unicode; rename the tensor in the checkpoint"
        ) from None


def require_optimizer(checkpoint: Checkpoint) -> OptimizerState:
    """Return the checkpoint's optimizer state, raising an error if it has none.

    Args:
        checkpoint: Checkpoint to convert.

    Returns:
        The optimizer state.

    Raises:
        OptimizerStateError: If the checkpoint does not contain optimizer state.
    """
    optimizer = checkpoint.optimizer
    if optimizer is None:
        raise OptimizerStateError(f"{checkpoint.root}: the checkpoint has no optimizer state")
    return optimizer


def to_plain_groups(optimizer: OptimizerState) -> ParamGroups:
    """Convert the parameter groups to plain Python objects, for example to write them as JSON.

    Args:
        optimizer: Optimizer state that contains the parameter groups.

    Returns:
        The parameter groups as dicts, lists, strings, and numbers. Only `betas` is a tuple, as in PyTorch.
    """
    groups: ParamGroups = to_json_value(optimizer.param_groups, limit=MAX_GROUP_VALUES)
    return [
        {
            key: tuple(value) if key == "betas" and isinstance(value, list) else value
            for key, value in group.items()
        }
        for group in groups
    ]


class OptimizerEntry(NamedTuple):
    """One tensor of the optimizer state to write.

    Attributes:
        parameter: Name of the parameter.
        state_name: Name of the state, such as `exp_avg`.
        entry: Tensor to write, named `<parameter>.<state_name>`.
    """

    parameter: str
    state_name: str
    entry: OutputTensor


def list_optimizer_entries(optimizer: OptimizerState, root: Place) -> list[OptimizerEntry]:
    """List the optimizer state tensors to write.

    Numbers are converted to 0-D tensors, and tensors keep their dtypes.

    Args:
        optimizer: Optimizer state to write.
        root: Folder or file of the checkpoint, used in error messages.

    Returns:
        One entry per tensor or number of the optimizer state.

    Raises:
        CheckpointError: If a name is not valid Unicode.
    """
    entries = []
    for name, values in optimizer.state.items():
        for state_name, value in values.items():
            _check_tensor_name(f"{name}.{state_name}", root)
            tensor = (
                value if isinstance(value, Tensor) else _make_scalar_tensor(f"{name}.{state_name}", value)
            )
            entry = OutputTensor(f"{name}.{state_name}", tensor.dtype, tensor)
            entries.append(OptimizerEntry(name, state_name, entry))
    return entries


def split_into_shards(entries: Iterable[OutputTensor], max_bytes: int) -> list[list[OutputTensor]]:
    """Group tensors into shards of limited size, preserving their order.

    Args:
        entries: Tensors to group.
        max_bytes: Maximum shard size in bytes. Any tensor larger than this is placed in a separate shard.

    Returns:
        The entries of each shard. There is always at least one shard, but it may be empty.

    Raises:
        CheckpointError: If `max_bytes` is less than 1.
    """
    if max_bytes < 1:
        raise CheckpointError(
            f"max_shard_size: {max_bytes} is not a positive number of bytes; specify at least 1"
        )
    entries_by_shard: list[list[OutputTensor]] = [[]]
    shard_bytes = 0
    for entry in entries:
        if entries_by_shard[-1] and shard_bytes + entry.nbytes > max_bytes:
            entries_by_shard.append([])
            shard_bytes = 0
        entries_by_shard[-1].append(entry)
        shard_bytes += entry.nbytes
    return entries_by_shard


class Options(TypedDict, total=False):
    """Options that determine how `carry_out` writes a plan.

    Attributes:
        overwrite: Whether to replace an existing output. Default: False.
        progress: Whether to show a progress bar if stderr is a terminal. Default: True.
        verify: Whether to read the written tensors back and compare them with the source before the output
            is published. Default: False.
        expand: Whether to allow an output that is much larger than the source. See `check_expansion`.
            Default: False.
        facts: Additional fields to store in the completion marker if the output is in an object store.
            Default: None.
        group: Processes that write the output together, each some of its files. All of them call the same
            function with the same arguments. Default: None, which means that this process writes all files.
    """

    overwrite: bool
    progress: bool
    verify: bool
    expand: bool
    facts: Mapping[str, Any] | None
    group: WriterGroup | None


def carry_out(
    checkpoint: Checkpoint,
    make_plan: Callable[[], ConversionPlan],
    out: Place,
    *,
    single: bool = False,
    **options: Unpack[Options],
) -> ConversionPlan:
    """Write a plan atomically.

    On a local disk, the output is written under a temporary name and renamed to `out` once it is complete. In
    an object store, a completion marker is added to the output folder once the folder is complete.

    Args:
        checkpoint: Checkpoint to convert. Its folder must not contain `out`, and vice versa.
        make_plan: Function that returns the plan. It is called after `out` has been checked.
        out: Output folder or file.
        single: Whether the plan consists of a single file. If True, `out` is the path of this file instead of
            a folder.
        **options: Additional options. See `Options`.

    Returns:
        The plan that was written.

    Raises:
        CheckpointError: If `out` cannot be written or replaced, the source is damaged, the output would be
            much larger than the source, or the disk is full.
        TypeError: If an option is unknown.
    """
    # Python does not check the names at runtime, so a misspelled option would be silently ignored.
    if unknown_names := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"{min(unknown_names)}: unknown option; use one of the fields of Options")
    group = options.get("group")
    if group is not None and group.size > 1:
        return _carry_out_in_group(checkpoint, make_plan, out, group, single=single, options=options)
    verify = options.get("verify", False)
    target, plan = _plan_output(checkpoint, make_plan, out, single=single, options=options)
    verified_bytes = sum(entry.nbytes for file in plan.files for entry in file.entries) if verify else 0
    bar = _open_progress_bar(plan.nbytes + verified_bytes, target, options)
    with bar as update, _open_output(target, plan, single=single, options=options) as draft:
        _write_files(checkpoint, draft, plan, plan.files, update)
        draft.commit()
        _write_small_files(draft, plan)
        if verify:
            num_threads = draft.threads or side_by_side(checkpoint.root)
            run_jobs(_iter_verify_jobs(draft.folder, plan), update, num_threads)
    return plan


def _carry_out_in_group(
    checkpoint: Checkpoint,
    make_plan: Callable[[], ConversionPlan],
    out: Place,
    group: WriterGroup,
    *,
    single: bool,
    options: Options,
) -> ConversionPlan:
    """Write a plan together with other processes. The arguments and errors are those of `carry_out`.

    Each process writes the files that `deal_files` assigns to it to the draft that process 0 has created. A
    failure in any process makes every process discard what it has written, so that the output is unchanged.
    """
    leads = group.number == 0
    if single or options.get("verify", False):
        raise TypeError("group: a single file, or an output that is verified, has one writer")
    plans: list[ConversionPlan] = []
    created: list[FolderOutput | StoreOutput] = []  # empty except in process 0
    with ExitStack() as stack:

        def create_draft() -> str:
            if leads:
                target, plan = _plan_output(checkpoint, make_plan, out, single=False, options=options)
                created.append(stack.enter_context(_open_output(target, plan, single=False, options=options)))
            else:
                plan = make_plan()
            plans.append(plan)
            return f"{compute_plan_digest(plan)} {created[0].folder.name if created else ''}"

        answers = [answer.split(" ", 1) for answer in group.call_everywhere(create_draft)]
        check_same_plan([digest for digest, _ in answers])
        plan = plans[0]
        draft: Output
        if created:
            draft = created[0]
        else:
            draft = stack.enter_context(join_output(resolve_links(out), answers[0][1]))
        own_files = deal_files(plan.files, group.size)[group.number]
        own_bytes = sum(file.nbytes for file in own_files)
        update = stack.enter_context(_open_progress_bar(own_bytes, out, options))

        def write() -> str:
            _write_files(checkpoint, draft, plan, own_files, update)
            draft.sync()
            return ""

        def commit(own_turn: bool) -> str:
            if own_turn:
                draft.commit()
            return ""

        group.call_everywhere(write)
        # Process 0 removes the old objects of a bucket before the first new object appears.
        group.call_everywhere(lambda: commit(leads))
        group.call_everywhere(lambda: commit(not leads))
        for output in created:
            output.check_sizes({file.name: file.nbytes for file in plan.files})
            _write_small_files(output, plan)
    return plan


class _CheckedPlan(NamedTuple):
    """Plan whose output may be written.

    Attributes:
        target: Absolute path of the output.
        plan: Files of the output.
    """

    target: Place
    plan: ConversionPlan


def _plan_output(
    checkpoint: Checkpoint,
    make_plan: Callable[[], ConversionPlan],
    out: Place,
    *,
    single: bool,
    options: Options,
) -> _CheckedPlan:
    """Check that the output may be written, and plan its files."""
    target = check_output(
        out,
        [checkpoint.root],
        overwrite=options.get("overwrite", False),
        single=single,
        companions=checkpoint.companions,
    )
    plan = make_plan()
    check_expansion(checkpoint, plan, allowed=options.get("expand", False))
    return _CheckedPlan(target, plan)


def _open_output(
    target: Place, plan: ConversionPlan, *, single: bool, options: Options
) -> AbstractContextManager[FolderOutput | StoreOutput]:
    """Return the context in which the files of a plan are written; see `open_output`."""
    return open_output(
        target,
        needed=plan.nbytes,
        overwrite=options.get("overwrite", False),
        names=plan.names,
        single=single,
        shared=options.get("group") is not None,
        facts=options.get("facts"),
        copied=lambda: _iter_copied_spans(plan),
    )


def _write_files(
    checkpoint: Checkpoint,
    draft: Output,
    plan: ConversionPlan,
    files: Sequence[PlannedFile],
    update: Progress,
) -> None:
    """Write files of a plan, and verify every checksum of the source that their tensors depend on."""
    num_threads = draft.threads or side_by_side(checkpoint.root)
    unverified_spans: Touched = set()
    late_jobs: list[Job] = []
    run_jobs(_iter_write_jobs(draft, plan, files, unverified_spans, late_jobs), update, num_threads)
    run_jobs(iter(late_jobs), update, num_threads)
    for span in unverified_spans:
        span.verify()


def _write_small_files(draft: FolderOutput | StoreOutput, plan: ConversionPlan) -> None:
    """Write the documents of a plan and copy its companion files."""
    for name, data in plan.documents.items():
        draft.write(name, data)
    for name, path in plan.companions.items():
        draft.copy(path, name)


@contextmanager
def _open_progress_bar(total: int, target: Place, options: Options) -> Iterator[Progress]:
    """Yield a function that takes a number of bytes, and show its progress if stderr is a terminal."""
    if not options.get("progress", True) or not sys.stderr.isatty():
        yield int
        return
    from tqdm import tqdm  # imported here because the import is slow

    name = target.name.removeprefix(".").removesuffix(".new")
    with tqdm(total=total, unit="B", unit_scale=True, desc=name) as bar:
        yield bar.update


def _iter_copied_spans(plan: ConversionPlan) -> Iterator[FileSpan]:
    """Yield the file spans that `_write_entry` copies directly from file to file."""
    for file in plan.files:
        for part, next_part in zip_longest(file.parts, file.parts[1:]):
            if (
                isinstance(part, OutputTensor)
                and part.dtype == part.tensor.dtype
                and not isinstance(next_part, Trailer)
            ):
                span = part.tensor.find_span(located=True)
                if span is not None:
                    yield span


def check_expansion(checkpoint: Checkpoint, plan: ConversionPlan, *, allowed: bool) -> None:
    """Check that the output of a plan is not much larger than the source files.

    In a pickle file, a tensor with a stride of 0 repeats the same elements, and many tensors can share the
    same storage. A file of a few kilobytes can therefore expand to gigabytes.

    Args:
        checkpoint: Checkpoint to convert.
        plan: Plan to check.
        allowed: Whether to allow an output of any size.

    Raises:
        CheckpointError: If the output would be more than `EXPANSION` times as large as the source.
    """
    if allowed or plan.nbytes <= _MAX_UNCHECKED_BYTES:
        return
    source_bytes = _count_source_bytes(checkpoint.root)
    # A checkpoint created in memory does not have any source files, so skip the check.
    if source_bytes and plan.nbytes > EXPANSION * source_bytes:
        largest = max(
            (entry for file in plan.files for entry in file.entries), key=lambda entry: entry.nbytes
        )
        raise CheckpointError(
            f"{checkpoint.root}: the files contain {source_bytes:,} bytes, but the output would contain "
            f"{plan.nbytes:,} bytes (the largest tensor, {largest.name!r}, has {largest.nbytes:,} bytes), "
            f"more than {EXPANSION} times as many; use --expand to write the output anyway"
        )


def _count_source_bytes(root: Place) -> int:
    """Return the total size of the files in a checkpoint folder in bytes, not counting holes.

    If the checkpoint was opened from a single file, all files in the same folder are counted, because the
    file may be the index of a sharded checkpoint.
    """
    folder = root.parent if root.is_file() else root
    files = files_below(folder).items()
    return sum(
        file.size if in_store(folder) else _count_data_bytes(folder / name, file.size) for name, file in files
    )


def _count_data_bytes(path: Path, size: int) -> int:
    """Return the size of a file in bytes, not counting holes.

    A file is not sparse if the file system has allocated enough blocks for its size. Otherwise, the file may
    be sparse or compressed by the file system, so its holes are located with `lseek`.
    """
    data_bytes, position = 0, 0
    try:
        if path.stat().st_blocks * _STAT_BLOCK_BYTES >= size:
            return size
        descriptor = open_regular(path.resolve())
    except OSError:  # the file was removed or belongs to another user
        return 0
    try:
        while position < size:
            data_start = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, data_start, os.SEEK_HOLE)
            data_bytes += position - data_start
    except OSError as error:
        # ENXIO means that the rest of the file is a hole. After any other error, holes cannot be detected.
        if error.errno != errno.ENXIO:
            return size
    finally:
        os.close(descriptor)
    return data_bytes


def _make_scalar_tensor(name: str, value: Scalar) -> Tensor:
    """Create a 0-D tensor: BOOL for a bool, I64 for an integer that fits in 64 bits, otherwise F64."""
    if isinstance(value, bool):
        return Tensor.from_source(name, "BOOL", (), Memory(bytes([value])))
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return Tensor.from_source(name, "I64", (), Memory(value.to_bytes(8, "little", signed=True)))
    return Tensor.from_source(name, "F64", (), Memory(struct.pack("<d", value)))


def _iter_write_jobs(
    draft: Output,
    plan: ConversionPlan,
    files: Sequence[PlannedFile],
    unverified_spans: Touched,
    late_jobs: list[Job],
) -> Iterator[Job]:
    """Iterate over the jobs that write files. Each file is created when its first job is requested.

    Args:
        draft: Output to write to.
        plan: Plan of the files.
        files: Files of the plan to write.
        unverified_spans: Set that collects the file spans whose CRC must be verified after all jobs have
            finished.
        late_jobs: List that collects the jobs to run after all other jobs have finished.

    Yields:
        Jobs that can run in parallel.
    """

    def iter_file_jobs(file: PlannedFile) -> Iterator[Job]:
        # In an object store, more threads keep pieces in memory.
        pieces = list(_group_parts(file.parts, FLUSH_BYTES // 4 if draft.threads else FLUSH_BYTES))
        output_file = draft.create_file(file.name, [piece.nbytes for piece in pieces])
        for index, (_, parts) in enumerate(pieces):
            job = partial(_write_piece, output_file.get_piece(index), parts, unverified_spans, plan.losses)
            if parts and isinstance(parts[-1], Trailer) and parts[-1].late:
                late_jobs.append(job)
            else:
                yield job

    # On a local disk, alternate between files, because the kernel allows only one thread at a time to write
    # to a file. In an object store, write one file at a time, because several threads prepare the pieces of
    # each file in parallel, but the pieces must be uploaded in order.
    return interleave_jobs(map(iter_file_jobs, files), 1 if draft.threads else count_threads())


class _PieceParts(NamedTuple):
    """Parts of a file that one job writes, and their total size in bytes."""

    nbytes: int
    parts: list[Part]


def _group_parts(parts: Iterable[Part], min_bytes: int) -> Iterator[_PieceParts]:
    """Group the parts of a file into pieces of at least `min_bytes` bytes.

    Only the last piece may be smaller. A trailer is always in the same piece as its tensor because it depends
    on the tensor's CRC32.

    Yields:
        The size and the parts of each piece.
    """
    piece_parts: list[Part] = []
    piece_bytes = 0
    for part in parts:
        if piece_bytes >= min_bytes and not isinstance(part, Trailer):
            yield _PieceParts(piece_bytes, piece_parts)
            piece_parts, piece_bytes = [], 0
        piece_parts.append(part)
        piece_bytes += count_bytes(part)
    yield _PieceParts(piece_bytes, piece_parts)


def _write_piece(
    piece: OutputPiece, parts: list[Part], unverified_spans: Touched, losses: CastLosses, progress: Progress
) -> None:
    """Write the parts of a piece to the output file."""
    crc = 0
    for i, part in enumerate(parts):
        if isinstance(part, OutputTensor):
            has_trailer = i + 1 < len(parts) and isinstance(parts[i + 1], Trailer)
            crc = _write_entry(piece, part, unverified_spans, losses, progress, compute_crc=has_trailer)
        else:
            data = part if isinstance(part, bytes) else part.compute(crc)
            piece.write(data)
            progress(len(data))
    piece.finish(progress)


def _write_entry(
    piece: OutputPiece,
    entry: OutputTensor,
    unverified_spans: Touched,
    losses: CastLosses,
    progress: Progress,
    *,
    compute_crc: bool,
) -> int:
    """Write a tensor and return the CRC32 of its data, or 0 if `compute_crc` is False."""
    if not compute_crc and entry.dtype == entry.tensor.dtype:
        span = entry.tensor.find_span()
        if span is not None and piece.copy(span, progress):
            return 0
    crc = 0
    entry_spans: Touched = set()
    for data in _iter_output_bytes(entry, entry_spans, losses):
        if compute_crc:
            crc = isal_zlib.crc32(data, crc)
        piece.write(data)
        progress(len(data))
    for span in entry_spans:
        # Verify the span as soon as all of its bytes have been read. If several tensors share a span, it is
        # verified after the last tensor has been read.
        if span.find_unread_range() is None:
            span.verify()
            unverified_spans.discard(span)
        else:
            unverified_spans.add(span)
    entry.tensor.release()
    return crc


def _iter_output_bytes(
    entry: OutputTensor, unverified_spans: Touched, losses: CastLosses
) -> Iterator[memoryview]:
    """Iterate over the bytes of a tensor in its output dtype."""
    if entry.dtype == entry.tensor.dtype:
        yield from entry.tensor.iter_byte_blocks(BLOCK_BYTES, unverified_spans)
    else:
        for block in cast_blocks(entry.tensor, entry.dtype, unverified_spans, losses=losses):
            yield block.view("u1").data


def _iter_verify_jobs(folder: Place, plan: ConversionPlan) -> Iterator[Job]:
    """Iterate over jobs that each compare a written tensor with its source tensor."""
    written_tensors = plan.reopen(folder)
    for file in plan.files:
        for entry in file.entries:
            written = written_tensors.get(entry.name)
            if written is None or written.shape != entry.tensor.shape or written.dtype != entry.dtype:
                raise CheckpointError(
                    f"{file.name}: the tensor {entry.name!r} is missing or has an unexpected shape or "
                    "dtype; this is a bug, so please report it"
                )
            yield partial(_compare_tensors, file.name, entry, written)


def _compare_tensors(file_name: str, entry: OutputTensor, written: Tensor, progress: Progress) -> None:
    """Raise CheckpointError unless a written tensor is bitwise equal to the cast source tensor."""
    block_bytes = BLOCK_BYTES // get_itemsize(entry.tensor.dtype) * get_itemsize(entry.dtype)
    expected_blocks = cast_blocks(entry.tensor, entry.dtype, set())
    for expected, actual in zip(expected_blocks, written.iter_blocks_then_verify(block_bytes), strict=True):
        if expected.tobytes() != actual.tobytes():
            raise CheckpointError(
                f"{file_name}: the written tensor {entry.name!r} differs from the source; "
                "check the disk and run the conversion again"
            )
        progress(expected.nbytes)
