"""Paths in object stores: `s3://bucket/run`, `gs://bucket/run`, and other URLs that fsspec can write to.

    if is_url(text):
        run = RemotePath.of(text)            # RemoteError: unknown protocol, package missing, ...
        run.is_dir(); run.iterdir(); (run / "a" / "b.json").read_text()

A `RemotePath` has the reading methods of `pathlib.Path`: `name`, `suffix`, `stem`, `parent`, `parts`, `/`,
`with_name`, `exists`, `is_file`, `is_dir`, `iterdir`, `stat().st_size`, `open("rb")`, `read_bytes`,
`read_text`, `str()`. Never make a `Path` of a URL: it collapses the two slashes.

More for reading:
    path.read_range(start, stop)             the bytes [start, stop) of an object, and nothing else
    path.download(local)                     the object into a local file, in pieces
    path.objects(), path.glob()              the objects below, or that match a pattern: sizes and versions
    path.object()                            the object itself, as it is now
    path.refresh()                           drop cached listings. They are cached as long as the paths that
                                             come from one `RemotePath.of` live; writes through these paths
                                             update the cache, writes by others do not

Writing: an object appears whole or not at all; folders need not be made.
    path.write_bytes(data)                   a small object; replaces an existing one
    path.upload_file(local)                  a local file, in parts, in little memory
    with path.create() as file:              a binary stream of any length, uploaded in parts; the object
        file.write(data)                     appears at the end, and not after an exception. `write` takes
                                             any buffer, so `torch.save(state, file)` works
    path.upload(nbytes)                      the parts themselves, from several threads: see `Upload`
    path.move_to(other)                      rename one object within the store
    path.unlink(missing_ok=...)              delete one object
    path.remove(names)                       delete objects below
    path.abort_uploads()                     abort uploads that a killed process left open

A folder of several objects (a step, a converted model) is made whole by the markers of
`converters.storage.completion_markers`:
    token = begin(folder)                    one process, before anything is written
    ...                                      every host writes its own objects; then a barrier
    complete(folder, token)                  the same process, last
    is_complete(folder), is_unfinished(folder)

Every request is retried after transient failures, up to `PORTABLE_STORAGE_ATTEMPTS` attempts with growing
random waits, and times out after `PORTABLE_STORAGE_TIMEOUT` seconds of silence. Failures raise `RemoteError`
(a `CheckpointError`: one line that names the URL without credentials) or its subclasses `AccessDeniedError`
and `RetriesUsedUpError`; a missing object raises `FileNotFoundError`. Credentials and endpoints come from
where the store's own tools look (`AWS_PROFILE`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`,
fsspec's configuration, ...), never from the URL. Thread-safe, and safe after a fork.
"""

from __future__ import annotations

import io
import logging
import os
import re
import stat
import threading
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from converters.storage.retries import timeout, with_retries
from converters.storage.store_errors import RemoteError, redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

_log = logging.getLogger(__name__)

_URL = re.compile(r"[a-z][a-z0-9+.:-]*://", re.IGNORECASE)
# The package for a protocol, and the extra of this project that installs it.
_PACKAGES = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}
_REFUSED = {
    "memory": "exists in one process only",
    "http": "can be neither listed nor written",
    "https": "can be neither listed nor written",
    **dict.fromkeys(("ftp", "sftp", "ssh", "smb"), "is no object store"),
}
_S3 = ("s3", "s3a")
_LOCAL = ("file", "local")
# Other names of the same stores.
_ALIASES = {"s3a": "s3", "gcs": "gs", "local": "file", "az": "abfs", "abfss": "abfs"}

# The fields that change with an object's content, the most reliable first.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
)

# Bytes of one part of an upload; S3 takes 10,000 parts of at least 5 MiB.
PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
_CONNECTIONS = 32


def is_url(text: object) -> bool:
    """Whether `text` is a URL (`s3://bucket/run`) rather than a path."""
    return isinstance(text, str) and _URL.match(text) is not None


