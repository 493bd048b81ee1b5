"""Determine file formats by suffix, and decompress files such as ``a.jsonl.gz``."""

from __future__ import annotations

import io
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from portable.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer

    from portable.converters.storage.path_or_url import AnyPath

FILE_FORMATS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
COMPRESSION_SUFFIXES = (".gz", ".zst")
_TEXT_FORMATS = (".txt", ".jsonl", ".json")
_BUFFER = 1 << 20
_MAX_EXPANSION, _UNCHECKED_BYTES = 64, 64 << 20
"""The decompressed contents of a file may have ``_MAX_EXPANSION`` times its compressed size or
``_UNCHECKED_BYTES`` bytes, whichever is larger.
"""


def get_file_format(path: AnyPath | str) -> str:
    """Return the lowercase suffix that determines a file's format, such as ``.jsonl`` for ``a.jsonl.gz``.

    A compression suffix is ignored only after ``.txt``, ``.jsonl`` and ``.json``, because only these
    formats may be compressed. For ``a.csv.gz``, the result is ``.gz``.
    """
    name = PurePosixPath(path if isinstance(path, str) else path.name)
    suffix = name.suffix.lower()
    if suffix in COMPRESSION_SUFFIXES and (inner := PurePosixPath(name.stem).suffix.lower()) in _TEXT_FORMATS:
        return inner
    return suffix


def is_compressed(path: AnyPath | str) -> bool:
    """Return whether a file name ends with ``.gz`` or ``.zst``, ignoring case."""
    name = path if isinstance(path, str) else path.name
    return name.lower().endswith(COMPRESSION_SUFFIXES)


def check_decompression_ratio(decompressed_bytes: int, stored_bytes: int, name: object) -> None:
    """Check that decompressed contents are at most 64 times as large as the compressed file.

    Contents of up to 64 MiB are always accepted. Without this check, a small malicious file (a
    decompression bomb) could exhaust the memory.

    Args:
        decompressed_bytes: Number of bytes decompressed so far.
        stored_bytes: Size of the compressed file in bytes.
        name: Name of the file, used in the error message.

    Raises:
        UserError: If the contents are too large.
    """
    if decompressed_bytes > max(_UNCHECKED_BYTES, _MAX_EXPANSION * stored_bytes):
        raise UserError(
            f"data.source: {name}: decompresses to more than {_MAX_EXPANSION} times its size "
            f"({stored_bytes:,} bytes); if you trust the file, decompress the file before training"
        )


class _ExpansionLimitedFile(io.RawIOBase):
    """Raw stream of the decompressed contents of a file, with a limit on their size.

    Reading raises UserError as soon as :func:`check_decompression_ratio` rejects the decompressed
    size.
    """

    def __init__(self, contents: Any, path: Path) -> None:
        self._contents = contents
        self._path = path
        self._size = path.stat().st_size
        self._expanded = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        count: int = self._contents.readinto(buffer)
        self._expanded += count
        check_decompression_ratio(self._expanded, self._size, self._path)
        return count


def open_decompressed(file: io.BufferedReader, path: Path) -> io.BufferedReader:
    """Open a file for reading its decompressed contents.

    Reading the result raises ``OSError``, ``EOFError`` or ``zlib.error`` if the contents are
    damaged. It raises UserError if the contents are implausibly large, compared with the compressed
    file. See :func:`check_decompression_ratio`.

    Args:
        file: The opened file. It is returned unchanged if the path has no compression suffix.
        path: Path of the file. Its suffix determines the compression.
    """
    name = path.name.lower()
    if name.endswith(".gz"):
        from isal import igzip

        opened: Any = igzip.IGzipFile
        return io.BufferedReader(_ExpansionLimitedFile(opened(fileobj=file), path), _BUFFER)
    if name.endswith(".zst"):
        import pyarrow  # contains the Zstandard codec

        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
        return io.BufferedReader(_ExpansionLimitedFile(raw, path), _BUFFER)
    return file
