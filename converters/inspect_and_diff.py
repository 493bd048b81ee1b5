"""Print the contents of a checkpoint, or the differences between two checkpoints.

Implements `portable-convert inspect SRC` and `portable-convert diff A B`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf, isfinite, prod, sqrt
from typing import TYPE_CHECKING, Any

from portable.converters.adapters.adapter import find_adapter
from portable.converters.console import print_line
from portable.converters.containers.gguf_header import read_gguf_header
from portable.converters.errors import CheckpointError, CommandError, to_printable
from portable.converters.integrity import find_model_problems
from portable.converters.lazy_numpy import np
from portable.converters.naming import find_name_rules, rename_to_published
from portable.converters.opening import is_gguf_file, open_checkpoint
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.path_or_url import parse_path_or_url
from portable.converters.storage.store_errors import RemoteError
from portable.converters.tensors.casting import BLOCK_BYTES
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import Tensor
from portable.converters.writers.parallel_jobs import run_jobs_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Array
    from portable.converters.writers.parallel_jobs import ReportBytes

    ParserFactory = Callable[..., argparse.ArgumentParser]

SAME, DIFFERENT = 0, 1
_BLOCK = BLOCK_BYTES // 4
_LONG = 500
_FIRST_LINE_KEYS = ("step", "world_size", "version", "architecture")


@dataclass
class TensorStatistics:
    """Statistics of the elements of a tensor.

    NaN and infinite elements are counted, but excluded from the other statistics. The statistics of
    complex elements are computed from their absolute values.

    Attributes:
        count: Number of elements.
        least: Smallest finite element.
        largest: Largest finite element.
        mean: Mean of the finite elements.
        rms: Root mean square of the finite elements.
        zeros: Number of elements that are zero.
        not_finite: Number of elements that are NaN or infinite.
    """

    count: int = 0
    least: float = inf
    largest: float = -inf
    mean: float = 0.0
    rms: float = 0.0
    zeros: int = 0
    not_finite: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add_block(self, block: Array) -> None:
        """Update all statistics in place with the next block of the tensor."""
        values = _convert_to_float64(block)
        values = np.abs(values) if values.dtype.kind == "c" else values
        finite = values[np.isfinite(values)]
        self.count += values.size
        self.not_finite += values.size - finite.size
        self.zeros += int(finite.size - np.count_nonzero(finite))
        if finite.size:
            self.least = min(self.least, float(finite.min()))
            self.largest = max(self.largest, float(finite.max()))
            with np.errstate(over="ignore"):
                self._sums[0] += float(finite.sum())
                self._sums[1] += float(np.square(finite).sum())
            left = self.count - self.not_finite
            self.mean, self.rms = self._sums[0] / left, sqrt(self._sums[1] / left)

    def to_json(self) -> dict[str, Any]:
        """Convert the statistics to JSON values.

        Returns:
            The attributes. The minimum and maximum are None if no element is finite. The mean and the
            RMS are 0 in this case, and None if their sums exceed the range of float64.
        """
        values = {key: value for key, value in asdict(self).items() if key != "_sums"}
        return {key: value if isfinite(value) else None for key, value in values.items()}


@dataclass
class TensorDifference:
    """Difference between two tensors of the same shape.

    Attributes:
        tolerance: Largest absolute difference at which two finite elements count as equal.
        elements: Number of elements that differ by more than the tolerance. Two NaN elements count as
            equal. Elements of different dtypes are compared as float64, unless both are integers.
        not_finite: Number of differing elements that are NaN or infinite in at least one tensor.
        largest: Largest absolute difference between two finite elements that differ. 0 if there are
            none. A difference that exceeds the range of float64 counts as the largest float64.
    """

    tolerance: float = 0.0
    elements: int = 0
    not_finite: int = 0
    largest: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add_blocks(self, left: Array, right: Array) -> None:
        """Add two corresponding blocks, one from each tensor, to the running totals.

        Args:
            left: Next block of the first tensor.
            right: Block of the second tensor at the same position.
        """
        left_values = _convert_to_float64(left)
        with np.errstate(all="ignore"):
            self._sums[1] += float(np.square(np.abs(left_values[np.isfinite(left_values)])).sum())
            if left.dtype == right.dtype and left.tobytes() == right.tobytes():
                return
            right_values = _convert_to_float64(right)
            # Compare integers directly, because not all 64-bit integers can be represented as float64.
            are_integers = left.dtype.kind in "iu" and right.dtype.kind in "iu"
            unequal = left != right if are_integers else left_values != right_values
            unequal &= ~(np.isnan(left_values) & np.isnan(right_values))
            is_finite = (np.isfinite(left_values) & np.isfinite(right_values))[unequal]
            finite = np.abs(left_values - right_values)[unequal][is_finite]
            # The difference of two finite elements may overflow.
            finite = np.minimum(finite, np.finfo(np.float64).max)
            if are_integers:
                # Unequal integers above 2^53 may become equal as float64.
                finite = np.maximum(finite, 1.0)
            if self.tolerance:
                finite = finite[finite > self.tolerance]
            not_finite = is_finite.size - int(np.count_nonzero(is_finite))
            self.elements += finite.size + not_finite
            self.not_finite += not_finite
            self.largest = max(self.largest, float(finite.max(initial=0.0)))
            self._sums[0] += float(np.square(finite).sum())

    def to_json(self) -> dict[str, Any]:
        """Convert the difference to JSON values.

        Returns:
            All attributes but `tolerance`, plus the key `relative`: the RMS of the differences divided by
            the RMS of the first tensor. Both are computed from finite values, and differences within the
            tolerance count as 0. `relative` is None if all finite elements of the first tensor are zero,
            or if the squares of the elements exceed the range of float64.
        """
        values = {key: value for key, value in asdict(self).items() if key not in ("tolerance", "_sums")}
        relative = sqrt(self._sums[0] / self._sums[1]) if self._sums[1] else inf
        return {**values, "relative": relative if isfinite(relative) else None}


def _convert_to_float64(block: Array) -> Array:
    """Convert the elements to float64, or to complex128 if they are complex."""
    return block.astype(np.complex128 if block.dtype.kind == "c" else np.float64)


def list_inspected_tensors(checkpoint: Checkpoint, *, includes_optimizer: bool) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, optionally including its optimizer state.

    Args:
        checkpoint: Checkpoint to inspect.
        includes_optimizer: Whether to also return the tensors of the optimizer state, as
            `<parameter>.<state>`. States that are Python numbers are omitted.

    Returns:
        The tensors, keyed by name.

    Raises:
        CheckpointError: If the optimizer state is requested, but cannot be read.
    """
    tensors = dict(checkpoint.tensors)
    state = checkpoint.optimizer if includes_optimizer else None
    for name, values in state.state.items() if state is not None else ():
        tensors |= {
            f"{name}.{state_name}": value for state_name, value in values.items() if isinstance(value, Tensor)
        }
    return tensors


