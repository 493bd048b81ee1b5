"""``metrics.jsonl`` and ``events.jsonl`` of a run: names, writers and readers."""

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
    return read_rows(folder / METRICS_FILE).rows


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
