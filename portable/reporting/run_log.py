"""Write the log file of a launch, ``log.txt`` in the folder of the run.

The file contains the messages that this program prints, and the warnings of libraries. The warnings
are not shown in the terminal.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from portable.converters.console import escape_control_characters, print_error
from portable.converters.storage.safe_open import open_for_writing
from portable.errors import RunError, UserError, to_one_line
from portable.terminal import LOG

if TYPE_CHECKING:
    from io import TextIOWrapper
    from pathlib import Path
    from types import TracebackType
    from typing import Self

LOG_FILE = "log.txt"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RunLogHandler(logging.Handler):
    """Logging handler that writes the log records of this process to a file.

    Libraries print warnings to stderr, in the middle of the progress bar. Within the context of
    this handler, library messages below the level ERROR are written to the file instead of the
    terminal. The warnings of Python's :mod:`warnings` are included. Library errors and the messages
    of this program are printed as well. Until the log file is open, records are kept in memory. If
    it is never opened because the run was rejected, the library warnings are printed when the
    context ends.

    On entry, the handler is added to the root logger and to the logger ``portable``, and a filter
    is added to all handlers that write to stdout or stderr. On exit, both are removed.

    Args:
        rank: Rank of this process. Only rank 0 logs the messages of this program. Other ranks
            create a file only if a library logs something or the run fails.

    Attributes:
        num_library_warnings: Number of warnings and errors that libraries have logged so far.
        path: Path of the log file. None until ``open_log_file`` is called.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.num_library_warnings = 0
        self.path: Path | None = None
        self._rank = rank
        self._file_handler: logging.Handler | None = None
        self._pending_records: list[logging.LogRecord] = []
        self._latest_record: logging.LogRecord | None = None
        self._console_handlers: list[logging.Handler] = []
        self._last_resort: logging.Handler | None = None

    def __enter__(self) -> Self:
        logging.captureWarnings(True)
        self._last_resort = None if logging.root.handlers else logging.lastResort
        if self._last_resort is not None:  # Python uses it to print the records that have no handler
            logging.root.addHandler(self._last_resort)
        loggers = [
            entry for entry in logging.root.manager.loggerDict.values() if isinstance(entry, logging.Logger)
        ]
        handlers = {handler for logger in (logging.root, *loggers) for handler in logger.handlers}
        self._console_handlers = [handler for handler in handlers if _is_console_handler(handler)]
        for logger in (LOG, logging.root):
            logger.addHandler(self)
        for handler in self._console_handlers:
            handler.addFilter(self._take_console_record)
        return self

    def open_log_file(self, folder: Path) -> None:
        """Open the log file for appending, and write the records that have been kept in memory.

        The file is ``log.txt`` on rank 0, and ``log.rank<r>.txt`` on other ranks. On other ranks,
        it is created when the first record is written.

        Args:
            folder: Folder of the run.
        """
        self.path = folder / (LOG_FILE if self._rank == 0 else f"log.rank{self._rank}.txt")
        self._file_handler = _LinkFreeFileHandler(self.path, delay=self._rank != 0)
        self._file_handler.setFormatter(_EscapingFormatter(_FORMAT))
        records, self._pending_records = self._pending_records, []
        for record in records:
            self._write_record(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep it in memory until the log file is open.

        Several handlers may forward the same record, so a repeated record is ignored. Warnings and
        errors that libraries log are also counted in ``num_library_warnings``.
        """
        if record is self._latest_record:  # several handlers pass on the same record
            return
        self._latest_record = record
        self.num_library_warnings += record.name != LOG.name and record.levelno >= logging.WARNING
        self._write_record(record)

    def _write_record(self, record: logging.LogRecord) -> None:
        """Write a record to the file, or keep it in memory if the file is not open yet."""
        if self._file_handler is None:
            self._pending_records.append(record)
        elif self._rank == 0 or record.name != LOG.name:  # only rank 0 logs messages of this program
            self._file_handler.handle(record)

    def record_failure(self, error: BaseException) -> None:
        """Write the error that ends the run to the log file.

        Does nothing if the file is not open yet.

        Args:
            error: The exception. Its traceback is included unless the error is expected, such as an
                invalid setting.
        """
        is_expected = isinstance(error, UserError | RunError)
        cause = None if is_expected else (type(error), error, error.__traceback__)
        record = logging.LogRecord(LOG.name, logging.ERROR, "", 0, to_one_line(error), None, cause)
        if self._file_handler is not None:
            self._file_handler.handle(record)

    def _take_console_record(self, record: logging.LogRecord) -> bool:
        """Handle a record that a library's own handler would print.

        This method is installed as a filter of the handlers that write to stdout or stderr.

        Returns:
            Whether the library's handler should still print the record. True only for errors.
        """
        self.handle(record)
        return record.levelno >= logging.ERROR

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler in self._console_handlers:
            handler.removeFilter(self._take_console_record)
        for logger in (LOG, logging.root):
            logger.removeHandler(self)
        if self._last_resort is not None:
            logging.root.removeHandler(self._last_resort)
        logging.captureWarnings(False)
        for record in self._pending_records:
            if record.name != LOG.name and logging.WARNING <= record.levelno < logging.ERROR:
                print_error(record.getMessage())
        if self._file_handler is not None:
            with suppress(OSError):  # the disk is full, so the last lines cannot be flushed
                self._file_handler.close()


class _EscapingFormatter(logging.Formatter):
    """Formatter that escapes control characters, because logged strings such as file names are untrusted."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_characters(super().format(record))


class _LinkFreeFileHandler(logging.FileHandler):
    """File handler that appends to a log file without following a symlink."""

    def __init__(self, path: Path, *, delay: bool) -> None:
        self._path = path  # logging stores an absolute path, but error messages show this one
        super().__init__(path, encoding="utf-8", delay=delay)

    def _open(self) -> TextIOWrapper:
        descriptor = open_for_writing(self._path, os.O_WRONLY | os.O_APPEND)
        return os.fdopen(descriptor, "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Ignore file system errors, such as a full disk. Print other errors.

        If the disk is full, the run fails elsewhere and reports it.
        """
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _is_console_handler(handler: logging.Handler) -> bool:
    standard = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in standard)