class Status(NamedTuple):
    """The result of `RemotePath.stat`, with the names of `os.stat_result`."""

    st_mode: int
    st_size: int


class Object(NamedTuple):
    """An object as it is listed.

    Attributes:
        size: in bytes.
        version: changes with the content: the store's ETag, generation or modification time.
    """

    size: int
    version: str


class _Entry(NamedTuple):
    is_dir: bool
    size: int


class _Store:
    """The file system behind some paths, and its cached listings."""

    def __init__(self, protocol: str, fs: Any, root: str) -> None:
        self.protocol = protocol
        self.fs = fs
        self.root = root
        self.folders: dict[str, dict[str, _Entry] | None] = {}
        self.infos: dict[str, _Entry | None] = {}

    def forget(self, key: str) -> None:
        """Drop the cached listings of every folder on the way to an object that was written or deleted."""
        for cached in (self.folders, self.infos):
            for path in [path for path in cached if key == path or key.startswith(path + "/")]:
                cached.pop(path, None)

    def listing(self, key: str, where: str) -> dict[str, _Entry] | None:
        """The folder's entries by name, None where there is no such folder."""
        if key not in self.folders:
            try:
                found = with_retries(where, "list", lambda: self.fs.ls(key, detail=True))
            except FileNotFoundError:
                found = []
            entries = {}
            for entry in found:
                name = str(entry["name"]).rstrip("/")
                if name.startswith(key.rstrip("/") + "/"):  # some stores list the folder itself
                    is_dir = entry["type"] == "directory"
                    entries[name.rpartition("/")[2]] = _Entry(is_dir, int(entry.get("size") or 0))
            _log.debug("%s: listed, %d entries", where, len(entries))
            self.folders[key] = entries or None
        return self.folders[key]

    def info(self, key: str, where: str) -> _Entry | None:
        """Kind and size of `key`, None where it does not exist."""
        parent, _, name = key.rpartition("/")
        if self.folders.get(key):
            return _Entry(True, 0)
        if parent in self.folders or parent == self.root or parent.startswith(self.root + "/"):
            return (self.listing(parent, where.rpartition("/")[0]) or {}).get(name)
        if key not in self.infos:
            try:
                found = with_retries(where, "look up", lambda: self.fs.info(key))
            except FileNotFoundError:
                self.infos[key] = None
            else:
                self.infos[key] = _Entry(found["type"] == "directory", int(found.get("size") or 0))
        return self.infos[key]


