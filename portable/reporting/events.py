"""``events.jsonl``: starts, saves, stops and other events of a run, one JSON object a line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from portable.reporting.json_lines import JsonLines, read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from portable.paths import Place

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
