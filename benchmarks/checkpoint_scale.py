"""Measure the cost of saving and resuming, in CPU seconds and memory, by number of ranks and tensors.

    python -m benchmarks.checkpoint_scale growth --tensors 1137 --ranks 8 32 128
    python -m benchmarks.checkpoint_scale steps --place thread

``growth`` writes a checkpoint for ``--ranks`` ranks, one after the other in a single process. The
state consists of the weights and two moments of each parameter. Each tensor has one row of four
values per rank. Each rank writes a shard file and a table that lists the contents of the file, and
rank 0 writes ``.metadata`` for all ranks. The benchmark measures one rank's table and rank 0's work
on ``.metadata``. It also measures the cost of opening the checkpoint: in one rank of the same world
size, in one rank of half the world size, and in ``portable-convert``, which reads ``.metadata``.

``steps`` trains a small model and saves a large state in the background. It compares the step times
during the save with the other steps. The wall times are only meaningful if no other program uses
the cores. The time without core waits is the wall time minus the time in which the thread was ready
to run, but another thread or program used its core. The kernel counts both times. ``--cores 0 1``
keeps the training loop on one core, and the threads and processes of the save on the other.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from isal import isal_zlib

from portable.converters import open_checkpoint, read_item_checksums
from portable.converters.formats.dcp.checksums import CHECKSUMS
from portable.converters.writers.dcp_tables import (
    Box,
    KeyEntry,
    WrittenPiece,
    build_rank_table,
    iter_metadata_bytes,
    write_rank_tables_index,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from portable.converters.writers.dcp_tables import RankTable

COLUMNS = 4


def list_keys(parameters: int, ranks: int) -> list[KeyEntry]:
    """List the entries of a run's state dict: weights and two moments, each with one row per rank.

    Args:
        parameters: Number of parameters.
        ranks: Number of ranks, which is also the number of rows in each tensor.
    """
    names = [f"model.layers.{n // 9}.mlp.part{n % 9}.weight" for n in range(parameters)]
    paths: list[tuple[str | int, ...]] = [("model", name) for name in names]
    paths += [("optim", "state", name, what) for name in names for what in ("exp_avg", "exp_avg_sq")]
    shape = (ranks, COLUMNS)
    return [KeyEntry(".".join(map(str, path)), path, "F32", shape) for path in paths]


def write_rank(folder: Path, keys: list[KeyEntry], rank: int) -> RankTable:
    """Write one rank's shard file and table, and return the table.

    Every element in the shard file has the rank's number as its value.
    """
    buffer = io.BytesIO()
    torch.save(torch.full((1, COLUMNS), float(rank)), buffer)
    item = buffer.getvalue()
    file = f"__{rank}_0.distcp"
    (folder / file).write_bytes(item * len(keys))
    (checksum,) = read_item_checksums(folder, [(file, 0, len(item))])
    pieces = [
        WrittenPiece(entry.key, (rank, 0), (1, COLUMNS), number * len(item), len(item), checksum)
        for number, entry in enumerate(keys)
    ]
    table, content = build_rank_table(f"__{rank}.metadata", file, keys, pieces)
    (folder / table.record.name).write_bytes(content)
    return table


def write_metadata(folder: Path, tables: list[RankTable]) -> int:
    """Write ``.metadata`` and the index of the tables, as rank 0 does.

    Returns:
        The size of ``.metadata`` in bytes.
    """
    crc32 = nbytes = 0
    with (folder / ".metadata").open("wb") as file:
        for part in iter_metadata_bytes(tables[0], (table.pieces for table in tables[1:])):
            file.write(part)
            crc32, nbytes = isal_zlib.crc32(part, crc32), nbytes + len(part)
    records = [table.record for table in tables]
    write_rank_tables_index(folder, records, metadata_crc32=crc32, metadata_nbytes=nbytes)
    return nbytes


def measure_cpu(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function, and return its CPU time in seconds and its result."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def open_as(folder: Path, rank: tuple[int, int] | None, shared: Path | None) -> None:
    """Open a checkpoint and read one rank's rows.

    Prints the CPU time in seconds and the additional peak memory in MiB, for :func:`measure_opening`.

    Args:
        folder: Folder of the checkpoint.
        rank: Rank and world size. If None, the metadata of all ranks is read, but no tensors.
        shared: Index of ``.metadata``, which the first process on a node writes and the other processes
            read. If None, no index is used.
    """

    def build_once(key: str, write: Callable[[Path], None]) -> Path | None:
        if shared is not None and not shared.exists():
            write(shared)
        return shared

    def read() -> None:
        checkpoint = open_checkpoint(folder, rank=rank, build_once=None if shared is None else build_once)
        assert checkpoint.optimizer is not None
        for name, tensor in checkpoint.tensors.items():
            if rank is not None:
                rows = tensor.shape[0] // rank[1]
                index = slice(rank[0] * rows, (rank[0] + 1) * rows)
                for part in (tensor, *checkpoint.optimizer.state[name].values()):
                    part.read(index)  # type: ignore[union-attr]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, _ = measure_cpu(read)
    print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measure_opening(folder: Path, rank: str, shared: Path | None = None) -> tuple[float, float]:
    """Open a checkpoint in a new process.

    Args:
        folder: Folder of the checkpoint.
        rank: ``<rank>/<world size>``, or ``all``.
        shared: See :func:`open_as`.

    Returns:
        The CPU time in seconds, and the additional peak memory in MiB.
    """
    command = [sys.executable, "-m", "benchmarks.checkpoint_scale", "open", str(folder), "--rank", rank]
    command += [] if shared is None else ["--shared", str(shared)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(output[0]), float(output[1])


def write_empty_rank(folder: Path, table: RankTable, rank: int) -> RankTable:
    """Write an empty shard file and an empty table for a rank.

    Args:
        folder: Folder of the checkpoint.
        table: Table of another rank.
        rank: Rank to write the files for.

    Returns:
        Copy of ``table`` with the file name and the rows of ``rank``.
    """
    record = table.record
    boxes = {shape: Box((rank, 0), box.sizes) for shape, box in record.boxes.items()}
    (folder / f"__{rank}_0.distcp").touch()
    (folder / f"__{rank}.metadata").touch()
    return replace(table, record=replace(record, name=f"__{rank}.metadata", boxes=boxes))


def measure_growth(parameters: int, ranks: int, *, sparse: bool = False) -> dict[str, float]:
    """Write and open a checkpoint for ``ranks`` ranks.

    Args:
        parameters: Number of parameters.
        ranks: Number of ranks.
        sparse: Whether to write real files only for the last two ranks, and empty files for all other
            ranks.

    Returns:
        Table row with CPU seconds, MiB and counts, keyed by column title.
    """
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-scale-"))
    try:
        seconds, keys = measure_cpu(partial(list_keys, parameters, ranks))
        tables = []
        for rank in reversed(range(ranks)):
            if not sparse or rank >= ranks - 2:
                of_rank, table = measure_cpu(partial(write_rank, folder, keys, rank))
            else:
                table = write_empty_rank(folder, table, rank)
            tables.append(table)
        tables.reverse()
        joining, nbytes = measure_cpu(partial(write_metadata, folder, tables))
        same, same_mb = measure_opening(folder, f"{ranks - 1}/{ranks}")
        half, half_mb = measure_opening(folder, f"{ranks // 2 - 1}/{ranks // 2}")
        whole, whole_mb = (math.nan, math.nan) if sparse else measure_opening(folder, "all")
        earlier = dict[str, float]()
        if not sparse:  # remove the tables, as in checkpoints of a previous version
            for name in (CHECKSUMS, *(table.record.name for table in tables)):
                (folder / name).unlink()
            for reader in ("first rank of a node", "another rank"):
                cpu, mb = measure_opening(folder, f"{ranks - 1}/{ranks}", folder / "index")
                earlier |= {f"no tables, {reader}, s": cpu, f"no tables, {reader}, MB": mb}
            earlier["index, MB"] = (folder / "index").stat().st_size / 1e6
    finally:
        shutil.rmtree(folder)
    return {
        "ranks": ranks,
        "pieces": ranks * len(keys),
        "table of a rank, s": seconds + of_rank,
        "rank 0 joins, s": joining,
        ".metadata, MB": nbytes / 1e6,
        "same world opens, s": same,
        "same world, MB": same_mb,
        "half the world opens, s": half,
        "half the world, MB": half_mb,
        "all pieces, s": whole,
        "all pieces, MB": whole_mb,
        **earlier,
    }


def print_exponents(rows: Sequence[dict[str, float]]) -> None:
    """Print the exponents with which the measurements grow with the number of ranks.

    The exponents are computed from the first and the last row.
    """
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        growth = math.log(last["ranks"] / first["ranks"])
        columns = [
            name for name in first if name in last and name != "ranks" and first[name] > 0 < last[name]
        ]
        exponents = {name: math.log(last[name] / first[name]) / growth for name in columns}
        print("exponents:", "  ".join(f"{name} {value:.2f}" for name, value in exponents.items()))


# -- steps during a save ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """Time of one optimizer step, in seconds.

    Attributes:
        wall: Wall time of the step.
        cpu: Time in which the training loop's thread ran on a core.
        queued: Time in which this thread waited for a core that another thread or program used.
    """

    wall: float
    cpu: float
    queued: float

    @property
    def alone(self) -> float:
        """Wall time in seconds, without the time in which the thread waited for a core."""
        return self.wall - self.queued

    @property
    def blocked(self) -> float:
        """Seconds in which the thread waited for anything except a core, such as the GIL or the disk."""
        return self.wall - self.queued - self.cpu


def train_with_saves(
    place: str, tensors: int, megabytes: int, device: str, *, saves: int = 4, cores: Sequence[int] = ()
) -> dict[str, float]:
    """Train a small model with background saves, and compare the steps during saves with other steps.

    Args:
        place: Method of saving. See :func:`choose_saver`.
        tensors: Number of tensors in the state.
        megabytes: Size of the state in MiB.
        device: Device of the model and the state.
        saves: Number of saves. The first save is not counted, because it starts processes.
        cores: Core for the training loop, and core for all other threads and processes. Empty to use
            any core.

    Returns:
        Times and ratios, keyed by description.
    """
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(24))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(32, 256, device=device)
    numel = megabytes * (1 << 20) // 4 // tensors
    state = {"model": {f"layers.{n}.weight": torch.zeros(numel, device=device) for n in range(tensors)}}
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-steps-"))
    save = choose_saver(place)
    alone, during = list[StepTime](), list[StepTime]()
    stalls, lengths, others = list[float](), list[float](), list[float]()
    try:
        for number in range(saves):
            target = folder / str(number)
            target.mkdir()
            started, of_others = time.perf_counter(), time.process_time() - time.thread_time()
            with on_core(*cores[1:], back_to=cores[:1]):  # new threads and processes stay on this core
                done = save(state, target)
            stalls.append(time.perf_counter() - started)
            while not done():
                during.append(measure_step(model, optimizer, batch))
            lengths.append(time.perf_counter() - started)
            others.append(time.process_time() - time.thread_time() - of_others)
            alone += [measure_step(model, optimizer, batch) for _ in range(100)]
            shutil.rmtree(target)
            if number == 0:
                during.clear()
    finally:
        shutil.rmtree(folder)
    mean = {
        kind: {
            name: statistics.mean(getattr(step, name) for step in steps)
            for name in ("wall", "alone", "cpu", "blocked")
        }
        for kind, steps in (("alone", alone), ("during", during))
    }
    return {
        "step, ms": 1000 * mean["alone"]["wall"],
        "CPU time of a step, ms": 1000 * mean["alone"]["cpu"],
        "steps during saves": len(during),
        "step during a save, ms": 1000 * mean["during"]["wall"],
        **{
            f"ratio of {label}": mean["during"][name] / mean["alone"][name]
            for name, label in (
                ("wall", "wall times"),
                ("alone", "times without core waits"),
                ("cpu", "CPU times"),
            )
        },
        "blocked in a step, ms": 1000 * mean["alone"]["blocked"],
        "blocked in a step during a save, ms": 1000 * mean["during"]["blocked"],
        "CPU time of other threads of the training process in a save, s": statistics.median(others[1:]),
        "save, s": statistics.median(lengths[1:]),
        "stall of the loop, s": statistics.median(stalls[1:]),
    }


@contextmanager
def on_core(*core: int, back_to: Sequence[int]) -> Iterator[None]:
    """Run this thread on ``core`` within this context, and on ``back_to`` afterward.

    Threads and processes that are started within this context stay on ``core``. An empty list leaves
    the cores unchanged.
    """
    if core:
        os.sched_setaffinity(0, core)
    try:
        yield
    finally:
        if back_to:
            os.sched_setaffinity(0, back_to)


def read_core_times() -> tuple[float, float]:
    """Return how many seconds this thread has run on a core, and how many it has waited for a core.

    The second value is 0 if the kernel does not count it.
    """
    try:
        ran, queued, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    except OSError:  # not on this system
        return time.thread_time(), 0.0
    return int(ran) / 1e9, int(queued) / 1e9


def measure_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> StepTime:
    """Take one optimizer step and measure its time."""
    (ran, queued), started = read_core_times(), time.perf_counter()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if batch.is_cuda:
        torch.cuda.synchronize()
    wall, (ran_after, queued_after) = time.perf_counter() - started, read_core_times()
    return StepTime(wall, ran_after - ran, queued_after - queued)


def start_copying(state: dict[str, Any], folder: Path) -> Callable[[], bool]:
    """Start a program that writes as many bytes as a save, from its own memory.

    The program is a control: it uses the same caches, memory and disk as the training process, but not
    its GIL. If steps are slower with this program, this is caused by the machine instead of the method
    of saving.

    Returns:
        Function that returns whether the program has ended.
    """
    size = sum(tensor.nbytes for tensor in state["model"].values())
    program = (
        "import os, sys\n"
        "os.nice(5)\n"
        f"source = bytes({size})\n"
        "with open(sys.argv[1], 'wb', buffering=0) as file:\n"
        "    for start in range(0, len(source), 4 << 20):\n"
        "        file.write(bytearray(memoryview(source)[start : start + (4 << 20)]))\n"
        "    os.fsync(file.fileno())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(folder / "bytes")])
    return lambda: process.poll() is not None


def choose_saver(place: str) -> Callable[[dict[str, Any], Path], Callable[[], bool]]:
    """Return a function that starts a save in the background.

    Args:
        place: ``thread`` or ``process`` for this project's save, ``dcp-thread`` or ``dcp-process`` for
            torch's ``async_save``, or ``other-program`` for the control of :func:`start_copying`.

    Returns:
        Function that accepts the state and the folder. It returns a function that returns whether the
        save has ended.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    from portable.engines.fsdp import saving

    if place == "other-program":
        return start_copying
    if place in ("thread", "process"):
        saving.MIN_PROCESS_BYTES = 0 if place == "process" else 1 << 62
        saver = saving.DcpSaver()
        return lambda state, folder: saver.save(state, folder, background=True).is_done
    kind = AsyncCheckpointerType.PROCESS if place == "dcp-process" else AsyncCheckpointerType.THREAD

    def save(state: dict[str, Any], folder: Path) -> Callable[[], bool]:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        future = async_save(state, checkpoint_id=folder, planner=planner, async_checkpointer_type=kind)
        return future.done  # type: ignore[union-attr]

    return save


