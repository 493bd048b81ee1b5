"""A DeepSpeed JSON whose keys and values were checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.config.importing.deepspeed import AUTO

if TYPE_CHECKING:
    from portable.config.importing.rows import Imported

KEY = "deepspeed.config"
"""The setting that names the file, or holds the mapping."""


@dataclass(frozen=True)
class Document:
    """A checked DeepSpeed configuration.

    Attributes:
        values: the configuration, under the names of the installed release.
        name: the file, or the setting that holds the mapping, for error messages.
        imported: the settings that it comes to, with a note for each value that was renamed, has no effect
            or another meaning here.
    """

    values: dict[str, Any]
    name: str
    imported: Imported

    def get(self, path: str) -> Any:
        """The value at the dotted ``path``; None if it is missing or ``auto``."""
        found: Any = self.values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return None if found == AUTO else found
