"""Local paths, URLs of object stores (``s3://bucket/run``) and the cache folder.

Paths and URLs have the same interface for reading (``name``, ``/``, ``is_file``, ``iterdir``, ``read_text``).
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

CONFIG_FILE, FINAL = "config.yaml", "final"
"""In the folder of a run: its config, and the folder of the exported model."""
__all__ = ["CONFIG_FILE", "FINAL", "Place", "default_cache_dir", "place_of", "storage_errors"]


def place_of(key: str, text: str) -> Place:
    """Return the path or URL that a setting names.

    Args:
        key: the setting, for error messages.
        text: its value.

    Raises:
        UserError: if the URL is invalid, contains credentials or needs a package that is not installed.
    """
    with storage_errors(key):
        try:
            return place(text)
        except RemoteError:
            raise
        except CheckpointError as error:
            raise UserError(f"{key}: {error}") from error


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/portable-trainer``, or ``~/.cache/portable-trainer``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "portable-trainer"


@contextmanager
def storage_errors(key: str) -> Iterator[None]:
    """Convert errors of an object store to errors of the setting ``key``.

    Raises:
        RunError: if all retries failed.
        UserError: for any other error of the store.
    """
    try:
        yield
    except RetriesUsedUpError as error:
        raise RunError(f"{key}: {error}") from error
    except RemoteError as error:
        raise UserError(f"{key}: {error}") from error


def exists(path: Place) -> bool:
    """Whether ``path`` exists. False for an invalid name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
