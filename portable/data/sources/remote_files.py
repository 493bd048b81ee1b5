"""Files in an object store, downloaded once into the local cache."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

from converters.storage.object_store import RemotePath
from portable.data.locked_folder import locked_folder
from portable.data.sources.compression import format_of
from portable.data.sources.documents import Document, Fields, changed_meanwhile, listed
from portable.data.sources.files import FORMATS, LocalFiles, content_digest, unknown_length
from portable.errors import UserError
from portable.paths import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.storage.object_store import Object

_DIGEST = "digest"
"""The name of the digest beside a copy. Copies always have a suffix."""


def remote_files(url: str) -> dict[RemotePath, Object]:
    """List the files of a URL: one file, those that match a pattern, or all readable files in a folder.

    Raises:
        UserError: if there is no readable file.
    """
    with storage_errors("data.source"):
        path = RemotePath.of(url)
        found = path.glob()
        if not found:
            found = {
                path / name: found
                for name, found in path.objects().items()
                if format_of(name) in FORMATS and not any(part.startswith(".") for part in name.split("/"))
            }
    if not found:
        raise UserError(
            f"data.source: there is no {listed(FORMATS)} file at {url}; check the URL and the pattern"
        )
    for file in found:
        if format_of(file) not in FORMATS:
            raise UserError(f"data.source: {file}: cannot read this kind of file; use {listed(FORMATS)}")
    return dict(sorted(found.items(), key=lambda item: str(item[0])))


class RemoteFiles(LocalFiles):
    """Files in an object store, read from local copies.

    Args:
        name: as given by the user.
        files: with their versions.
        downloads: the folder for copies, by URL and version.
    """

    downloads = True
    _files: list[RemotePath]  # type: ignore[assignment]  # it has the required part of Path's interface

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
        self._checked: set[Path] = set()

    @property
    def key(self) -> str:
        """A digest of the store's versions, so that tokenized files need not be downloaded again."""
        versions = [(str(path), found.size, found.version) for path, found in self._objects.items()]
        return hashlib.blake2b(repr((self._settings, versions)).encode(), digest_size=16).hexdigest()

    @property
    def size_bytes(self) -> int | None:
        if self._max_samples is not None or any(map(unknown_length, self._files)):
            return None
        return sum(found.size for found in self._objects.values())

    def documents_of_key(self) -> Iterator[Document]:
        """Copies are stored by version with a digest, and nothing else writes to them."""
        return self.documents()

    def check(self) -> None:
        """A no-op: the files exist, and reading them would download them."""

    def release(self) -> None:
        for path in self._files:
            shutil.rmtree(self._folder(path), ignore_errors=True)
        self._checked.clear()

    def _folder(self, path: RemotePath) -> Path:
        """The folder of a file's copy."""
        content = repr((str(path), self._objects[path]))
        return self._downloads / hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def _local(self, path: RemotePath) -> Path:  # type: ignore[override]
        """Return the copy of a file. Downloads it if needed; other processes of this machine wait."""
        listed_object = self._objects[path]
        folder = self._folder(path)
        copy = folder / path.name
        if copy in self._checked and copy.exists():
            return copy
        self._checked.add(copy)
        if _is_intact(copy):
            return copy
        with storage_errors("data.source"), locked_folder(folder) as draft:
            if not _is_intact(copy):
                fetched = draft.path / path.name
                with fetched.open("xb") as file:
                    now = path.download(file.write)
                # A file of the hub has no version: its URL has the revision.
                if listed_object.version not in ("", now.version) or now.size != listed_object.size:
                    raise changed_meanwhile(path)
                (draft.path / _DIGEST).write_bytes(content_digest(fetched))
                draft.commit()
        return copy


def _is_intact(copy: Path) -> bool:
    """Whether a copy exists and matches its digest."""
    try:
        return (copy.parent / _DIGEST).read_bytes() == content_digest(copy)
    except OSError:
        return False
