"""Where a value came from, and how it is shown in messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.config import keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def located(message: str, names: Sequence[str], origins: Mapping[tuple[str, ...], Origin]) -> str:
    """``message`` with its origin: where one of the settings ``names`` was written.

    A flag counts before a line: what was written last is most likely what the person has just changed.
    """
    found = [origin for key in names if (origin := origins.get(tuple(key.split("."))))]
    first = next((origin for origin in (*(one for one in found if one.flag), *found)), None)
    return message if first is None else first.before(message)