def run_inspect(make_parser: ParserFactory, argv: Sequence[str]) -> int:
    """Run `portable-convert inspect`.

    Args:
        make_parser: Function that creates an argument parser.
        argv: Arguments after `inspect`.

    Returns:
        The exit code: 0 if the checkpoint has no problems, otherwise 1. Always 0 for a GGUF file, which
        is not checked.
    """
    arguments = make_parser(
        prog="portable-convert inspect",
        description="List the contents of a checkpoint, and check that the model is complete. Only headers "
        "and a few bytes of each expert are read, unless --stats is given.",
        epilog="exit codes: 0 no problems, 1 problems, 2 mistake in the command, 65 SRC cannot be opened",
    )
    arguments.add_argument(
        "src",
        metavar="SRC",
        help="run folder, step folder, folder of shards, file (including GGUF files) or URL",
    )
    arguments.add_argument("--tag", help="step of SRC: a folder name (step-000100) or a number (100)")
    arguments.add_argument("--optimizer", action="store_true", help="also list the optimizer state")
    arguments.add_argument(
        "--stats",
        action="store_true",
        help="also read the tensors, and print the minimum, maximum, mean and RMS of each tensor, and how "
        "many of its elements are zero, NaN or infinite",
    )
    arguments.add_argument("--json", action="store_true", help="print JSON")
    options = arguments.parse_args(argv)
    if is_gguf_file(path := parse_path_or_url(options.src)):
        document = _inspect_gguf_file(path, options)
        print_line(json.dumps(document, indent=1) if options.json else format_inspection(document))
        return SAME
    checkpoint = open_checkpoint(options.src, options.tag)
    tensors = list_inspected_tensors(checkpoint, includes_optimizer=options.optimizer)
    tensor_statistics = compute_tensor_statistics(tensors) if options.stats else {}
    problems = find_model_problems(checkpoint)
    document = build_inspection(checkpoint, tensors, tensor_statistics)
    document["problems"] = [{**asdict(problem), "text": str(problem)} for problem in problems]
    print_line(json.dumps(document, indent=1, default=str) if options.json else format_inspection(document))
    return DIFFERENT if problems else SAME


