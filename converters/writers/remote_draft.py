"""An output folder in an object store, which cannot rename one into its place.

While the files grow they are uploads, of which nothing is to be seen. When all are done, the folder is begun
(`converters.storage.completion`), what it held goes, and the uploads become objects; then come the small
files, the
comparison of `--verify`, and the marker of completion last of all. So a conversion that fails while the files
grow leaves OUT as it was; one that is killed leaves uploads that the next run to the same OUT aborts, or, at
the very end, a folder that is marked as incomplete and that nothing here reads.

The marker of completion names every object that was written, with its version (`Written`). So a program that
writes to the same folder again, and knows its own work by the marker, can tell what somebody else put there.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError, printable
from converters.storage.completion import COMPLETE, INCOMPLETE, begin, complete, facts_of, is_unfinished
from converters.storage.object_store import RemotePath
from converters.storage.output_file import FLUSH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from converters.storage.bytes import FileSpan
    from converters.storage.object_store import Upload
    from converters.storage.path_or_url import Place

# Each waits for the network most of the time, and holds up to two parts and two runs of what it reads.
THREADS = 4

Version = tuple[int, str]
"""Of an object: its bytes, and what changes with its content."""


@dataclass(frozen=True)
class Written:
    """What a folder's marker tells of who wrote it and what.

    Attributes:
        facts: what the writer said of itself.
        objects: the objects that it wrote, or found there and had leave to replace.
        names: those that it was about to write, where it did not come to the end.
    """

    facts: Mapping[str, Any]
    objects: Mapping[str, Version]
    names: frozenset[str]

    @classmethod
    def of(cls, folder: RemotePath) -> Written:
        """What the folder's marker tells; nothing where there is none, or it is nobody's here."""
        told = facts_of(folder)
        facts, objects, names = told.get("facts"), told.get("objects"), told.get("names")
        return cls(
            facts if isinstance(facts, dict) else {},
            {
                name: (entry[0], entry[1])
                for name, entry in (objects.items() if isinstance(objects, dict) else ())
                if isinstance(entry, list) and len(entry) == 2
            },
            frozenset(map(str, names)) if isinstance(names, list) else frozenset(),
        )


def versions(folder: RemotePath) -> dict[str, Version]:
    """Every object below `folder` but the markers."""
    if not folder.exists():  # asking for all that is below nothing costs more requests
        return {}
    found = {name: (entry.size, entry.version) for name, entry in folder.objects().items()}
    return {name: version for name, version in found.items() if name not in (COMPLETE, INCOMPLETE)}


def check_prefix(out: RemotePath, *, overwrite: bool) -> None:
    """CheckpointError if writing below `out` could harm what is there."""
    if out.is_file():
        raise CheckpointError(f"{out}: is not a folder")
    if overwrite or not out.exists():
        return
    if is_unfinished(out):
        raise CheckpointError(
            f"{out}: holds what a conversion left unfinished ({INCOMPLETE}); give --overwrite to replace it"
        )
    raise CheckpointError(f"{out}: exists already; give another folder or --overwrite")


@contextmanager
def new_prefix(
    target: RemotePath, *, overwrite: bool, names: Iterable[str], facts: Mapping[str, Any]
) -> Iterator[_Draft]:
    """A draft that becomes the folder `target` when the block ends well.

    Args:
        names: of all objects that will be written.
        facts: what the marker is to tell besides: see `Written`.
    """
    draft = _Draft(target, overwrite=overwrite, names=names, facts=facts)
    target.abort_uploads(deep=False)
    try:
        yield draft
        draft.publish()
    finally:
        draft.discard()


class _Draft:
    """Uploads, until `settle` makes objects of them."""

    threads = THREADS

    def __init__(
        self, folder: RemotePath, *, overwrite: bool, names: Iterable[str], facts: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self._overwrite = overwrite
        self._planned = sorted(names)
        self._facts = dict(facts)
        self._there = versions(folder)
        self._uploads: list[Upload] = []
        self._names: list[str] = []
        self._token = ""

    def run_bytes(self, nbytes: int) -> int:
        probe = self.folder.upload(nbytes)
        return nbytes if probe.ordered else max(FLUSH_BYTES, probe.part_bytes)

    def file(self, name: str, lengths: Sequence[int]) -> _File:
        upload = (self.folder / name).upload(sum(lengths))
        self._uploads.append(upload)
        self._names.append(name)
        return _File(upload, lengths)

    def settle(self) -> None:
        """Replace what the folder holds by the objects, marked as incomplete."""
        self.folder.refresh()
        if not self._overwrite and self.folder.exists():
            raise CheckpointError(f"{self.folder}: appeared while it was being written; nothing was replaced")
        there = versions(self.folder)
        for name, version in there.items():
            if self._there.get(name) != version:  # nobody has said that it may be replaced
                raise CheckpointError(
                    f"{printable(self.folder / name)}: appeared while {self.folder} was being written; "
                    "nothing was replaced"
                )
        self._token = begin(self.folder, facts=self._facts, objects=there, names=self._planned)
        for name in there:
            # What is written later stays till then: a config.json may be copied from here, to here.
            if name not in self._planned:
                (self.folder / name).unlink(missing_ok=True)
        while self._uploads:
            self._uploads[0].commit()
            self._uploads.pop(0)

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)
        self._names.append(name)

    def copy(self, path: Place, name: str) -> None:
        if isinstance(path, RemotePath):
            path.copy_to(self.folder / name)
        else:
            (self.folder / name).upload_file(path)
        self._names.append(name)

    def publish(self) -> None:
        # Beginning an upload twice, where the first answer was lost, leaves one that nobody knows of.
        self.folder.abort_uploads(deep=False)
        there = versions(self.folder)
        objects = {name: there[name] for name in sorted(self._names) if name in there}
        complete(self.folder, self._token, facts=self._facts, objects=objects)
        self._token = ""

    def discard(self) -> None:
        """Undo what has not been published, as far as the store can be reached."""
        for upload in self._uploads:
            upload.discard()
        self._uploads.clear()
        token, self._token = self._token, ""
        if token:
            self._remove()

    def _remove(self) -> None:
        try:
            for name in [*self._names, COMPLETE, INCOMPLETE]:
                (self.folder / name).unlink(missing_ok=True)
        except CheckpointError:
            pass  # what stays is marked as incomplete; the error that led here matters more


class _File:
    """An upload whose parts are numbered through all pieces."""

    def __init__(self, upload: Upload, lengths: Sequence[int]) -> None:
        self.upload = upload
        self._firsts = [1]
        for length in lengths:
            self._firsts.append(self._firsts[-1] + max(1, length // upload.part_bytes))

    def piece(self, number: int) -> _Piece:
        return _Piece(self.upload, self._firsts[number], self._firsts[number + 1] - 1)


class _Piece:
    """Parts `first` to `last` of an upload; the last takes what is left, less than two parts' worth."""

    def __init__(self, upload: Upload, first: int, last: int) -> None:
        self._upload = upload
        self._next = first
        self._last = last
        self._buffer = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        limit = self._upload.part_bytes
        while view:
            room = limit - len(self._buffer) if self._next < self._last else len(view)
            self._buffer += view[:room]
            view = view[room:]
            if self._next < self._last and len(self._buffer) == limit:
                self._send()

    def copy(self, span: FileSpan, progress: Callable[[int], object]) -> bool:
        return False

    def finish(self) -> None:
        if self._buffer:
            self._send()

    def _send(self) -> None:
        data, self._buffer = self._buffer, bytearray()
        self._upload.part(self._next, memoryview(data))
        self._next += 1
