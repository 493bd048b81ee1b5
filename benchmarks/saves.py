"""How long a save blocks the training, in the background and in the foreground, beside plain copies.

``python -m benchmarks.saves --docs docs/moving.md`` saves one state again and again, by turns with a copy
of as many bytes in memory, with writing and syncing them, and with what torch and DeepSpeed offer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.big_state import RANKS, config, dcp_state, on_ranks, step
from benchmarks.machine import command_line, describe_machine, machine_in_words
from benchmarks.pages import put_into
from portable.checkpoint.store import Checkpoints
from portable.loop import Progress
from portable.registry import create_backend
from portable.run.prepare import Prepared, prepare
from portable.run.restore import restore
from portable.run.save import save as save_run
from portable.run.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.backend import Backend, Engine

STRATEGIES = ("full_shard", "zero2", "xla")
COPY, WRITE = "copy of the bytes in memory", "write of the bytes, with fsync"
BEHIND, TOTAL, FOREGROUND = (
    "save behind the training: blocked",
    "the same, until complete",
    "save in the foreground",
)
DEEPSPEED = "DeepSpeed's save, without fsync"
BEGIN, END = "<!-- benchmarks.saves: begin -->", "<!-- benchmarks.saves: end -->"

Seconds = dict[str, list[float]]


def measure(strategy: str, rounds: int, hidden: int, layers: int, place: str) -> tuple[Seconds, int]:
    """Save ``rounds`` times in each way, on this rank; all ranks call it together.

    Returns:
        seconds of the slowest rank, by contestant and round; and the bytes that all ranks write.
    """
    with tempfile.TemporaryDirectory(prefix="saves-") as scratch:
        backend = create_backend("xla" if strategy == "xla" else "cpu")
        run = prepare(settle(config(Path(scratch), strategy, hidden, layers), backend.name), backend)
        backend.start()
        try:
            engine = restore(run, None).engine
            step(run, engine)
            return _take_turns(run, engine, strategy, rounds, Path(place))
        finally:
            backend.stop()


def _take_turns(
    run: Prepared, engine: Engine, strategy: str, rounds: int, place: Path
) -> tuple[Seconds, int]:
    backend = run.backend
    checkpoints = Checkpoints(place / "checkpoints", keep=1, rank=backend.rank)
    number = 0

    def save(*, background: bool) -> None:
        nonlocal number
        number += 1
        config = run.config.replaced({"checkpoint.async": background})
        save_run(replace(run, config=config), checkpoints, engine, Progress(number, number))

    save(background=False)
    backend.barrier()
    total = sum(path.stat().st_size for path in (checkpoints.latest() or place).rglob("*") if path.is_file())
    ours = np.random.default_rng(backend.rank).bytes(total // backend.world_size)
    file = place / f"raw-{backend.rank}"

    def write() -> None:
        with file.open("wb") as opened:
            opened.write(ours)
            opened.flush()
            os.fsync(opened.fileno())

    contestants: dict[str, Callable[[], object]] = {
        COPY: lambda: bytearray(ours),
        WRITE: write,
        FOREGROUND: lambda: save(background=False),
        BEHIND: lambda: save(background=True),
        **_peers(engine, strategy, place / "peer"),
    }
    seconds: Seconds = {name: [] for name in (COPY, WRITE, BEHIND, TOTAL, *contestants)}
    for turn in range(rounds + 1):
        for name, function in contestants.items():
            begun = _together(backend)
            result: Any = function()
            blocked = time.perf_counter() - begun
            over = None
            if name == BEHIND:
                checkpoints.finish()
                over = time.perf_counter() - begun
            elif result is not None and hasattr(result, "result"):
                result.result()
            del result
            if turn:  # the first is to warm up
                seconds[name].append(_slowest(blocked))
                if over is not None:
                    seconds[TOTAL].append(_slowest(over))
            backend.barrier()
            if backend.rank == 0:
                shutil.rmtree(place / "peer", ignore_errors=True)
            file.unlink(missing_ok=True)
    return seconds, total


def _peers(engine: Any, strategy: str, folder: Path) -> dict[str, Callable[[], object]]:
    """torch's and DeepSpeed's own saves of the same state."""
    if strategy == "full_shard":
        from torch.distributed.checkpoint.state_dict_saver import async_save
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        group: Any = dist.new_group(backend="gloo")

        return {
            "torch's async_save: blocked": lambda: async_save(
                dcp_state(engine), checkpoint_id=folder, process_group=group
            ),
            "torch's save": lambda: dcp_save(dcp_state(engine), checkpoint_id=folder) and None,
        }
    if strategy.startswith("zero"):
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        from portable.terminal import native_stdout_closed

        peer = TorchCheckpointEngine()

        def save() -> None:
            ours, engine._engine.checkpoint_engine = engine._engine.checkpoint_engine, peer
            try:
                with native_stdout_closed():
                    engine._engine.save_checkpoint(str(folder))
            finally:
                engine._engine.checkpoint_engine = ours

        return {DEEPSPEED: save}
    return {}


def _together(backend: Backend) -> float:
    """The time after a barrier and a sync of the disk."""
    if backend.rank == 0:
        os.sync()
    backend.barrier()
    return time.perf_counter()


def _slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def table(seconds: Seconds) -> str:
    """A Markdown table: medians, and medians of the ratios to copy and write of the same round."""
    lines = ["| | seconds | x the copy | x the write |", "| --- | ---: | ---: | ---: |"]
    for name, values in seconds.items():
        ratios = [
            statistics.median(value / other for value, other in zip(values, seconds[base], strict=True))
            for base in (COPY, WRITE)
        ]
        lines.append(f"| {name} | {statistics.median(values):.2f} | {ratios[0]:.1f} | {ratios[1]:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saves", description=__doc__)
    parser.add_argument(
        "--strategy", nargs="+", choices=(*STRATEGIES, "zero3", "no_shard"), default=STRATEGIES
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=768, help="size of the model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the tables into this page as well")
    given = parser.parse_args(argv)
    command = command_line("benchmarks.saves", argv)
    machine = describe_machine(torch.device("cpu"), "deepspeed", "torch_xla")
    told = []
    for strategy in given.strategy:
        with tempfile.TemporaryDirectory(prefix="saves-") as place:
            seconds, total = on_ranks(measure, strategy, given.rounds, given.hidden, given.layers, place)[0]
        where = f"{RANKS} devices" if strategy == "xla" else f"{RANKS} ranks"
        told.append(f"`{strategy}`, {where}, {total / 1e6:.0f} MB together:\n\n{table(seconds)}")
        print(told[-1] + "\n", flush=True)
    said = f"{time.strftime('%Y-%m-%d')}, `{command}`; " + machine_in_words(machine)
    print(said)
    if given.docs is not None:
        put_into(given.docs, "\n" + "\n\n".join([*told, said]) + "\n", BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