def _inspect_gguf_file(path: AnyPath, options: argparse.Namespace) -> dict[str, Any]:
    """Describe the contents of a GGUF file as JSON values, like `build_inspection`.

    Args:
        path: Path of the file.
        options: Options of `inspect`.

    Raises:
        CommandError: If `--tag`, `--optimizer` or `--stats` is given.
        CheckpointError: If the file is damaged.
    """
    for option in ("tag", "optimizer", "stats"):
        if getattr(options, option):
            raise CommandError(f"{path}: --{option} does not apply to GGUF files; leave out --{option}")
    header = read_gguf_header(CheckpointFolder(path.parent).get_file(path.name))
    elements: Counter[str] = Counter()
    for tensor in header.tensors.values():
        elements[tensor.dtype] += prod(tensor.shape)
    return {
        "path": str(path),
        "format": "gguf",
        "version": header.version,
        "architecture": to_printable(header.settings.get("general.architecture", "unknown")),
        "elements": dict(elements),
        "bytes": sum(tensor.nbytes for tensor in header.tensors.values()),
        "settings": header.settings,
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "pieces": 1,
            }
            for name, tensor in header.tensors.items()
        },
    }


def build_inspection(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], tensor_statistics: Mapping[str, TensorStatistics]
) -> dict[str, Any]:
    """Describe the contents of a checkpoint as JSON values.

    Args:
        checkpoint: Checkpoint to describe.
        tensors: Tensors to list, keyed by name.
        tensor_statistics: Statistics of the tensors, keyed by name. Empty without `--stats`.

    Returns:
        The description as a dict. `format_inspection` formats it as text.
    """
    tensor_entries: dict[str, dict[str, Any]] = {
        name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
            "pieces": tensor.pieces,
        }
        for name, tensor in tensors.items()
    }
    for name, statistic in tensor_statistics.items():
        tensor_entries[name]["statistics"] = statistic.to_json()
    by_dtype: dict[str, int] = {}
    for entry in tensor_entries.values():
        dtype = entry["dtype"]
        by_dtype[dtype] = by_dtype.get(dtype, 0) + entry["bytes"] // get_itemsize(dtype)
    metadata = {key: checkpoint.metadata[key] for key in ("step", "world_size") if key in checkpoint.metadata}
    adapter = _describe_adapter(checkpoint)
    return {
        "path": str(checkpoint.root),
        "format": checkpoint.format,
        **metadata,
        **({"adapter": adapter} if adapter else {}),
        "elements": by_dtype,
        "bytes": sum(entry["bytes"] for entry in tensor_entries.values()),
        "tied": dict(checkpoint.aliases),
        "companions": sorted(checkpoint.companions),
        "tensors": tensor_entries,
    }


