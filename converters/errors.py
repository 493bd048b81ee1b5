"""The one exception a user of the converters sees."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


# More than a screen of it helps nobody, and a name in a file may be as long as the file.
_MOST_SHOWN = 2000


def printable(text: object) -> str:
    """`text` in one line without control characters, for a terminal: names in files are anybody's."""
    line = " ".join(str(text).split())
    if len(line) > _MOST_SHOWN:
        line = f"{line[:_MOST_SHOWN]}... ({len(line):,} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class CheckpointError(Exception):
    """A checkpoint, an output folder or an option that is refused.

    The message is one line: it names the file or key at fault and, where there is one, the remedy.
    """


class OptimizerStateError(CheckpointError):
    """The optimizer state cannot be read, but the weights can. The argument is the reason."""

    @property
    def reason(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.reason}; convert without --optimizer"


@contextmanager
def blame(path: object) -> Iterator[None]:
    """Put `path` before the message of a `CheckpointError` raised within, where it says nothing of files."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}: {error.args[0]}") from None
