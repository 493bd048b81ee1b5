"""Peak host memory of each rank under ZeRO, in bytes a parameter, beside the theoretical values.

``python -m benchmarks.zero_memory --docs docs/zero.md`` trains a model whose state is far larger than
activations and buffers, on CPU ranks, each setting in fresh processes, and puts the table into the page. A
rank's memory is what is resident and its own (not shared with files), beyond what it took after the same
steps with a tiny model under zero3, so that libraries do not count. On a GPU, what is not offloaded is there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

from benchmarks.big_state import llama, write_text
from benchmarks.machine import command_line
from benchmarks.pages import put_into
from portable.checkpoint.store import Checkpoints
from portable.config import load_config
from portable.loop import Progress, train_step
from portable.ranks.launch import launch
from portable.registry import create_backend
from portable.run.batches import train_loader
from portable.run.prepare import prepare
from portable.run.restore import restore
from portable.run.save import save
from portable.run.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.config import RunConfig

STRATEGIES = ("zero1", "zero2", "zero3")
STEPS = 2
FIGURES = ("resident", "peak", "saving")
BEGIN = "<!-- benchmarks.zero_memory: begin -->"
END = "<!-- benchmarks.zero_memory: end -->"


@dataclass(frozen=True)
class Case:
    """One case: a strategy, with or without everything it can offload to host memory."""

    strategy: str
    offload: bool
    ranks: int

    @property
    def name(self) -> str:
        return self.strategy + (" with offload to cpu" if self.offload else "")

    @property
    def formula(self) -> float:
        """Bytes a parameter on each rank in bf16, wherever they lie; see docs/zero.md."""
        return {
            "zero1": 2 + 2 + 12 / self.ranks,
            "zero2": 2 + (4 + 12) / self.ranks,
            "zero3": (2 + 4 + 12) / self.ranks,
        }[self.strategy]


@dataclass(frozen=True)
class Usage:
    """Memory of a rank: between steps, at the peak of building and stepping, and while saving."""

    resident: float
    peak: float
    saving: float


class Sampler:
    """Peak memory of one kind of this process, polled every few milliseconds."""

    def __init__(self, memory: Callable[[], int] | None = None) -> None:
        self._memory = memory or anonymous
        self.peak = self._memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, self._memory())

    def restart(self) -> int:
        """The peak so far; the next one is counted from now."""
        peak, self.peak = max(self.peak, self._memory()), self._memory()
        return peak

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return max(self.peak, self._memory())


def anonymous() -> int:
    """Anonymous resident bytes of this process."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


def file_backed() -> int:
    """File-backed and shared resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * resource.getpagesize()


def trim() -> None:
    """Return free memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def measure(case: Case, hidden: int, layers: int) -> tuple[Usage, int]:
    """Train a few steps and save on one rank; all ranks call it together.

    Returns:
        what this process took, libraries included, in bytes; and the parameters of the model.
    """
    with tempfile.TemporaryDirectory(prefix="zero-memory-") as scratch:
        backend = create_backend("cpu")
        settled = settle(_config(case, Path(scratch), hidden, layers), backend.name)
        backend.start()
        sampler = Sampler()
        try:
            run = prepare(settled, backend)
            engine = restore(run, None).engine
            batches = iter(train_loader(run, 0))
            for step in range(STEPS):
                train_step(
                    backend,
                    engine,
                    batches,
                    plan=run.plan,
                    first_sample=step * run.plan.global_batch_size,
                    learning_rate=1e-4,
                    max_grad_norm=1.0,
                )
            batches.close()
            trim()
            resident = anonymous()
            peak = sampler.restart()
            checkpoints = Checkpoints(Path(scratch) / "checkpoints", keep=1, rank=backend.rank)
            save(run, checkpoints, engine, Progress(STEPS, STEPS * run.plan.global_batch_size))
            checkpoints.finish()
            backend.barrier()
            return Usage(resident, peak, sampler.stop()), run.parameters
        finally:
            backend.stop()


def _config(case: Case, folder: Path, hidden: int, layers: int) -> RunConfig:
    text, model = write_text(folder), llama(hidden, layers)
    settings: dict[str, Any] = {
        "backend": "cpu",
        "precision": "bf16",
        "strategy": case.strategy,
        "output_dir": str(folder / "run"),
        "model.config": model,
        "data.source": str(text),
        "data.cache_dir": str(folder / "cache"),
        "data.seq_len": 32,
        "train.steps": STEPS,
        "train.global_batch_size": case.ranks,
        "train.micro_batch_size": 1,
        # Buckets that follow the model's size, as in the Trainer: the defaults are for much larger ones.
        "deepspeed.config": {
            "zero_optimization": {"stage": int(case.strategy[-1]), "reduce_bucket_size": "auto"}
        },
    }
    if case.offload:
        settings["memory.offload_optimizer"] = "cpu"
        if case.strategy == "zero3":
            settings["memory.offload_params"] = "cpu"
    return load_config(None, settings)


def _rank(case: Case, hidden: int, layers: int, folder: str) -> int:
    usage, parameters = measure(case, hidden, layers)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps([asdict(usage), parameters]), "utf-8")
    return 0


def run_case(case: Case, hidden: int, layers: int) -> Usage:
    """Bytes a parameter, beyond what the same steps take with a tiny model; the largest among the ranks."""
    little, few = _tiny(case.ranks)
    much, many = _in_fresh_processes(case, hidden, layers)
    return Usage(*((getattr(much, name) - getattr(little, name)) / (many - few) for name in FIGURES))


@cache
def _tiny(ranks: int) -> tuple[Usage, int]:
    """What the libraries take, which hardly depends on the strategy."""
    return _in_fresh_processes(Case("zero3", True, ranks), 64, 1)


def _in_fresh_processes(case: Case, hidden: int, layers: int) -> tuple[Usage, int]:
    with tempfile.TemporaryDirectory(prefix="zero-memory-") as scratch:
        launch(_rank, (case, hidden, layers, scratch), ranks=case.ranks)
        ranks = [json.loads(path.read_text("utf-8")) for path in sorted(Path(scratch).iterdir())]
    largest = Usage(*(max(usage[name] for usage, _ in ranks) for name in FIGURES))
    return largest, int(ranks[0][1])


def table(measured: Sequence[tuple[Case, Usage]]) -> str:
    """A Markdown table, one line a case."""
    lines = [
        "| `strategy` | ranks | formula | between steps | peak | peak while saving |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case, usage in measured:
        lines.append(
            f"| {case.name} | {case.ranks} | {case.formula:.1f} | {usage.resident:.1f} | {usage.peak:.1f} | "
            f"{usage.saving:.1f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero_memory", description=__doc__)
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--hidden", type=int, default=1024, help="size of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the table into this page as well")
    given = parser.parse_args(argv)
    command = command_line("benchmarks.zero_memory", argv)
    measured = []
    for strategy in given.strategy:
        for offload in (False, True):
            for ranks in given.ranks:
                start = time.monotonic()
                case = Case(strategy, offload, ranks)
                measured.append((case, run_case(case, given.hidden, given.layers)))
                print(f"{case} {measured[-1][1]} {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(f"$ {command}\n\n{table(measured)}")
    if given.docs is not None:
        put_into(given.docs, f"\n{table(measured)}\n\n`{command}`\n", BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
