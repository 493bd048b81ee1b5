"""``metrics.jsonl`` and ``events.jsonl``, throughput, and numbers formatted for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from portable.formatting import format_count
from portable.reporting.json_lines import JsonLines, drop_later_rows, read_rows
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from portable.converters.storage.path_or_url import Place
    from portable.data.samples.loader import BatchIterator


METRICS_FILE = "metrics.jsonl"


class MetricsFile(JsonLines):
    """``metrics.jsonl``, to which every launch of a run appends.

    Rows after ``from_step`` are dropped: the earlier launch was killed after logging them, and they will be
    logged again. Only the end of the file is read, because it may have a million rows.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        path = folder / METRICS_FILE
        super().__init__(path)
        rows, unreadable = drop_later_rows(path, from_step)
        if unreadable:
            lost = format_count(unreadable, "row")
            tell(f"warning: {path}: {lost} cannot be read and will not be shown")
        self._evaluated = {row["step"] for row in rows if any(map(is_evaluation, row))}

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        super().write(row)
        if any(map(is_evaluation, row)):
            self._evaluated.add(row["step"])

    def has_evaluation(self, step: int) -> bool:
        """Return whether the file has an evaluation of a step, which is not before ``from_step``."""
        return step in self._evaluated


def read_metrics(folder: Place) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``; invalid lines are skipped."""
    return read_rows(folder / METRICS_FILE)[0]


EVALUATION = "eval_"
"""Begins the name of each value of an evaluation: eval_loss, and eval_loss/news for a source with a name."""
_SHOWN = 8


def is_evaluation(name: str) -> bool:
    """Whether a value of ``metrics.jsonl`` is of an evaluation."""
    return name.startswith(EVALUATION)


def format_evaluation(values: Mapping[str, float]) -> str:
    """The values of an evaluation in one line; F1 of each class is left out."""
    shown = [name for name in values if not name.startswith("eval_f1.")]
    text = "  ".join(f"{name.removeprefix(EVALUATION)} {values[name]:.4f}" for name in shown[:_SHOWN])
    return text + ("  ..." if len(shown) > _SHOWN else "")


class Throughput:
    """Speed of a launch, in samples per second, and the time that steps wait for batches.

    Evaluations and saves do not count. The first step, which compiles and allocates, only counts until there
    is a second step. Work after the last log, such as the export, does not count either.

    Args:
        samples_per_step: Number of samples in each step.
        batches: Batches of the training.

    Attributes:
        started: Time at which the launch started.
        steps: Number of steps of this launch, as of the last log.
        paused: Time in seconds of evaluations and saves.
        launch: Samples per second of this launch, until the last log.
        waits: Share of the time between the last two logs in which steps waited for batches.
    """

    def __init__(self, samples_per_step: int, batches: BatchIterator) -> None:
        self.started = time.perf_counter()
        self.steps = 0
        self.paused = 0.0
        self.launch = 0.0
        self.waits = 0.0
        self._samples_per_step = samples_per_step
        self._batches = batches
        self._waited = batches.waited
        self._start = self._first = self._logged = self._measure()

    @property
    def first_step(self) -> float:
        """Seconds until the end of the first step, which is always logged."""
        return self._first[0] - self.started

    def _measure(self) -> tuple[float, int]:
        """Return the seconds of a clock that stops during pauses, and the number of samples so far."""
        return time.perf_counter() - self.paused, self.steps * self._samples_per_step

    def compute_seconds_per_step(self) -> float:
        """Return the mean duration of the steps of this launch, including evaluations and saves."""
        return (time.perf_counter() - self.started) / max(self.steps, 1)

    def log(self, steps: int) -> float:
        """Measure the speed since the last call.

        Args:
            steps: Number of steps of this launch so far.

        Returns:
            The samples per second.
        """
        self.steps = steps
        now = self._measure()
        if steps == 1:
            self._first = now
        waited = self._batches.waited
        self.waits = min(1.0, (waited - self._waited) / max(now[0] - self._logged[0], 1e-9))
        self._waited = waited
        start = self._first if steps > 1 else self._start
        rate = _compute_rate(max(start, self._logged), now)
        self.launch, self._logged = _compute_rate(start, now), now
        return rate

    def pause(self, seconds: float) -> None:
        """Exclude the seconds of an evaluation or a save."""
        self.paused += seconds


def _compute_rate(start: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - start[1]) / max(end[0] - start[0], 1e-9)


EVENTS_FILE = "events.jsonl"

Kind = Literal["start", "resume", "save", "skip", "stop", "end"]


class History(JsonLines):
    """Appends to ``events.jsonl`` in a run's folder.

    Unlike rows of ``metrics.jsonl``, the events of a killed launch stay: they record that it happened.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / EVENTS_FILE)

    def record(self, kind: Kind, step: int, **facts: Any) -> None:
        """Append an event.

        Args:
            kind: of the event.
            step: optimizer steps done so far.
            facts: further fields of the JSON object.
        """
        self.write({"event": kind, "step": step, "time": round(time.time(), 3), **facts})


def read_events(folder: Place) -> list[dict[str, Any]]:
    """The events of a run, oldest first; empty if there is no file."""
    try:
        rows, _ = read_rows(folder / EVENTS_FILE)
    except OSError:
        return []
    return [row for row in rows if "time" in row]
