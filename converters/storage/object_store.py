"""Paths in object stores: `s3://bucket/run`, `gs://bucket/run`, `az://container/run`, by way of obstore.

    if is_url(text):
        run = RemotePath.of(text)            # RemoteError: unknown protocol, no bucket, ...
        run.is_dir(); run.iterdir(); (run / "a" / "b.json").read_bytes()

A `RemotePath` shares a few operations with `pathlib.Path`: `name`, `parent`, `/`, `exists`, `is_file`,
`is_dir`, `iterdir`, `read_bytes` and `str()`. The other operations that both have are functions of a
`AnyPath`, in `portable.converters.storage.path_or_url` and `places`. Never make a `Path` of a URL: it
collapses the two slashes. Folders are listed once as long as the paths live that come from one
`RemotePath.from_url`; a write through these paths, or `clear_listings`, makes them be listed again.

Writing: an object appears whole or not at all; folders need not be made. A folder of several objects (a step,
a converted model) is made whole by the markers of `portable.converters.storage.completion_markers`.

obstore repeats every request after a failure that may pass, for `PORTABLE_STORAGE_MINUTES` minutes; one times
out after `PORTABLE_STORAGE_TIMEOUT` seconds of silence. Failures raise `RemoteError` (a `CheckpointError`:
one line that names the URL without credentials) or its subclasses; a missing object raises
`FileNotFoundError`. Names of objects are untrusted: `validate_object_name` refuses those that could leave a
folder when they are copied to a disk. Thread-safe; a process forked from one that has used a store must not
use one.
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
    prefix_checkpoint_errors,
    raise_unless_panic,
    redact_credentials,
    to_printable,
)
from portable.converters.storage.credentials import OPTION_BUILDERS, SEARCHED_CREDENTIALS
from portable.converters.storage.listed_file import ListedFile
from portable.converters.storage.store_errors import (
    LostUploadError,
    RemoteError,
    RetriesExhaustedError,
    format_store_error,
    parse_hub_page_url,
    translate_store_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

_log = logging.getLogger(__name__)

FIRST_RETRY_WAIT, _LONGEST_RETRY_WAIT = 0.1, 15.0  # seconds between two attempts

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


def get_request_timeout() -> float:
    """Seconds without a response after which a request fails (`PORTABLE_STORAGE_TIMEOUT`, default 60)."""
    return max(0.1, _read_numeric_env("PORTABLE_STORAGE_TIMEOUT", 60))


def get_max_connections() -> int:
    """Parts that a conversion reads and sends at a time (`PORTABLE_STORAGE_CONNECTIONS`, default 16)."""
    return max(1, int(_read_numeric_env("PORTABLE_STORAGE_CONNECTIONS", 16)))


def get_retry_seconds() -> float:
    """Seconds for which a request is repeated (`PORTABLE_STORAGE_MINUTES`, default 3)."""
    if "PORTABLE_STORAGE_ATTEMPTS" in os.environ:
        raise RemoteError(
            "PORTABLE_STORAGE_ATTEMPTS: requests are limited by time now; set PORTABLE_STORAGE_MINUTES"
        )
    return max(0.0, 60 * _read_numeric_env("PORTABLE_STORAGE_MINUTES", 3))


def compute_part_bytes(nbytes: int) -> int:
    """Bytes of a part of an upload of `nbytes`."""
    return max(PART_BYTES, -(-nbytes // _MAX_PARTS))


def _read_numeric_env(name: str, default: float) -> float:
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


def validate_object_name(name: str, location: object) -> str:
    """The name of an object, relative to a folder, that can be trusted as a relative path on a disk.

    Raises:
        RemoteError: it has `..`, `.`, an empty part, a leading slash, a backslash or a control character.
    """
    odd = {"", ".", ".."} & set(name.split("/")) or "\\" in name or any(c < " " or c == "\x7f" for c in name)
    if odd:
        raise RemoteError(
            f"{redact_credentials(str(location))}: the object name {to_printable(ascii(name))} is refused: "
            "it could lead out of a folder; rename that object or delete it"
        )
    return name


FOLDER_SIZE = -1
"""In a listing, the size of a folder."""

_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR", "HF_", "CLOUDSDK_")
_owner_process_id = 0  # the process that obstore's threads live in


def check_not_forked(location: object) -> None:
    """RemoteError in a process that was forked from one that has used a store: it would wait for ever."""
    global _owner_process_id
    if _owner_process_id and _owner_process_id != os.getpid():
        raise RemoteError(
            f"{redact_credentials(str(location))}: this process was forked from one that has used an object "
            "store; start it with spawn or forkserver"
        )
    _owner_process_id = os.getpid()


@cache
def _open_store(
    protocol: str, bucket_name: str, retry_seconds: float, timeout_seconds: float, environment: object
) -> Any:
    """The store of obstore; one per process and environment."""
    from obstore.store import from_url  # not at the top: takes time to import

    _check_endpoints()
    open_url: Any = from_url  # whose type depends on the protocol
    first, longest, limit, silence, connecting = (
        timedelta(seconds=s)
        for s in (
            FIRST_RETRY_WAIT,
            _LONGEST_RETRY_WAIT,
            retry_seconds,
            timeout_seconds,
            min(timeout_seconds, 10),
        )
    )
    waits = {"init_backoff": first, "max_backoff": longest, "base": 2}
    retries = {"max_retries": 1 << 20, "retry_timeout": limit, "backoff": waits}
    client: dict[str, Any] = {"connect_timeout": connecting, "read_timeout": silence}
    # A large object may take long; http is used only where the endpoint is given as http://.
    client |= {"timeout": timedelta(days=1), "allow_http": True}
    try:
        options = OPTION_BUILDERS[protocol](bucket_name)
        client |= options.pop("client_options", {})
        # The URL of a bucket of Azure's may name the account and its host.
        target = options.pop("url", f"{protocol}://{bucket_name}")
        return open_url(target, client_options=client, retry_config=retries, **options)
    except RemoteError:
        raise
    except BaseException as error:  # of obstore, and of the packages that look for credentials
        raise_unless_panic(error)
        raise RemoteError(f"cannot be set up: {format_store_error(error)}") from None


@dataclass(frozen=True, order=True)
class Bucket:
    """A bucket, opened at its first use in a process, and the folders in it that have been listed.

    Attributes:
        url_protocol: the name of the protocol in the user's URL, which may be an alias.
        max_retry_seconds: for which a request is repeated at most.
    """

    protocol: str
    name: str
    url_protocol: str = field(default="", compare=False)
    max_retry_seconds: float = field(default=1e9, compare=False)
    listings: dict[str, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)


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

    objects: dict[str, ListedFile]
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
    def from_url(cls, url: str) -> RemotePath:
        """The path of a URL.

        Raises:
            RemoteError: the URL is malformed, or holds credentials or a query; its protocol is unknown or not
                supported.
        """
        bucket, key = _parse_url(url)
        return cls(bucket, key, key)

    @classmethod
    def from_hub_repository(cls, repository: str) -> RemotePath:
        """The files of a repository of the Hugging Face hub, for reading: `datasets/owner/name@revision`."""
        return cls(Bucket("hf", repository), "")

    def with_retry_limit(self, seconds: float) -> RemotePath:
        """This path, whose requests are repeated for `seconds` at most; its folders are listed anew."""
        return replace(self, bucket=replace(self.bucket, max_retry_seconds=seconds, listings={}))

    def __str__(self) -> str:
        return f"{self.bucket.url_protocol or self.bucket.protocol}://{self.bucket.name}/{self.key}".rstrip(
            "/"
        )

    def __truediv__(self, name: str) -> RemotePath:
        parts = PurePosixPath(name).parts
        validate_object_name("/".join(parts), self)
        return replace(self, key="/".join([*([self.key] if self.key else []), *parts]))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket.name

    @property
    def parent(self) -> RemotePath:
        """The folder above; the parent of a bucket is the bucket."""
        return replace(self, key=self.key.rpartition("/")[0])

    def call_store(self, operation: str, function: Callable[[Any, Any], T]) -> T:
        """Return `function(obstore, store)`, with errors of one line, and so that Ctrl-C is not held up.

        Args:
            operation: Operation as a verb, used in error messages ("read").
            function: Function to call. obstore repeats its requests.

        Raises:
            FileNotFoundError: there is no such object.
            RemoteError: any other failure; one line, without credentials.
        """
        import obstore  # not at the top: takes time to import

        check_not_forked(self)
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)))
        with prefix_checkpoint_errors(redact_credentials(str(self))):
            store = _open_store(
                self.bucket.protocol,
                self.bucket.name,
                self._get_retry_seconds(),
                get_request_timeout(),
                environment,
            )
        try:
            return _run_interruptibly(partial(function, obstore, store))
        except CheckpointError:
            raise
        except BaseException as error:
            raise_unless_panic(error)
            _log.debug(
                "%s: %s failed (%s)", self, operation, redact_credentials(str(error).partition("\n")[0])
            )
            raise translate_store_error(
                str(self), operation, error, SEARCHED_CREDENTIALS[self.bucket.protocol]
            ) from None

    def _call_store_with_retries(self, operation: str, function: Callable[[Any, Any], T]) -> T:
        """Call as `function` does, and again while the answer of the store breaks off.

        obstore does not repeat a request if its answer is XML that breaks off: the answer to a list, a copy,
        a deletion, and the start and the end of an upload. docs/decisions.md has the figures.
        """
        deadline = time.monotonic() + self._get_retry_seconds()
        while True:
            try:
                return self.call_store(operation, function)
            except RetriesExhaustedError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(FIRST_RETRY_WAIT)

    def _get_retry_seconds(self) -> float:
        return min(self.bucket.max_retry_seconds, get_retry_seconds())

    # -- looking about ---------------------------------------------------------------------------------------

    def _get_relative_name(self, key: str) -> str:
        """The name of an object or folder relative to this folder."""
        return key[len(self.key) + 1 if self.key else 0 :]

    def list_objects(self, matches_name: Callable[[str], object] = bool) -> dict[str, ListedFile]:
        """Every object below, at any depth, as it is now, by its name in this folder, if that fits."""
        listed = self._call_store_with_retries(
            "list", lambda obs, store: obs.list(store, self.key or None).collect()
        )
        objects_by_key = {str(meta["path"]): parse_object_metadata(meta) for meta in listed}
        folders = {key[:index] for key in objects_by_key for index, char in enumerate(key) if char == "/"}
        # Some tools write an empty object for a folder.
        keys = (
            key
            for key in sorted(objects_by_key)
            if key != self.key and (objects_by_key[key].size_bytes or key not in folders)
        )
        objects_by_name = {self._get_relative_name(key): objects_by_key[key] for key in keys}
        return {
            validate_object_name(name, self): entry
            for name, entry in objects_by_name.items()
            if matches_name(name)
        }

    def _list_folder(self) -> _FolderListing:
        """The objects directly in this folder by their names, unchecked, and the folders, as they are now."""
        listing = self._call_store_with_retries(
            "list", lambda obs, store: obs.list_with_delimiter(store, self.key or None)
        )
        objects = {
            self._get_relative_name(m["path"]): parse_object_metadata(m)
            for m in listing["objects"]
            if m["path"] != self.key
        }
        return _FolderListing(
            objects, [self._get_relative_name(str(key)) for key in listing["common_prefixes"]]
        )

    def _get_listing(self) -> dict[str, int]:
        """The sizes of the objects directly in this folder, and FOLDER for each folder in it, by name."""
        sizes = self.bucket.listings.get(self.key)
        if sizes is None:
            objects, folders = self._list_folder()
            sizes = {name: entry.size_bytes for name, entry in objects.items()} | dict.fromkeys(
                folders, FOLDER_SIZE
            )
            self.bucket.listings[self.key] = sizes
            _log.debug("%s: listed, %d entries", self, len(sizes))
        return sizes

    def clear_listings(self) -> None:
        """List the folders of all paths again that come from the same `RemotePath.from_url`."""
        self.bucket.listings.clear()

    def _find_size(self) -> int | None:
        """The size of the object, FOLDER for a folder, or None if there is neither."""
        if self.key != self.root and f"{self.key}/".startswith(f"{self.root}/" if self.root else ""):
            return self.parent._get_listing().get(self.name)
        if self._get_listing():
            return FOLDER_SIZE
        with suppress(FileNotFoundError):
            return self.fetch_status().size_bytes if self.key else None
        return None

    def exists(self) -> bool:
        return self._find_size() is not None

    def is_file(self) -> bool:
        return self._find_size() not in (None, FOLDER_SIZE)

    def is_dir(self) -> bool:
        return self._find_size() == FOLDER_SIZE

    def iterdir(self) -> Iterator[RemotePath]:
        """The objects and folders directly below; FileNotFoundError where there are none."""
        names = self._get_listing()
        if not names:
            raise FileNotFoundError(2, "no such folder", str(self))
        return iter([self / name for name in names])

    def get_file_size(self) -> int:
        """The size of the object in bytes; OSError if there is none."""
        size = self._find_size()
        if size is None:
            raise FileNotFoundError(2, "no such object", str(self))
        if size == FOLDER_SIZE:
            raise IsADirectoryError(21, "is a folder", str(self))
        return size

    def fetch_status(self) -> ListedFile:
        """The object as it is now; FileNotFoundError where there is none."""
        return parse_object_metadata(self.call_store("look up", lambda obs, store: obs.head(store, self.key)))

    # -- reading and writing ---------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """The whole of a small object."""
        return self.read_versioned().data

    def read_versioned(self) -> VersionedContent:
        """The whole of a small object, and what `write_bytes` takes as `replacing`."""

        def read(obs: Any, store: Any) -> VersionedContent:
            response = obs.get(store, self.key)
            return VersionedContent(bytes(response.bytes()), _get_version(response.meta))

        return self.call_store("read", read)

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop); fewer where the object ends before `stop`."""
        _log.debug("%s: reading bytes %d to %d", self, start, stop)
        call = lambda obs, store: bytes(obs.get_range(store, self.key, start=start, end=stop))  # noqa: E731
        return self.call_store("read", call) if stop > start else b""

    def download_to(self, write_block: Callable[[Any], object]) -> ListedFile:
        """Give the object to `write_block`, in pieces; what it was."""

        def copy(obs: Any, store: Any) -> ListedFile:
            response = obs.get(store, self.key)
            for block in response.stream(min_chunk_size=PART_BYTES):
                write_block(block)
            return parse_object_metadata(response.meta)

        return self.call_store("read", copy)

    def copy_to(self, target: RemotePath) -> None:
        """Copy the object to another path, in any store; to itself is no copy."""
        size = self.fetch_status().size_bytes
        if self == target:
            return
        if self.bucket == target.bucket and size < _MAX_COPY:
            self._call_store_with_retries("copy", lambda obs, store: obs.copy(store, self.key, target.key))
            target.clear_listings()
        elif size < PART_BYTES:
            target.write_bytes(self.read_bytes())
        else:
            stream = self.call_store("read", lambda obs, store: obs.get(store, self.key)).stream(PART_BYTES)
            block = partial(self.call_store, "read", lambda *_: bytes(next(stream, b"")))
            # obstore asks for them one by one, in a thread of its own, where it cannot be called.
            target._upload(iter(lambda: run_in_thread(block).result(), b""), size, target.call_store)

    def move_to(self, target: RemotePath) -> None:
        """Rename the object, which copies and then deletes it."""
        self.copy_to(target)
        self.unlink()

    def write_bytes(self, data: bytes, *, expected_version: Any = None) -> Any:
        """Write a small object in one request, replacing an existing one.

        Args:
            expected_version: only write if the object is still the one that this value was returned for; ""
            for one
                that does not exist.

        Returns:
            What this object is `expected_version` for another write.

        Raises:
            ConflictError: another process was first.
            UnconditionalError: the store has no conditional writes.
        """
        options = (
            {"mode": expected_version or "create"}
            if expected_version is not None
            else {"use_multipart": False}
        )
        response = self.call_store("write", lambda obs, store: obs.put(store, self.key, data, **options))
        _log.debug("%s: wrote %d bytes", self, len(data))
        self.clear_listings()
        return _get_version(response)

    def upload_file(self, local_path: Path) -> None:
        """Copy a local file here, a large one in parts that are sent side by side."""
        self._upload(local_path, local_path.stat().st_size, self._call_store_with_retries)

    def _upload(
        self, data: Any, nbytes: int, call_store: Callable[[str, Callable[[Any, Any], Any]], Any]
    ) -> None:
        options = {"chunk_size": compute_part_bytes(nbytes), "max_concurrency": get_max_connections()}
        call = lambda obs, store: obs.put(store, self.key, data, **options)  # noqa: E731
        with self.tolerate_lost_upload_response(nbytes):
            call_store("upload", call)

    @contextmanager
    def tolerate_lost_upload_response(self, expected_bytes: int) -> Iterator[None]:
        """A block that completes an upload of `expected_bytes` bytes, maybe by a request whose answer is lost."""
        try:
            yield
        except LostUploadError:
            with suppress(FileNotFoundError):
                if self.fetch_status().size_bytes == expected_bytes:
                    return
            raise LostUploadError(
                f"{self}: another process aborted the upload; give each run an output of its own"
            ) from None
        finally:
            self.clear_listings()

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete one object; stores do not tell whether it was there."""
        self.parent.remove_objects([self.name])

    def remove_objects(self, names: Sequence[str]) -> None:
        """Delete objects below, by their names relative to this folder; those already gone are ignored."""
        keys = [(self / name).key for name in names]
        try:
            if keys:
                self._call_store_with_retries("delete", lambda obs, store: obs.delete(store, keys))
        except FileNotFoundError:  # another process deletes them too, and some stores stop there
            for name in names if len(names) > 1 else ():
                self.remove_objects([name])
        self.clear_listings()


def parse_object_metadata(meta: Any) -> ListedFile:
    """An object as obstore lists it."""
    return ListedFile(
        int(meta["size"]), str(meta.get("e_tag") or meta.get("version") or meta["last_modified"]).strip('"')
    )


def _get_version(meta: Any) -> dict[str, str]:
    """What identifies an object's content in a conditional write."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _parse_url(url: str) -> _ParsedUrl:
    """The bucket and the key of a URL."""
    protocol, _, rest = url.partition("://")
    protocol = protocol.lower()
    bucket, _, key = rest.partition("/")
    store_protocol = _ALIASES.get(protocol, protocol)
    if "@" in bucket and not (protocol in ("abfs", "abfss") and _AZURE_HOST.fullmatch(bucket)):
        raise RemoteError(
            f"{redact_credentials(url)}: credentials do not belong in a URL; set them up as for the store's "
            "own tools"
        )
    if "?" in rest and not _MAGIC.search(key.partition("?")[0]) and "=" in rest:
        raise RemoteError(
            f"{redact_credentials(url)}: a signed URL cannot name a folder; leave out the query"
        )
    if name := parse_hub_page_url(url):
        raise RemoteError(
            f"{redact_credentials(url)}: is the web page of a repository; give its name, {name}"
        )
    if store_protocol not in OPTION_BUILDERS or store_protocol == "hf":
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
        validate_object_name(key, url)
    return _ParsedUrl(Bucket(store_protocol, bucket, protocol), key)


