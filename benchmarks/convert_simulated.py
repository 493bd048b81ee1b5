"""How a conversion would scale on a machine with many cores and a fast array, simulated on this one.

The converter's own threads, queues and readers run. What costs a core's time without Python's lock (reading
from the page cache, CRC32, writing) sleeps for as long as it takes one core of this machine, and the array
lets through so many bytes a second. What Python does between the blocks is real, and shows where the
interpreter's lock limits.

    python -m benchmarks.convert_simulated --gigabytes 100 --read 56 --write 40
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from converters.storage.bytes import SourceFile
from converters.storage.output_file import FLUSH_BYTES, WRITE_BYTES
from converters.tensors.tensor import Tensor
from converters.writers.conversion import Entry, Plan, PlannedFile
from converters.writers.parallel import in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GB = 10**9
# A terabyte in tensors of this size, and in files of this size.
TENSOR_BYTES, FILE_BYTES = 100 << 20, 2 << 30
THREADS = (1, 2, 4, 8, 16, 32, 64)


class Disk:
    """An array that lets through `rate` bytes a second, whoever asks."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int, busy: float) -> None:
        """Return when the bytes have passed, and the core has been busy for so many seconds."""
        now = time.perf_counter()
        with self._lock:
            self._free_at = max(now, self._free_at) + nbytes / self._rate
            until = max(self._free_at, now + busy)
        time.sleep(max(0.0, until - time.perf_counter()))


class File(SourceFile):
    """A file of a rank."""

    def __init__(self, disk: Disk, cost: float) -> None:
        super().__init__("simulated", Path("simulated"), 1 << 62, verify=True)
        self._disk = disk
        self._cost = cost

    def read_into(self, buffer: memoryview, at: int, wanted: int = 0, end: int = 0) -> None:
        self._disk.wait(len(buffer), len(buffer) * self._cost)


class Out:
    """A draft, its files and their pieces in one: what is written waits for the array."""

    threads = None

    def __init__(self, disk: Disk, cost: float) -> None:
        self._disk = disk
        self._cost = cost

    def run_bytes(self, nbytes: int) -> int:
        return FLUSH_BYTES

    def file(self, name: str, lengths: Sequence[int]) -> Out:
        return self

    def piece(self, number: int) -> Out:
        return self

    def write(self, data: memoryview | bytes) -> None:
        left = memoryview(data)
        while left:  # as `Piece.write` does
            count = len(left[:WRITE_BYTES])
            left = left[count:]
            self._disk.wait(count, count * self._cost)

    def copy(self, span: Any, progress: Any) -> bool:
        return False

    def finish(self) -> None:
        pass


def rates() -> tuple[float, float, float]:
    """Seconds of one core of this machine for each byte: read, summed, written."""
    count = 256 << 20
    data = bytearray(os.urandom(1 << 20))

    def timed(step: Callable[[int], object]) -> float:
        begun = time.thread_time()
        for at in range(0, count, len(data)):
            step(at)
        return (time.thread_time() - begun) / count

    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryFile(dir=folder) as file:
        fd = file.fileno()
        written = timed(lambda at: os.pwrite(fd, data, at))
        return timed(lambda at: os.preadv(fd, [data], at)), timed(lambda at: isal_zlib.crc32(data)), written


def convert(
    gigabytes: float, threads: int, costs: tuple[float, float, float], disks: tuple[Disk, Disk]
) -> float:
    """Seconds of one conversion of DCP's kind: every byte is read, summed and written."""
    read, summed, written = costs

    def crc32(data: memoryview, crc: int = 0) -> int:
        time.sleep(len(data) * summed)
        return 0

    # The real one would use cores that this machine does not have.
    stub = SimpleNamespace(crc32=crc32, crc32_combine=lambda *values: 0)
    stored: Any = import_module("converters.storage.bytes")
    conversion: Any = import_module("converters.writers.conversion")
    file = File(disks[0], read)
    per_file = max(1, min(FILE_BYTES, round(gigabytes * GB / threads)) // TENSOR_BYTES)
    files = []
    for number in range(max(threads, round(gigabytes * GB / FILE_BYTES))):
        entries = []
        for i in range(per_file):
            name = f"{number}.{i}"
            span = file.span(0, TENSOR_BYTES, crc32=0)
            entries.append(Entry(name, "F32", Tensor.contiguous(name, "F32", (TENSOR_BYTES // 4,), span)))
        files.append(PlannedFile(str(number), tuple(entries)))
    plan = Plan(tuple(files), {}, {}, lambda folder: {})
    real_sum, real_threads = stored.isal_zlib, conversion.threads
    stored.isal_zlib, conversion.threads = stub, lambda: threads
    try:
        begun = time.perf_counter()
        jobs = conversion._write_jobs(Out(disks[1], written), plan, set(), [])
        in_parallel(jobs, lambda count: None, threads)
        return (time.perf_counter() - begun) / (plan.nbytes / GB)
    finally:
        stored.isal_zlib, conversion.threads = real_sum, real_threads


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=20, help="simulated for each number of threads")
    parser.add_argument("--read", type=float, default=56, help="GB/s of the array (4 Gen5 drives)")
    parser.add_argument("--write", type=float, default=40, help="GB/s of the array")
    options = parser.parse_args()
    costs = rates()
    read, summed, written = (cost * GB for cost in costs)
    print(f"one core: read {read:.2f} s/GB, CRC32 {summed:.2f}, write {written:.2f}\n")
    print("| cores | GB/s | 1 TB, seconds |\n| ---: | ---: | ---: |")
    for threads in THREADS:
        disks = Disk(options.read * GB), Disk(options.write * GB)
        each = convert(options.gigabytes * min(1, threads / 8), threads, costs, disks)
        print(f"| {threads} | {1 / each:.1f} | {each * 1000:.0f} |", flush=True)


if __name__ == "__main__":
    main()
