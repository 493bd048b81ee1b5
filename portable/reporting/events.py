"""What happened to a run beside its steps: ``events.jsonl``, one JSON object an event, never rewritten."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Literal

from converters.storage.guarded import open_own
from portable.reporting.metrics import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from portable.paths import Place

EVENTS_FILE = "events.jsonl"

Kind = Literal["start", "resume", "save", "skip", "stop", "end"]


class History:
    """Adds to ``events.jsonl`` of a run's folder.

    Unlike the rows of ``metrics.jsonl``, events of a leg that was killed stay: that it happened is what they
    tell.
    """

    def __init__(self, folder: Path) -> None:
        appended = open_own(folder / EVENTS_FILE, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(appended, "a", encoding="utf-8")

    def record(self, kind: Kind, step: int, **facts: Any) -> None:
        """Add an event.

        Args:
            kind: of event.
            step: optimizer steps done when it happened.
            facts: what else is to be known of it.
        """
        row = {"event": kind, "step": step, "time": round(time.time(), 3), **facts}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_events(folder: Place) -> list[dict[str, Any]]:
    """The events of a run, oldest first; none where it kept no record of them."""
    try:
        rows, _ = read_rows(folder / EVENTS_FILE)
    except OSError:
        return []
    return [row for row in rows if type(row.get("time")) in (int, float)]
