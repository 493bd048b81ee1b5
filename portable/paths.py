"""Where things are: a path of this machine, or a URL of an object store (``s3://bucket/run``).

Both are read in the same words (``name``, ``/``, ``is_file``, ``iterdir``, ``read_text`` ...), so that
whoever reads need not know which it is. And where this program keeps what it can do without.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from converters.storage.path_or_url import Place, place
from converters.storage.store_errors import RemoteError, RetriesUsedUpError
from portable.errors import RunError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Place", "default_cache_dir", "place_of", "storage_errors"]


def place_of(key: str, text: str) -> Place:
    """The place that a setting names.

    Args:
        key: of the setting, for the message.
        text: a path or a URL.

    Raises:
        UserError: a URL that cannot be used: a protocol whose package is not installed, credentials in it ...
    """
    with storage_errors(key):
        try:
            return place(text)
        except RemoteError:
            raise
        except CheckpointError as error:
            raise UserError(f"{key}: {error}") from error


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/portable-trainer``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "portable-trainer"


@contextmanager
def storage_errors(key: str) -> Iterator[None]:
    """Say what a store refuses as an error of the setting ``key``.

    Raises:
        RunError: the store could not be reached, however often it was tried.
        UserError: everything else.
    """
    try:
        yield
    except RetriesUsedUpError as error:
        raise RunError(f"{key}: {error}") from error
    except RemoteError as error:
        raise UserError(f"{key}: {error}") from error


def exists(path: Place) -> bool:
    """Whether there is a ``path``; there is none of a name that cannot be."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
