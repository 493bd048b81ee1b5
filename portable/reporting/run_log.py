"""``log.txt`` in the run's folder: what was told, and the warnings of libraries, kept off the terminal."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from portable.converters.console import escape_control_characters
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
    """Collects what is logged in this process, and writes it once there is a folder.

    Libraries print their warnings to stderr, in the middle of the progress bar. In this context those below
    errors go into the file alone. Without a folder (a run that was refused) they are printed at the end.

    Attributes:
        num_library_warnings: warnings of libraries so far.
        path: of the file.
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
        if self._last_resort is not None:  # Python prints with it what no handler took
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
        """Write into ``folder`` what came so far and what will come; ranks other than 0 only if need be."""
        self.path = folder / (LOG_FILE if self._rank == 0 else f"log.rank{self._rank}.txt")
        self._file_handler = _LinkFreeFileHandler(self.path, delay=self._rank != 0)
        self._file_handler.setFormatter(_EscapingFormatter(_FORMAT))
        records, self._pending_records = self._pending_records, []
        for record in records:
            self._write_record(record)

    def emit(self, record: logging.LogRecord) -> None:
        if record is self._latest_record:  # it passes several handlers
            return
        self._latest_record = record
        self.num_library_warnings += record.name != LOG.name and record.levelno >= logging.WARNING
        self._write_record(record)

    def _write_record(self, record: logging.LogRecord) -> None:
        if self._file_handler is None:
            self._pending_records.append(record)
        elif self._rank == 0 or record.name != LOG.name:  # rank 0 tells for all
            self._file_handler.handle(record)

    def record_failure(self, error: BaseException) -> None:
        """Record why the run ended; a bug with its traceback."""
        is_expected = isinstance(error, UserError | RunError)
        cause = None if is_expected else (type(error), error, error.__traceback__)
        record = logging.LogRecord(LOG.name, logging.ERROR, "", 0, to_one_line(error), None, cause)
        if self._file_handler is not None:
            self._file_handler.handle(record)

    def _take_console_record(self, record: logging.LogRecord) -> bool:
        """Take the record; whether its own handler is to print it as well."""
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
                print(escape_control_characters(record.getMessage()), file=sys.stderr)
        if self._file_handler is not None:
            with suppress(OSError):  # a full disk, which takes the last line no more
                self._file_handler.close()


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_control_characters(super().format(record))


class _LinkFreeFileHandler(logging.FileHandler):
    """Appends to a file of the run's, through no link."""

    def __init__(self, path: Path, *, delay: bool) -> None:
        self._path = path  # as errors are to name it
        super().__init__(path, encoding="utf-8", delay=delay)

    def _open(self) -> TextIOWrapper:
        descriptor = open_for_writing(self._path, os.O_WRONLY | os.O_APPEND)
        return os.fdopen(descriptor, "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Go without the line where the disk is full: the error that ends the run has its own."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _is_console_handler(handler: logging.Handler) -> bool:
    standard = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in standard)
