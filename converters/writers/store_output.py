"""An output folder in an object store, which cannot rename folders.

Files are written as multipart uploads, which are invisible. When all are done, the folder is marked as begun
(`portable.converters.storage.completion_markers`), its old objects are deleted and the uploads completed; the
small files, the comparison of `--verify` and the completion marker follow. A conversion that fails while
uploading leaves OUT unchanged. A killed one leaves uploads, which the next run to the same OUT aborts, or,
near the end, a folder marked as incomplete, which is never read.

The marker of a folder lists every object that was written, with its version (`read_written_objects`). A
program that writes to the same folder again can thus tell its own objects from those of others.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError, CommandError, redact_credentials, to_printable
from portable.converters.storage.completion_markers import COMPLETE, INCOMPLETE, begin, complete
from portable.converters.storage.folder_operations import copy_file, is_unfinished
from portable.converters.storage.listed_file import Object
from portable.converters.storage.object_store import abort_uploads, connections, part_bytes
from portable.converters.storage.safe_open import read_small_table
from portable.converters.writers.replace_folder import check_replaceable
from portable.converters.writers.writer_group import check_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from portable.converters.storage.byte_sources import FileSpan
    from portable.converters.storage.object_store import RemotePath
    from portable.converters.storage.path_or_url import Place


_log = logging.getLogger(__name__)


def read_written_objects(folder: RemotePath, fact: str = "") -> dict[str, Object | None]:
    """What the folder's marker says was written into it; nothing if it has none, or a malformed one.

    Args:
        fact: the writer has given this one, see `StoreOutput`; "" for any writer.

    Returns:
        Each object that was written, or found there and might be replaced; None for one that a writer which
        did not finish has planned, of any version.
    """
    marker = read_small_table(folder / COMPLETE) or read_small_table(folder / INCOMPLETE)
    facts, objects, planned = (marker.get(name) for name in ("facts", "objects", "names"))
    if not isinstance(objects, dict) or (fact and not (isinstance(facts, dict) and fact in facts)):
        return {}
    if isinstance(planned, list):  # as earlier releases write them
        objects |= dict.fromkeys(map(str, planned))
    return {
        name: None if object_ is None else Object(*object_)
        for name, object_ in objects.items()
        if object_ is None or (isinstance(object_, list) and len(object_) == 2)
    }


def list_objects(folder: RemotePath) -> dict[str, Object]:
    """Every object below `folder` except the markers."""
    return {name: object_ for name, object_ in folder.objects().items() if name not in (COMPLETE, INCOMPLETE)}


def check_prefix(out: RemotePath, *, overwrite: bool) -> None:
    """Check that writing below `out` does not destroy other files."""
    if out.is_file():
        raise CommandError(f"{out}: is not a folder")
    if not out.exists():
        return
    if overwrite:
        check_replaceable(out, list_objects(out).keys() - read_written_objects(out).keys())
        return
    if is_unfinished(out):
        raise CommandError(
            f"{out}: holds an unfinished conversion ({INCOMPLETE}); give --overwrite to replace it"
        )
    raise CommandError(f"{out}: exists already; give another folder or --overwrite")


class StoreUploads:
    """Uploads to a folder of an object store that one process makes, and that are invisible until `commit`.

    Args:
        folder: URL of the folder, or of the only object if `single` is True.
        single: Whether `folder` is the URL of the only object.
    """

    def __init__(self, folder: RemotePath, *, single: bool = False) -> None:
        self.folder = folder
        self.threads = connections()
        self._single = single
        self._uploads: list[UploadedFile] = []

    def _get_path(self, name: str) -> RemotePath:
        return self.folder if self._single else self.folder / name

    def create_file(self, name: str, lengths: Sequence[int]) -> UploadedFile:
        """Begin the upload of a file of pieces of these lengths."""
        upload = UploadedFile(self._get_path(name), sum(lengths))
        self._uploads.append(upload)
        return upload

    def sync(self) -> None:
        """Do nothing, because a store acknowledges a part once the part is durable."""

    def commit(self) -> None:
        """Make objects of the uploads, several at a time, because each waits for an answer of the store."""
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in pool.map(UploadedFile.close, self._uploads):
                pass
        self._uploads.clear()

    def abort(self) -> None:
        """Abort the uploads that have not become objects, if the store is reachable."""
        for upload in self._uploads:
            upload.abort()
        self._uploads.clear()


class StoreOutput(StoreUploads):
    """Uploads, until `commit` makes objects of them; `publish` or `abort` ends them.

    The other methods are those of `draft.FolderOutput`.

    Args:
        names: of all objects that will be written.
        facts: extra fields for the marker.
        single: `folder` is the only object that will be written, and no folder. It needs no marker, since it
            is never seen in part.
        shared: whether other processes upload to the same folder.
    """

    def __init__(
        self,
        folder: RemotePath,
        *,
        overwrite: bool,
        names: Iterable[str],
        facts: Mapping[str, Any],
        single: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__(folder, single=single)
        self._shared = shared
        self._overwrite = overwrite
        self._planned = sorted(names)
        self._facts = dict(facts)
        self._there = self._list_objects()
        self._token = ""
        self._undo: Callable[[], object] = bool  # which does nothing
        abort_uploads(folder, deep=False)

    def _list_objects(self) -> dict[str, Object]:
        if not self._single:
            return list_objects(self.folder)
        with suppress(FileNotFoundError):
            return {"": self.folder.look_up()}
        return {}

    def commit(self) -> None:
        """Replace the content of the folder by the uploaded objects, marked as incomplete."""
        self.folder.refresh()
        there = self._list_objects()
        if not self._overwrite and (there or self.folder.exists()):
            raise CommandError(f"{self.folder}: appeared while it was being written; nothing was replaced")
        for name, object_ in there.items():
            if self._there.get(name) != object_:  # --overwrite did not cover it
                raise CheckpointError(
                    f"{to_printable(self._get_path(name))}: appeared while {self.folder} was being written; "
                    "nothing was replaced"
                )
        if not self._single:
            self._undo = bool if there else self._clear
            objects = {**there, **dict.fromkeys(self._planned)}
            self._token = begin(self.folder, facts=self._facts, objects=objects)
            # Keep what is overwritten later: a config.json may be copied from this folder to itself.
            self.folder.remove([name for name in there if name not in self._planned])
            self._undo = self._clear
        super().commit()
        if self._single:  # until now, an old one has stayed
            self._undo = self.folder.unlink

    def _clear(self) -> None:
        self.folder.remove([COMPLETE, *self._planned])
        if not self._shared:  # otherwise another process may still complete an upload
            self.folder.remove([INCOMPLETE])

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Check the objects that several processes have written; see `draft.FolderOutput`."""
        self.folder.refresh()
        there = list_objects(self.folder)
        for name, size in sizes.items():
            check_size(self.folder / name, size, there[name].size if name in there else None)

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def copy(self, path: Place, name: str) -> None:
        copy_file(path, self.folder / name)

    def publish(self) -> None:
        if not self._single:
            # A repeated start of an upload, whose first response was lost, leaves an unknown upload.
            abort_uploads(self.folder, deep=False)
            there = list_objects(self.folder)
            objects = {name: there[name] for name in self._planned if name in there}
            complete(self.folder, self._token, facts=self._facts, objects=objects)
        self._undo = bool

    def abort(self) -> None:
        """Remove what was not published, if the store is reachable."""
        super().abort()
        with suppress(CheckpointError):  # what stays is marked as incomplete
            self._undo()


