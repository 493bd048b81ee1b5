"""The optimizer step of this project's loop beside a bare PyTorch loop, Accelerate and the Trainer.

``python -m benchmarks.train_overhead`` trains the quickstart model with all of them, in turns of a few
steps, from the same weights on the same data. It fails if, in fp32, this project's losses differ from the
bare loop's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Where torch_xla is installed, transformers and accelerate would start its runtime on import.
os.environ.setdefault("USE_TORCH_XLA", "0")

import torch

from benchmarks.loops import (
    AccelerateLoop,
    BareLoop,
    Contestant,
    Loop,
    PortableLoop,
    Setting,
    TrainerLoop,
    cross_entropy,
    plain_model,
    take_turns,
)
from benchmarks.machine import command_line, describe_machine
from portable.config import RunConfig, load_config
from portable.registry import create_backend, resolve_backend
from portable.run.prepare import prepare
from portable.run.settle import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from portable.run.stages import Prepared

SAME_LOSS = 1e-6
"""Largest relative difference of this project's fp32 losses from the bare loop's."""

BASELINE = "bare PyTorch"
GLOBAL_BATCH_SIZE = 8
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

SMALL_MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class TurnOptions:
    """``rounds`` turns of ``steps`` optimizer steps are measured of each loop, after ``warmup`` steps."""

    steps: int = 10
    warmup: int = 5
    rounds: int = 6
    precision: str = "fp32"
    backend: str = "auto"
    small: bool = False
    control: bool = False
    clock: str = "wall"

    @property
    def total_steps(self) -> int:
        return self.warmup + self.rounds * self.steps

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Give ``parser`` these options, with the values here as defaults, and ``--json``."""
        parser.add_argument(
            "--steps", type=int, default=self.steps, help="optimizer steps of a turn; each logs once"
        )
        parser.add_argument("--warmup", type=int, default=self.warmup, help="steps that do not count")
        parser.add_argument("--rounds", type=int, default=self.rounds, help="measured turns of each loop")
        parser.add_argument("--precision", choices=("fp32", "bf16"), default=self.precision)
        parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default=self.backend)
        parser.add_argument("--small", action="store_true", help="a tiny model, to try the program out")
        parser.add_argument(
            "--control", action="store_true", help="the bare loop twice: how far equals differ"
        )
        parser.add_argument(
            "--clock",
            choices=tuple(CLOCKS),
            default=self.clock,
            help="cpu: processor time instead of wall time, for a busy machine; set OMP_NUM_THREADS=1 with "
            "it, since threads that wait for each other spend it too",
        )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write every step's time as well")


def turn_values(given: argparse.Namespace) -> dict[str, Any]:
    """The given fields of :class:`TurnOptions`, by name."""
    return {field.name: getattr(given, field.name) for field in fields(TurnOptions)}


@dataclass(frozen=True)
class Options(TurnOptions):
    """Options of this benchmark."""

    micro_batch_sizes: tuple[int, ...] = (8, 4)
    adapter: str | None = None


@dataclass(frozen=True)
class Result:
    """Results of one loop.

    Attributes:
        step_seconds: of every measured step, by turn.
        turn_losses: of the last step of every turn, the warm-up included, where the loop tells.
        final_loss: of the final weights on the batch that would have come next, in fp32.
    """

    name: str
    step_seconds: list[list[float]]
    turn_losses: list[float | None]
    final_loss: float

    @property
    def median(self) -> float:
        return statistics.median(self._steps)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self._steps) < 2:
            return self.median, self.median
        lower, _, upper = statistics.quantiles(self._steps, n=4, method="inclusive")
        return lower, upper

    @property
    def turn_means(self) -> list[float]:
        """Seconds per step of each turn, with the step that logs."""
        return [statistics.fmean(turn) for turn in self.step_seconds]

    @property
    def _steps(self) -> list[float]:
        return [seconds for turn in self.step_seconds for seconds in turn]


def measure(options: Options, micro_batch_size: int) -> list[Result]:
    """All loops with one micro-batch size; the bare loop comes first.

    Raises:
        AssertionError: in fp32, this project's losses differ from the bare loop's.
    """
    with tempfile.TemporaryDirectory(prefix="train-overhead-") as scratch:
        folder = Path(scratch)
        backend = create_backend(resolve_backend(options.backend))
        settled = settle(_config(options, micro_batch_size, folder), backend.name)
        backend.start()
        try:
            results = _take_turns(options, prepare(settled, backend), folder)
        finally:
            backend.stop()
            forget_accelerators()
    if options.precision == "fp32":
        check_losses(results)
    return results


def _take_turns(options: Options, prepared: Prepared, folder: Path) -> list[Result]:
    now = CLOCKS[options.clock]
    ours = PortableLoop(prepared, folder / "portable", now)
    setting = Setting.of(prepared, ours.model, now, steps=options.total_steps)
    trainer = TrainerLoop(setting, folder / "trainer", logging_steps=options.steps)
    others: list[Loop] = [BareLoop(setting, BASELINE), ours, AccelerateLoop(setting)]
    if options.control:
        others.append(BareLoop(setting, "bare, again"))
    contestants: list[Contestant] = [*others, trainer]
    try:
        turns = take_turns(trainer, others, [options.warmup, *[options.steps] * options.rounds])
    finally:
        ours.close()
    return [
        Result(
            contestant.name,
            step_seconds=[turn.seconds for turn in turns[contestant.name][1:]],
            turn_losses=[turn.loss for turn in turns[contestant.name]],
            final_loss=_final_loss(setting, contestant.model),
        )
        for contestant in contestants
    ]


