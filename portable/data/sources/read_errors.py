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
        f"data.source: {name}: cannot be read ({to_one_line(error.strerror or error)}); check the file"
    )


@contextmanager
def convert_read_errors(name: object) -> Iterator[None]:
    """Convert exceptions within this context to UserErrors that name the file ``name``.

    Every reader runs in this context, because parsers raise many types of exceptions for damaged data,
    not all of them documented. See :meth:`portable.data.sources.source.DataSource.iter_rows`. This
    project's own exceptions are passed on unchanged. Exceptions that only a bug can raise, such as
    ``NameError``, are also passed on, to keep their traceback.
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
                f"data.source: {name}: is not UTF-8 text; convert the file (iconv -t utf-8)"
            ) from error
        except (EOFError, zlib.error) as error:
            raise UserError(f"data.source: {name}: {to_one_line(error)}; copy the file again") from error
        except OSError as error:
            raise build_unreadable_error(name, error) from error
        except Exception as error:
            reason = f"{type(error).__name__}: {to_one_line(error)[:200]}"
            raise UserError(f"data.source: {name}: cannot be read ({reason}); copy the file again") from error
