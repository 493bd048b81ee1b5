"""Paths in object stores: `s3://bucket/run`, `gs://bucket/run`, `az://container/run`, by way of obstore.

    if is_url(text):
        run = RemotePath.of(text)            # RemoteError: unknown protocol, no bucket, ...
        run.is_dir(); run.iterdir(); (run / "a" / "b.json").read_text()

A `RemotePath` has the reading methods of `pathlib.Path`: `name`, `suffix`, `stem`, `parent`, `parts`, `/`,
`with_name`, `exists`, `is_file`, `is_dir`, `iterdir`, `stat().st_size`, `open("rb")`, `read_bytes`,
`read_text`, `str()`. Never make a `Path` of a URL: it collapses the two slashes. What a folder of a disk can
do as well is in `converters.storage.places`. Listings are cached as long as the paths live that come from one
`RemotePath.of`; writes through these paths update the cache, `refresh` drops it.

Writing: an object appears whole or not at all; folders need not be made. A folder of several objects (a step,
a converted model) is made whole by the markers of `converters.storage.completion_markers`.

obstore repeats every request after a failure that may pass, for `PORTABLE_STORAGE_MINUTES` minutes; one times
out after `PORTABLE_STORAGE_TIMEOUT` seconds of silence. Failures raise `RemoteError` (a `CheckpointError`:
one line that names the URL without credentials) or its subclasses; a missing object raises
`FileNotFoundError`. Names of objects are untrusted: `checked` refuses those that could leave a folder when
they are copied to a disk. Thread-safe; a process forked from one that has used a store must not use one.
"""

from __future__ import annotations

import fnmatch
import io
import logging
import os
import re
import stat
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import methodcaller
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from converters.errors import CheckpointError, printable, redact
from converters.storage.credentials import LOOKED_FOR, OPTIONS
from converters.storage.listed import Object
from converters.storage.store_errors import LostUploadError, RemoteError, broke_off, reason_of, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

T = TypeVar("T")

_log = logging.getLogger(__name__)

FIRST_WAIT, _LONGEST_WAIT = 0.1, 15.0  # seconds between two attempts

# Other names of the same stores.
_PROTOCOLS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_REFUSED = {
    "hf": "cannot be listed; name the data set without it (owner/name)",
    "http": "can be neither listed nor written",
    "https": "can be neither listed nor written",
}
_AZURE_HOST = re.compile(r"[\w-]+@\w+\.(dfs|blob)\.(core\.windows\.net|fabric\.microsoft\.com)")
_MAGIC = re.compile(r"[*?[]")

# Bytes of one part of an upload; S3 takes 10,000 parts of at least 5 MiB, and copies up to 5 GiB at once.
PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
_MAX_COPY = 5 << 30


def timeout() -> float:
    """Seconds without a response after which a request fails (`PORTABLE_STORAGE_TIMEOUT`, default 60)."""
    return max(0.1, _setting("PORTABLE_STORAGE_TIMEOUT", 60))


def connections() -> int:
    """Parts that a conversion reads and sends at a time (`PORTABLE_STORAGE_CONNECTIONS`, default 4)."""
    return max(1, int(_setting("PORTABLE_STORAGE_CONNECTIONS", 4)))


def patience() -> float:
    """Seconds for which a request is repeated (`PORTABLE_STORAGE_MINUTES`, default 3)."""
    if "PORTABLE_STORAGE_ATTEMPTS" in os.environ:
        raise RemoteError(
            "PORTABLE_STORAGE_ATTEMPTS: requests are limited by time now; set PORTABLE_STORAGE_MINUTES"
        )
    return max(0.0, 60 * _setting("PORTABLE_STORAGE_MINUTES", 3))


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise RemoteError(f"{name}: {text!r} is not a number") from None


def checked(name: str, where: object) -> str:
    """The name of an object, relative to a folder, that can be trusted as a relative path on a disk.

    Raises:
        RemoteError: it has `..`, `.`, an empty part, a leading slash, a backslash or a control character.
    """
    odd = {"", ".", ".."} & set(name.split("/")) or "\\" in name or any(c < " " or c == "\x7f" for c in name)
    if odd:
        raise RemoteError(
            f"{redact(str(where))}: the object name {printable(ascii(name))} is refused: it could lead out "
            "of a folder; rename that object or delete it"
        )
    return name


