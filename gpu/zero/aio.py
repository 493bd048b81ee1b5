"""Good ``aio`` settings for a disk: ``python -m gpu.zero.aio FOLDER`` measures, with the code that swaps to
it.

The search goes along one setting at a time and keeps what was fastest. A trial writes a file and reads it
back past the page cache, as ZeRO-Infinity does with its swap files, and counts by the seconds that both took
together: what is swapped in a step is read and written once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tqdm import tqdm

from gpu.zero import nvme
from gpu.zero import runtime as zero_runtime
from portable.errors import UserError, one_line
from portable.terminal import native_stdout_closed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Aio:
    """DeepSpeed's ``aio`` block, under its names.

    Source: https://www.deepspeed.ai/docs/config-json/#asynchronous-io
    """

    block_size: int
    queue_depth: int
    intra_op_parallelism: int
    single_submit: bool
    overlap_events: bool


DEFAULT = Aio(**nvme.AIO_DEFAULTS)

# In the order of how much they usually matter; the search goes round until nothing gets better.
CHOICES: dict[str, tuple[Any, ...]] = {
    "intra_op_parallelism": (1, 2, 4, 8),
    "block_size": (_MIB // 8, _MIB // 2, _MIB, 4 * _MIB, 8 * _MIB),
    "queue_depth": (8, 32, 128),
    "overlap_events": (True, False),
    "single_submit": (False, True),
}
_BLOCKS = max(CHOICES["block_size"]) * max(CHOICES["intra_op_parallelism"])


@dataclass(frozen=True)
class Trial:
    """Seconds that it took to write and to read ``size`` bytes, medians of ``rounds``."""

    aio: Aio
    size: int
    write_seconds: float
    read_seconds: float
    rounds: int

    @property
    def seconds(self) -> float:
        return self.write_seconds + self.read_seconds

    @property
    def write_rate(self) -> float:
        """GiB/s."""
        return self.size / self.write_seconds / _GIB

    @property
    def read_rate(self) -> float:
        """GiB/s."""
        return self.size / self.read_seconds / _GIB


def search(
    measure: Callable[[Aio], tuple[float, float]],
    size: int,
    seconds: float,
    progress: Callable[[float], None] = lambda _: None,
) -> list[Trial]:
    """What was tried, fastest first.

    Args:
        measure: seconds of one write and of one read with some settings.
        size: bytes that it writes and reads.
        seconds: after which no more are begun, but for the first.
        progress: told the share of the time that is over.
    """
    start = time.monotonic()
    taken: dict[Aio, list[tuple[float, float]]] = {}

    def time_is_up() -> bool:
        elapsed = (time.monotonic() - start) / seconds
        progress(min(elapsed, 1.0))
        return elapsed >= 1.0

    def take(aio: Aio) -> None:
        taken.setdefault(aio, []).append(measure(aio))

    def total(aio: Aio) -> float:
        return statistics.median(write + read for write, read in taken[aio])

    take(DEFAULT)  # which also warms up whatever there is to warm up
    taken[DEFAULT].clear()
    take(DEFAULT)
    best, before = DEFAULT, None
    while best != before and not time_is_up():
        before = best
        for name, values in CHOICES.items():
            for value in values:
                candidate = replace(best, **{name: value})
                if candidate not in taken and not time_is_up():
                    take(candidate)
            best = min(taken, key=total)
    # A single measurement may be luck: the fastest ones and the default again, for the time that is left.
    while not time_is_up():
        leaders = {*sorted(taken, key=total)[:3], DEFAULT}
        take(min(leaders, key=lambda aio: len(taken[aio])))
    trials = []
    for aio in sorted(taken, key=total):
        writes, reads = zip(*taken[aio], strict=True)
        trials.append(Trial(aio, size, statistics.median(writes), statistics.median(reads), len(writes)))
    progress(1.0)
    return trials


def tune(folder: Path, *, seconds: float, size: int, progress: bool = False) -> list[Trial]:
    """Measure the disk of ``folder`` for about ``seconds``; what was tried, fastest first.

    Args:
        folder: on the disk; nothing is left in it.
        seconds: to measure for. Where DeepSpeed has yet to build its op, minutes come on top, once.
        size: bytes of the scratch file.
        progress: show a bar.

    Raises:
        UserError: if the folder cannot be measured in, or DeepSpeed or its op is not to be had.
    """
    nvme.check_folder(folder, "PATH")
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        raise UserError(f"PATH: {folder} has {free // _MIB} MiB left; make room for {2 * size // _MIB}")
    deepspeed = zero_runtime.import_deepspeed("cpu")
    nvme.check_async_io(deepspeed)
    try:
        with native_stdout_closed():
            op = deepspeed.ops.op_builder.AsyncIOBuilder().load(verbose=False)
    except Exception as error:
        raise UserError(f"DeepSpeed's async_io could not be built ({one_line(error)})") from error
    with tempfile.TemporaryDirectory(prefix="portable-aio-", dir=folder) as scratch:
        disk = _Disk(op, Path(scratch) / "swap", size)
        bar = tqdm(total=100, unit="%", desc="measuring", leave=False, disable=not progress)
        try:
            return search(disk.measure, size, seconds, lambda share: _move(bar, share))
        finally:
            bar.close()
            disk.close()


def _move(bar: tqdm[NoReturn], share: float) -> None:
    bar.update(round(100 * share) - bar.n)


class _Disk:
    """One page-locked buffer and one file, as ZeRO-Infinity's swapper has them."""

    def __init__(self, op: Any, file: Path, size: int) -> None:
        self._op, self._file = op, str(file)
        self._pins = op.aio_handle()
        self._buffer = self._pins.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
        self._buffer.random_()  # some disks are quicker with zeros than with anything else

    def measure(self, aio: Aio) -> tuple[float, float]:
        handle = self._op.aio_handle(*(getattr(aio, field.name) for field in _ARGUMENTS))
        seconds = []
        for name in ("sync_pwrite", "sync_pread"):
            start = time.perf_counter()
            done = getattr(handle, name)(self._buffer, self._file, 0)
            seconds.append(time.perf_counter() - start)
            if done != 1:
                raise UserError(
                    f"PATH: {self._file} cannot be swapped to: the file system refuses direct, asynchronous "
                    "input and output; name a folder on another disk"
                )
        return seconds[0], seconds[1]

    def close(self) -> None:
        self._pins.free_cpu_locked_tensor(self._buffer)


