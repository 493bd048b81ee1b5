"""Test many gloo ranks on one machine: messages per step, a killed rank, and a resume on fewer.

``python -m benchmarks.ranks --ranks 24`` has two parts. The first part counts the TCP segments that
all ranks send to exchange the number of tokens and the stop request in a step. It compares the
single all-reduce that :mod:`portable.loop` uses with the two all-reduces of an earlier version. Run
the command under ``unshare --net`` to exclude other programs' messages.

The second part trains a tiny model on ``--ranks`` ranks that are started only through environment
variables. It kills one rank after a checkpoint, and measures how long the other ranks continue. It
then resumes the run on ``--fewer`` ranks, and compares all losses with a run on one rank. Exits
with 1 if a rank continues for more than ``--seconds``, or if a loss differs by more than rounding.

Every rank is a fork of one process that has imported torch, because imports would otherwise take
longer than the measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import SMALL_MODEL
from portable.reporting.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

STEPS_AFTER = 10  # number of steps that the resumed run takes
CALLS = 100
TOLERANCE = 1e-5
PRELOADED = (
    "portable.run.rank",
    "portable.engines.backend",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "benchmarks.freeze_imports",
)


def start_ranks(ranks: int, function: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Start ranks as processes, with the environment variables that torch.distributed reads.

    Args:
        ranks: Number of ranks.
        function: Function to call in each rank.
        *arguments: Arguments of the function.

    Returns:
        The processes, in rank order.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in range(ranks):
        of_rank = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=run_as_rank, args=(of_rank, function, arguments)))
        processes[-1].start()
    return processes


def run_as_rank(variables: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Set the environment variables of a rank in this process, and call a function."""
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    function(*arguments)


# -- messages ----------------------------------------------------------------------------------------------


