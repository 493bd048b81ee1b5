"""Write and read the metrics and events of a run, in ``metrics.jsonl`` and ``events.jsonl``."""

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
    """Writer of ``metrics.jsonl``. Every launch of a run appends to it.

    Opening the file removes the rows after ``from_step``, which would otherwise be logged twice.
    Such rows exist if a previous launch was killed after its last checkpoint. The file may have a
    million rows, so only its end is read. Invalid rows in this part are also removed, with a
    warning.

    Args:
        folder: Output folder of the run.
        from_step: Step that the launch continues from. 0 for a new run.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        path = folder / METRICS_FILE
        super().__init__(path)
        rows, unreadable = remove_rows_after_step(path, from_step)
        if unreadable:
            lost = format_count(unreadable, "row")
            print_status(f"warning: {path}: skipped {lost} that cannot be read")
        self._evaluated_steps = {row["step"] for row in rows if is_evaluation_row(row)}

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Append a row, and record its step as evaluated if it is the row of an evaluation.

        Args:
            row: Values of a step, keyed by metric name. ``step`` is required.
        """
        super().append_row(row)
        if is_evaluation_row(row):
            self._evaluated_steps.add(row["step"])

    def has_evaluation(self, step: int) -> bool:
        """Return whether ``metrics.jsonl`` contains an evaluation at a step.

        Args:
            step: Number of the step. It must be at least ``from_step``, the step that the launch
                continues from, because earlier rows may not have been read.
        """
        return step in self._evaluated_steps


def read_metrics(folder: AnyPath) -> list[dict[str, Any]]:
    """Read the valid rows of ``metrics.jsonl``.

    Args:
        folder: Output folder of the run.

    Returns:
        The rows in log order.

    Raises:
        OSError: If the file does not exist, is not a regular file, or is larger than 1 GiB.
        CheckpointError: If a symlink points outside the folder of the run, or if a request to the
            object store fails.
    """
    return read_log_rows(folder / METRICS_FILE).rows


EVALUATION_PREFIX = "eval_"
"""Prefix of the metrics of an evaluation, such as ``eval_loss``, or ``eval_loss/news`` for a named source."""
_MAX_SHOWN_VALUES = 8


def is_evaluation_metric(name: str) -> bool:
    """Return whether a metric is the result of an evaluation.

    The names of these metrics begin with ``eval_``.
    """
    return name.startswith(EVALUATION_PREFIX)


def is_evaluation_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row of ``metrics.jsonl`` contains the results of an evaluation.

    The row of a training step always contains ``loss``. It may also contain values with the prefix
    ``eval_``, which a callback has logged.
    """
    return "loss" not in row and any(map(is_evaluation_metric, row))


def format_evaluation_line(values: Mapping[str, float]) -> str:
    """Format the metrics of an evaluation as one line for the terminal.

    The line omits the F1 scores of the individual classes. Metrics after the first
    ``_MAX_SHOWN_VALUES`` are replaced by ``...``.

    Args:
        values: Values of the evaluation, keyed by metric name.
    """
    shown = [name for name in values if not name.startswith("eval_f1.")]
    text = "  ".join(
        f"{name.removeprefix(EVALUATION_PREFIX)} {values[name]:.4f}" for name in shown[:_MAX_SHOWN_VALUES]
    )
    return text + ("  ..." if len(shown) > _MAX_SHOWN_VALUES else "")


EVENTS_FILE = "events.jsonl"

EventKind = Literal["start", "resume", "save", "skip", "stop", "end"]


class EventsFile(JsonLinesWriter):
    """Writer of ``events.jsonl``. Every launch of a run appends its start, saves, and end.

    Unlike the rows of ``metrics.jsonl``, the events of a killed launch are kept, because they record
    that the launch happened.

    Args:
        folder: Output folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / EVENTS_FILE)

    def append_event(self, kind: EventKind, step: int, **facts: Any) -> None:
        """Append an event to ``events.jsonl``, with the current time.

        Args:
            kind: Kind of the event, such as ``save``.
            step: Number of optimizer steps so far.
            facts: Additional fields of the event, written to the same JSON object.
        """
        self.append_row({"event": kind, "step": step, "time": round(time.time(), 3), **facts})


def read_events(folder: AnyPath) -> list[dict[str, Any]]:
    """Read the events of a run from ``events.jsonl``.

    Args:
        folder: Output folder of the run.

    Returns:
        The events that have a timestamp in the key ``time``, oldest first. Empty if the file does
        not exist or cannot be read.

    Raises:
        CheckpointError: If a symlink points outside the folder of the run, or if a request to the
            object store fails.
    """
    try:
        rows, _ = read_log_rows(folder / EVENTS_FILE)
    except OSError:
        return []
    return [row for row in rows if "time" in row]