def _describe_adapter(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Describe the adapter in a checkpoint as JSON values.

    Returns:
        The type, rank, alpha and base model. A dict with only `error` if the adapter is damaged,
        incomplete or not supported. None if there is no adapter.

    Raises:
        RemoteError: If a request to an object store fails.
    """
    try:
        adapter = find_adapter(checkpoint)
    except RemoteError:  # the store failed, so the error does not describe the adapter
        raise
    except CheckpointError as error:
        return {"error": str(error)}
    if adapter is None:
        return None
    config = adapter.config
    return {"type": config.type, "r": config.r, "alpha": config.alpha, "base": config.base_model}


def format_inspection(document: Mapping[str, Any]) -> str:
    """Format the result of `build_inspection` for a terminal.

    Args:
        document: Description of the checkpoint.
    """
    metadata = [f"{key} {document[key]}" for key in _FIRST_LINE_KEYS if key in document]
    lines = [", ".join([f"{document['path']} ({document['format']})", *metadata])]
    if "adapter" in document:
        lines.append(
            "  adapter: "
            + ", ".join(f"{key} {to_printable(value)}" for key, value in document["adapter"].items())
        )
    lines += [
        f"  tied: {to_printable(alias)} is {to_printable(owner)}"
        for alias, owner in document.get("tied", {}).items()
    ]
    counts = ", ".join(f"{count:,} {dtype}" for dtype, count in document["elements"].items())
    rows = [
        (
            name if name.isprintable() and len(name) < _LONG else to_printable(name),
            entry["dtype"],
            "x".join(map(str, entry["shape"])) or "-",
            f"{entry['bytes']:,}",
            f"  {entry['pieces']} pieces" if entry["pieces"] > 1 else "",
            f"  {_format_statistics(entry['statistics'])}" if "statistics" in entry else "",
        )
        for name, entry in document["tensors"].items()
    ]
    names, dtypes, shapes, sizes = (max((len(row[i]) for row in rows), default=0) for i in range(4))
    for name, dtype, shape, size, pieces, numbers in rows:
        entry = f"{name:<{names}}  {dtype:<{dtypes}}  {shape:<{shapes}}  {size:>{sizes}}{pieces}{numbers}"
        lines.append("  " + entry)
    lines.append(f"{len(rows):,} tensors, {counts or 'no'} elements, {document['bytes']:,} bytes")
    lines += [f"problem: {problem['text']}" for problem in document.get("problems", ())]
    return "\n".join(lines)


def _format_statistics(entry: Mapping[str, Any]) -> str:
    shown = ("least", "largest", "mean", "rms")
    numbers = [f"{key} {'-' if entry[key] is None else format(entry[key], '.4g')}" for key in shown]
    counts = [f"{entry[key]:,} {key.replace('_', ' ')}" for key in ("zeros", "not_finite") if entry[key]]
    return ", ".join([*numbers, *counts])


def compute_tensor_statistics(tensors: Mapping[str, Tensor]) -> dict[str, TensorStatistics]:
    """Compute the statistics of tensors, reading each tensor only once.

    Tensors are read in blocks, and several tensors are read in parallel.

    Args:
        tensors: Tensors, keyed by name.

    Returns:
        The statistics, keyed by name.
    """
    statistics_by_name = {name: TensorStatistics() for name in tensors}

    def add_tensor(name: str, progress: ReportBytes) -> None:
        for block in tensors[name].iter_blocks_then_verify(BLOCK_BYTES):
            statistics_by_name[name].add_block(block)
            progress(block.nbytes)
        tensors[name].release()

    run_jobs_in_threads((partial(add_tensor, name) for name in tensors), lambda _: None)
    return statistics_by_name


def run_diff(make_parser: ParserFactory, argv: Sequence[str]) -> int:
    """Run `portable-convert diff`.

    Args:
        make_parser: Function that creates an argument parser.
        argv: Arguments after `diff`.

    Returns:
        The exit code: 0 if the tensors of both checkpoints have the same names, shapes and values,
        otherwise 1. If the names differ, they are first converted to published names if possible.
        Values are equal if they differ by at most `--tolerance`. With `--optimizer`, only the tensors
        of the optimizer states are compared, not Python numbers or parameter groups.
    """
    arguments = make_parser(
        prog="portable-convert diff",
        description="Compare the tensors of two checkpoints of any formats, value by value.",
        epilog="exit codes: 0 the same, 1 different, 2 mistake in the command, 65 A or B cannot be opened",
    )
    arguments.add_argument("left", metavar="A", help="run folder, step folder, folder of shards, file or URL")
    arguments.add_argument("right", metavar="B", help="checkpoint to compare with A")
    arguments.add_argument(
        "--tolerance",
        type=_parse_tolerance,
        default=0.0,
        help="maximum absolute difference at which two elements count as equal (default: 0)",
    )
    arguments.add_argument("--optimizer", action="store_true", help="also compare the optimizer states")
    arguments.add_argument("--json", action="store_true", help="print JSON")
    options = arguments.parse_args(argv)
    checkpoints = [open_checkpoint(path) for path in (options.left, options.right)]
    sides = [
        list_inspected_tensors(side, includes_optimizer=options.optimizer)
        for side in _rename_to_common_names(checkpoints)
    ]
    document = compare_tensors(*sides, tolerance=options.tolerance)
    print_line(json.dumps(document, indent=1) if options.json else _format_differences(document))
    return SAME if document["same"] else DIFFERENT


def _parse_tolerance(text: str) -> float:
    """Parse the value of `--tolerance`, a finite number of at least 0.

    Raises:
        argparse.ArgumentTypeError: If the text is not such a number.
    """
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number of at least 0, such as 1e-6")
    return tolerance


def _rename_to_common_names(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Rename the tensors of two checkpoints to published names, unless the names already agree.

    Published names are the tensor names in the files of the published model. The name rules of a
    checkpoint convert its tensors to these names. If the rules of one checkpoint are unknown, the
    rules of the other are used. If both are unknown, the checkpoints are returned unchanged.
    """
    left, right = checkpoints
    if left.tensors.keys() == right.tensors.keys():
        return checkpoints
    rules = [find_name_rules(checkpoint) for checkpoint in checkpoints]
    default = rules[0] or rules[1]
    if default is None:
        return checkpoints
    return [
        rename_to_published(checkpoint, own_rules or default)
        for checkpoint, own_rules in zip(checkpoints, rules, strict=True)
    ]


def compare_tensors(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], *, tolerance: float = 0.0
) -> dict[str, Any]:
    """Compare two sets of tensors element by element.

    Tensors of different dtypes are equal if their values are equal. Tensors of different shapes are
    not compared.

    Args:
        left: Tensors of the first checkpoint, keyed by name.
        right: Tensors of the second checkpoint, keyed by name.
        tolerance: Largest absolute difference at which two elements count as equal.

    Returns:
        The differences as JSON values. `same` is True if no names, shapes or values differ.
    """
    common_names = [name for name in left if name in right]
    comparable_names = [name for name in common_names if left[name].shape == right[name].shape]
    differences = {name: TensorDifference(tolerance) for name in comparable_names}

    def compare_one_tensor(name: str, progress: ReportBytes) -> None:
        both = left[name], right[name]
        blocks = (side.iter_blocks_then_verify(_BLOCK * get_itemsize(side.dtype)) for side in both)
        for ours, theirs in zip(*blocks, strict=True):
            differences[name].add_blocks(ours, theirs)
            progress(ours.nbytes)
        for side in both:
            side.release()

    run_jobs_in_threads((partial(compare_one_tensor, name) for name in comparable_names), lambda _: None)
    different_values = {
        name: difference.to_json() for name, difference in differences.items() if difference.elements
    }
    shapes = {
        name: [list(left[name].shape), list(right[name].shape)]
        for name in common_names
        if name not in differences
    }
    dtypes = {
        name: [left[name].dtype, right[name].dtype]
        for name in common_names
        if left[name].dtype != right[name].dtype
    }
    unmatched_names = [
        [name for name in tensors if name not in other_tensors]
        for tensors, other_tensors in ((left, right), (right, left))
    ]
    return {
        "same": not (different_values or shapes or unmatched_names[0] or unmatched_names[1]),
        "compared": len(comparable_names),
        "only_in_a": unmatched_names[0],
        "only_in_b": unmatched_names[1],
        "shapes": shapes,
        "dtypes": dtypes,
        "values": different_values,
    }


