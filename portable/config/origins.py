"""Origins of values, and the form in which messages show values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from portable.config import keys

MAX_VALUE_CHARACTERS = 60
"""Characters of a value that a message shows."""
KeyPath = tuple[str, ...]
"""Names from the top level of the config to a value: ``("train", "steps")``."""


@dataclass(frozen=True)
class Origin:
    """The origin of a value: a line of a file, or a flag.

    Attributes:
        text: ``run.yaml:7`` or ``--train.steps``.
        order: Position among all origins. Flags come after files.
        is_flag: Whether the origin is a flag.
        overridden: Origins of earlier values that this value overrides, the latest first.
    """

    text: str
    order: int
    is_flag: bool = False
    overridden: tuple[str, ...] = ()

    def add_to_message(self, message: str) -> str:
        """Return ``message`` with the origin. A flag replaces the key that it sets."""
        key = self.text.removeprefix("--").replace("-", "_")
        if self.is_flag and message.startswith((f"{key} ", f"{key}: ")):
            return self.text + message.removeprefix(key)
        return f"{self.text}: {message}"


class Assignment(NamedTuple):
    """A value for one setting, or for one key inside an open mapping.

    Attributes:
        path: Path of the setting.
        value: Value, not validated yet.
        origin: Origin, or None for a value from Python.
    """

    path: KeyPath
    value: Any
    origin: Origin | None


def format_short_value(value: object) -> str:
    """Format ``value`` for an error message: short and printable."""
    text = (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(keys.to_plain_value(value))
    )
    text = "null" if value is None else text
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."
