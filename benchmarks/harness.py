"""Share options, results, comparisons, tables, and JSON output between step time benchmarks."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.loops import PortableLoop
from portable.config import load_config

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from benchmarks.loops import Named, Turn
    from portable.config import RunConfig

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
LEGEND = """\
step           median over all measured steps (of the first rank), and the middle half of them
with logs      median over the turns of the mean of a turn's steps, which log once; its ratio is the median
               over the rounds of this loop's turn to the bare loop's
loss           of the final weights on the batch that would have come next; under ZeRO, of the last step"""


@dataclass(frozen=True)
class Options:
    """Options of a benchmark.

    Each loop runs ``warmup`` steps, and then ``rounds`` measured turns with ``steps`` steps each.

    Attributes:
        steps: Number of optimizer steps per measured turn.
        warmup: Number of steps in the first turn, which is not measured.
        rounds: Number of measured turns.
        precision: Value of the setting ``precision``.
        backend: Value of the setting ``backend``.
        small: Whether to use a tiny model.
        control: Whether to measure the bare loop twice, to determine how much equal loops differ.
    """

    steps: int = 10
    warmup: int = 5
    rounds: int = 6
    precision: str = "fp32"
    backend: str = "auto"
    small: bool = False
    control: bool = False

    @property
    def total_steps(self) -> int:
        return self.warmup + self.rounds * self.steps

    @property
    def turns(self) -> list[int]:
        """Number of steps in each turn. The first turn is the warmup."""
        return [self.warmup, *[self.steps] * self.rounds]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add these options and ``--json`` to a parser. The defaults are the values in this object."""
        add = parser.add_argument
        add("--steps", type=int, default=self.steps, help="optimizer steps of a turn; each logs once")
        add("--warmup", type=int, default=self.warmup, help="steps that do not count")
        add("--rounds", type=int, default=self.rounds, help="measured turns of each loop")
        add("--precision", choices=("fp32", "bf16"), default=self.precision)
        add("--backend", choices=("auto", "cpu", "cuda"), default=self.backend)
        add("--small", action="store_true", help="a tiny model, to try the program out")
        add("--control", action="store_true", help="the bare loop twice: how far equals differ")
        add_json(parser)

    @staticmethod
    def given(namespace: argparse.Namespace) -> dict[str, Any]:
        """Return the parsed values for these options, keyed by name."""
        return {field.name: getattr(namespace, field.name) for field in fields(Options)}


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to it as well")


@dataclass(frozen=True)
class Result:
    """Results of one loop.

    Attributes:
        name: Name of the loop.
        step_seconds: Time of every measured step in seconds, as one list per turn.
        turn_losses: Loss of the last step in every turn, including the warmup. None if the loop does
            not report its loss.
        final_loss: Loss after the last turn. Each benchmark defines how it is computed.
    """

    name: str
    step_seconds: list[list[float]]
    turn_losses: list[float | None]
    final_loss: float

    @classmethod
    def of(cls, loop: Named, turns: Mapping[str, list[Turn]], final_loss: float) -> Result:
        own = turns[loop.name]
        return cls(loop.name, [turn.seconds for turn in own[1:]], [turn.loss for turn in own], final_loss)

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
        """Mean seconds per step in each measured turn, including the step that logs."""
        return [statistics.fmean(turn) for turn in self.step_seconds]

    @property
    def _steps(self) -> list[float]:
        return [seconds for turn in self.step_seconds for seconds in turn]


def check_losses(results: Sequence[Result], baseline: str, tolerance: float) -> None:
    """Check that this project's losses match the loop ``baseline`` within a relative tolerance.

    A loss is not compared if it is None in one of the loops.

    Raises:
        AssertionError: If a loss differs.
    """
    losses = {result.name: [*result.turn_losses, result.final_loss] for result in results}
    for expected, loss in zip(losses[baseline], losses[PortableLoop.name], strict=True):
        if loss is not None and expected is not None and abs(loss - expected) > tolerance * abs(expected):
            raise AssertionError(f"this project's loss is {loss:.9f} where the bare loop's is {expected:.9f}")


def table(results: Sequence[Result], baseline: str) -> str:
    """Format a table with one row per loop. Ratios are relative to the loop ``baseline``."""
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


def quickstart(options: Options, folder: Path, **more: Any) -> RunConfig:
    """Build the quickstart config with a constant learning rate, and without evaluation or checkpoints.

    Args:
        options: Options of the benchmark.
        folder: Folder of the run.
        more: Additional settings, with ``__`` instead of a dot.
    """
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "precision": options.precision,
        "train.steps": options.total_steps,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "log.trackers": [],
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    if options.small:
        text = folder / "text.txt"
        text.write_text("\n".join(f"line {i} of a text with {i * i} words" for i in range(3000)))
        settings |= {"model.config": SMALL_MODEL, "data.source": str(text), "data.seq_len": 32}
        settings["data.cache_dir"] = str(folder / "cache")
    return load_config(None, settings)


def write(path: Path | None, command: str, machine: Mapping[str, str], **measured: Any) -> None:
    """Write the measurements as JSON, with the command and the machine. Does nothing if ``path`` is None."""
    if path is not None:
        document = {"command": command, "machine": machine, **measured}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def about(options: Options, key: str, value: Any, results: Sequence[Result]) -> dict[str, Any]:
    """Build one measurement for the JSON document: ``key`` with its value, the options, and the results."""
    return {key: value, "options": asdict(options), "loops": [asdict(result) for result in results]}