class Status(NamedTuple):
    """The result of `RemotePath.stat`, with the names of `os.stat_result`."""

    st_mode: int
    st_size: int


_FOLDER = Status(stat.S_IFDIR, 0)

_stores: dict[Any, Any] = {}
_lock = threading.Lock()
_used_in = 0  # the process that obstore's threads live in
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR", "HF_", "CLOUDSDK_")


class Bucket:
    """A bucket, opened at its first use in a process, and the cached listings of some paths in it."""

    def __init__(self, protocol: str, name: str, url: str, seconds: float = 1e9) -> None:
        self.protocol = protocol
        self.name = name
        self.seconds = seconds
        self.kind = _PROTOCOLS.get(protocol, protocol)
        self.url = url
        self.folders: dict[str, dict[str, Status]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.protocol, self.name, self.url, self.seconds)

    def store(self) -> Any:
        """The store of obstore; one per process and environment."""
        global _used_in
        seconds = min(self.seconds, patience())
        found = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)))
        key = (self.kind, self.name, seconds, timeout(), found)
        with _lock:
            if _used_in and _used_in != os.getpid():
                raise RemoteError(
                    f"{redact(self.url)}: this process was forked from one that has used an object store; "
                    "start it with spawn or forkserver"
                )
            _used_in = os.getpid()
            if key not in _stores:
                _stores[key] = self._open(seconds)
            return _stores[key]

    def _open(self, seconds: float) -> Any:
        from obstore import store  # not at the top: takes time to import

        first, longest, limit, quiet, connecting = (
            timedelta(seconds=s) for s in (FIRST_WAIT, _LONGEST_WAIT, seconds, timeout(), min(timeout(), 10))
        )
        waits = {"init_backoff": first, "max_backoff": longest, "base": 2}
        retries = {"max_retries": 1 << 20, "retry_timeout": limit, "backoff": waits}
        client: dict[str, Any] = {"connect_timeout": connecting, "read_timeout": quiet}
        # A large object may take long; http is used only where the endpoint is given as http://.
        client |= {"timeout": timedelta(days=1), "allow_http": True}
        try:
            if self.kind == "hf":
                return _hub(self.name, client, retries)
            options = OPTIONS[self.kind](self.name, self.url)
            client |= options.pop("client_options", {})
            kind = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[self.kind]
            return kind(self.name.partition("@")[0], client_options=client, retry_config=retries, **options)
        except CheckpointError:
            raise
        except Exception as error:  # those of obstore, and of the packages that look for credentials
            raise RemoteError(f"{redact(self.url)}: cannot be set up: {reason_of(error)}") from None

    def call(
        self,
        where: object,
        what: str,
        call: Callable[[Any, Any], T],
        again: bool = True,
    ) -> T:
        """`call(obstore, store)` with errors of one line, and so that Ctrl-C is not held up.

        Args:
            where: the URL, for messages.
            what: the operation as a verb, for messages ("read").
            again: whether `call` may be called twice.

        Raises:
            FileNotFoundError: there is no such object.
            RemoteError: any other failure; one line, without credentials.
        """
        import obstore  # not at the top: takes time to import

        ask = partial(call, obstore, self.store())
        deadline = time.monotonic() + min(self.seconds, patience())
        while True:
            try:
                return _interruptible(ask)
            except CheckpointError:
                raise
            except Exception as error:
                _log.debug("%s: %s failed (%s)", where, what, redact(str(error).partition("\n")[0]))
                failure = translated(str(where), what, error, LOOKED_FOR[self.kind])
                # obstore does not repeat a request whose answer, a small XML, broke off.
                if not (again and broke_off(error)) or time.monotonic() > deadline:
                    raise failure from None
            time.sleep(FIRST_WAIT)

    # -- what is asked of obstore; keys are without the bucket -----------------------------------------------

    def below(self, key: str, where: object) -> dict[str, Object]:
        """Every object below a folder, by its key."""
        found = self.call(
            where, "list", lambda obs, store: [m for c in obs.list(store, key or None) for m in c]
        )
        folders = {above for meta in found for above in _folders(str(meta["path"]))}
        # Some tools write an empty object for a folder.
        return {
            str(meta["path"]): object_of(meta)
            for meta in found
            if str(meta["path"]) != key and (meta["size"] or meta["path"] not in folders)
        }

    def entries(self, key: str, where: object) -> tuple[dict[str, Object], list[str]]:
        """The objects directly in a folder by their keys, and the folders."""
        found = self.call(where, "list", lambda obs, store: obs.list_with_delimiter(store, key or None))
        objects = {str(m["path"]): object_of(m) for m in found["objects"] if m["path"] != key}
        return objects, [str(name) for name in found["common_prefixes"]]

    def head(self, key: str, where: object) -> Object:
        """An object as it is now; FileNotFoundError where there is none."""
        return object_of(self.call(where, "look up", lambda obs, store: obs.head(store, key)))

    # -- cached listings -------------------------------------------------------------------------------------

    def forget(self, key: str) -> None:
        """Drop the cached listings of every folder on the way to an object that was written or deleted."""
        for path in list(self.folders):  # which other threads change
            if not path or f"{key}/".startswith(f"{path}/"):
                self.folders.pop(path, None)

    def listing(self, key: str, where: str) -> dict[str, Status]:
        """The folder's entries by name; none where there is no such folder."""
        listed = self.folders.get(key)
        if listed is None:
            skip = len(key) + 1 if key else 0
            objects, folders = self.entries(key, where)
            found = {name: Status(stat.S_IFREG, each.size) for name, each in objects.items()}
            found |= dict.fromkeys(folders, _FOLDER)
            listed = {checked(name[skip:], where): status for name, status in found.items()}
            self.folders[key] = listed
            _log.debug("%s: listed, %d entries", where, len(listed))
        return listed

    def info(self, key: str, where: str, root: str) -> Status | None:
        """An object or folder, None where it does not exist. Nothing above `root` is listed."""
        parent, _, name = key.rpartition("/")
        if key != root and f"{key}/".startswith(f"{root}/" if root else ""):
            return self.listing(parent, where.rpartition("/")[0]).get(name)
        if self.listing(key, where):
            return _FOLDER
        with suppress(FileNotFoundError):
            return Status(stat.S_IFREG, self.head(key, where).size) if key else None
        return None


