"""Origins of settings: the line of a file or the flag that set a value. Used in error messages."""

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
        text: Text of the origin in messages, such as ``run.yaml:7`` or ``--train.steps``.
        order: Sort key for error messages: by file in the order of the command line, then by line.
            Flags have the highest numbers.
        is_flag: Whether the origin is a flag.
        overridden: Texts of the origins that this value overrides, latest first.
    """

    text: str
    order: int
    is_flag: bool = False
    overridden: tuple[str, ...] = ()

    def add_to_message(self, message: str) -> str:
        """Add the place where a setting was specified to an error message.

        For a line of a config file, the file and line are put before the message, for example
        ``run.yaml:7: train.steps must be ...``. For a flag, the flag replaces the key at the start
        of the message, for example ``--train.steps must be ...``. If the message does not start
        with the key, the flag is put before the message.
        """
        key = self.text.removeprefix("--").replace("-", "_")
        if self.is_flag and message.startswith((f"{key} ", f"{key}: ")):
            return self.text + message.removeprefix(key)
        return f"{self.text}: {message}"


class Assignment(NamedTuple):
    """A value for a setting, or for a key in a mapping with arbitrary keys, such as ``model.config``.

    Attributes:
        path: Path of the setting or key.
        value: Value, not validated yet.
        origin: Place where the value was set: a line of a file, or a flag. None if Python code has
            set the value.
        is_assumed: Whether the value is an assumption of an imported file. It is then only used if
            no config file sets the setting.
    """

    path: KeyPath
    value: Any
    origin: Origin | None
    is_assumed: bool = False


def format_short_value(value: object) -> str:
    """Format ``value`` for an error message, and truncate the text.

    None and booleans are formatted as in YAML. Other values are formatted as in Python, so strings
    have quotes. The text is truncated to :data:`MAX_VALUE_CHARACTERS` characters.
    """
    text = (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(keys.to_plain_value(value))
    )
    text = "null" if value is None else text
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."
