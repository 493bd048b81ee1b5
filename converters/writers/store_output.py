"""Write an output folder to an object store, which cannot rename folders.

Files are written as multipart uploads, which are invisible until they are completed. When all files
are uploaded, the folder is marked as incomplete (see
`portable.converters.storage.completion_markers`), old objects are deleted, and the uploads are
completed. Then the small files are written, `--verify` compares the output with the source, and the
completion marker is written.

If a conversion fails while uploading, the output is unchanged. If it is killed while uploading,
invisible uploads remain, which the next conversion to the same output aborts. If it is killed
later, the folder remains marked as incomplete and is never read.

The completion marker lists the version of each written object. A program that writes to the same
folder again can use `read_written_objects` to distinguish these objects from other programs'
objects.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError, CommandError, redact_credentials, to_printable
from portable.converters.storage.completion_markers import (
    COMPLETE_MARKER,
    INCOMPLETE_MARKER,
    mark_folder_complete,
    mark_folder_incomplete,
)
from portable.converters.storage.folder_operations import copy_file, is_incomplete_folder
from portable.converters.storage.listed_file import ListedFile
from portable.converters.storage.object_store import (
    abort_open_uploads,
    compute_part_bytes,
    get_max_connections,
)
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.writers.replace_folder import check_folder_replaceable
from portable.converters.writers.writer_group import check_written_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from portable.converters.storage.byte_sources import FileSpan
    from portable.converters.storage.object_store import RemotePath
    from portable.converters.storage.path_or_url import AnyPath


_log = logging.getLogger(__name__)


def read_written_objects(folder: RemotePath, required_fact: str = "") -> dict[str, ListedFile | None]:
    """Read from a folder's marker which objects a conversion has written.

    Each writer creates a marker: an object that lists the other objects and shows whether the
    folder is complete. The marker of a complete folder has priority over the marker of an
    incomplete folder.

    Args:
        folder: URL of the folder.
        required_fact: Name of an additional field that the marker must contain. See the argument
            `facts` of `StoreOutput`. If empty, the marker of any writer is accepted.

    Returns:
        Size and version of each object in the marker, keyed by name. If the folder is complete,
        these are the objects that the conversion has written. If a conversion was interrupted, they
        are the objects that existed before it, and the objects that it was going to write. The
        latter have the value None, because they may or may not exist. Empty if the folder has no
        valid marker, or if the marker does not contain `required_fact`.
    """
    marker = read_json_object_or_empty(folder / COMPLETE_MARKER) or read_json_object_or_empty(
        folder / INCOMPLETE_MARKER
    )
    facts, objects, planned = (marker.get(name) for name in ("facts", "objects", "names"))
    if not isinstance(objects, dict) or (
        required_fact and not (isinstance(facts, dict) and required_fact in facts)
    ):
        return {}
    if isinstance(planned, list):  # previous releases listed the planned objects separately
        objects |= dict.fromkeys(map(str, planned))
    return {
        name: None if object_ is None else ListedFile(*object_)
        for name, object_ in objects.items()
        if object_ is None or (isinstance(object_, list) and len(object_) == 2)
    }


def list_content_objects(folder: RemotePath) -> dict[str, ListedFile]:
    """Return the size and version of each object below a folder, keyed by name.

    The completion marker and the marker of an incomplete folder are omitted.
    """
    return {
        name: object_
        for name, object_ in folder.list_objects().items()
        if name not in (COMPLETE_MARKER, INCOMPLETE_MARKER)
    }


def check_store_output(out: RemotePath, *, overwrite: bool) -> None:
    """Check that writing an output folder cannot destroy other files.

    If `overwrite` is True, each object in an existing folder must be listed in the folder's marker,
    or have a name that `check_folder_replaceable` accepts. The versions of the objects are not
    compared.

    Args:
        out: URL of the folder.
        overwrite: Whether an existing output may be replaced.

    Raises:
        CheckpointError: If `out` is an object, if the folder contains other files, or if the folder
            exists and `overwrite` is False.
    """
    if out.is_file():
        raise CommandError(f"{out}: is not a folder; choose another folder")
    if not out.exists():
        return
    if overwrite:
        check_folder_replaceable(out, list_content_objects(out).keys() - read_written_objects(out).keys())
        return
    if is_incomplete_folder(out):
        raise CommandError(
            f"{out}: contains an unfinished conversion ({INCOMPLETE_MARKER}); add --overwrite to replace "
            "the folder"
        )
    raise CommandError(f"{out}: already exists; choose another folder, or add --overwrite")


class StoreUploads:
    """Multipart uploads of one process to a folder in an object store.

    The files are invisible until `complete_files` is called.

    Args:
        folder: URL of the folder, or of the only object if `single` is True.
        single: Whether `folder` is the URL of the only object.

    Attributes:
        num_threads: Number of threads that upload files.
    """

    def __init__(self, folder: RemotePath, *, single: bool = False) -> None:
        self.folder = folder
        self.num_threads = get_max_connections()
        self._single = single
        self._uploads: list[FileUpload] = []

    def _get_path(self, name: str) -> RemotePath:
        return self.folder if self._single else self.folder / name

    def create_file(self, name: str, lengths: Sequence[int]) -> FileUpload:
        """Start the multipart upload of a file, and return the upload.

        Args:
            name: Path of the file, relative to the folder.
            lengths: Size of each piece of the file in bytes.
        """
        upload = FileUpload(self._get_path(name), sum(lengths))
        self._uploads.append(upload)
        return upload

    def sync(self) -> None:
        """Do nothing, because every part that a store acknowledges is already durable."""

    def complete_files(self) -> None:
        """Complete all uploads, so that their objects become visible.

        Uploads are completed in parallel, because each one waits for a response from the store.
        """
        with ThreadPoolExecutor(self.num_threads) as pool:
            for _ in pool.map(FileUpload.close, self._uploads):
                pass
        self._uploads.clear()

    def abort_uploads(self) -> None:
        """Abort the uploads that have not been completed, if the store is reachable."""
        for upload in self._uploads:
            upload.abort_upload()
        self._uploads.clear()


class StoreOutput(StoreUploads):
    """Output folder or object in an object store.

    The constructor aborts uploads left over from a killed conversion to the same output. Until
    `complete_files` is called, the uploaded objects are not visible, and the objects in the store
    do not change. `complete_files` makes the new objects visible, and `publish_folder` then marks
    the output as complete. If the conversion fails before `publish_folder`, `abort_uploads` removes
    the new objects. See `FolderOutput` for the other methods.

    Args:
        folder: URL of the folder, or of the only object if `single` is True.
        overwrite: Whether an existing output may be replaced.
        names: Names of all objects that will be written.
        facts: Additional fields of the completion marker.
        single: Whether `folder` is the URL of the only object. A single object needs no marker,
            because it appears atomically.
        shared: Whether other processes upload to the same folder. They must start their uploads
            after this object is created, because the constructor may abort all open uploads to the
            folder.
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
        self._planned_names = sorted(names)
        self._facts = dict(facts)
        self._objects_at_start = self._list_present_objects()
        self._marker_token = ""
        self._undo_commit: Callable[[], object] = bool  # does nothing when it is called
        abort_open_uploads(folder, recursive=False)

    def _list_present_objects(self) -> dict[str, ListedFile]:
        """Return the size and version of each object in the output, keyed by name.

        If the output is a single object and not a folder, the name of this object is `""`.
        """
        if not self._single:
            return list_content_objects(self.folder)
        with suppress(FileNotFoundError):
            return {"": self.folder.fetch_status()}
        return {}

    def complete_files(self) -> None:
        """Replace the old objects in the output with the uploaded objects.

        A folder is replaced in three steps:

        1. The folder is marked as incomplete. The marker remains until `publish_folder` is called.
        2. Old objects that will not be overwritten are deleted.
        3. The uploads are completed, so the new objects become visible.

        A single object needs no marker, because it is replaced atomically.

        Raises:
            CheckpointError: If objects were created or changed by another process after the output
                was opened.
            CommandError: If another process has created the output, and it may not be overwritten.
        """
        self.folder.clear_listings()
        there = self._list_present_objects()
        if not self._overwrite and (there or self.folder.exists()):
            raise CommandError(
                f"{self.folder}: was created by another process during the conversion, and was not replaced; "
                "choose another folder"
            )
        for name, object_ in there.items():
            if self._objects_at_start.get(name) != object_:  # it changed after --overwrite was checked
                raise CheckpointError(
                    f"{to_printable(self._get_path(name))}: was created or changed by another process "
                    f"during the conversion of {self.folder}, and was not replaced; choose another folder"
                )
        if not self._single:
            self._undo_commit = bool if there else self._remove_written_objects
            objects = {**there, **dict.fromkeys(self._planned_names)}
            self._marker_token = mark_folder_incomplete(self.folder, facts=self._facts, objects=objects)
            # Do not delete objects that this output will overwrite, because its config.json may be copied
            # from this folder.
            self.folder.remove_objects([name for name in there if name not in self._planned_names])
            self._undo_commit = self._remove_written_objects
        super().complete_files()
        if self._single:  # up to this point, an old object is unchanged
            self._undo_commit = self.folder.unlink

    def _remove_written_objects(self) -> None:
        """Delete all objects with names that this output writes, and the markers of the folder.

        This includes old objects that have not been overwritten yet. The markers are objects that show
        whether the folder is complete. If other processes upload to the same folder, the marker of an
        incomplete folder is kept, because another process may still complete an upload.
        """
        self.folder.remove_objects([COMPLETE_MARKER, *self._planned_names])
        if not self._shared:  # otherwise another process may still complete an upload
            self.folder.remove_objects([INCOMPLETE_MARKER])

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Check the sizes of objects that several processes have written.

        Args:
            sizes: Expected size of each object in bytes, keyed by name.

        Raises:
            CheckpointError: If an object is missing or has a different size.
        """
        self.folder.clear_listings()
        there = list_content_objects(self.folder)
        for name, size in sizes.items():
            check_written_size(self.folder / name, size, there[name].size_bytes if name in there else None)

    def write_small_file(self, name: str, data: bytes) -> None:
        """Write a small object.

        Args:
            name: Path of the object, relative to the folder.
            data: Content of the object.
        """
        (self.folder / name).write_bytes(data)

    def copy_small_file(self, path: AnyPath, name: str) -> None:
        """Copy a small file to an object in the output.

        Args:
            path: Path or URL of the file to copy.
            name: Path of the object, relative to the folder.
        """
        copy_file(path, self.folder / name)

    def publish_folder(self) -> None:
        """Write the completion marker, which makes the output complete.

        Before that, uploads to the folder that are still open may be aborted. Therefore, all
        processes must have completed their uploads.

        An output that is a single object has no marker. In this case, this method only prevents
        `abort_uploads` from removing the object.

        Raises:
            RemoteError: If another process has begun to write to the same folder.
        """
        if not self._single:
            # If the response to the start of an upload was lost, the upload remains open, but this
            # process has no ID to abort it.
            abort_open_uploads(self.folder, recursive=False)
            there = list_content_objects(self.folder)
            objects = {name: there[name] for name in self._planned_names if name in there}
            mark_folder_complete(self.folder, self._marker_token, facts=self._facts, objects=objects)
        self._undo_commit = bool

    def abort_uploads(self) -> None:
        """Abort the uploads and remove unpublished objects, if the store is reachable."""
        super().abort_uploads()
        with suppress(CheckpointError):  # objects that remain are marked as incomplete
            self._undo_commit()


class FileUpload:
    """Multipart upload of a file, which several threads write piece by piece.

    The threads prepare pieces in parallel, but the pieces must be uploaded in order. When a thread
    has completed a piece, it waits until all earlier pieces have been uploaded, and keeps its piece
    in memory until then. Therefore, at most one piece per thread is in memory.

    Args:
        path: URL of the object.
        nbytes: Expected size of the object in bytes, which determines the part size of the upload.

    Attributes:
        path: URL of the object.
        next_piece: Index of the piece to append next.
        piece_turn: Condition that is notified when `next_piece` changes.
    """

    def __init__(self, path: RemotePath, nbytes: int) -> None:
        self.path = path
        self.next_piece = 0
        self.piece_turn = threading.Condition()
        self._part_bytes = compute_part_bytes(nbytes)
        self._written = 0
        options = {"buffer_size": self._part_bytes, "max_concurrency": get_max_connections()}
        self._writer = self._call_store(lambda obs, store: obs.open_writer(store, path.key, **options))

    def _call_store(self, call: Callable[[Any, Any], Any]) -> Any:
        return self.path.call_store("upload", call)

    def write(self, data: memoryview | bytes | bytearray) -> None:
        """Append data to the upload.

        Args:
            data: Bytes to append. They are copied, because obstore's writer keeps a reference to its
                argument.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._part_bytes):
            part = bytes(view[start : start + self._part_bytes])
            self._call_store(lambda *_, part=part: self._writer.write(part))
        self._written += len(view)

    def close(self) -> None:
        """Complete the upload, so that the object becomes visible.

        Raises:
            LostUploadError: If another process has aborted the upload.
        """
        with self.path.tolerate_lost_upload_response(self._written):
            self._call_store(lambda *_: self._writer.close())

    def abort_upload(self) -> None:
        """Abort the upload, so that the store discards the uploaded parts. Errors are ignored.

        If the store is unreachable, the uploaded parts may remain in it, but they never become a
        visible object.
        """
        try:
            self._writer.__exit__(RuntimeError, RuntimeError("discarded"), None)
        except Exception as error:  # the error that caused the abort is more important
            _log.debug("%s: an upload was not discarded: %s", self.path, redact_credentials(str(error)))

    def get_piece(self, index: int) -> PieceUpload:
        """Return the piece with this index."""
        return PieceUpload(self, index)


