"""Plan a conversion and write its output, for any output format.

The code for each format builds a `ConversionPlan` that describes the output files. Each file is a
sequence of literal bytes, tensors, and trailers. Everything except the tensor data and its
checksums is known before writing, so a plan can be printed, measured, and checked against the free
disk space. `write_plan_atomically` then streams the tensor data to the files.
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

from portable.converters.console import is_terminal
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.errors import CheckpointError, OptimizerStateError
from portable.converters.limits import MAX_GROUP_VALUES
from portable.converters.names.code_names import find_quantized_names
from portable.converters.options import MAX_EXPANSION
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.storage.folder_operations import get_read_concurrency, list_files_below
from portable.converters.storage.output_file import FLUSH_BYTES
from portable.converters.storage.path_or_url import is_in_store, resolve_links
from portable.converters.storage.safe_open import open_regular_file
from portable.converters.tensors.casting import (
    BLOCK_BYTES,
    CastLosses,
    iter_cast_blocks,
    parse_target_dtype,
    select_written_dtype,
)
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.entry import OutputTensor
from portable.converters.tensors.tensor import Tensor
from portable.converters.writers.atomic_output import (
    join_atomic_output,
    open_atomic_output,
    validate_output_path,
)
from portable.converters.writers.parallel_jobs import (
    get_default_thread_count,
    interleave_job_groups,
    run_jobs_in_threads,
)
from portable.converters.writers.plan import (
    ConversionPlan,
    CrcTrailer,
    FilePart,
    PlannedFile,
    get_part_nbytes,
)
from portable.converters.writers.writer_group import (
    check_equal_plan_digests,
    compute_plan_digest,
    distribute_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Unpack

    from portable.converters.checkpoint import Checkpoint, OptimizerState, ParamGroups, Scalar
    from portable.converters.storage.byte_sources import FileSpan, UnverifiedSpans
    from portable.converters.storage.output_file import OutputPiece
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.atomic_output import FolderOutput
    from portable.converters.writers.parallel_jobs import Job, ReportBytes
    from portable.converters.writers.store_output import PieceUpload, StoreOutput, StoreUploads
    from portable.converters.writers.writer_group import WriterGroup

    WritableOutput = FolderOutput | StoreOutput | StoreUploads
    WritablePiece = OutputPiece | PieceUpload


# Outputs up to this size in bytes are always allowed, regardless of the size of the source.
_MAX_UNCHECKED_BYTES = 64 << 20
# Block size of `st_blocks` in `os.stat` results, in bytes.
_STAT_BLOCK_BYTES = 512


@dataclass(frozen=True)
class ContentOptions:
    """Options for the content of the output.

    Attributes:
        dtype: Target dtype for floating-point model tensors: `"float32"`, `"bfloat16"`, or `"float16"`
            (`"fp32"`, `"bf16"`, or `"fp16"` for short), or `"keep"` to leave the dtypes unchanged. GGUF
            also supports `"q8_0"`, `"q4_0"`, and `"mxfp4"`. 8-bit floats and 0-D tensors are never
            cast.
        max_shard_size: Maximum file size in bytes for formats that split the tensors into several
            files. A larger tensor is written to a separate file.
        optimizer: Whether to also write the optimizer state and the parameter groups.
    """

    dtype: str = "keep"
    max_shard_size: int = 5_000_000_000
    optimizer: bool = False


def list_model_entries(checkpoint: Checkpoint, dtype: str, *, aliases: bool = False) -> list[OutputTensor]:
    """List the model tensors to write, with their output dtypes.

    Tensors in the same module as a quantized weight, or nested under the weight, keep their dtypes,
    because they may be its scales. Biases are cast nevertheless.

    Args:
        checkpoint: Checkpoint to convert.
        dtype: Target dtype. See `ContentOptions` for the supported values.
        aliases: Whether to also write tied tensors under all of their aliases.

    Returns:
        One entry per tensor name to write.

    Raises:
        CheckpointError: If the checkpoint does not contain any model tensors, if a tensor name is
            not valid Unicode, or if `dtype` is unknown.
    """
    target_dtype = parse_target_dtype(dtype)
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
    quantized_modules = find_quantized_names(tensors)

    def choose_dtype(name: str, tensor: Tensor) -> str:
        module, _, leaf = name.rpartition(".")
        return select_written_dtype(
            tensor, None if module in quantized_modules and leaf != "bias" else target_dtype
        )

    return [OutputTensor(name, choose_dtype(name, tensor), tensor) for name, tensor in tensors.items()]


def _check_tensor_name(name: str, root: AnyPath) -> None:
    """Check that a tensor name can be encoded as UTF-8.

    Raises:
        CheckpointError: If the name contains lone surrogates.
    """
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{root}: the tensor name {name!r} is not valid Unicode; rename the tensor in the checkpoint"
        ) from None


def require_optimizer_state(checkpoint: Checkpoint) -> OptimizerState:
    """Return the checkpoint's optimizer state, or raise an error if it has none.

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


