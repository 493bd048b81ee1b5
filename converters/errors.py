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


@contextmanager
def blame(path: object) -> Iterator[None]:
    """Prefix the message of a `CheckpointError` raised within by `path`."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
