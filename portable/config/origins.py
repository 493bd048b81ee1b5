"""Origins of values, and the format of values in error messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from portable.config import keys

MAX_VALUE_CHARACTERS = 60
"""Maximum number of characters of a value in an error message."""
KeyPath = tuple[str, ...]
"""Names from the top level of the config to a value, such as ``("train", "steps")``."""


@dataclass(frozen=True)
class Origin:
    """The origin of a value: a line of a file, or a flag.

    Attributes:
        text: Text in messages, such as ``run.yaml:7`` or ``--train.steps``.
        order: Position among all origins. Flags override files. Error messages are sorted by it.
        is_flag: Whether the origin is a flag.
        overridden: Origins of the previous values that this value overrides, the latest first.
    """

    text: str
    order: int
    is_flag: bool = False
    overridden: tuple[str, ...] = ()

    def add_to_message(self, message: str) -> str:
        """Return ``message`` with the origin.

        The origin of a file precedes the message (``run.yaml:7: train.steps must be ...``). A flag replaces
        the key that it sets (``--train.steps must be ...``).
        """
        key = self.text.removeprefix("--").replace("-", "_")
        if self.is_flag and message.startswith((f"{key} ", f"{key}: ")):
            return self.text + message.removeprefix(key)
        return f"{self.text}: {message}"


class Assignment(NamedTuple):
    """A value for one setting, or for one key inside an open mapping.

    Attributes:
        path: Path of the setting.
        value: Value, not validated yet.
        origin: Origin. None if Python code has set the value.
    """

    path: KeyPath
    value: Any
    origin: Origin | None


def format_short_value(value: object) -> str:
    """Format ``value`` for an error message, with at most :data:`MAX_VALUE_CHARACTERS` characters."""
    text = (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(keys.to_plain_value(value))
    )
    text = "null" if value is None else text
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."
