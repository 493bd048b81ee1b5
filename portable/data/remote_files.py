"""Files in an object store: listed there, and copied once into the cache of the machine that reads them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from converters.storage.object_store import RemotePath
from portable.data.cache import locked_folder
from portable.data.documents import Document, Fields, changed_meanwhile, listed
from portable.data.files import FORMATS, LocalFiles
from portable.errors import UserError
from portable.paths import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.storage.object_store import Object

_DIGEST = "digest"
"""The file beside a copy; what is copied has a suffix."""


def remote_files(url: str) -> dict[RemotePath, Object]:
    """The files that a URL stands for: one, those of a pattern, or all that can be read in a folder.

    Raises:
        UserError: nothing there that can be read.
    """
    with storage_errors("data.source"):
        path = RemotePath.of(url)
        found = path.glob()
        if not found:
            found = {
                path / name: told
                for name, told in path.objects().items()
                if (path / name).suffix.lower() in FORMATS
                and not any(part.startswith(".") for part in name.split("/"))
            }
    if not found:
        raise UserError(
            f"data.source: there is no {listed(FORMATS)} file at {url}; check the URL and the pattern"
        )
    for file in found:
        if file.suffix.lower() not in FORMATS:
            raise UserError(f"data.source: {file}: cannot read this kind of file; use {listed(FORMATS)}")
    return dict(sorted(found.items(), key=lambda item: str(item[0])))


class RemoteFiles(LocalFiles):
    """Files in an object store, read as local ones are, from copies.

    Args:
        name: what a person called them.
        files: with what tells their versions apart.
        downloads: the folder for the copies, which are kept there by URL and version.
    """

    _files: list[RemotePath]  # type: ignore[assignment]  # it has what is asked of a path here

    def __init__(
        self,
        name: str,
        files: Mapping[RemotePath, Object],
        fields: Fields,
        max_samples: int | None,
        downloads: Path,
    ) -> None:
        super().__init__(name, list(files), fields, max_samples)  # type: ignore[arg-type]
        self._objects = files
        self._downloads = downloads
        self._copies: dict[Path, RemotePath] = {}

    @property
    def key(self) -> str:
        """By what the store tells of the files: one that was tokenized before need not be fetched for it."""
        versions = [(str(path), found.size, found.version) for path, found in self._objects.items()]
        return hashlib.blake2b(repr((self._told(), versions)).encode(), digest_size=16).hexdigest()

    @property
    def size_bytes(self) -> int | None:
        if self._max_samples is not None or any(path.suffix.lower() == ".parquet" for path in self._files):
            return None
        return sum(found.size for found in self._objects.values())

    def documents(self) -> Iterator[Document]:
        try:
            yield from super().documents()
        except UserError as error:
            message = str(error)
            for copy, path in self._copies.items():
                message = message.replace(str(copy), str(path))
            raise UserError(message) from error

    def documents_of_key(self) -> Iterator[Document]:
        """The copies are kept by version, each with a digest, and nobody else writes to them."""
        return self.documents()

    def check(self) -> None:
        """Nothing: they are there, and a look into them would fetch them."""

    def _here(self, path: RemotePath) -> Path:  # type: ignore[override]
        """The copy of a file, made now if there is none; processes of this machine wait for each other."""
        told = self._objects[path]
        version = hashlib.blake2b(repr((str(path), told)).encode(), digest_size=16).hexdigest()
        folder = self._downloads / version
        copy = folder / path.name
        if copy in self._copies and copy.exists():
            return copy
        self._copies[copy] = path
        if _as_fetched(copy):
            return copy
        with storage_errors("data.source"), locked_folder(folder) as draft:
            if not _as_fetched(copy):
                fetched = draft.path / path.name
                path.download(fetched)
                now = path.objects().get("")
                if fetched.stat().st_size != told.size or now != told:
                    raise changed_meanwhile(path)
                (draft.path / _DIGEST).write_bytes(_digest(fetched))
                draft.commit()
        return copy


def _as_fetched(copy: Path) -> bool:
    """Whether a copy is there, as it was fetched."""
    try:
        return (copy.parent / _DIGEST).read_bytes() == _digest(copy)
    except OSError:
        return False


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        hasher = hashlib.blake2b(digest_size=16)
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return hasher.digest()