def convert_param_groups_to_plain(optimizer: OptimizerState) -> ParamGroups:
    """Convert the parameter groups to plain Python objects, which can be written as JSON.

    Objects that JSON cannot represent are replaced with their class names. Values beyond the first
    `MAX_GROUP_VALUES`, and values in very deep nesting, are replaced with `"..."`. See
    `to_json_value`.

    Args:
        optimizer: Optimizer state that contains the parameter groups.

    Returns:
        The parameter groups as dicts, lists, strings, numbers, booleans, and None. Only `betas` is
        a tuple, as in PyTorch.
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
    """Tensor of the optimizer state to write.

    Attributes:
        parameter: Name of the parameter.
        state_name: Key of the state, such as `exp_avg`.
        entry: Tensor to write, named `<parameter>.<state_name>`.
    """

    parameter: str
    state_name: str
    entry: OutputTensor


def list_optimizer_entries(optimizer: OptimizerState, root: AnyPath) -> list[OptimizerEntry]:
    """List the optimizer state tensors to write.

    Numbers are converted to 0-D tensors. Tensors keep their dtypes.

    Args:
        optimizer: Optimizer state to write.
        root: Folder or file of the checkpoint, used in error messages.

    Returns:
        One entry per tensor or number in the optimizer state.

    Raises:
        CheckpointError: If a name is not valid Unicode.
    """
    entries = []
    for name, values in optimizer.state.items():
        for state_name, value in values.items():
            _check_tensor_name(f"{name}.{state_name}", root)
            tensor = (
                value if isinstance(value, Tensor) else _build_scalar_tensor(f"{name}.{state_name}", value)
            )
            entry = OutputTensor(f"{name}.{state_name}", tensor.dtype, tensor)
            entries.append(OptimizerEntry(name, state_name, entry))
    return entries


def split_into_shards(entries: Iterable[OutputTensor], max_bytes: int) -> list[list[OutputTensor]]:
    """Group tensors into shards of limited size, preserving their order.

    Args:
        entries: Tensors to group.
        max_bytes: Maximum size of the tensor data in a shard in bytes, not counting file headers.
            Any tensor larger than this is placed in a separate shard.

    Returns:
        The entries in each shard. There is always at least one shard, which may be empty.

    Raises:
        CheckpointError: If `max_bytes` is less than 1.
    """
    if max_bytes < 1:
        raise CheckpointError(
            f"max_shard_size: {max_bytes} is not a positive number of bytes; specify a number of at least 1"
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
    """Options for `write_plan_atomically`.

    Attributes:
        overwrite: Whether to replace an existing output. Default: False.
        progress: Whether to show a progress bar if stderr is a terminal. Default: True.
        verify: Whether to read back the written tensors and compare them with the source before
            publishing the output. Default: False.
        expand: Whether to allow an output that is much larger than the source. See
            `check_output_growth`. Default: False.
        facts: Additional fields for the completion marker of an output in an object store. Default:
            None.
        group: Processes that write the output together. Each process writes some of the files. All
            processes must call the same function with the same arguments. A group of several
            processes can only write a folder, and does not support `verify`. Default: None, which
            means that this process writes all files.
    """

    overwrite: bool
    progress: bool
    verify: bool
    expand: bool
    facts: Mapping[str, Any] | None
    group: WriterGroup | None


def write_plan_atomically(
    checkpoint: Checkpoint,
    make_plan: Callable[[], ConversionPlan],
    out: AnyPath,
    *,
    is_single_file: bool = False,
    **options: Unpack[Options],
) -> ConversionPlan:
    """Write the files of a plan, and publish the output when all files are complete.

    On a local disk, the output is written under a temporary name, and renamed to `out` when it is
    complete. In an object store, a complete output folder receives a completion marker.

    Args:
        checkpoint: Checkpoint to convert. Its folder must not contain `out`, and vice versa.
        make_plan: Function that returns the plan. It is called after `out` has been checked.
        out: Output folder or file.
        is_single_file: Whether the output is a single file. If True, `out` is the path of this file
            instead of a folder.
        **options: Additional options. See `Options`.

    Returns:
        The plan that was written.

    Raises:
        CheckpointError: If `out` cannot be written or replaced, if the source is damaged, if the
            output would be much larger than the source, if the disk is full, or if the option
            `verify` is set and a written tensor differs from the source.
        TypeError: If an option is unknown, or if several processes write a single file or use
            `verify`.
    """
    # Python does not check the names at runtime, so a misspelled option would be silently ignored.
    if unknown_names := options.keys() - Options.__annotations__.keys():
        raise TypeError(
            f"{min(unknown_names)}: unknown option; use one of {', '.join(sorted(Options.__annotations__))}"
        )
    group = options.get("group")
    if group is not None and group.size > 1:
        return _write_plan_in_group(
            checkpoint, make_plan, out, group, is_single_file=is_single_file, options=options
        )
    verify = options.get("verify", False)
    target, plan = _validate_and_plan_output(
        checkpoint, make_plan, out, is_single_file=is_single_file, options=options
    )
    verified_bytes = sum(entry.nbytes for file in plan.files for entry in file.entries) if verify else 0
    progress_bar = _open_progress_bar(plan.nbytes + verified_bytes, target, options)
    with (
        progress_bar as update,
        _open_plan_output(target, plan, is_single_file=is_single_file, options=options) as output,
    ):
        _write_tensor_files(checkpoint, output, plan, plan.files, update)
        output.complete_files()
        _write_small_files(output, plan)
        if verify:
            num_threads = output.num_threads or get_read_concurrency(checkpoint.root)
            run_jobs_in_threads(_iter_verification_jobs(output.folder, plan), update, num_threads)
    return plan


def _write_plan_in_group(
    checkpoint: Checkpoint,
    make_plan: Callable[[], ConversionPlan],
    out: AnyPath,
    group: WriterGroup,
    *,
    is_single_file: bool,
    options: Options,
) -> ConversionPlan:
    """Write a plan together with other processes.

    See `write_plan_atomically` for the arguments and errors.

    Process 0 creates the output. Each process writes the files that `distribute_files` assigns to
    it. If a process fails before all files are written, all processes discard their files, and an
    existing output is unchanged. In an object store, process 0 then marks the folder as incomplete
    and deletes the old objects, so a later failure leaves an incomplete folder. The other processes
    return without waiting until process 0 has written the small files and published the output.
    """
    is_leader = group.number == 0
    if is_single_file or options.get("verify", False):
        raise TypeError(
            "group: cannot be combined with a single output file or with verification; write to a folder, "
            "and leave out verify"
        )
    plans: list[ConversionPlan] = []
    created: list[FolderOutput | StoreOutput] = []  # empty except in process 0
    with ExitStack() as stack:

        def create_draft() -> str:
            if is_leader:
                target, plan = _validate_and_plan_output(
                    checkpoint, make_plan, out, is_single_file=False, options=options
                )
                created.append(
                    stack.enter_context(
                        _open_plan_output(target, plan, is_single_file=False, options=options)
                    )
                )
            else:
                plan = make_plan()
            plans.append(plan)
            return f"{compute_plan_digest(plan)} {created[0].folder.name if created else ''}"

        draft_ids = [answer.split(" ", 1) for answer in group.call_everywhere(create_draft)]
        check_equal_plan_digests([digest for digest, _ in draft_ids])
        plan = plans[0]
        shared_output: WritableOutput
        if created:
            shared_output = created[0]
        else:
            shared_output = stack.enter_context(join_atomic_output(resolve_links(out), draft_ids[0][1]))
        own_files = distribute_files(plan.files, group.size)[group.number]
        own_bytes = sum(file.nbytes for file in own_files)
        update = stack.enter_context(_open_progress_bar(own_bytes, out, options))

        def write_own_files() -> str:
            _write_tensor_files(checkpoint, shared_output, plan, own_files, update)
            shared_output.sync()
            return ""

        def complete_own_files(is_own_turn: bool) -> str:
            if is_own_turn:
                shared_output.complete_files()
            return ""

        group.call_everywhere(write_own_files)
        # Process 0 goes first, because it removes the old objects of a bucket, which must happen before the
        # first new object appears.
        group.call_everywhere(lambda: complete_own_files(is_leader))
        group.call_everywhere(lambda: complete_own_files(not is_leader))
        for output in created:
            output.check_sizes({file.name: file.nbytes for file in plan.files})
            _write_small_files(output, plan)
    return plan


class _CheckedPlan(NamedTuple):
    """Output path and plan of a conversion, after `_validate_and_plan_output` has checked them.

    Attributes:
        target: Absolute path of the output.
        plan: Names and contents of the files to write.
    """

    target: AnyPath
    plan: ConversionPlan


def _validate_and_plan_output(
    checkpoint: Checkpoint,
    make_plan: Callable[[], ConversionPlan],
    out: AnyPath,
    *,
    is_single_file: bool,
    options: Options,
) -> _CheckedPlan:
    """Check that the output may be written, plan its files, and check their total size.

    Returns:
        The absolute path of the output, and the plan.

    Raises:
        CheckpointError: If the output could destroy files, or would be much larger than the source.
    """
    target = validate_output_path(
        out,
        [checkpoint.root],
        overwrite=options.get("overwrite", False),
        is_single_file=is_single_file,
        replaceable_names=checkpoint.companions,
    )
    plan = make_plan()
    check_output_growth(checkpoint, plan, is_allowed=options.get("expand", False))
    return _CheckedPlan(target, plan)


def _open_plan_output(
    target: AnyPath, plan: ConversionPlan, *, is_single_file: bool, options: Options
) -> AbstractContextManager[FolderOutput | StoreOutput]:
    """Return the context manager for writing the files of a plan. See `open_atomic_output`."""
    return open_atomic_output(
        target,
        needed_bytes=plan.nbytes,
        overwrite=options.get("overwrite", False),
        file_names=plan.names,
        is_single_file=is_single_file,
        has_other_writers=options.get("group") is not None,
        marker_fields=options.get("facts"),
        iter_copied_spans=lambda: _iter_copied_spans(plan),
    )


def _write_tensor_files(
    checkpoint: Checkpoint,
    output: WritableOutput,
    plan: ConversionPlan,
    files: Sequence[PlannedFile],
    report_bytes: ReportBytes,
) -> None:
    """Write files of a plan with several threads, and verify the CRCs of all source data that was read.

    Raises:
        CheckpointError: If a CRC does not match.
    """
    num_threads = output.num_threads or get_read_concurrency(checkpoint.root)
    unverified_spans: UnverifiedSpans = set()
    late_jobs: list[Job] = []
    run_jobs_in_threads(
        _iter_write_jobs(output, plan, files, unverified_spans, late_jobs), report_bytes, num_threads
    )
    run_jobs_in_threads(iter(late_jobs), report_bytes, num_threads)
    for span in unverified_spans:
        span.verify_crc()


def _write_small_files(output: FolderOutput | StoreOutput, plan: ConversionPlan) -> None:
    """Write the small files of a plan.

    These are generated files, such as JSON files, and files that are copied from the source, such
    as tokenizer files.
    """
    for name, data in plan.documents.items():
        output.write_small_file(name, data)
    for name, path in plan.companions.items():
        output.copy_small_file(path, name)


@contextmanager
def _open_progress_bar(total_bytes: int, target: AnyPath, options: Options) -> Iterator[ReportBytes]:
    """Show a progress bar for the written bytes, if stderr is a terminal and the option `progress` is True.

    Yields:
        A function that advances the progress bar by a number of bytes. Without a bar, it does nothing.
    """
    if not options.get("progress", True) or not is_terminal(sys.stderr):
        yield int
        return
    from tqdm import tqdm  # imported here because the import is slow

    name = target.name.removeprefix(".").removesuffix(".new")
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc=name) as bar:
        yield bar.update


def _iter_copied_spans(plan: ConversionPlan) -> Iterator[FileSpan]:
    """Yield the file spans that `_write_tensor` can copy directly from the source file.

    A span can be copied if the dtype of its tensor does not change. In addition, the output must
    not contain a CRC32 trailer after the tensor, because computing the CRC32 requires reading the
    data.
    """
    for file in plan.files:
        for part, next_part in zip_longest(file.parts, file.parts[1:]):
            if (
                isinstance(part, OutputTensor)
                and part.dtype == part.tensor.dtype
                and not isinstance(next_part, CrcTrailer)
            ):
                span = part.tensor.find_span(located=True)
                if span is not None:
                    yield span


def check_output_growth(checkpoint: Checkpoint, plan: ConversionPlan, *, is_allowed: bool) -> None:
    """Check that the output of a plan is not much larger than the source files.

    In a pickle file, a tensor with a stride of 0 repeats its elements, and many tensors can share
    one storage. A file of a few kilobytes can therefore expand to gigabytes.

    Outputs of up to 64 MiB are always allowed. A checkpoint that was created in memory is not
    checked, because it has no source files.

    Args:
        checkpoint: Checkpoint to convert.
        plan: Plan to check.
        is_allowed: Whether an output of any size is allowed.

    Raises:
        CheckpointError: If the output would be more than `MAX_EXPANSION` times as large as the
            source.
    """
    if is_allowed or plan.nbytes <= _MAX_UNCHECKED_BYTES:
        return
    source_bytes = _count_source_bytes(checkpoint.root)
    # A checkpoint created in memory does not have any source files, so skip the check.
    if source_bytes and plan.nbytes > MAX_EXPANSION * source_bytes:
        largest = max(
            (entry for file in plan.files for entry in file.entries), key=lambda entry: entry.nbytes
        )
        raise CheckpointError(
            f"{checkpoint.root}: the files contain {source_bytes:,} bytes, but the output would contain "
            f"{plan.nbytes:,} bytes (the largest tensor, {largest.name!r}, has {largest.nbytes:,} bytes), "
            f"more than {MAX_EXPANSION} times as much; use --expand to write the output anyway"
        )


def _count_source_bytes(root: AnyPath) -> int:
    """Return the total size of the files in a checkpoint folder in bytes, not counting holes in sparse files.

    If the checkpoint was opened from a single file, all files in the same folder are counted, because
    the file may be the index of a sharded checkpoint.
    """
    folder = root.parent if root.is_file() else root
    files = list_files_below(folder).items()
    return sum(
        file.size_bytes if is_in_store(folder) else _count_data_bytes(folder / name, file.size_bytes)
        for name, file in files
    )


def _count_data_bytes(path: Path, size_bytes: int) -> int:
    """Return the size of a file in bytes, not counting holes in a sparse file.

    A file is not sparse if the file system has allocated enough blocks for its size. If there are
    fewer blocks, the file either has holes or is compressed by the file system. The holes are then
    located with `lseek`.

    Args:
        path: Path of the file.
        size_bytes: Size of the file in bytes, including holes.

    Returns:
        The size in bytes. `size_bytes` if holes cannot be detected, and 0 if the file cannot be
        opened.
    """
    data_bytes, position = 0, 0
    try:
        if path.stat().st_blocks * _STAT_BLOCK_BYTES >= size_bytes:
            return size_bytes
        descriptor = open_regular_file(path.resolve())
    except OSError:  # the file was removed or belongs to another user
        return 0
    try:
        while position < size_bytes:
            data_start = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, data_start, os.SEEK_HOLE)
            data_bytes += position - data_start
    except OSError as error:
        # ENXIO means that the rest of the file is a hole. After any other error, holes cannot be detected.
        if error.errno != errno.ENXIO:
            return size_bytes
    finally:
        os.close(descriptor)
    return data_bytes


def _build_scalar_tensor(name: str, value: Scalar) -> Tensor:
    """Create a 0-D tensor from a number.

    The dtype is BOOL for a bool, I64 for an integer that fits in 64 bits, and F64 for any other number.
    """
    if isinstance(value, bool):
        return Tensor.from_source(name, "BOOL", (), InMemorySource(bytes([value])))
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return Tensor.from_source(name, "I64", (), InMemorySource(value.to_bytes(8, "little", signed=True)))
    return Tensor.from_source(name, "F64", (), InMemorySource(struct.pack("<d", value)))


def _iter_write_jobs(
    output: WritableOutput,
    plan: ConversionPlan,
    files: Sequence[PlannedFile],
    unverified_spans: UnverifiedSpans,
    late_jobs: list[Job],
) -> Iterator[Job]:
    """Iterate over the jobs that write files. Each file is created when its first job is requested.

    Args:
        output: Output to write to.
        plan: Plan that contains the files.
        files: Files to write.
        unverified_spans: Set that collects the file spans whose CRC must be verified after all jobs have
            finished.
        late_jobs: List that collects the jobs to run after all other jobs have finished.

    Yields:
        Jobs that can run in parallel.
    """

    def iter_file_jobs(file: PlannedFile) -> Iterator[Job]:
        # Use smaller pieces in an object store, because each of its more numerous threads keeps a piece in
        # memory.
        pieces = list(
            _group_parts_into_pieces(file.parts, FLUSH_BYTES // 4 if output.num_threads else FLUSH_BYTES)
        )
        output_file = output.create_file(file.name, [piece.nbytes for piece in pieces])
        for index, (_, parts) in enumerate(pieces):
            job = partial(_write_piece, output_file.get_piece(index), parts, unverified_spans, plan.losses)
            if parts and isinstance(parts[-1], CrcTrailer) and parts[-1].is_written_last:
                late_jobs.append(job)
            else:
                yield job

    # On a local disk, alternate between files, because the kernel allows only one thread at a time to write
    # to a file. In an object store, write one file at a time, because several threads prepare the pieces of
    # each file in parallel, but the pieces must be uploaded in order.
    return interleave_job_groups(
        map(iter_file_jobs, files), 1 if output.num_threads else get_default_thread_count()
    )


class _PieceParts(NamedTuple):
    """Consecutive parts of an output file that are written together as one piece.

    Attributes:
        nbytes: Total size of the parts in bytes.
        parts: Parts in file order, such as tensors and encoded headers.
    """

    nbytes: int
    parts: list[FilePart]


def _group_parts_into_pieces(parts: Iterable[FilePart], min_bytes: int) -> Iterator[_PieceParts]:
    """Group the parts of a file into pieces of at least `min_bytes` bytes.

    Only the last piece may be smaller. A `CrcTrailer` is always in the same piece as the tensor
    before it, because it contains the CRC32 of the tensor's data.

    Yields:
        Pieces with their parts and size.
    """
    piece_parts: list[FilePart] = []
    piece_bytes = 0
    for part in parts:
        if piece_bytes >= min_bytes and not isinstance(part, CrcTrailer):
            yield _PieceParts(piece_bytes, piece_parts)
            piece_parts, piece_bytes = [], 0
        piece_parts.append(part)
        piece_bytes += get_part_nbytes(part)
    yield _PieceParts(piece_bytes, piece_parts)


def _write_piece(
    piece: WritablePiece,
    parts: list[FilePart],
    unverified_spans: UnverifiedSpans,
    losses: CastLosses,
    report_bytes: ReportBytes,
) -> None:
    """Write the parts of a piece to the output file, and mark the piece as finished.

    Args:
        piece: Piece of the output file to write to.
        parts: Parts of the piece, in file order. A `CrcTrailer` is computed from the CRC32 of the
            tensor directly before it.
        unverified_spans: Set of file spans whose CRC could not be verified yet. Updated in place.
        losses: Counters of elements that become infinite or zero in a cast. Updated in place.
        report_bytes: Callback that receives the number of bytes after each write.
    """
    crc = 0
    for i, part in enumerate(parts):
        if isinstance(part, OutputTensor):
            has_trailer = i + 1 < len(parts) and isinstance(parts[i + 1], CrcTrailer)
            crc = _write_tensor(piece, part, unverified_spans, losses, report_bytes, compute_crc=has_trailer)
        else:
            data = part if isinstance(part, bytes) else part.compute_bytes(crc)
            piece.write(data)
            report_bytes(len(data))
    piece.finish(report_bytes)


def _write_tensor(
    piece: WritablePiece,
    entry: OutputTensor,
    unverified_spans: UnverifiedSpans,
    losses: CastLosses,
    report_bytes: ReportBytes,
    *,
    compute_crc: bool,
) -> int:
    """Write the data of a tensor to a piece of the output file.

    If the dtype does not change and no CRC32 is needed, the file system copies the data if it supports
    this. Otherwise, the data is read and cast. The CRC of a source span is verified as soon as all
    bytes of the span have been read. Partially read spans are added to `unverified_spans`.

    Returns:
        The CRC32 of the written data, or 0 if `compute_crc` is False.
    """
    if not compute_crc and entry.dtype == entry.tensor.dtype:
        span = entry.tensor.find_span()
        if span is not None and piece.copy(span, report_bytes):
            return 0
    crc = 0
    entry_spans: UnverifiedSpans = set()
    for data in _iter_output_bytes(entry, entry_spans, losses):
        if compute_crc:
            crc = isal_zlib.crc32(data, crc)
        piece.write(data)
        report_bytes(len(data))
    for span in entry_spans:
        # Verify the span as soon as all of its bytes have been read. If several tensors share a span, it is
        # verified after the last tensor has been read.
        if span.find_unread_range() is None:
            span.verify_crc()
            unverified_spans.discard(span)
        else:
            unverified_spans.add(span)
    entry.tensor.release()
    return crc


def _iter_output_bytes(
    entry: OutputTensor, unverified_spans: UnverifiedSpans, losses: CastLosses
) -> Iterator[memoryview]:
    """Iterate over the bytes of a tensor in its output dtype, block by block.

    Args:
        entry: Tensor and its output dtype.
        unverified_spans: Set that collects the spans that are read, so that the caller can verify their
            CRCs.
        losses: Counters of elements that become infinite or zero in a cast. Updated in place.
    """
    if entry.dtype == entry.tensor.dtype:
        yield from entry.tensor.iter_byte_blocks(BLOCK_BYTES, unverified_spans)
    else:
        for block in iter_cast_blocks(entry.tensor, entry.dtype, unverified_spans, losses=losses):
            yield block.view("u1").data


def _iter_verification_jobs(written_folder: AnyPath, plan: ConversionPlan) -> Iterator[Job]:
    """Iterate over jobs that compare the written tensors with their source tensors, one job per tensor.

    Raises:
        CheckpointError: If a written tensor is missing or has an unexpected shape or dtype.
    """
    written_tensors = plan.reopen_tensors(written_folder)
    for file in plan.files:
        for entry in file.entries:
            written = written_tensors.get(entry.name)
            if written is None or written.shape != entry.tensor.shape or written.dtype != entry.dtype:
                raise CheckpointError(
                    f"{file.name}: the tensor {entry.name!r} is missing or has an unexpected shape or "
                    "dtype; report this as a bug"
                )
            yield partial(_check_written_tensor, file.name, entry, written)


def _check_written_tensor(
    file_name: str, planned_tensor: OutputTensor, written_tensor: Tensor, report_bytes: ReportBytes
) -> None:
    """Check that a written tensor is bitwise equal to its source tensor after the cast.

    The source tensor is cast again to the dtype of the written tensor. The two tensors are then
    compared block by block.

    Args:
        file_name: Name of the written file, used in the error message.
        planned_tensor: Source tensor, with the name and dtype of the written tensor.
        written_tensor: Tensor in the written file.
        report_bytes: Function that is called with the size in bytes of each block that is equal.

    Raises:
        CheckpointError: If a block differs.
    """
    block_bytes = (
        BLOCK_BYTES // get_itemsize(planned_tensor.tensor.dtype) * get_itemsize(planned_tensor.dtype)
    )
    expected_blocks = iter_cast_blocks(planned_tensor.tensor, planned_tensor.dtype, set())
    for expected, actual in zip(
        expected_blocks, written_tensor.iter_blocks_then_verify(block_bytes), strict=True
    ):
        if expected.tobytes() != actual.tobytes():
            raise CheckpointError(
                f"{file_name}: the written tensor {planned_tensor.name!r} differs from the source; "
                "check the disk and run the conversion again"
            )
        report_bytes(expected.nbytes)