def _format_differences(document: Mapping[str, Any]) -> str:
    """Format the result of `compare_tensors` for a terminal."""
    lines = [f"only in A: {to_printable(name)}" for name in document["only_in_a"]]
    lines += [f"only in B: {to_printable(name)}" for name in document["only_in_b"]]
    lines += [
        f"{to_printable(name)}: shape {a} in A, {b} in B" for name, (a, b) in document["shapes"].items()
    ]
    for name, difference in sorted(document["values"].items(), key=lambda item: -item[1]["largest"]):
        relative = difference["relative"]
        more = "" if relative is None else f" (relative RMS difference {relative:.3g})"
        more += f", {difference['not_finite']:,} of them NaN or infinite" if difference["not_finite"] else ""
        number = difference["elements"]
        count = "1 element differs" if number == 1 else f"{number:,} elements differ"
        lines.append(f"{to_printable(name)}: {count} by at most {difference['largest']:.3g}{more}")
    dtypes: dict[tuple[str, str], int] = {}
    for first_dtype, two in document["dtypes"].values():
        dtypes[first_dtype, two] = dtypes.get((first_dtype, two), 0) + 1
    lines += [
        f"{count} tensors are {first_dtype} in A and {two} in B"
        for (first_dtype, two), count in dtypes.items()
    ]
    equal = document["compared"] - len(document["values"])
    lines.append(f"{equal} of {document['compared']} tensors have the same values")
    return "\n".join(lines)