def main() -> None:
    """Run the measurement selected on the command line, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    growth = commands.add_parser("growth")
    growth.add_argument("--tensors", type=int, default=1137, help="parameters of the model")
    growth.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128])
    growth.add_argument("--sparse", action="store_true", help="leave the files of all but two ranks empty")
    growth.add_argument("--json", type=Path)
    steps = commands.add_parser("steps")
    steps.add_argument(
        "--place",
        choices=("thread", "process", "dcp-thread", "dcp-process", "other-program"),
        default="process",
        help="what writes; other-program is the control: a program that only writes as many bytes",
    )
    steps.add_argument("--tensors", type=int, default=3411)
    steps.add_argument("--megabytes", type=int, default=400)
    steps.add_argument("--device", default="cpu")
    steps.add_argument("--saves", type=int, default=4)
    steps.add_argument("--cores", type=int, nargs=2, default=(), help="of the training loop, and of the save")
    steps.add_argument("--json", type=Path)
    opened = commands.add_parser("open")
    opened.add_argument("folder", type=Path)
    opened.add_argument("--rank", required=True)
    opened.add_argument("--shared", type=Path)
    options = parser.parse_args()
    if options.command == "open":
        rank, _, world_size = options.rank.partition("/")
        open_as(options.folder, (int(rank), int(world_size)) if world_size else None, options.shared)
        return
    if options.command == "steps":
        arguments = options.place, options.tensors, options.megabytes, options.device
        rows = [train_with_saves(*arguments, saves=options.saves, cores=options.cores)]
    else:
        rows = []
        for ranks in options.ranks:
            rows.append(measure_growth(options.tensors, ranks, sparse=options.sparse))
            print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
        print_exponents(rows)
    if options.command == "steps":
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
