"""A DeepSpeed JSON whose keys and values were checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

AUTO = "auto"


def shown(value: Any) -> str:
    """``value`` as JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


KEY = "deepspeed.config"
"""The setting that names the file, or holds the mapping."""


@dataclass(frozen=True)
class Document:
    """A checked DeepSpeed configuration.

    Attributes:
        values: the configuration.
        name: the file, or the setting that holds the mapping, for error messages.
        notices: one line for each value that was renamed, has no effect or another meaning here.
    """

    values: dict[str, Any]
    name: str
    notices: tuple[str, ...]

    def get(self, path: str) -> Any:
        """The value at the dotted ``path``; None if it is missing or ``auto``."""
        found: Any = self.values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return None if found == AUTO else found
