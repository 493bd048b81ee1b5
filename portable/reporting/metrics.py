"""``metrics.jsonl`` and ``events.jsonl`` of a run: names, writers and readers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from portable.formatting import format_count
from portable.reporting.json_lines import JsonLinesWriter, read_log_rows, remove_rows_after_step
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from portable.converters.storage.path_or_url import AnyPath

METRICS_FILE = "metrics.jsonl"


class MetricsFile(JsonLinesWriter):
    """``metrics.jsonl``, to which every launch of a run appends.

    Rows after ``from_step`` are dropped: the earlier launch was killed after logging them, and they will be
    logged again. Only the end of the file is read, because it may have a million rows.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        path = folder / METRICS_FILE
        super().__init__(path)
        rows, unreadable = remove_rows_after_step(path, from_step)
        if unreadable:
            lost = format_count(unreadable, "row")
            print_status(f"warning: {path}: {lost} cannot be read and will not be shown")
        self._evaluated_steps = {row["step"] for row in rows if any(map(is_evaluation_metric, row))}

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        super().append_row(row)
        if any(map(is_evaluation_metric, row)):
            self._evaluated_steps.add(row["step"])

    def has_evaluation(self, step: int) -> bool:
        """Return whether the file has an evaluation of a step, which is not before ``from_step``."""
        return step in self._evaluated_steps


def read_metrics(folder: AnyPath) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``; invalid lines are skipped."""
    return read_log_rows(folder / METRICS_FILE).rows


EVALUATION_PREFIX = "eval_"
"""Begins the name of each value of an evaluation: eval_loss, and eval_loss/news for a source with a name."""
_MAX_SHOWN_VALUES = 8


def is_evaluation_metric(name: str) -> bool:
    """Whether a value of ``metrics.jsonl`` is of an evaluation."""
    return name.startswith(EVALUATION_PREFIX)


def format_evaluation_line(values: Mapping[str, float]) -> str:
    """The values of an evaluation in one line; F1 of each class is left out."""
    shown = [name for name in values if not name.startswith("eval_f1.")]
    text = "  ".join(
        f"{name.removeprefix(EVALUATION_PREFIX)} {values[name]:.4f}" for name in shown[:_MAX_SHOWN_VALUES]
    )
    return text + ("  ..." if len(shown) > _MAX_SHOWN_VALUES else "")


EVENTS_FILE = "events.jsonl"

EventKind = Literal["start", "resume", "save", "skip", "stop", "end"]


class EventsFile(JsonLinesWriter):
    """Appends to ``events.jsonl`` in a run's folder.

    Unlike rows of ``metrics.jsonl``, the events of a killed launch stay: they record that it happened.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / EVENTS_FILE)

    def append_event(self, kind: EventKind, step: int, **facts: Any) -> None:
        """Append an event.

        Args:
            kind: of the event.
            step: optimizer steps done so far.
            facts: further fields of the JSON object.
        """
        self.append_row({"event": kind, "step": step, "time": round(time.time(), 3), **facts})


def read_events(folder: AnyPath) -> list[dict[str, Any]]:
    """The events of a run, oldest first; empty if there is no file."""
    try:
        rows, _ = read_log_rows(folder / EVENTS_FILE)
    except OSError:
        return []
    return [row for row in rows if "time" in row]
