"""Python's standard library as a source: real text without a download."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from portable.data.sources.documents import Document, Source, changed_meanwhile
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

_STDLIB_BYTES = 10_000_000
_STDLIB_LARGEST = 512_000
_STDLIB_SKIPS = re.compile(
    "tests?|idle_test|idlelib|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|.*-packages|__pycache__|config-.*"
)


class _Digest:
    """A digest of documents in order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(b"stdlib", digest_size=16)

    def add(self, document: Document) -> int:
        """Add a document and return its size in bytes."""
        content = document.text.encode()
        self._hash.update(hashlib.blake2b(content, digest_size=16).digest())
        return len(content)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class StandardLibrary(Source):
    """The Python files of the interpreter's standard library: real text without a download.

    One document per file, without tests and tables. Files are ordered by a hash of their names, so that every
    part, including the evaluation part at the end, is a fair sample.
    """

    name = "the standard library's sources"

    def __init__(self, max_samples: int | None = None, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._max_samples = max_samples
        self._key: str | None = None
        self._size = 0

    @property
    def key(self) -> str:
        if self._key is None:
            digest = _Digest()
            self._size = sum(map(digest.add, self.documents()))
            self._key = digest.hexdigest()
        return self._key

    def documents_of_key(self) -> Iterator[Document]:
        key, digest = self.key, _Digest()
        for document in self.documents():
            digest.add(document)
            yield document
        if digest.hexdigest() != key:
            raise changed_meanwhile(self._root)

    @property
    def size_bytes(self) -> int | None:
        return self._size if self.key else None

    def documents(self) -> Iterator[Document]:
        count = total = 0
        for path in self._files():
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if not text.strip():
                continue
            if count == self._max_samples or total + len(text) > _STDLIB_BYTES:
                break
            count, total = count + 1, total + len(text)
            yield Document(text)
        if not count:
            raise UserError(
                f"data.source: this Python has no standard library sources in {self._root}; "
                "name a file or data set"
            )

    def _files(self) -> list[Path]:
        found = []
        for folder, subfolders, names in os.walk(self._root):
            subfolders[:] = [name for name in subfolders if not _STDLIB_SKIPS.fullmatch(name)]
            # _sysconfigdata describes the build of this Python and differs between machines.
            wanted = (
                name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
            )
            paths = (Path(folder, name) for name in wanted)
            found += [path for path in paths if path.stat().st_size <= _STDLIB_LARGEST]

        def order(path: Path) -> bytes:
            name = path.relative_to(self._root).as_posix()
            return hashlib.blake2b(name.encode(), digest_size=8).digest()

        return sorted(found, key=order)