@torch.no_grad()
def _final_loss(setting: Setting, trained: nn.Module) -> float:
    model = setting.build_model()  # not the trained one itself, whose forward Accelerate may have wrapped
    plain_model(model).load_state_dict(plain_model(trained).state_dict())
    batch = setting.batches[-1]
    logits = model.eval()(input_ids=batch["input_ids"].to(setting.device)).logits
    return float(cross_entropy(logits, batch["labels"].to(setting.device)))


def forget_accelerators() -> None:
    """Accelerate keeps its settings for the life of the process; the next measurement has others."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def check_losses(results: Sequence[Result]) -> None:
    """Raise AssertionError unless this project's losses are the bare loop's within :data:`SAME_LOSS`."""
    by_name = {result.name: result for result in results}
    bare, ours = by_name[BASELINE], by_name[PortableLoop.name]
    pairs = [*zip(bare.turn_losses, ours.turn_losses, strict=True), (bare.final_loss, ours.final_loss)]
    for expected, loss in pairs:
        assert expected is not None
        assert loss is not None
        if abs(loss - expected) > SAME_LOSS * abs(expected):
            raise AssertionError(f"this project's loss is {loss:.9f} where the bare loop's is {expected:.9f}")


def table(results: Sequence[Result], baseline: str = BASELINE) -> str:
    """One line a loop; ratios are to ``baseline``."""
    bare = next(result for result in results if result.name == baseline)
    heads = f"{'step, ms':>10}{'middle half':>18}{'x bare':>9}{'with logs, ms':>15}{'x bare':>9}{'loss':>13}"
    lines = [f"{'':<16}{heads}"]
    for result in results:
        lower, upper = result.quartiles
        paired = [mean / base for mean, base in zip(result.turn_means, bare.turn_means, strict=True)]
        lines.append(
            f"{result.name:<16}{1e3 * result.median:>10.2f}{f'{1e3 * lower:.1f} to {1e3 * upper:.1f}':>18}"
            f"{result.median / bare.median:>9.3f}{1e3 * statistics.median(result.turn_means):>15.2f}"
            f"{statistics.median(paired):>9.3f}{result.final_loss:>13.8f}"
        )
    return "\n".join(lines)


LEGEND = """\
step           median over all measured steps, and the middle half of them
with logs      median over the turns of the mean of a turn's steps, which log once; its ratio is the median
               over the rounds of this loop's turn to the bare loop's
loss           of the final weights on the batch that would have come next"""


def _config(options: Options, micro_batch_size: int, folder: Path) -> RunConfig:
    """The quickstart, at a constant learning rate and with neither evaluation nor checkpoints."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "precision": options.precision,
        "train.steps": options.total_steps,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.global_batch_size": GLOBAL_BATCH_SIZE,
        "train.micro_batch_size": micro_batch_size,
    }
    if options.adapter is not None:
        settings |= {"adapter.type": "lora", "adapter.use_dora": options.adapter == "dora"}
    if options.small:
        text = folder / "text.txt"
        text.write_text("\n".join(f"line {i} of a text with {i * i} words" for i in range(3000)))
        settings |= {
            "model.config": SMALL_MODEL,
            "data.source": str(text),
            "data.cache_dir": str(folder / "cache"),
            "data.seq_len": 32,
            "log.trackers": [],
        }
    return load_config(None, settings)


def parse(argv: Sequence[str] | None) -> tuple[Options, Path | None]:
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_overhead", description=__doc__)
    defaults.add_to(parser)
    parser.add_argument(
        "--micro-batch",
        type=int,
        nargs="+",
        default=defaults.micro_batch_sizes,
        metavar="N",
        help="sequences of a micro-batch, of 8 a step; several are measured one after the other",
    )
    parser.add_argument(
        "--adapter", choices=("lora", "dora"), help="train an adapter; the other loops take peft's own"
    )
    given = parser.parse_args(argv)
    if min(given.steps, given.warmup, given.rounds) < 1:
        parser.error("--steps, --warmup and --rounds must be at least 1")
    if any(size < 1 or GLOBAL_BATCH_SIZE % size for size in given.micro_batch):
        parser.error(f"--micro-batch must divide the {GLOBAL_BATCH_SIZE} sequences of a step")
    options = Options(micro_batch_sizes=tuple(given.micro_batch), adapter=given.adapter, **turn_values(given))
    return options, given.json


def main(argv: Sequence[str] | None = None) -> int:
    options, path = parse(argv)
    command = command_line("benchmarks.train_overhead", argv)
    machine = describe_machine(create_backend(resolve_backend(options.backend)).device)
    print(f"$ {command}")
    print("\n".join(f"{name:<13} {value}" for name, value in machine.items()))
    measured = []
    for size in options.micro_batch_sizes:
        results = measure(options, size)
        measured.append({"micro_batch_size": size, "loops": [asdict(result) for result in results]})
        accumulated = GLOBAL_BATCH_SIZE // size
        print(
            f"\n{options.precision}, {accumulated} x {size} sequences a step, "
            f"{options.rounds} x {options.steps} steps each, {options.clock} time\n{table(results)}"
        )
    print(f"\n{LEGEND}")
    if path is not None:
        document = {"command": command, "machine": machine, "options": asdict(options), "measured": measured}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
