"""Paths in object stores: `s3://bucket/run`, `gs://bucket/run`, `az://container/run`, by way of obstore.

    if is_url(text):
        run = RemotePath.of(text)            # RemoteError: unknown protocol, no bucket, ...
        run.is_dir(); run.iterdir(); (run / "a" / "b.json").read_bytes()

A `RemotePath` shares a few operations with `pathlib.Path`: `name`, `parent`, `/`, `exists`, `is_file`,
`is_dir`, `iterdir`, `read_bytes` and `str()`. The other operations that both have are functions of a `Place`,
in `portable.converters.storage.path_or_url` and `places`. Never make a `Path` of a URL: it collapses the two
slashes. Folders are listed once as long as the paths live that come from one `RemotePath.of`; a write through
these paths, or `refresh`, makes them be listed again.

Writing: an object appears whole or not at all; folders need not be made. A folder of several objects (a step,
a converted model) is made whole by the markers of `portable.converters.storage.completion_markers`.

obstore repeats every request after a failure that may pass, for `PORTABLE_STORAGE_MINUTES` minutes; one times
out after `PORTABLE_STORAGE_TIMEOUT` seconds of silence. Failures raise `RemoteError` (a `CheckpointError`:
one line that names the URL without credentials) or its subclasses; a missing object raises
`FileNotFoundError`. Names of objects are untrusted: `checked` refuses those that could leave a folder when
they are copied to a disk. Thread-safe; a process forked from one that has used a store must not use one.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from portable.converters.errors import (
    CheckpointError,
    prefix_errors,
    raise_unless_panic,
    redact_credentials,
    to_printable,
)
from portable.converters.storage.credentials import LOOKED_FOR, OPTIONS
from portable.converters.storage.listed_file import Object
from portable.converters.storage.store_errors import (
    LostUploadError,
    RemoteError,
    RetriesUsedUpError,
    find_repository,
    reason_of,
    translated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

_log = logging.getLogger(__name__)

FIRST_WAIT, _LONGEST_WAIT = 0.1, 15.0  # seconds between two attempts

# Other names of the same stores.
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
_REFUSED = {
    "hf": "cannot be listed; name the data set without it (owner/name)",
    **dict.fromkeys(("http", "https"), "can be neither listed nor written"),
}
_AZURE_HOST = re.compile(r"[\w-]+@\w+\.(dfs|blob)\.(core\.windows\.net|fabric\.microsoft\.com)")
_MAGIC = re.compile(r"[*?[]")

# Bytes of one part of an upload; S3 takes 10,000 parts of at least 5 MiB, and copies up to 5 GiB at once.
PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
_MAX_COPY = 5 << 30


_ENDPOINT_VARIABLE = re.compile("(AWS|AZURE)_(STORAGE_)?ENDPOINT(_URL)?(_S3)?")
_ENDPOINT = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[!-~]*)?", re.IGNORECASE)
_MAX_SETTING = 1_000_000
"""Largest number of connections, seconds or minutes that can be set."""


def timeout() -> float:
    """Seconds without a response after which a request fails (`PORTABLE_STORAGE_TIMEOUT`, default 60)."""
    return max(0.1, _setting("PORTABLE_STORAGE_TIMEOUT", 60))


def connections() -> int:
    """Parts that a conversion reads and sends at a time (`PORTABLE_STORAGE_CONNECTIONS`, default 16)."""
    return max(1, int(_setting("PORTABLE_STORAGE_CONNECTIONS", 16)))


def patience() -> float:
    """Seconds for which a request is repeated (`PORTABLE_STORAGE_MINUTES`, default 3)."""
    if "PORTABLE_STORAGE_ATTEMPTS" in os.environ:
        raise RemoteError(
            "PORTABLE_STORAGE_ATTEMPTS: requests are limited by time now; set PORTABLE_STORAGE_MINUTES"
        )
    return max(0.0, 60 * _setting("PORTABLE_STORAGE_MINUTES", 3))


def part_bytes(nbytes: int) -> int:
    """Bytes of a part of an upload of `nbytes`."""
    return max(PART_BYTES, -(-nbytes // _MAX_PARTS))


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_SETTING:
        raise RemoteError(f"{name}: {text!r} is not a number from 0 to {_MAX_SETTING:,}; correct or unset it")
    return value


def _check_endpoints() -> None:
    """Raise RemoteError if an endpoint is not a URL, for which obstore panics and prints a backtrace."""
    for name, text in os.environ.items():
        if _ENDPOINT_VARIABLE.fullmatch(name) and text and not _ENDPOINT.fullmatch(text):
            raise RemoteError(
                f"{name}: {to_printable(ascii(text[:100]))} is not a URL such as https://host:9000; correct "
                "or unset it"
            )


def checked(name: str, where: object) -> str:
    """The name of an object, relative to a folder, that can be trusted as a relative path on a disk.

    Raises:
        RemoteError: it has `..`, `.`, an empty part, a leading slash, a backslash or a control character.
    """
    odd = {"", ".", ".."} & set(name.split("/")) or "\\" in name or any(c < " " or c == "\x7f" for c in name)
    if odd:
        raise RemoteError(
            f"{redact_credentials(str(where))}: the object name {to_printable(ascii(name))} is refused: it "
            "could lead out of a folder; rename that object or delete it"
        )
    return name


FOLDER = -1
"""In a listing, the size of a folder."""

_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR", "HF_", "CLOUDSDK_")
_used_in = 0  # the process that obstore's threads live in


def check_process(where: object) -> None:
    """RemoteError in a process that was forked from one that has used a store: it would wait for ever."""
    global _used_in
    if _used_in and _used_in != os.getpid():
        raise RemoteError(
            f"{redact_credentials(str(where))}: this process was forked from one that has used an object "
            "store; start it with spawn or forkserver"
        )
    _used_in = os.getpid()


@cache
def _opened(protocol: str, name: str, seconds: float, quiet: float, environment: object) -> Any:
    """The store of obstore; one per process and environment."""
    from obstore.store import from_url  # not at the top: takes time to import

    _check_endpoints()
    made: Any = from_url  # whose type depends on the protocol
    first, longest, limit, silence, connecting = (
        timedelta(seconds=s) for s in (FIRST_WAIT, _LONGEST_WAIT, seconds, quiet, min(quiet, 10))
    )
    waits = {"init_backoff": first, "max_backoff": longest, "base": 2}
    retries = {"max_retries": 1 << 20, "retry_timeout": limit, "backoff": waits}
    client: dict[str, Any] = {"connect_timeout": connecting, "read_timeout": silence}
    # A large object may take long; http is used only where the endpoint is given as http://.
    client |= {"timeout": timedelta(days=1), "allow_http": True}
    try:
        options = OPTIONS[protocol](name)
        client |= options.pop("client_options", {})
        # The URL of a bucket of Azure's may name the account and its host.
        target = options.pop("url", f"{protocol}://{name}")
        return made(target, client_options=client, retry_config=retries, **options)
    except RemoteError:
        raise
    except BaseException as error:  # of obstore, and of the packages that look for credentials
        raise_unless_panic(error)
        raise RemoteError(f"cannot be set up: {reason_of(error)}") from None


@dataclass(frozen=True, order=True)
class Bucket:
    """A bucket, opened at its first use in a process, and the folders in it that have been listed.

    Attributes:
        said: the name of the protocol in the user's URL, which may be an alias.
        seconds: for which a request is repeated at most.
    """

    protocol: str
    name: str
    said: str = field(default="", compare=False)
    seconds: float = field(default=1e9, compare=False)
    listed: dict[str, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)


class _ParsedUrl(NamedTuple):
    """The bucket and the key of a URL."""

    bucket: Bucket
    key: str


class VersionedContent(NamedTuple):
    """The content of an object, and the version that `RemotePath.write_bytes` takes as `replacing`."""

    data: bytes
    version: Any


class _FolderListing(NamedTuple):
    """The objects and the folders directly in a folder, by their names in it."""

    objects: dict[str, Object]
    folders: list[str]


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object, or the folder of all objects whose keys begin with this key and a slash.

    Attributes:
        root: the key that the user named; what is above may be large, or hidden from these credentials.
    """

    bucket: Bucket
    key: str
    root: str = field(default="", compare=False)

    @classmethod
    def of(cls, url: str) -> RemotePath:
        """The path of a URL.

        Raises:
            RemoteError: the URL is malformed, or holds credentials or a query; its protocol is unknown or not
                supported.
        """
        bucket, key = _parse_url(url)
        return cls(bucket, key, key)

    @classmethod
    def of_hub(cls, repository: str) -> RemotePath:
        """The files of a repository of the Hugging Face hub, for reading: `datasets/owner/name@revision`."""
        return cls(Bucket("hf", repository), "")

    def patient(self, seconds: float) -> RemotePath:
        """This path, whose requests are repeated for `seconds` at most; its folders are listed anew."""
        return replace(self, bucket=replace(self.bucket, seconds=seconds, listed={}))

    def __str__(self) -> str:
        return f"{self.bucket.said or self.bucket.protocol}://{self.bucket.name}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> RemotePath:
        parts = PurePosixPath(name).parts
        checked("/".join(parts), self)
        return replace(self, key="/".join([*([self.key] if self.key else []), *parts]))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket.name

    @property
    def parent(self) -> RemotePath:
        """The folder above; the parent of a bucket is the bucket."""
        return replace(self, key=self.key.rpartition("/")[0])

    def call(self, what: str, call: Callable[[Any, Any], T]) -> T:
        """Return `call(obstore, store)`, with errors of one line, and so that Ctrl-C is not held up.

        Args:
            what: Operation as a verb, used in error messages ("read").
            call: Function to call. obstore repeats its requests.

        Raises:
            FileNotFoundError: there is no such object.
            RemoteError: any other failure; one line, without credentials.
        """
        import obstore  # not at the top: takes time to import

        check_process(self)
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)))
        with prefix_errors(redact_credentials(str(self))):
            store = _opened(self.bucket.protocol, self.bucket.name, self._patience(), timeout(), environment)
        try:
            return _interruptible(partial(call, obstore, store))
        except CheckpointError:
            raise
        except BaseException as error:
            raise_unless_panic(error)
            _log.debug("%s: %s failed (%s)", self, what, redact_credentials(str(error).partition("\n")[0]))
            raise translated(str(self), what, error, LOOKED_FOR[self.bucket.protocol]) from None

    def _call_again(self, what: str, call: Callable[[Any, Any], T]) -> T:
        """Call as `call` does, and again while the answer of the store breaks off.

        obstore does not repeat a request if its answer is XML that breaks off: the answer to a list, a copy,
        a deletion, and the start and the end of an upload. docs/decisions.md has the figures.
        """
        deadline = time.monotonic() + self._patience()
        while True:
            try:
                return self.call(what, call)
            except RetriesUsedUpError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(FIRST_WAIT)

    def _patience(self) -> float:
        return min(self.bucket.seconds, patience())

    # -- looking about ---------------------------------------------------------------------------------------

    def _below(self, key: str) -> str:
        """The name of an object or folder relative to this folder."""
        return key[len(self.key) + 1 if self.key else 0 :]

    def objects(self, fits: Callable[[str], object] = bool) -> dict[str, Object]:
        """Every object below, at any depth, as it is now, by its name in this folder, if that fits."""
        listed = self._call_again("list", lambda obs, store: obs.list(store, self.key or None).collect())
        found = {str(meta["path"]): object_of(meta) for meta in listed}
        folders = {key[:at] for key in found for at, char in enumerate(key) if char == "/"}
        # Some tools write an empty object for a folder.
        keys = (key for key in sorted(found) if key != self.key and (found[key].size or key not in folders))
        named = {self._below(key): found[key] for key in keys}
        return {checked(name, self): entry for name, entry in named.items() if fits(name)}

    def _list_folder(self) -> _FolderListing:
        """The objects directly in this folder by their names, unchecked, and the folders, as they are now."""
        found = self._call_again("list", lambda obs, store: obs.list_with_delimiter(store, self.key or None))
        objects = {self._below(m["path"]): object_of(m) for m in found["objects"] if m["path"] != self.key}
        return _FolderListing(objects, [self._below(str(key)) for key in found["common_prefixes"]])

    def _listed(self) -> dict[str, int]:
        """The sizes of the objects directly in this folder, and FOLDER for each folder in it, by name."""
        sizes = self.bucket.listed.get(self.key)
        if sizes is None:
            objects, folders = self._list_folder()
            sizes = {name: entry.size for name, entry in objects.items()} | dict.fromkeys(folders, FOLDER)
            self.bucket.listed[self.key] = sizes
            _log.debug("%s: listed, %d entries", self, len(sizes))
        return sizes

    def refresh(self) -> None:
        """List the folders of all paths again that come from the same `RemotePath.of`."""
        self.bucket.listed.clear()

    def _find(self) -> int | None:
        """The size of the object, FOLDER for a folder, or None if there is neither."""
        if self.key != self.root and f"{self.key}/".startswith(f"{self.root}/" if self.root else ""):
            return self.parent._listed().get(self.name)
        if self._listed():
            return FOLDER
        with suppress(FileNotFoundError):
            return self.look_up().size if self.key else None
        return None

    def exists(self) -> bool:
        return self._find() is not None

    def is_file(self) -> bool:
        return self._find() not in (None, FOLDER)

    def is_dir(self) -> bool:
        return self._find() == FOLDER

    def iterdir(self) -> Iterator[RemotePath]:
        """The objects and folders directly below; FileNotFoundError where there are none."""
        names = self._listed()
        if not names:
            raise FileNotFoundError(2, "no such folder", str(self))
        return iter([self / name for name in names])

    def file_size(self) -> int:
        """The size of the object in bytes; OSError if there is none."""
        size = self._find()
        if size is None:
            raise FileNotFoundError(2, "no such object", str(self))
        if size == FOLDER:
            raise IsADirectoryError(21, "is a folder", str(self))
        return size

    def look_up(self) -> Object:
        """The object as it is now; FileNotFoundError where there is none."""
        return object_of(self.call("look up", lambda obs, store: obs.head(store, self.key)))

    # -- reading and writing ---------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """The whole of a small object."""
        return self.read_versioned().data

    def read_versioned(self) -> VersionedContent:
        """The whole of a small object, and what `write_bytes` takes as `replacing`."""

        def read(obs: Any, store: Any) -> VersionedContent:
            found = obs.get(store, self.key)
            return VersionedContent(bytes(found.bytes()), _tag(found.meta))

        return self.call("read", read)

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop); fewer where the object ends before `stop`."""
        _log.debug("%s: reading bytes %d to %d", self, start, stop)
        call = lambda obs, store: bytes(obs.get_range(store, self.key, start=start, end=stop))  # noqa: E731
        return self.call("read", call) if stop > start else b""

    def download(self, write: Callable[[Any], object]) -> Object:
        """Give the object to `write`, in pieces; what it was."""

        def copy(obs: Any, store: Any) -> Object:
            found = obs.get(store, self.key)
            for block in found.stream(min_chunk_size=PART_BYTES):
                write(block)
            return object_of(found.meta)

        return self.call("read", copy)

    def copy_to(self, other: RemotePath) -> None:
        """Copy the object to another path, in any store; to itself is no copy."""
        size = self.look_up().size
        if self == other:
            return
        if self.bucket == other.bucket and size < _MAX_COPY:
            self._call_again("copy", lambda obs, store: obs.copy(store, self.key, other.key))
            other.refresh()
        elif size < PART_BYTES:
            other.write_bytes(self.read_bytes())
        else:
            stream = self.call("read", lambda obs, store: obs.get(store, self.key)).stream(PART_BYTES)
            block = partial(self.call, "read", lambda *_: bytes(next(stream, b"")))
            # obstore asks for them one by one, in a thread of its own, where it cannot be called.
            other._upload(iter(lambda: in_thread(block).result(), b""), size, other.call)

    def move_to(self, other: RemotePath) -> None:
        """Rename the object, which copies and then deletes it."""
        self.copy_to(other)
        self.unlink()

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
        found = self.call("write", lambda obs, store: obs.put(store, self.key, data, **options))
        _log.debug("%s: wrote %d bytes", self, len(data))
        self.refresh()
        return _tag(found)

    def upload_file(self, local: Path) -> None:
        """Copy a local file here, a large one in parts that are sent side by side."""
        self._upload(local, local.stat().st_size, self._call_again)

    def _upload(self, data: Any, nbytes: int, send: Callable[[str, Callable[[Any, Any], Any]], Any]) -> None:
        options = {"chunk_size": part_bytes(nbytes), "max_concurrency": connections()}
        call = lambda obs, store: obs.put(store, self.key, data, **options)  # noqa: E731
        with self.arriving(nbytes):
            send("upload", call)

    @contextmanager
    def arriving(self, size: int) -> Iterator[None]:
        """A block that completes an upload of `size` bytes, maybe by a request whose answer is lost."""
        try:
            yield
        except LostUploadError:
            with suppress(FileNotFoundError):
                if self.look_up().size == size:
                    return
            raise LostUploadError(
                f"{self}: another process aborted the upload; give each run an output of its own"
            ) from None
        finally:
            self.refresh()

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete one object; stores do not tell whether it was there."""
        self.parent.remove([self.name])

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects below, by their names relative to this folder; those already gone are ignored."""
        keys = [(self / name).key for name in names]
        try:
            if keys:
                self._call_again("delete", lambda obs, store: obs.delete(store, keys))
        except FileNotFoundError:  # another process deletes them too, and some stores stop there
            for name in names if len(names) > 1 else ():
                self.remove([name])
        self.refresh()


def object_of(meta: Any) -> Object:
    """An object as obstore lists it."""
    return Object(
        int(meta["size"]), str(meta.get("e_tag") or meta.get("version") or meta["last_modified"]).strip('"')
    )


def _tag(meta: Any) -> dict[str, str]:
    """What identifies an object's content in a conditional write."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _parse_url(url: str) -> _ParsedUrl:
    """The bucket and the key of a URL."""
    protocol, _, rest = url.partition("://")
    protocol = protocol.lower()
    bucket, _, key = rest.partition("/")
    named = _ALIASES.get(protocol, protocol)
    if "@" in bucket and not (protocol in ("abfs", "abfss") and _AZURE_HOST.fullmatch(bucket)):
        raise RemoteError(
            f"{redact_credentials(url)}: credentials do not belong in a URL; set them up as for the store's "
            "own tools"
        )
    if "?" in rest and not _MAGIC.search(key.partition("?")[0]) and "=" in rest:
        raise RemoteError(
            f"{redact_credentials(url)}: a signed URL cannot name a folder; leave out the query"
        )
    if name := find_repository(url):
        raise RemoteError(
            f"{redact_credentials(url)}: is the web page of a repository; give its name, {name}"
        )
    if named not in OPTIONS or named == "hf":
        why = _REFUSED.get(protocol, "is no object store that is known here")
        raise RemoteError(
            f"{redact_credentials(url)}: {protocol}:// {why}; use s3://, gs://, az:// or a folder"
        )
    if {".", ".."} & set(rest.split("/")):
        raise RemoteError(
            f"{redact_credentials(url)}: . and .. are not supported in a URL; write the full path"
        )
    if not bucket:
        raise RemoteError(f"{redact_credentials(url)}: names no bucket; write s3://bucket/path")
    key = "/".join(part for part in key.split("/") if part)
    if key:
        checked(key, url)
    return _ParsedUrl(Bucket(named, bucket, protocol), key)


