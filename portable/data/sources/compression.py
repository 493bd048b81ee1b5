"""The format of a file by its name, and the contents of compressed ones, such as ``a.jsonl.gz``."""

from __future__ import annotations

import io
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.storage.path_or_url import Place

COMPRESSED = (".gz", ".zst")
_OF_TEXT = (".txt", ".jsonl", ".json")
_BUFFER = 1 << 20


def format_of(path: Place | str) -> str:
    """The suffix that tells how a file is read, in lower case: ``.jsonl`` for ``a.jsonl.gz``."""
    name = PurePosixPath(path if isinstance(path, str) else path.name)
    suffix = name.suffix.lower()
    if suffix in COMPRESSED and (inner := PurePosixPath(name.stem).suffix.lower()) in _OF_TEXT:
        return inner
    return suffix


def is_compressed(path: Place | str) -> bool:
    name = path if isinstance(path, str) else path.name
    return name.lower().endswith(COMPRESSED)


def decompressed(file: io.BufferedReader, name: str) -> io.BufferedReader:
    """The contents of a file, decompressed while they are read if its name says so.

    What it raises for damaged data: ``OSError``, ``EOFError`` or ``zlib.error``.
    """
    if name.lower().endswith(".gz"):
        from isal import igzip

        opened: Any = igzip.IGzipFile
        return io.BufferedReader(opened(fileobj=file), _BUFFER)
    if name.lower().endswith(".zst"):
        import pyarrow  # which brings the codec

        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
        return io.BufferedReader(raw, _BUFFER)
    return file