class PieceUpload:
    """Piece of a file in an object store, written by one thread.

    See `FileUpload` for the order of the uploads.

    Args:
        file: Upload that contains the piece.
        number: Index of the piece, from 0.
    """

    def __init__(self, file: FileUpload, number: int) -> None:
        self._file = file
        self._number = number
        self._pending_bytes = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        """Append data to the upload if all earlier pieces are complete, or else keep it in memory.

        Data that was kept in memory is appended first.
        """
        if self._file.next_piece != self._number:
            self._pending_bytes += data
            return
        pending, self._pending_bytes = self._pending_bytes, bytearray()
        self._file.write(pending)
        self._file.write(data)

    def copy(self, span: FileSpan, progress: Callable[[int], object]) -> bool:
        """Return False, because an object store cannot copy a span from another file."""
        return False

    def finish(self, progress: Callable[[int], object]) -> None:
        """Wait until all earlier pieces have been uploaded, and complete this piece.

        Uploads the data of this piece that is still in memory, and then lets the next piece be
        uploaded.

        Args:
            progress: Progress function. It is called repeatedly with 0 while waiting, so that it
                can raise an exception if another job has failed.
        """
        file = self._file
        with file.piece_turn:
            while not file.piece_turn.wait_for(lambda: file.next_piece == self._number, timeout=0.2):
                progress(0)  # raises if another job has failed
        self.write(b"")
        with file.piece_turn:
            file.next_piece += 1
            file.piece_turn.notify_all()