def count_segments() -> int:
    """Return the number of TCP segments sent in this network namespace since its creation."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line
    )
    return int(dict(zip(names, values, strict=True))["OutSegs"])


def measure_messages(path: Path, lazy: bool) -> None:
    """Measure collectives as one rank, and end the process.

    Rank 0 writes a JSON file with the TCP segments and the microseconds per call for each exchange, and
    with the number of its sockets.

    Args:
        path: File for the result.
        lazy: Whether gloo delays the connection of two ranks until they first exchange a message.
    """
    import torch
    import torch.distributed as dist

    from portable.ranks.collectives import get_or_create_background_group, reduce_any
    from portable.registry import create_backend

    if lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    backend = create_backend("cpu")
    backend.start()
    get_or_create_background_group()
    flag = torch.zeros((), dtype=torch.int32)

    def exchange_now() -> None:
        backend.sum_host_numbers(7, stop=False)
        backend.is_stop_requested(False)

    def exchange_before() -> None:
        backend.sum_host_numbers(7)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)

    def ask_all() -> None:
        reduce_any(False)

    rows: dict[str, float] = {}
    for name, call in (("before", exchange_before), ("now", exchange_now), ("any", ask_all)):
        for _ in range(10):
            call()
        reduce_any(False)
        before, begun = count_segments(), time.perf_counter()
        for _ in range(CALLS):
            call()
        rows[f"{name}_us"] = (time.perf_counter() - begun) / CALLS * 1e6
        rows[name] = (count_segments() - before) / CALLS
        reduce_any(False)
    rows["sockets"] = sum(
        str(entry.readlink()).startswith("socket:")
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink()
    )
    if backend.rank == 0:
        path.write_text(json.dumps(rows))
    reduce_any(False)
    os._exit(0)  # do not destroy the process groups, because this would wait for gloo's threads


def print_messages(sizes: Sequence[int], folder: Path) -> None:
    """Measure the messages for each number of ranks in ``sizes``, and print a table."""
    print(
        "ranks  segments a step before, now  microseconds before, now  any: segments, us  sockets: mesh, lazy"
    )
    for size in sizes:
        rows = []
        for lazy in (False, True):
            path = folder / f"{size}.{lazy}.json"
            for process in start_ranks(size, measure_messages, path, lazy):
                process.join()
            rows.append(json.loads(path.read_text()))
        mesh, r = rows
        print(
            f"{size:5}  {r['before']:.0f}, {r['now']:.0f}  {r['before_us']:.0f}, {r['now_us']:.0f}  "
            f"{r['any']:.0f}, {r['any_us']:.0f}  {mesh['sockets']}, {r['sockets']}",
            flush=True,
        )


# -- death and resume --------------------------------------------------------------------------------------


def wait_for(processes: Sequence[BaseProcess]) -> set[int | None]:
    """Wait for processes to end, and return the set of their exit codes."""
    for process in processes:
        process.join()
    return {process.exitcode for process in processes}


def train(arguments: Sequence[str], errors: Path) -> None:
    """Run ``portable-train`` in this process as a rank of a different launcher, and end the process.

    Args:
        arguments: Command-line arguments.
        errors: Folder for files that contain the standard error of each rank.
    """
    sys.stderr.flush()
    os.dup2(os.open(errors / f"{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    from portable.cli import run_as_process

    sys.argv = ["portable-train", *arguments]
    os._exit(run_as_process())


def config_flags(folder: Path, data: Path, stop_after: int | None, batch: int) -> list[str]:
    """Return the ``portable-train`` command-line arguments for the tiny run.

    Args:
        folder: Folder of the run.
        data: File with the training text.
        stop_after: Step after which the launch ends. None to run until the process is killed.
        batch: Number of sequences per step.
    """
    model = json.dumps(SMALL_MODEL | {"max_position_embeddings": 64})
    values: dict[str, Any] = {
        "output_dir": folder,
        "backend": "cpu",
        "model.config": model,
        "data.source": data,
        "data.seq_len": 32,
        "data.eval_fraction": 0,
        "data.cache_dir": data.parent / "cache",
        "train.steps": 1_000_000,
        "train.warmup_steps": 2,
        "train.global_batch_size": batch,
        "train.eval_every": "null",
        "strategy": "full_shard",
        "precision": "fp32",
        "log.every_steps": 1,
        "log.sample_tokens": 0,
        "checkpoint.every_steps": 5,
        "checkpoint.export": "false",
    }
    if stop_after is not None:
        values["train.stop_after"] = stop_after
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def read_losses(folder: Path) -> dict[int, float]:
    """Read the losses of a run from its metrics, keyed by step. Empty without metrics."""
    if not (folder / METRICS_FILE).exists():
        return {}
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


def kill_one(processes: Sequence[BaseProcess], victim: int, folder: Path) -> dict[int, float]:
    """Kill a rank after the first checkpoint, and wait up to a minute until the other ranks end.

    Ranks that do not end in time are also killed.

    Returns:
        Seconds from the kill to the end of each other rank, keyed by rank. Ranks that did not end in
        time are omitted.

    Raises:
        RuntimeError: If a rank ends before the first checkpoint.
    """
    while not list((folder / "checkpoints").glob("step-*")):
        if any(process.exitcode is not None for process in processes):
            raise RuntimeError("a rank ended before the first checkpoint")
        time.sleep(0.2)
    pid = processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    died, ended = time.monotonic(), dict[int, float]()
    while len(ended) < len(processes) and time.monotonic() - died < 60:
        for rank, process in enumerate(processes):
            if rank not in ended and process.exitcode is not None:
                ended[rank] = time.monotonic() - died
        time.sleep(0.02)
    for process in processes:
        process.kill()
    return {rank: seconds for rank, seconds in ended.items() if rank != victim}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all measurements and print the results. Returns 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=24)
    parser.add_argument("--fewer", type=int, default=16)
    parser.add_argument("--victim", type=int, default=5)
    parser.add_argument("--batch", type=int, default=48, help="sequences of a step")
    parser.add_argument("--seconds", type=float, default=5.0, help="that a rank may run on after a death")
    parser.add_argument("--messages", type=int, nargs="*", default=[2, 4, 8, 16])
    options = parser.parse_args(argv)
    # Do not load backends for accelerators that are installed but not used.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print_messages(options.messages, folder)
        data = folder / "text.txt"
        data.write_text("".join(f"line {number} of a text to train on\n" for number in range(3000)))
        run, errors = folder / "run", folder / "errors"
        errors.mkdir()
        begun = time.monotonic()
        ranks = start_ranks(options.ranks, train, config_flags(run, data, None, options.batch), errors)
        ended = kill_one(ranks, options.victim, run)
        last = max(ended.values(), default=0.0)
        print(
            f"{options.ranks} ranks, rank {options.victim} killed: {len(ended)} others ended after at most "
            f"{last:.1f} s ({time.monotonic() - begun:.0f} s in all); load {os.getloadavg()[0]:.0f}",
            flush=True,
        )
        lines = [line for path in sorted(errors.iterdir()) for line in path.read_text().splitlines()]
        for line in lines:
            if "error" in line or "Traceback" in line:
                print(f"  {line}")
        end = max(read_losses(run)) + STEPS_AFTER
        flags = config_flags(run, data, end, options.batch)
        codes = wait_for(start_ranks(options.fewer, train, flags, errors))
        seconds = time.monotonic() - begun
        print(f"resumed on {options.fewer} ranks: exit codes {codes} ({seconds:.0f} s in all)", flush=True)
        truth = folder / "truth"
        flags = config_flags(truth, data, end, options.batch)
        codes |= wait_for(start_ranks(1, train, flags, errors))
        ours, theirs = read_losses(run), read_losses(truth)
        worst = max((abs(ours[step] / theirs[step] - 1) for step in theirs if step in ours), default=1.0)
        print(
            f"{len(ours)} losses, {len(theirs)} of one rank; largest relative difference {worst:.1e} "
            f"({time.monotonic() - begun:.0f} s in all)"
        )
        good = len(ended) == options.ranks - 1 and max(ended.values()) <= options.seconds
        good = good and codes == {0} and set(ours) == set(theirs) and worst < TOLERANCE
    return 0 if good else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