class RemotePath:
    """An object, or the folder of all objects whose keys begin with this key and a slash."""

    __slots__ = ("_bucket", "_key", "_root")

    def __init__(self, bucket: Bucket, key: str, root: str) -> None:
        self._bucket = bucket
        self._key = key
        self._root = root

    @classmethod
    def of(cls, url: str) -> RemotePath:
        """The path of a URL.

        Raises:
            RemoteError: the URL is malformed, or holds credentials or a query; its protocol is unknown or not
                supported.
        """
        bucket, key = _parsed(url)
        return cls(bucket, key, key)

    @classmethod
    def of_hub(cls, repository: str) -> RemotePath:
        """The files of a repository of the Hugging Face hub, for reading: `datasets/owner/name@revision`."""
        return cls(Bucket("hf", repository, f"hf://{repository}"), "", "")

    def patient(self, seconds: float) -> RemotePath:
        """This path, whose requests are repeated for `seconds` at most; its listings are cached apart."""
        known = self._bucket
        bucket = Bucket(known.protocol, known.name, known.url, seconds)
        return RemotePath(bucket, self._key, self._root)

    def __str__(self) -> str:
        return (
            f"{self._bucket.protocol}://{'/'.join(part for part in (self._bucket.name, self._key) if part)}"
        )

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> str:
        """The URL with one protocol name per store, for comparing."""
        return f"{self._bucket.kind}://{self._bucket.name}/{self._key}"

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def _at(self, key: str) -> RemotePath:
        return RemotePath(self._bucket, key, self._root)

    def __truediv__(self, name: str) -> RemotePath:
        parts = PurePosixPath(name).parts
        checked("/".join(parts), self)
        return self._at("/".join([*([self._key] if self._key else []), *parts]))

    @property
    def name(self) -> str:
        return self._key.rpartition("/")[2] or self._bucket.name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self._key).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self._key).stem

    @property
    def parent(self) -> RemotePath:
        """The folder above; the parent of a bucket is the bucket."""
        return self._at(self._key.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def absolute(self) -> RemotePath:
        return self

    resolve = absolute

    def is_relative_to(self, other: object) -> bool:
        """Whether this is `other` or below it."""
        return isinstance(other, RemotePath) and f"{self._identity}/".startswith(
            f"{other._identity.rstrip('/')}/"
        )

    def _call(self, what: str, call: Callable[[Any, Any], T]) -> T:
        return self._bucket.call(self, what, call)

    def _info(self) -> Status | None:
        return self._bucket.info(self._key, str(self), self._root)

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        return self._info() not in (None, _FOLDER)

    def is_dir(self) -> bool:
        return self._info() == _FOLDER

    def iterdir(self) -> Iterator[RemotePath]:
        """The objects and folders directly below; FileNotFoundError where there are none."""
        found = self._bucket.listing(self._key, str(self))
        if not found:
            raise FileNotFoundError(2, "no such folder", str(self))
        return iter([self / name for name in found])

    def stat(self) -> Status:
        """Kind and size; FileNotFoundError where nothing exists."""
        found = self._info()
        if found is None:
            raise FileNotFoundError(2, "no such object", str(self))
        return found

    def objects(self) -> dict[str, Object]:
        """Every object below, at any depth, by its name relative to this folder. Never cached."""
        found = self._bucket.below(self._key, self)
        skip = len(self._key) + 1 if self._key else 0
        return {checked(name[skip:], self): entry for name, entry in sorted(found.items())}

    def look_up(self) -> Object:
        """The object as it is now, never cached; FileNotFoundError where there is none."""
        return self._bucket.head(self._key, self)

    def refresh(self) -> None:
        """Drop the cached listings of all paths that come from the same `RemotePath.of`."""
        self._bucket.folders.clear()

    def read_bytes(self) -> bytes:
        """The whole of a small object."""
        return self.read_versioned()[0]

    def read_versioned(self) -> tuple[bytes, Any]:
        """The whole of a small object, and what `write_bytes` takes as `replacing`."""

        def read(obs: Any, store: Any) -> tuple[bytes, Any]:
            found = obs.get(store, self._key)
            return bytes(found.bytes()), _tag(found.meta)

        return self._call("read", read)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb") -> io.BytesIO:
        """A small object as a stream, for reading; see also `read_range` and `create`."""
        if mode != "rb":
            raise ValueError(f"mode {mode!r}")
        return io.BytesIO(self.read_bytes())

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop); fewer where the object ends before `stop`."""
        _log.debug("%s: reading bytes %d to %d", self, start, stop)
        call = lambda obs, store: bytes(obs.get_range(store, self._key, start=start, end=stop))  # noqa: E731
        return self._call("read", call) if stop > start else b""

    def download(self, write: Callable[[Any], object]) -> Object:
        """Give the object to `write`, in pieces; what it was."""

        def copy(obs: Any, store: Any) -> Object:
            found = obs.get(store, self._key)
            for block in found.stream(min_chunk_size=PART_BYTES):
                write(block)
            return object_of(found.meta)

        return self._bucket.call(self, "read", copy, again=False)

    def copy_to(self, other: RemotePath) -> None:
        """Copy the object to another path, in any store."""
        with other.create(self.stat().st_size) as out:
            self.download(out.write)

    def move_to(self, other: RemotePath) -> None:
        """Rename the object within its store, which copies and then deletes it."""
        if self.stat().st_size >= _MAX_COPY:
            self.copy_to(other)
        else:
            self._call("copy", lambda obs, store: obs.copy(store, self._key, other._key))
        self._bucket.forget(other._key)
        self.unlink(missing_ok=True)

    def write_bytes(self, data: bytes, *, replacing: Any = None) -> Any:
        """Write a small object in one request, replacing an existing one.

        Args:
            replacing: only write if the object is still the one that this value was returned for; "" for one
                that does not exist.

        Returns:
            What this object is `replacing` for another write.

        Raises:
            ConflictError: another process was first.
            UnconditionalError: the store has no conditional writes.
        """
        options = {"mode": replacing or "create"} if replacing is not None else {"use_multipart": False}
        found = self._call("write", lambda obs, store: obs.put(store, self._key, data, **options))
        _log.debug("%s: wrote %d bytes", self, len(data))
        self._bucket.forget(self._key)
        return _tag(found)

    def create(self, nbytes: int) -> Upload:
        """A stream of about `nbytes` that become the object on `close`; none after an exception in `with`."""
        return Upload(self, max(PART_BYTES, -(-nbytes // _MAX_PARTS)))

    def upload_file(self, local: Path) -> None:
        """Copy a local file here, a large one in parts that are sent side by side."""
        size = local.stat().st_size
        options = {"chunk_size": max(PART_BYTES, -(-size // _MAX_PARTS)), "max_concurrency": connections()}
        try:
            self._call("upload", lambda obs, store: obs.put(store, self._key, local, **options))
        except LostUploadError:
            self._check_arrived(size)
        self._bucket.forget(self._key)

    def _check_arrived(self, size: int) -> None:
        """LostUploadError, unless an upload was completed by a request whose answer was lost."""
        with suppress(FileNotFoundError):
            if self.look_up().size == size:
                return
        raise LostUploadError(
            f"{self}: another process aborted the upload; give each run an output of its own"
        )

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete one object; stores do not tell whether it was there."""
        self.parent.remove([self.name])

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects below, by their names relative to this folder; those already gone are ignored."""
        keys = [(self / name)._key for name in names]
        try:
            if keys:
                self._call("delete", lambda obs, store: obs.delete(store, keys))
        except FileNotFoundError:  # another process deletes them too, and some stores stop there
            for name in names if len(names) > 1 else ():
                self.remove([name])
        for key in keys:
            self._bucket.forget(key)


class Upload:
    """A stream uploaded in parts; `close` makes the object, an exception within `with` discards it.

    `write` takes any buffer, from one thread at a time; parts are sent side by side behind it.
    """

    def __init__(self, path: RemotePath, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self._path = path
        self._writer: Any = None
        self._bytes = 0

    def write(self, data: Any) -> None:
        """Append `data`, which is copied: the writer would keep the buffer itself."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self.part_bytes):
            part = bytes(view[start : start + self.part_bytes])
            self._call(methodcaller("write", part))
        self._bytes += len(view)

    def _call(self, act: Callable[[Any], object]) -> None:
        def call(obs: Any, store: Any) -> None:
            if self._writer is None:
                options = {"buffer_size": self.part_bytes, "max_concurrency": connections()}
                self._writer = obs.open_writer(store, self._path._key, **options)
            act(self._writer)

        self._path._bucket.call(self._path, "upload", call, again=False)

    def close(self) -> None:
        """Make the object."""
        try:
            self._call(methodcaller("close"))
            self._writer = None
        except LostUploadError:
            self._path._check_arrived(self._bytes)
        finally:
            self.discard()
            self._path._bucket.forget(self._path._key)

    def discard(self) -> None:
        """Abort the upload; leaves nothing behind if the store is reachable. Never raises."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.__exit__(RuntimeError, RuntimeError("discarded"), None)
            except Exception as error:  # the failure that led here matters more
                _log.debug("%s: an upload was not discarded: %s", self._path, redact(str(error)))

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def object_of(meta: Any) -> Object:
    """An object as obstore lists it."""
    return Object(
        int(meta["size"]), str(meta.get("e_tag") or meta.get("version") or meta["last_modified"]).strip('"')
    )


def _tag(meta: Any) -> dict[str, str]:
    """What identifies an object's content in a conditional write."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _folders(key: str) -> Iterator[str]:
    """The folders on the way to an object."""
    while key := key.rpartition("/")[0]:
        yield key


