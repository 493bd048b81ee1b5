"""The one exception a user of the converters sees."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class CheckpointError(Exception):
    """A checkpoint, an output folder or an option that is refused.

    The message is one line: it names the file or key at fault and, where there is one, the remedy.
    """


@contextmanager
def blame(path: object) -> Iterator[None]:
    """Put `path` before the message of a `CheckpointError` raised within, where it says nothing of files."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