def find_matching_objects(path: RemotePath) -> dict[RemotePath, ListedFile]:
    """The objects that match this path as a pattern: `*` and `[...]` within a name, `**` for any folders.

    Without these, the object itself, if it exists.
    """
    parts = path.key.split("/")
    fixed = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    folder, pattern = replace(path, key="/".join(parts[:fixed])), parts[fixed:]
    if not pattern:
        with suppress(FileNotFoundError):
            return {path: path.fetch_status()}
        return {}
    fits: Callable[[str], bool] = lambda name: _matches_pattern(name.split("/"), pattern)  # noqa: E731
    objects = (
        folder._list_folder().objects
        if len(pattern) == 1 and pattern != ["**"]
        else folder.list_objects(fits)
    )
    return {folder / name: entry for name, entry in objects.items() if fits(name)}


def _matches_pattern(parts: list[str], pattern: list[str]) -> bool:
    """Whether the parts of a name match those of a pattern."""
    if not pattern:
        return not parts
    if pattern[0] == "**" and _matches_pattern(parts, pattern[1:]):
        return True
    fits = bool(parts) and fnmatchcase(parts[0], pattern[0])
    return fits and _matches_pattern(parts[1:], pattern if pattern[0] == "**" else pattern[1:])


def abort_open_uploads(folder: RemotePath, *, recursive: bool = True) -> None:
    """Abort the open uploads below, which a killed process leaves behind.

    Only on S3, and where boto3 is installed, for obstore cannot list them. Else, and on any failure, they
    are left to the bucket's lifecycle rules.

    Args:
        recursive: also those in folders below; else only those directly in this folder.
    """
    if folder.bucket.protocol != "s3":
        return
    prefix = f"{folder.key}/" if folder.key else ""
    try:
        import boto3

        bucket = boto3.resource("s3").Bucket(folder.bucket.name)
        for upload in bucket.multipart_uploads.filter(Prefix=prefix):
            if recursive or "/" not in upload.object_key[len(prefix) :]:
                upload.abort()
    except Exception as error:  # the package is missing, or any of its own
        _log.debug("%s: open uploads were not aborted: %s", folder, redact_credentials(str(error)))


_SIGNALS = 0.5  # seconds between looks for one


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """`call()` in a thread of its own, which ends with the process."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return result


def _run_interruptibly(call: Callable[[], T]) -> T:
    """`call()`; in the main thread it is another's, since no signal is handled within obstore."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return wait_for_result(run_in_thread(call))


def wait_for_result(result: Future[T]) -> T:
    """Return the result of a thread as soon as it is available, and handle signals in the meantime."""
    while not wait([result], timeout=_SIGNALS).done:  # a signal that another thread got does not end a wait
        pass
    return result.result()
