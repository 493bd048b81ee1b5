"""``events.jsonl``: starts, saves, stops and other events of a run, one JSON object a line."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Literal

from converters.storage.safe_open import open_own
from portable.reporting.metrics import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from portable.paths import Place

EVENTS_FILE = "events.jsonl"

Kind = Literal["start", "resume", "save", "skip", "stop", "end"]


class History:
    """Appends to ``events.jsonl`` in a run's folder.

    Unlike rows of ``metrics.jsonl``, the events of a killed launch stay: they record that it happened.
    """

    def __init__(self, folder: Path) -> None:
        appended = open_own(folder / EVENTS_FILE, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(appended, "a", encoding="utf-8")

    def record(self, kind: Kind, step: int, **facts: Any) -> None:
        """Append an event.

        Args:
            kind: of the event.
            step: optimizer steps done so far.
            facts: further fields of the JSON object.
        """
        row = {"event": kind, "step": step, "time": round(time.time(), 3), **facts}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_events(folder: Place) -> list[dict[str, Any]]:
    """The events of a run, oldest first; empty if there is no file."""
    try:
        rows, _ = read_rows(folder / EVENTS_FILE)
    except OSError:
        return []
    return [row for row in rows if type(row.get("time")) in (int, float)]