def _parsed(url: str) -> tuple[Bucket, str]:
    """The bucket and the key of a URL."""
    protocol, _, rest = url.partition("://")
    protocol = protocol.lower()
    bucket, _, key = rest.partition("/")
    if "@" in bucket and not (protocol in ("abfs", "abfss") and _AZURE_HOST.fullmatch(bucket)):
        raise RemoteError(
            f"{redact(url)}: credentials do not belong in a URL; set them up as for the store's own tools"
        )
    if "?" in rest and not _MAGIC.search(key.partition("?")[0]) and "=" in rest:
        raise RemoteError(f"{redact(url)}: a signed URL cannot name a folder; leave out the query")
    if protocol not in _PROTOCOLS:
        why = _REFUSED.get(protocol, "is no object store that is known here")
        raise RemoteError(f"{redact(url)}: {protocol}:// {why}; use s3://, gs://, az:// or a folder")
    if {".", ".."} & set(rest.split("/")):
        raise RemoteError(f"{redact(url)}: . and .. are not supported in a URL; write the full path")
    if not bucket:
        raise RemoteError(f"{redact(url)}: names no bucket; write s3://bucket/path")
    key = "/".join(part for part in key.split("/") if part)
    if key:
        checked(key, url)
    return Bucket(protocol, bucket, url), key


