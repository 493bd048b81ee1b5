"""Convert exceptions raised while reading data to one-line UserErrors that name the file."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from portable.converters.storage.store_errors import RemoteError
from portable.data.sources.records import EnoughErrors
from portable.errors import RunError, UserError, to_one_line
from portable.paths import convert_storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator


def build_unreadable_error(name: object, error: OSError) -> UserError:
    """Build the error for a file that the operating system could not read."""
    return UserError(
        f"data.source: {name}: cannot be read ({to_one_line(error.strerror or error)}); check the path "
        "and the permissions of the file"
    )


@contextmanager
def convert_deleted_errors(path: object) -> Iterator[None]:
    """Convert FileNotFoundErrors within this context to UserErrors that name a remote file or folder.

    Use this context when a listed object is copied to the cache. Otherwise, the cache folder would be
    reported as not writable, because FileNotFoundError is an OSError.

    Args:
        path: URL of the file or folder.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"data.source: {path}: was deleted after it was listed; restore it, then run the same command "
            "again"
        ) from error


@contextmanager
def convert_read_errors(name: object) -> Iterator[None]:
    """Convert exceptions within this context to UserErrors that name the file ``name``.

    Every reader runs in this context, because parsers raise many types of exceptions for
    damaged data, some of them undocumented. See
    :meth:`portable.data.sources.source.DataSource.iter_rows`. UserError, RunError and
    EnoughErrors are passed on unchanged. Errors of an object store are converted as in
    :func:`portable.paths.convert_storage_errors`. MemoryError, and exceptions that indicate a
    bug or a broken installation, such as ``NameError`` or ``ImportError``, are also passed on,
    to keep their traceback.

    Raises:
        UserError: If the file cannot be read or is damaged.
        RunError: If an object store cannot be reached after all retries.
    """
    with convert_storage_errors("data.source"):
        try:
            yield
        except (UserError, RunError, RemoteError, EnoughErrors):
            raise
        except (MemoryError, NameError, AssertionError, ImportError):
            raise
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.source: {name}: is not UTF-8 text; convert the file to UTF-8 (for example with iconv "
                "-f ENCODING -t utf-8)"
            ) from error
        except (EOFError, zlib.error) as error:
            raise UserError(
                f"data.source: {name}: cannot be decompressed ({to_one_line(error)}); copy the file again"
            ) from error
        except OSError as error:
            raise build_unreadable_error(name, error) from error
        except Exception as error:
            reason = f"{type(error).__name__}: {to_one_line(error)[:200]}"
            raise UserError(f"data.source: {name}: cannot be read ({reason}); copy the file again") from error