class RemotePath:
    """An object, or the folder of all objects whose keys begin with this key and a slash."""

    __slots__ = ("_key", "_store")

    def __init__(self, store: _Store, key: str) -> None:
        self._store = store
        self._key = key

    @classmethod
    def of(cls, url: str) -> RemotePath:
        """The path of a URL.

        Raises:
            RemoteError: the URL is malformed, or holds credentials or a query; its protocol is unknown or not
                supported, or needs a package that is not installed.
        """
        protocol, found, rest = url.partition("://")
        protocol = protocol.lower()
        if not found or not _URL.match(url):
            raise RemoteError(f"{redact(url)}: not a URL")
        if "@" in rest.partition("/")[0]:
            raise RemoteError(
                f"{redact(url)}: credentials do not belong in a URL; set them up as for the store's own tools"
            )
        if "?" in rest:
            raise RemoteError(f"{redact(url)}: a signed URL cannot name a folder; leave out the query")
        if "::" in protocol:
            raise RemoteError(f"{redact(url)}: chained protocols are not supported")
        if protocol in _REFUSED:
            raise RemoteError(
                f"{redact(url)}: {protocol}:// {_REFUSED[protocol]}; use s3://, gs:// or a folder"
            )
        if {".", ".."} & set(rest.split("/")):
            raise RemoteError(f"{redact(url)}: . and .. are not supported in a URL; write the full path")
        fs = _filesystem(protocol, url)
        key = str(fs._strip_protocol(url)).rstrip("/")
        if not key:
            raise RemoteError(f"{redact(url)}: names no bucket; write s3://bucket/path")
        return cls(_Store(protocol, fs, key), key)

    def __str__(self) -> str:
        return f"{self._store.protocol}://{self._key}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> str:
        """The URL with one protocol name per store, for comparing."""
        protocol = self._store.protocol
        return f"{_ALIASES.get(protocol, protocol)}://{self._key}"

    @property
    def local(self) -> Path | None:
        """The local path of a `file://` URL."""
        from pathlib import Path

        return Path("/", self._key) if self._store.protocol in _LOCAL else None

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._store, "/".join([self._key, *PurePosixPath(name).parts]))

    @property
    def name(self) -> str:
        return self._key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self._key).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self._key).stem

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._key.split("/"))

    @property
    def parent(self) -> RemotePath:
        """The folder above; the parent of a bucket is the bucket."""
        above = self._key.rpartition("/")[0]
        return RemotePath(self._store, above) if above else self

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def absolute(self) -> RemotePath:
        return self

    resolve = absolute

    def is_relative_to(self, other: object) -> bool:
        """Whether this is `other` or below it."""
        return isinstance(other, RemotePath) and f"{self._identity}/".startswith(f"{other._identity}/")

    def _info(self) -> _Entry | None:
        return self._store.info(self._key, str(self))

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        found = self._info()
        return found is not None and not found.is_dir

    def is_dir(self) -> bool:
        found = self._info()
        return found is not None and found.is_dir

    def iterdir(self) -> Iterator[RemotePath]:
        """The objects and folders directly below; FileNotFoundError where there are none."""
        found = self._store.listing(self._key, str(self))
        if found is None:
            raise FileNotFoundError(2, "no such folder", str(self))
        return iter([self / name for name in found])

    def stat(self) -> Status:
        """Kind and size; FileNotFoundError where nothing exists."""
        found = self._info()
        if found is None:
            raise FileNotFoundError(2, "no such object", str(self))
        return Status(stat.S_IFDIR if found.is_dir else stat.S_IFREG, found.size)

    def files(self) -> dict[str, int]:
        """Every object below, at any depth: name relative to this folder -> bytes. Never cached."""
        return {name: found.size for name, found in self.objects().items()}

    def objects(self) -> dict[str, Object]:
        """Like `files`, with versions; if this path is itself an object, it is included under the name ''."""
        found = with_retries(str(self), "list", lambda: self._store.fs.find(self._key, detail=True))
        below = self._key + "/"
        objects = {
            str(name)[len(below) :]: _object(entry)
            for name, entry in found.items()
            if str(name).startswith(below) and not str(name).endswith("/")
        }
        if not objects and self.is_file():
            objects[""] = _object(with_retries(str(self), "look up", lambda: self._store.fs.info(self._key)))
        return objects

    def object(self) -> Object:
        """The object as it is now. Never cached.

        Raises:
            FileNotFoundError: there is none.
        """
        return _object(with_retries(str(self), "look up", lambda: self._store.fs.info(self._key)))

    def glob(self) -> dict[RemotePath, Object]:
        """The objects that match this path as a pattern: `*` and `[...]` within a name, `**` for any folders.

        Without these, the object itself, if it exists.
        """
        found = with_retries(str(self), "list", lambda: self._store.fs.glob(self._key, detail=True))
        return {
            RemotePath(self._store, name): _object(entry)
            for name, entry in found.items()
            if entry["type"] == "file"
        }

    def refresh(self) -> None:
        """Drop the cached listings of all paths that come from the same `RemotePath.of`."""
        self._store.folders.clear()
        self._store.infos.clear()

    def read_bytes(self) -> bytes:
        """The whole of a small object."""

        def read() -> bytes:
            return bytes(self._store.fs.cat_file(self._key))

        return with_retries(str(self), "read", read)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb") -> io.BytesIO:
        """A small object as a stream, for reading; see also `read_range` and `create`."""
        if mode != "rb":
            raise ValueError(f"mode {mode!r}")
        return io.BytesIO(self.read_bytes())

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop); fewer where the object ends before `stop`."""

        def read() -> bytes:
            return bytes(self._store.fs.cat_file(self._key, start=start, end=stop))

        _log.debug("%s: reading bytes %d to %d", self, start, stop)
        return with_retries(str(self), "read", read) if stop > start else b""

    def download(self, local: Path) -> None:
        """Copy the object into a new local file, in pieces of `PART_BYTES`."""
        size = self.stat().st_size
        with local.open("wb") as file:
            for start in range(0, size, PART_BYTES):
                file.write(self.read_range(start, min(size, start + PART_BYTES)))

    def copy_to(self, other: RemotePath) -> None:
        """Copy the object to another path, in pieces of `PART_BYTES`."""
        size = self.stat().st_size
        with other.create() as out:
            for start in range(0, size, PART_BYTES):
                out.write(self.read_range(start, min(size, start + PART_BYTES)))

    def move_to(self, other: RemotePath) -> None:
        """Rename the object within its store, which copies and then deletes it."""
        with_retries(str(self), "copy", lambda: self._store.fs.cp_file(self._key, other._key))
        self._store.forget(other._key)
        self.unlink(missing_ok=True)

    def write_bytes(self, data: bytes) -> int:
        """Write a small object in one request, replacing an existing one."""
        with_retries(str(self), "write", lambda: self._store.fs.pipe_file(self._key, data))
        _log.debug("%s: wrote %d bytes", self, len(data))
        self._store.forget(self._key)
        return len(data)

    def upload(self, nbytes: int) -> Upload:
        """A multipart upload of about `nbytes`; several threads may send parts."""
        part_bytes = max(PART_BYTES, -(-nbytes // _MAX_PARTS))
        kind = _S3Upload if self._store.protocol in _S3 else _StreamUpload
        return kind(self, part_bytes)

    def create(self) -> UploadStream:
        """A stream whose bytes become the object on `close`; after an exception in `with` none appears."""
        return UploadStream(self)

    def upload_file(self, local: Path) -> None:
        """Copy a local file here, in parts."""
        with local.open("rb") as file, self.create() as out:
            while block := file.read(PART_BYTES):
                out.write(block)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete one object."""
        try:
            with_retries(str(self), "delete", lambda: self._store.fs.rm_file(self._key))
        except FileNotFoundError:
            if not missing_ok:
                raise
        self._store.forget(self._key)

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects below, by their names relative to this folder; those already gone are ignored."""
        keys = [f"{self._key}/{name}" for name in names]
        with suppress(FileNotFoundError):  # another process may delete them too
            if keys:
                with_retries(str(self), "delete", lambda: self._store.fs.rm(keys))

    def remove_folders(self) -> None:
        """Delete what `remove` leaves on stores that have real folders, and forget what was listed."""
        with suppress(FileNotFoundError):
            with_retries(str(self), "delete", lambda: self._store.fs.rm(self._key, recursive=True))
        self.refresh()

    def abort_uploads(self, *, deep: bool = True) -> int:
        """Abort the open uploads below, which a killed process leaves behind.

        Args:
            deep: also those in folders below; else only those directly in this folder.

        Returns:
            How many there were; 0 where the store cannot list them (Google's expire after a week).
        """
        if self._store.protocol not in _S3:
            return 0
        bucket, _, key = self._key.partition("/")
        count = 0
        where: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{key}/" if key else ""}

        def listed() -> Any:
            return self._store.fs.call_s3("list_multipart_uploads", **where)

        while True:
            page = with_retries(str(self), "list uploads", listed)
            for upload in page.get("Uploads", []):
                if not deep and "/" in upload["Key"][len(where["Prefix"]) :]:
                    continue
                _abort(self, bucket, upload["Key"], upload["UploadId"])
                count += 1
            if not page.get("IsTruncated"):
                return count
            where |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _object(entry: dict[str, Any]) -> Object:
    known = (entry[key] for key in _VERSION_KEYS if entry.get(key) is not None)
    return Object(int(entry.get("size") or 0), str(next(known, "")).strip('"'))


class Upload(Protocol):
    """An object being uploaded. Every part has `part_bytes`, the last one up to twice that.

    Attributes:
        ordered: whether the parts must be sent in order; else in any order, from any thread.
    """

    part_bytes: int
    ordered: bool

    def part(self, number: int, data: bytes | memoryview) -> None:
        """Send part `number`, from 1. Numbers order the parts and may have gaps."""
        ...

    def commit(self) -> None:
        """Make the object from the parts."""
        ...

    def discard(self) -> None:
        """Abort the upload; leaves nothing behind if the store is reachable. Never raises."""
        ...


class _S3Upload:
    """An S3 multipart upload."""

    ordered = False

    def __init__(self, path: RemotePath, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self._path = path
        self._bucket, _, self._name = path._key.partition("/")
        self._lock = threading.Lock()
        self._id = ""
        self._tags: dict[int, str] = {}
        self._nbytes = 0

    def _call(self, method: str, what: str, **arguments: Any) -> Any:
        fs = self._path._store.fs
        return with_retries(
            str(self._path),
            what,
            lambda: fs.call_s3(method, Bucket=self._bucket, Key=self._name, **arguments),
        )

    def part(self, number: int, data: bytes | memoryview) -> None:
        with self._lock:
            if not self._id:
                self._id = self._call("create_multipart_upload", "start an upload")["UploadId"]
        body = bytes(data)
        sent = self._call("upload_part", "upload", UploadId=self._id, PartNumber=number, Body=body)
        with self._lock:
            self._tags[number] = sent["ETag"]
            self._nbytes += len(body)
        _log.debug("%s: part %d, %d bytes", self._path, number, len(body))

    def commit(self) -> None:
        parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in sorted(self._tags)]
        try:
            self._call(
                "complete_multipart_upload",
                "complete the upload",
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:
            # Aborted by another process, or completed by an attempt whose response was lost.
            self._path._store.forget(self._path._key)
            if self._path._store.fs.exists(self._path._key) and self._size() == self._nbytes:
                return
            raise RemoteError(
                f"{self._path}: another process aborted the upload; give each run an output of its own"
            ) from None
        finally:
            self._path._store.forget(self._path._key)
        self._id = ""

    def _size(self) -> int:
        found = with_retries(str(self._path), "look up", lambda: self._path._store.fs.info(self._path._key))
        return int(found["size"])

    def discard(self) -> None:
        if self._id:
            _abort(self._path, self._bucket, self._name, self._id)
            self._id = ""


def _abort(path: RemotePath, bucket: str, key: str, upload: str) -> None:
    """Abort one multipart upload; on failure it is left to the bucket's lifecycle rules."""
    fs = path._store.fs
    try:
        with_retries(
            str(path),
            "abort an upload",
            lambda: fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload),
        )
    except (RemoteError, FileNotFoundError) as error:
        _log.debug("%s: an upload of %s was not aborted: %s", path, key, error)