_ANY_FOLDERS = "(?:[^/]+/)*"


def matching(path: RemotePath) -> dict[RemotePath, Object]:
    """The objects that match this path as a pattern: `*` and `[...]` within a name, `**` for any folders.

    Without these, the object itself, if it exists.
    """
    parts = path._key.split("/")
    fixed = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    if fixed == len(parts):
        with suppress(FileNotFoundError):
            return {path: path.look_up()}
        return {}
    folder = path._at("/".join(parts[:fixed]))
    if fixed == len(parts) - 1 and parts[-1] != "**":
        found, _ = path._bucket.entries(folder._key, folder)
    else:
        found = path._bucket.below(folder._key, folder)
    pattern = re.compile("/".join(map(_expression, parts)).replace(f"{_ANY_FOLDERS}/", _ANY_FOLDERS))
    found = {name: entry for name, entry in found.items() if pattern.fullmatch(name)}
    return {path._at(checked(name, path)): entry for name, entry in found.items()}


def _expression(part: str) -> str:
    """A part of a pattern as a regular expression."""
    if part == "**":
        return _ANY_FOLDERS
    inner = re.fullmatch(r"\(\?s:(.*)\)\\[zZ]", fnmatch.translate(part), re.DOTALL)
    assert inner is not None
    return inner[1].replace(".*", "[^/]*")


