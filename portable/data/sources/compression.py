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
"""Limit of the decompressed contents of a file: ``_MAX_EXPANSION`` times the compressed size or
``_UNCHECKED_BYTES`` bytes, whichever is larger.
"""


def get_file_format(path: AnyPath | str) -> str:
    """Return the lowercase suffix that determines a file's format: ``.jsonl`` for ``a.jsonl.gz``.

    A compression suffix is ignored only after ``.txt``, ``.jsonl`` and ``.json``, because only these
    formats may be compressed. For ``a.csv.gz``, the result is ``.gz``.
    """
    name = PurePosixPath(path if isinstance(path, str) else path.name)
    suffix = name.suffix.lower()
    if suffix in COMPRESSION_SUFFIXES and (inner := PurePosixPath(name.stem).suffix.lower()) in _TEXT_FORMATS:
        return inner
    return suffix


def is_compressed(path: AnyPath | str) -> bool:
    """Return whether the suffix of a file is one of ``COMPRESSION_SUFFIXES``."""
    name = path if isinstance(path, str) else path.name
    return name.lower().endswith(COMPRESSION_SUFFIXES)


def check_decompression_ratio(decompressed_bytes: int, stored_bytes: int, name: object) -> None:
    """Check that decompressed contents are not excessively larger than the compressed file.

    Otherwise, a small malicious file (a decompression bomb) could exhaust the memory.

    Args:
        decompressed_bytes: Number of bytes decompressed so far.
        stored_bytes: Size of the compressed file in bytes.
        name: Name of the file, used in the error message.

    Raises:
        UserError: If the contents are too large.
    """
    if decompressed_bytes > max(_UNCHECKED_BYTES, _MAX_EXPANSION * stored_bytes):
        raise UserError(
            f"data.source: {name}: expands to more than {_MAX_EXPANSION} times its {stored_bytes:,} bytes; "
            "if you trust the file, decompress the file first"
        )


class _ExpansionLimitedFile(io.RawIOBase):
    """Raw binary file that yields the decompressed contents of another file.

    Reading raises UserError as soon as :func:`check_decompression_ratio` rejects the decompressed size.
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
    """Open the decompressed contents of a file. A file without a compression suffix is returned unchanged.

    Reading the result raises ``OSError``, ``EOFError`` or ``zlib.error`` if the contents are damaged,
    and UserError if they are excessively larger than the compressed file.

    Args:
        file: The opened file.
        path: Path of the file. Its suffix determines the compression.
    """
    name = path.name.lower()
    if name.endswith(".gz"):
        from isal import igzip

        opened: Any = igzip.IGzipFile
        return io.BufferedReader(_ExpansionLimitedFile(opened(fileobj=file), path), _BUFFER)
    if name.endswith(".zst"):
        import pyarrow  # contains the codec

        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
        return io.BufferedReader(_ExpansionLimitedFile(raw, path), _BUFFER)
    return file
