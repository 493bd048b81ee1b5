"""``metrics.jsonl`` and ``events.jsonl``, throughput, and numbers formatted for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from portable.formatting import human_count
from portable.reporting.json_lines import JsonLines, drop_later_rows, read_rows
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.storage.path_or_url import Place


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
            lost = human_count(unreadable, "row")
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


def evaluation_in_words(values: Mapping[str, float]) -> str:
    """The values of an evaluation in one line; F1 of each class is left out."""
    shown = [name for name in values if not name.startswith("eval_f1.")]
    text = "  ".join(f"{name.removeprefix(EVALUATION)} {values[name]:.4f}" for name in shown[:_SHOWN])
    return text + ("  ..." if len(shown) > _SHOWN else "")


class Throughput:
    """Samples a second since the last log, and over the whole launch; how long the steps wait for batches.

    Evaluations and saves do not count, nor does the first step, which compiles and allocates, once there is
    another. What follows the last log, such as the export, does not count either.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.steps = 0
        self.paused = 0.0
        self.launch = 0.0
        """Samples a second of this launch, until the last log."""
        self.waits = 0.0
        """The share of the time between the last two logs in which a step waited for its batches."""
        self._waited = 0.0  # since the last log, in steps
        self.waiting = 0.0
        """Seconds that the iterator of batches has waited since the last step."""
        self._samples = 0
        self._start = self._first = self._logged = self._now()

    @property
    def first_step(self) -> float:
        """Seconds until the end of the first step."""
        return self._first[0] - self.started

    def _now(self) -> tuple[float, int]:
        """Seconds by a clock that stands still in pauses, and samples so far."""
        return time.perf_counter() - self.paused, self._samples

    def add(self, samples: int) -> None:
        """Count one step of ``samples`` sequences."""
        self.steps += 1
        self._samples += samples
        self._waited, self.waiting = self._waited + self.waiting, 0.0
        if self.steps == 1:
            self._first = self._now()

    def seconds_per_step(self) -> float:
        """Mean over the launch, evaluations and saves included."""
        return (time.perf_counter() - self.started) / max(self.steps, 1)

    def window(self) -> float:
        """Samples a second since the last call."""
        now = self._now()
        if self.steps == 1:  # the device may have finished the step only now
            self._first = now
        self.waits = min(1.0, self._waited / max(now[0] - self._logged[0], 1e-9))
        self._waited = 0.0
        start = self._first if self.steps > 1 else self._start
        rate = _rate(max(start, self._logged), now)
        self.launch, self._logged = _rate(start, now), now
        return rate

    def pause(self, seconds: float) -> None:
        """Do not count ``seconds`` of an evaluation or a save, nor what it waited."""
        self.paused += seconds
        self.waiting = 0.0


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float:
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