def abort_uploads(folder: RemotePath, *, deep: bool = True) -> None:
    """Abort the open uploads below, which a killed process leaves behind.

    Only on S3, and where boto3 is installed, for obstore cannot list them. Else, and on any failure, they
    are left to the bucket's lifecycle rules.

    Args:
        deep: also those in folders below; else only those directly in this folder.
    """
    if folder._bucket.kind != "s3":
        return
    prefix = f"{folder._key}/" if folder._key else ""
    try:
        import boto3

        client = boto3.client("s3")
        pages = client.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=folder._bucket.name, Prefix=prefix):
            for upload in page.get("Uploads", []):
                if deep or "/" not in upload["Key"][len(prefix) :]:
                    known = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    client.abort_multipart_upload(Bucket=folder._bucket.name, **known)
    except Exception as error:  # the package is missing, or any of its own
        _log.debug("%s: open uploads were not aborted: %s", folder, redact(str(error)))


def _hub(repository: str, client: dict[str, Any], retries: Any) -> Any:
    """The files of a repository on the hub at one revision."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers
    from obstore.store import HTTPStore

    name, _, revision = repository.partition("@")
    headers = {key: value for key, value in build_hf_headers().items() if key.lower() == "authorization"}
    options: Any = {**client, "default_headers": headers}
    url = f"{constants.ENDPOINT}/{name}/resolve/{quote(revision or 'main', safe='')}"
    return HTTPStore.from_url(url, client_options=options, retry_config=retries)


_SIGNALS = 0.5  # seconds between looks for one


def in_thread(call: Callable[[], T]) -> Future[T]:
    """`call()` in a thread of its own, which ends with the process."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return result


def _interruptible(call: Callable[[], T]) -> T:
    """`call()`; in the main thread it is another's, since no signal is handled within obstore."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    result = in_thread(call)
    while not wait([result], timeout=_SIGNALS).done:  # a signal that another thread got does not end a wait
        pass
    return result.result()
