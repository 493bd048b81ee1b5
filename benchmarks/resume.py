"""Time and memory to load a checkpoint, beside torch's and DeepSpeed's own loading.

``python -m benchmarks.resume --docs docs/moving.md`` saves a run of more than a gigabyte of state and loads
it again and again, by turns with torch's DCP and DeepSpeed's own loading into the same engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
import torch.distributed as dist

from benchmarks.big_state import config, dcp_state, on_ranks, step
from benchmarks.machine import command_line, describe_machine, machine_in_words
from benchmarks.pages import put_into
from benchmarks.zero_memory import Sampler, anonymous, file_backed, trim
from portable.checkpoint.store import Checkpoints
from portable.loop import Progress
from portable.registry import create_backend
from portable.run.prepare import Prepared, prepare
from portable.run.restore import load, restore
from portable.run.save import save
from portable.run.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.backend import Engine

OURS = "portable-train"
MOVES = (
    ("full_shard", 2, "full_shard", 2),
    ("full_shard", 2, "full_shard", 1),
    ("zero2", 2, "zero2", 2),
    ("full_shard", 2, "zero2", 2),
    ("zero2", 2, "full_shard", 2),
)
"""Strategy and ranks of the writer, and of the reader."""
STATES = ("warm", "cold")
"""Whether the files are in the page cache."""
BEGIN, END = "<!-- benchmarks.resume: begin -->", "<!-- benchmarks.resume: end -->"

Figures = dict[str, list[tuple[float, int, int]]]
"""Of each contestant and round: seconds, and bytes of anonymous and of file-backed memory beyond what was."""


def write(strategy: str, hidden: int, layers: int, place: str) -> int:
    """Train a step and save it, on all ranks; the bytes of the checkpoint."""
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        run, engine = _engine(strategy, hidden, layers, Path(scratch))
        try:
            step(run, engine)
            checkpoints = Checkpoints(Path(place), keep=1, rank=run.backend.rank)
            save(run, checkpoints, engine, Progress(1, run.plan.global_batch_size))
            checkpoints.finish()
            run.backend.barrier()
            return _nbytes(Path(place))
        finally:
            run.backend.stop()


def _engine(strategy: str, hidden: int, layers: int, scratch: Path) -> tuple[Prepared, Engine]:
    backend = create_backend("cpu")
    run = prepare(settle(config(scratch, strategy, hidden, layers), backend.name), backend)
    backend.start()
    engine = restore(run, None).engine
    return run, engine


def read(
    strategy: str, hidden: int, layers: int, place: str, writer: str, writers: int, rounds: int
) -> dict[str, Figures]:
    """Load a checkpoint ``rounds`` times with each contestant, on this rank; all ranks call it together.

    Returns:
        numbers with the files in the page cache, and without: of the slowest rank, and of the one that takes
        most memory.
    """
    folder = next(path for path in Path(place).iterdir())
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        run, engine = _engine(strategy, hidden, layers, Path(scratch))
        try:
            step(run, engine)
            contestants: dict[str, Callable[[], object]] = {
                OURS: lambda: load(engine, folder, None, run),
                **_peers(engine, strategy, folder, writer, same_ranks=writers == run.backend.world_size),
            }
            return {state: _take_turns(run, contestants, folder, rounds, state) for state in STATES}
        finally:
            run.backend.stop()


def _take_turns(
    run: Prepared, contestants: dict[str, Callable[[], object]], folder: Path, rounds: int, state: str
) -> Figures:
    backend = run.backend
    measured: Figures = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, function in contestants.items():
            trim()
            if backend.rank == 0:
                _set_cache(folder, state)
            before = anonymous(), file_backed()
            samplers = Sampler(anonymous), Sampler(file_backed)
            backend.barrier()
            begun = time.perf_counter()
            function()
            seconds = time.perf_counter() - begun
            peaks = [sampler.stop() - value for sampler, value in zip(samplers, before, strict=True)]
            worst = torch.tensor([seconds, *peaks], dtype=torch.float64)
            if backend.world_size > 1:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if turn:  # the first is to warm up
                slowest, memory, files = worst.tolist()
                measured[name].append((slowest, int(memory), int(files)))
    return measured


def _set_cache(folder: Path, state: str) -> None:
    """Have the checkpoint's files in the page cache, or out of it; all are synced."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                if state == "cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(1 << 24):
                        pass


def _peers(
    engine: Any, strategy: str, folder: Path, writer: str, *, same_ranks: bool
) -> dict[str, Callable[[], object]]:
    """Other loaders of this checkpoint into this engine."""
    if writer == strategy == "full_shard":
        from torch.distributed.checkpoint.state_dict_loader import load

        return {"torch DCP": lambda: load(dcp_state(engine), checkpoint_id=folder)}
    if writer == strategy and strategy.startswith("zero") and same_ranks:
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        from portable.terminal import native_stdout_closed

        peer = TorchCheckpointEngine()

        def deepspeed() -> None:
            ours, engine._engine.checkpoint_engine = engine._engine.checkpoint_engine, peer
            try:
                with native_stdout_closed():
                    path, _ = engine._engine.load_checkpoint(str(folder))
            finally:
                engine._engine.checkpoint_engine = ours
            assert path is not None

        return {"DeepSpeed": deepspeed}
    return {}


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(measured: Sequence[tuple[tuple[str, int, str, int], dict[str, Figures]]]) -> str:
    """A Markdown table of medians, and of the medians of the ratios of the same round."""
    lines = [
        "| from | onto | loaded by | warm, s | cold, s | x this project's, warm | cold | anonymous MB "
        "| file-backed MB |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (writer, writers, reader, readers), states in measured:
        for name in states["warm"]:
            seconds, ratios = [], []
            for state in STATES:
                values, ours = states[state][name], states[state][OURS]
                seconds.append(statistics.median(value[0] for value in values))
                ratios.append(
                    statistics.median(value[0] / own[0] for value, own in zip(values, ours, strict=True))
                )
            anonymous, files = (max(value[i] for value in states["warm"][name]) / 1e6 for i in (1, 2))
            lines.append(
                f"| `{writer}`, {writers} | `{reader}`, {readers} | {name} | {seconds[0]:.2f} "
                f"| {seconds[1]:.2f} | {ratios[0]:.1f} | {ratios[1]:.1f} | {anonymous:.0f} | {files:.0f} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024, help="size of the model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--moves", type=int, nargs="+", choices=range(len(MOVES)), default=range(len(MOVES)))
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the table into this page as well")
    given = parser.parse_args(argv)
    command = command_line("benchmarks.resume", argv)
    machine = describe_machine(torch.device("cpu"), "deepspeed")
    size = given.hidden, given.layers
    measured = []
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        written: dict[str, int] = {}
        for move in (MOVES[index] for index in given.moves):
            writer, writers, reader, readers = move
            place = Path(scratch) / f"{writer}-{writers}"
            if not place.exists():
                (written[f"`{writer}`"], *_) = on_ranks(write, writer, *size, str(place), ranks=writers)
            arguments = (*size, str(place), writer, writers, given.rounds)
            measured.append((move, on_ranks(read, reader, *arguments, ranks=readers)[0]))
            print(table(measured[-1:]).splitlines()[-1], file=sys.stderr)
    sizes = ", ".join(f"{name} {nbytes / 1e9:.2f} GB" for name, nbytes in written.items())
    said = f"{time.strftime('%Y-%m-%d')}, `{command}`; " + machine_in_words(machine)
    told = f"Checkpoints: {sizes}.\n\n{table(measured)}\n\n{said}"
    print(told)
    if given.docs is not None:
        put_into(given.docs, f"\n{told}\n", BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
