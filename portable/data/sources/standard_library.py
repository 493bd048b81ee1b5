"""Python's standard library as a source: real text without a download."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from portable.data.sources.documents import Document
from portable.data.sources.source import Source, SourceSettings
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

_STDLIB_BYTES = 10_000_000
_STDLIB_LARGEST = 512_000
_STDLIB_SKIPS = re.compile(
    "tests?|idle_test|idlelib|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|.*-packages|__pycache__|config-.*"
)


class StandardLibrary(Source):
    """The Python files of the interpreter's standard library: real text without a download.

    One document per file, without tests and tables. Files are ordered by a hash of their names, so that every
    part, including the evaluation part at the end, is a fair sample.
    """

    only_text = "the standard library's sources"

    def __init__(self, settings: SourceSettings, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._size = 0
        super().__init__(self.only_text, settings)

    def digest(self) -> str:
        digest, self._size = hashlib.blake2b(b"stdlib", digest_size=16), 0
        for document in self.documents():
            content = document.text.encode()
            digest.update(hashlib.blake2b(content, digest_size=16).digest())
            self._size += len(content)
        return digest.hexdigest()

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
            if count == self.settings.data.max_samples or total + len(text) > _STDLIB_BYTES:
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