def matching(path: RemotePath) -> dict[RemotePath, Object]:
    """The objects that match this path as a pattern: `*` and `[...]` within a name, `**` for any folders.

    Without these, the object itself, if it exists.
    """
    parts = path.key.split("/")
    fixed = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    folder, pattern = replace(path, key="/".join(parts[:fixed])), parts[fixed:]
    if not pattern:
        with suppress(FileNotFoundError):
            return {path: path.look_up()}
        return {}
    fits: Callable[[str], bool] = lambda name: _fits(name.split("/"), pattern)  # noqa: E731
    found = folder._list_folder().objects if len(pattern) == 1 and pattern != ["**"] else folder.objects(fits)
    return {folder / name: entry for name, entry in found.items() if fits(name)}


def _fits(parts: list[str], pattern: list[str]) -> bool:
    """Whether the parts of a name match those of a pattern."""
    if not pattern:
        return not parts
    if pattern[0] == "**" and _fits(parts, pattern[1:]):
        return True
    fits = bool(parts) and fnmatchcase(parts[0], pattern[0])
    return fits and _fits(parts[1:], pattern if pattern[0] == "**" else pattern[1:])


def abort_uploads(folder: RemotePath, *, deep: bool = True) -> None:
    """Abort the open uploads below, which a killed process leaves behind.

    Only on S3, and where boto3 is installed, for obstore cannot list them. Else, and on any failure, they
    are left to the bucket's lifecycle rules.

    Args:
        deep: also those in folders below; else only those directly in this folder.
    """
    if folder.bucket.protocol != "s3":
        return
    prefix = f"{folder.key}/" if folder.key else ""
    try:
        import boto3

        bucket = boto3.resource("s3").Bucket(folder.bucket.name)
        for upload in bucket.multipart_uploads.filter(Prefix=prefix):
            if deep or "/" not in upload.object_key[len(prefix) :]:
                upload.abort()
    except Exception as error:  # the package is missing, or any of its own
        _log.debug("%s: open uploads were not aborted: %s", folder, redact_credentials(str(error)))


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
    return wait_for(in_thread(call))


def wait_for(result: Future[T]) -> T:
    """Return the result of a thread as soon as it is available, and handle signals in the meantime."""
    while not wait([result], timeout=_SIGNALS).done:  # a signal that another thread got does not end a wait
        pass
    return result.result()
