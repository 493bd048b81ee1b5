"""Where a value came from, and how it is shown in messages."""

from __future__ import annotations

from dataclasses import dataclass

from portable.config import keys

MOST = 60


@dataclass(frozen=True)
class Origin:
    """The origin of a value: a line of a file, or a flag."""

    text: str
    """``run.yaml:7`` or ``--train.steps``."""
    order: int
    """Position among all origins; flags come after files."""
    flag: bool = False
    over: tuple[str, ...] = ()
    """Origins of earlier values, which this one overrides; the last first."""

    def before(self, message: str) -> str:
        """``message`` with the origin. A flag replaces the key that it sets."""
        key = self.text.removeprefix("--").replace("-", "_")
        if self.flag and message.startswith((f"{key} ", f"{key}: ")):
            return self.text + message.removeprefix(key)
        return f"{self.text}: {message}"


def shown(value: object) -> str:
    """Format ``value`` for an error message: short and printable."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(keys.plain(value))
    text = "null" if value is None else text
    return text if len(text) <= MOST else text[: MOST - 3] + "..."