_BY_NAME = {field.name: field for field in fields(Aio)}
# In the order in which the op takes them.
_ARGUMENTS = [
    _BY_NAME[name]
    for name in ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
]


def table(trials: Sequence[Trial], shown: int = 8) -> str:
    """The fastest trials and the default, one a line."""
    heads = ("block_size", "queue_depth", "parallelism", "single", "overlap", "write GiB/s", "read GiB/s")
    widths = (11, 12, 12, 7, 8, 12, 11)
    lines = ["".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for index, trial in enumerate(trials):
        if index >= shown and trial.aio != DEFAULT:
            continue
        aio = trial.aio
        cells = (
            aio.block_size,
            aio.queue_depth,
            aio.intra_op_parallelism,
            "yes" if aio.single_submit else "no",
            "yes" if aio.overlap_events else "no",
            f"{trial.write_rate:.2f}",
            f"{trial.read_rate:.2f}",
        )
        mark = "  the default" if aio == DEFAULT else ""
        lines.append("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + mark)
    return "\n".join(lines)


def to_paste(aio: Aio) -> str:
    """The settings for a run's YAML file and for a DeepSpeed JSON."""
    block = json.dumps(asdict(aio))
    yaml = f"deepspeed:\n  config:\n    aio: {block}"
    return f'for the YAML file of a run:\n\n{yaml}\n\nfor a DeepSpeed JSON:\n\n"aio": {block}'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu.zero.aio", description=__doc__)
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder on the disk to swap to")
    parser.add_argument("--seconds", type=float, default=30.0, help="to measure for (default 30)")
    parser.add_argument(
        "--size", type=int, default=256, metavar="MIB", help="of the scratch file, in MiB (default 256)"
    )
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the scratch file goes, too
    try:
        if given.size < 1 or given.size * _MIB % _BLOCKS:
            raise UserError(f"--size: must be a multiple of {_BLOCKS // _MIB} MiB")
        if not given.seconds > 0:
            raise UserError("--seconds: must be positive")
        trials = tune(given.path, seconds=given.seconds, size=given.size * _MIB, progress=sys.stderr.isatty())
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    print(f"{given.path}: {len(trials)} settings tried with a file of {given.size} MiB\n\n{table(trials)}\n")
    print(to_paste(trials[0].aio))
    return 0


if __name__ == "__main__":
    sys.exit(main())
