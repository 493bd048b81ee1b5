"""The exception of this package, and text that is safe to print."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


# A name in a file may be as long as the file.
_MAX_SHOWN = 2000


def printable(text: object) -> str:
    """`text` on one line without control characters, for a terminal: names in files are untrusted."""
    line = " ".join(str(text).split())
    if len(line) > _MAX_SHOWN:
        line = f"{line[:_MAX_SHOWN]}... ({len(line):,} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class CheckpointError(Exception):
    """A checkpoint, output folder or option is refused.

    The message is one line that names the file or key and, where there is one, the remedy.
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
    """Prefix the message of a `CheckpointError` raised within by `path`."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}: {error.args[0]}") from None
