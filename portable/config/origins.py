"""Classes for the origin of a setting's value, which error messages contain: a line of a file, or a flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from portable.config import keys

MAX_VALUE_CHARACTERS = 60
"""Maximum number of characters of a value in an error message."""
KeyPath = tuple[str, ...]
"""Type of a key that is split at its dots, such as ``("train", "steps")``."""


@dataclass(frozen=True)
class Origin:
    """The origin of a value: a line of a file, or a flag.

    Attributes:
        text: Text that names the origin in messages, such as ``run.yaml:7`` or ``--train.steps``.
        order: Number by which error messages are sorted. It increases with the line, then with the position
            of the file on the command line, and flags have the highest numbers.
        is_flag: Whether the origin is a flag.
        overridden: Texts of the origins whose values this value overrides, the latest first.
    """

    text: str
    order: int
    is_flag: bool = False
    overridden: tuple[str, ...] = ()

    def add_to_message(self, message: str) -> str:
        """Add the origin to an error message.

        The line of a file is put before the message (``run.yaml:7: train.steps must be ...``). A flag
        replaces the key at the beginning of the message (``--train.steps must be ...``).
        """
        key = self.text.removeprefix("--").replace("-", "_")
        if self.is_flag and message.startswith((f"{key} ", f"{key}: ")):
            return self.text + message.removeprefix(key)
        return f"{self.text}: {message}"


class Assignment(NamedTuple):
    """A value for one setting, or for one key inside a mapping with arbitrary keys such as ``model.config``.

    Attributes:
        path: Path of the setting or key.
        value: Value, not validated yet.
        origin: Origin of the value. None if Python code has set the value.
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