class UploadedFile:
    """An upload of about `nbytes` in parts, which `close` makes an object, and to which pieces are appended.

    Pieces are read and cast side by side, and appended in the order of their numbers. One that is not next is
    kept in memory, and its thread waits at its end, so that no more pieces are kept than there are threads.
    """

    def __init__(self, path: RemotePath, nbytes: int) -> None:
        self.path = path
        self.next = 0
        self.turns = threading.Condition()
        self._part_bytes = part_bytes(nbytes)
        self._written = 0
        options = {"buffer_size": self._part_bytes, "max_concurrency": connections()}
        self._writer = self._call(lambda obs, store: obs.open_writer(store, path.key, **options))

    def _call(self, call: Callable[[Any, Any], Any]) -> Any:
        return self.path.call("upload", call)

    def write(self, data: memoryview | bytes | bytearray) -> None:
        """Append `data`, which is copied: the writer would keep the buffer itself."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._part_bytes):
            part = bytes(view[start : start + self._part_bytes])
            self._call(lambda *_, part=part: self._writer.write(part))
        self._written += len(view)

    def close(self) -> None:
        """Make the object."""
        with self.path.arriving(self._written):
            self._call(lambda *_: self._writer.close())

    def abort(self) -> None:
        """Abort the upload; leaves nothing behind if the store is reachable. Never raises."""
        try:
            self._writer.__exit__(RuntimeError, RuntimeError("discarded"), None)
        except Exception as error:  # the failure that led here matters more
            _log.debug("%s: an upload was not discarded: %s", self.path, redact_credentials(str(error)))

    def get_piece(self, number: int) -> UploadedPiece:
        return UploadedPiece(self, number)


class UploadedPiece:
    def __init__(self, file: UploadedFile, number: int) -> None:
        self._file = file
        self._number = number
        self._kept = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        if self._file.next != self._number:
            self._kept += data
            return
        pending, self._kept = self._kept, bytearray()
        self._file.write(pending)
        self._file.write(data)

    def copy(self, span: FileSpan, progress: Callable[[int], object]) -> bool:
        return False

    def finish(self, progress: Callable[[int], object]) -> None:
        file = self._file
        with file.turns:
            while not file.turns.wait_for(lambda: file.next == self._number, timeout=0.2):
                progress(0)  # raises after a failure elsewhere
        self.write(b"")
        with file.turns:
            file.next += 1
            file.turns.notify_all()