class _StreamUpload:
    """An upload through the protocol package's own file object and its own retries."""

    ordered = True

    def __init__(self, path: RemotePath, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self._path = path
        self._file: Any = None

    def _do(self, call: Any) -> None:
        # Not retried: the file has advanced, and its package has retried already.
        try:
            call()
        except OSError as error:
            raise RemoteError(f"{self._path}: cannot upload: {redact(str(error))}") from None

    def part(self, number: int, data: bytes | memoryview) -> None:
        if self._file is None:
            self._file = with_retries(
                str(self._path),
                "start an upload",
                lambda: self._path._store.fs.open(
                    self._path._key, "wb", autocommit=False, block_size=self.part_bytes
                ),
            )
        self._do(lambda: self._file.write(data))

    def commit(self) -> None:
        if self._file is None:
            self.part(1, b"")
        self._do(self._file.close)
        self._do(self._file.commit)
        self._file = None
        self._path._store.forget(self._path._key)

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.discard()
            except Exception as error:  # the failure that led here matters more
                _log.debug("%s: an upload was not discarded: %s", self._path, redact(str(error)))


class UploadStream(io.RawIOBase):
    """A stream uploaded in parts; `close` makes the object, an exception within `with` discards it."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._path = path
        self._upload = path.upload(0)
        self._buffer = bytearray()
        self._parts = 0
        self._position = 0
        self._discarded = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        if self.closed or self._discarded:
            raise ValueError("the upload is closed")
        view = memoryview(data).cast("B")
        limit = self._part_bytes()
        for start in range(0, len(view), limit):
            self._buffer += view[start : start + limit]
            if len(self._buffer) >= limit:
                self._send()
        self._position += len(view)
        return len(view)

    def _part_bytes(self) -> int:
        # Parts grow with their number, so that the largest object fits into the 10,000 parts of S3.
        return self._upload.part_bytes << min(8, self._parts // 1000)

    def _send(self) -> None:
        self._parts += 1
        data, self._buffer = self._buffer, bytearray()
        self._upload.part(self._parts, memoryview(data))

    def discard(self) -> None:
        """Abort the upload; no object appears."""
        if not self.closed:
            self._discarded = True
            self._upload.discard()
            super().close()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if not self._parts:
                self._path.write_bytes(bytes(self._buffer))
            else:
                if self._buffer:
                    self._send()
                self._upload.commit()
        except BaseException:
            self._discarded = True
            self._upload.discard()
            raise
        finally:
            super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # Never closed: the writer failed, so make no object.
        self.discard()


_filesystems: dict[Any, Any] = {}
_filesystems_lock = threading.Lock()


def _filesystem(protocol: str, url: str) -> Any:
    """The fsspec file system of a protocol: one per process and environment."""
    seconds = timeout()
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "FSSPEC_"))))
    key = (os.getpid(), protocol, seconds, settings)
    with _filesystems_lock:
        if key not in _filesystems:
            _filesystems[key] = _make_filesystem(protocol, url, seconds)
        return _filesystems[key]


def _make_filesystem(protocol: str, url: str, seconds: float) -> Any:
    import fsspec  # not at the top: slow to import
    from fsspec.config import conf

    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in _S3:
        options["max_concurrency"] = 1  # per read: more would request the size first
        options["config_kwargs"] = {
            "connect_timeout": min(seconds, 10.0),
            "read_timeout": seconds,
            "max_pool_connections": _CONNECTIONS,
            **conf.get(protocol, {}).get("config_kwargs", {}),
            "retries": {"mode": "standard", "total_max_attempts": 1},  # `with_retries` retries
        }
    if protocol in _LOCAL:
        options["auto_mkdir"] = True
    try:
        fs = fsspec.filesystem(protocol, **options)
    except ImportError as error:
        package, extra = _PACKAGES.get(protocol, ("", ""))
        if not package:
            raise RemoteError(f"{redact(url)}: {redact(str(error))}") from None
        raise RemoteError(
            f"{redact(url)}: the package {package} is not installed: pip install 'portable-trainer[{extra}]'"
        ) from None
    except ValueError:
        raise RemoteError(
            f"{redact(url)}: fsspec knows no protocol {protocol}://; use s3://, gs:// or a folder"
        ) from None
    except Exception as error:  # some packages look for credentials on construction
        raise RemoteError(f"{redact(url)}: cannot be set up: {redact(str(error))}") from None
    if protocol in _S3:
        fs.retries = 1
    return fs
