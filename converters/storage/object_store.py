"""Access object stores through paths such as `s3://bucket/run`, `gs://bucket/run`, and `az://container/run`.

    if is_url(text):
        run = RemotePath.from_url(text)      # RemoteError: unknown protocol, no bucket, ...
        run.is_dir(); run.iterdir(); (run / "a" / "b.json").read_bytes()

A `RemotePath` has a few of the methods of `pathlib.Path`: `name`, `parent`, `/`, `exists`,
`is_file`, `is_dir`, `iterdir`, `read_bytes`, and `str()`. The functions in
`portable.converters.storage.path_or_url` and `folder_operations` provide other operations for both
types of paths. Never convert a URL to a `Path`, because this would collapse the double slash.

Folder listings are cached in the `Bucket`, which is shared by all paths derived from the same call
of `RemotePath.from_url`. The cache is dropped by `clear_listings`, and by a write through one of
these paths.

Each object is written atomically, and folders need not be created. A folder with several objects,
such as a checkpoint or a converted model, is marked as complete as described in
`portable.converters.storage.completion_markers`.

If a failure may be temporary, obstore retries the request for `PORTABLE_STORAGE_MINUTES` minutes. A
request times out after `PORTABLE_STORAGE_TIMEOUT` seconds without a response. Failures raise
`RemoteError` or one of its subclasses, which are `CheckpointError`s. Their messages have one line
and contain the URL without credentials. A missing object raises `FileNotFoundError`. Object names
are untrusted: `validate_object_name` rejects names that could leave a folder when the objects are
copied to a disk.

This module is thread-safe. After a process has used an object store, its forked children must not
use one. See `check_not_forked`.
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

FIRST_RETRY_WAIT, _LONGEST_RETRY_WAIT = 0.1, 15.0  # First and longest wait between two attempts, in seconds

# Aliases of protocols, mapped to the protocol names that are used internally.
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
_AZURE_HOST = re.compile(r"[\w-]+@\w+\.(dfs|blob)\.(core\.windows\.net|fabric\.microsoft\.com)")
_MAGIC = re.compile(r"[*?[]")

# Size of a part of an upload. S3 accepts at most 10,000 parts of at least 5 MiB, and copies at most 5 GiB per
# request.
PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
_MAX_COPY = 5 << 30


_ENDPOINT_VARIABLE = re.compile("(AWS|AZURE)_(STORAGE_)?ENDPOINT(_URL)?(_S3)?")
_ENDPOINT = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[!-~]*)?", re.IGNORECASE)
_MAX_SETTING = 1_000_000
"""Maximum number of connections, seconds, or minutes that can be set."""


def get_request_timeout() -> float:
    """Return how many seconds to wait for the response to a storage request.

    The environment variable `PORTABLE_STORAGE_TIMEOUT` sets this time. The default is 60, and the
    minimum is 0.1.

    Raises:
        RemoteError: If the value is not valid.
    """
    return max(0.1, _read_numeric_env("PORTABLE_STORAGE_TIMEOUT", 60))


def get_max_connections() -> int:
    """Return the maximum number of file parts that a conversion transfers concurrently.

    The environment variable `PORTABLE_STORAGE_CONNECTIONS` sets this number. The default is 16, and
    the minimum is 1.

    Raises:
        RemoteError: If the value is not valid.
    """
    return max(1, int(_read_numeric_env("PORTABLE_STORAGE_CONNECTIONS", 16)))


def get_retry_seconds() -> float:
    """Return how long a failed request is retried, in seconds.

    The environment variable `PORTABLE_STORAGE_MINUTES` sets this time in minutes. The default is 3.

    Raises:
        RemoteError: If the value is not valid, or if the obsolete `PORTABLE_STORAGE_ATTEMPTS` is
            set.
    """
    if "PORTABLE_STORAGE_ATTEMPTS" in os.environ:
        raise RemoteError(
            "PORTABLE_STORAGE_ATTEMPTS: is no longer supported, because retries are limited by time; set "
            "PORTABLE_STORAGE_MINUTES instead"
        )
    return max(0.0, 60 * _read_numeric_env("PORTABLE_STORAGE_MINUTES", 3))


def compute_part_bytes(nbytes: int) -> int:
    """Compute the part size in bytes for an upload of `nbytes` bytes.

    This is `PART_BYTES`, or more if the upload would otherwise have more than `_MAX_PARTS` parts.
    """
    return max(PART_BYTES, -(-nbytes // _MAX_PARTS))


def _read_numeric_env(name: str, default: float) -> float:
    """Read a number from an environment variable. If it is unset or empty, `default` is returned.

    Raises:
        RemoteError: If the value is not a number from 0 to `_MAX_SETTING`.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_SETTING:
        raise RemoteError(
            f"{name}: {text!r} is not a number from 0 to {_MAX_SETTING:,}; correct or unset {name}"
        )
    return value


def _check_endpoints() -> None:
    """Check that all endpoints in the environment are URLs.

    For an invalid endpoint, obstore would panic and print a backtrace.

    Raises:
        RemoteError: If an endpoint is not a URL.
    """
    for name, text in os.environ.items():
        if _ENDPOINT_VARIABLE.fullmatch(name) and text and not _ENDPOINT.fullmatch(text):
            raise RemoteError(
                f"{name}: {to_printable(ascii(redact_credentials(text)[:100]))} is not a URL such as "
                f"https://host:9000; correct or unset {name}"
            )


def validate_object_name(name: str, location: object) -> str:
    """Check that an object name can be used as a relative path on a disk, and return it.

    Args:
        name: Name of the object, relative to a folder.
        location: Folder or URL of the object, used in error messages.

    Raises:
        RemoteError: If a component of the name is `..`, `.`, or empty, as in a name with a leading
            slash. Also if the name contains a backslash or a control character.
    """
    odd = {"", ".", ".."} & set(name.split("/")) or "\\" in name or any(c < " " or c == "\x7f" for c in name)
    if odd:
        raise RemoteError(
            f"{redact_credentials(str(location))}: the object name {to_printable(ascii(name))} has an empty "
            "component, the component . or .., a backslash or a control character; rename or delete the "
            "object, or correct the URL"
        )
    return name


FOLDER_SIZE = -1
"""Value that a listing contains as the size of a folder."""

_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR", "HF_", "CLOUDSDK_")
_owner_process_id = 0  # ID of the process in which obstore's threads run


def check_not_forked(location: object) -> None:
    """Raise an error if this process was forked from a process that has used an object store.

    In such a process, obstore would wait forever, because threads are not copied by a fork. Call this
    function before every use of obstore. The first call records the process ID.

    Args:
        location: URL that the process is about to use, used in error messages.

    Raises:
        RemoteError: If the process was forked.
    """
    global _owner_process_id
    if _owner_process_id and _owner_process_id != os.getpid():
        raise RemoteError(
            f"{redact_credentials(str(location))}: this process was forked from a process that has used an "
            "object store; start processes with spawn or forkserver"
        )
    _owner_process_id = os.getpid()


@cache
def _open_store(
    protocol: str, bucket_name: str, retry_seconds: float, timeout_seconds: float, environment: object
) -> Any:
    """Open a bucket with obstore.

    The stores are cached: there is one per process and combination of arguments.

    Args:
        protocol: Protocol, such as `s3`.
        bucket_name: Name of the bucket.
        retry_seconds: Maximum time to retry a failed request, in seconds.
        timeout_seconds: Timeout in seconds for a request that receives no response.
        environment: Environment variables that affect the store. This argument is used only as a
            part of the cache key, so that a changed environment opens a new store.

    Raises:
        RemoteError: If there are no credentials, or if the store cannot be opened.
    """
    from obstore.store import from_url  # Imported here because the import is slow.

    _check_endpoints()
    open_url: Any = from_url  # its type depends on the protocol
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
    # Sending a large object may take long. http:// is only used if the endpoint is given as http://.
    client |= {"timeout": timedelta(days=1), "allow_http": True}
    try:
        options = OPTION_BUILDERS[protocol](bucket_name)
        client |= options.pop("client_options", {})
        # The URL of an Azure container may contain the account and its host.
        target = options.pop("url", f"{protocol}://{bucket_name}")
        return open_url(target, client_options=client, retry_config=retries, **options)
    except RemoteError:
        raise
    except BaseException as error:  # obstore and the vendors' packages raise exceptions of many types
        raise_unless_panic(error)
        raise RemoteError(
            f"the object store cannot be opened: {format_store_error(error)}; check the URL and the "
            "settings of the store"
        ) from None


@dataclass(frozen=True, order=True)
class Bucket:
    """Bucket in an object store, and the cached listings of its folders. It is opened by the first request.

    Attributes:
        protocol: Protocol of the store, such as `s3`.
        name: Name of the bucket. In Azure, this may be a container followed by `@` and the host of
            the account. On the Hugging Face Hub, it is a repository with an optional revision.
        url_protocol: Protocol in the user's URL, which may be an alias of `protocol`.
        max_retry_seconds: Maximum time to retry a failed request, in seconds. If
            `get_retry_seconds` returns a shorter time, that time applies.
        listings: Sizes of the entries in each listed folder, keyed by folder key and then by entry
            name. Subfolders have the size `FOLDER_SIZE`.
    """

    protocol: str
    name: str
    url_protocol: str = field(default="", compare=False)
    max_retry_seconds: float = field(default=1e9, compare=False)
    listings: dict[str, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)


class _ParsedUrl(NamedTuple):
    """Bucket and key parsed from a URL."""

    bucket: Bucket
    key: str


class VersionedContent(NamedTuple):
    """Content and version of an object.

    `RemotePath.write_bytes` accepts the version as `expected_version`.
    """

    data: bytes
    version: Any


class _FolderListing(NamedTuple):
    """Objects and subfolders directly in a folder, keyed by name."""

    objects: dict[str, ListedFile]
    folders: list[str]


@dataclass(frozen=True, order=True)
class RemotePath:
    """Path of an object or folder in an object store.

    A folder consists of all objects whose keys begin with the key of the folder and a slash. If an
    object has the same key as a folder, the path counts as a folder.

    `exists`, `is_file`, `is_dir`, `iterdir`, and `get_file_size` use cached listings. They therefore
    miss changes by other processes until `clear_listings` is called.

    Attributes:
        bucket: Bucket that contains the object.
        key: Key of the object or folder.
        root: Key in the user's URL. The parent folders of this key are not listed, because they may be
            large or inaccessible with the user's credentials.
    """

    bucket: Bucket
    key: str
    root: str = field(default="", compare=False)

    @classmethod
    def from_url(cls, url: str) -> RemotePath:
        """Parse a URL into a path, without sending a request.

        Empty components of the key, such as in `s3://bucket//run/`, are dropped. Wildcards are kept,
        see `find_matching_objects`.

        Raises:
            RemoteError: If the URL is malformed, contains credentials or a query, or has an unsupported
                protocol.
        """
        bucket, key = _parse_url(url)
        return cls(bucket, key, key)

    @classmethod
    def from_hub_repository(cls, repository: str) -> RemotePath:
        """Return a path for reading the files of a Hugging Face Hub repository.

        The Hub is accessed with plain HTTP requests, which can neither list nor write files. Therefore,
        use only `fetch_status` and the methods that read a file.

        Args:
            repository: Name of the repository with an optional revision, such as
                `datasets/owner/name@revision`.
        """
        return cls(Bucket("hf", repository), "")

    def with_retry_limit(self, seconds: float) -> RemotePath:
        """Return a copy of this path that retries failed requests for at most `seconds` seconds.

        The new path starts with an empty cache of listings.
        """
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
        """Last part of the key, or the name of the bucket if the key is empty."""
        return self.key.rpartition("/")[2] or self.bucket.name

    @property
    def parent(self) -> RemotePath:
        """Folder that contains the object. The parent of a bucket is the bucket itself."""
        return replace(self, key=self.key.rpartition("/")[0])

    def call_store(self, operation: str, function: Callable[[Any, Any], T]) -> T:
        """Call a function that sends requests to the store, and return its result.

        All exceptions of the function except `CheckpointError` are converted to errors of the store with a
        one-line message. In the main thread, Ctrl-C ends the call, although the function continues to run in
        another thread.

        Args:
            operation: Operation as a verb, used in error messages, such as `"read"`.
            function: Function to call with the module `obstore` and the opened store. obstore retries the
                requests that the function sends.

        Raises:
            FileNotFoundError: If the object does not exist.
            RemoteError: If the request fails for any other reason.
        """
        import obstore  # Imported here because the import is slow.

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
        """Run `call_store`, and retry if the response of the store is incomplete.

        obstore does not retry a request if its XML response is cut off. This concerns list, copy, and
        delete requests, and the request that begins an upload. For the request that completes an
        upload, see `tolerate_lost_upload_response`. See docs/decisions.md for measurements.

        Raises:
            RetriesExhaustedError: If requests still fail after the retry time.
            FileNotFoundError: If the object does not exist.
            RemoteError: If the request fails for any other reason.
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

    # -- listing and status ----------------------------------------------------------------------------------

    def _get_relative_name(self, key: str) -> str:
        """Return the name of an object or folder relative to this folder."""
        return key[len(self.key) + 1 if self.key else 0 :]

    def list_objects(self, matches_name: Callable[[str], object] = bool) -> dict[str, ListedFile]:
        """List all objects below this folder at any depth, bypassing the cache.

        Empty objects with the name of a folder are omitted, because some tools write them to mark
        folders.

        Args:
            matches_name: Predicate that returns whether to include a name. It also receives names
                that have not been validated. By default, all names are included.

        Returns:
            Size and version of each object, keyed by its name relative to this folder and sorted by
            name. Empty if the folder does not exist.

        Raises:
            RemoteError: If the request fails, or if the name of an included object could lead to a
                path outside the folder.
        """
        listed = self._call_store_with_retries(
            "list", lambda obs, store: obs.list(store, self.key or None).collect()
        )
        objects_by_key = {str(meta["path"]): parse_object_metadata(meta) for meta in listed}
        folders = {key[:index] for key in objects_by_key for index, char in enumerate(key) if char == "/"}
        # Ignore empty objects with the name of a folder, which some tools write.
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
        """List the objects and folders directly in this folder, bypassing the cache.

        Names are not validated. Empty objects with the name of a folder are omitted.
        """
        listing = self._call_store_with_retries(
            "list", lambda obs, store: obs.list_with_delimiter(store, self.key or None)
        )
        folders = [self._get_relative_name(str(key)) for key in listing["common_prefixes"]]
        objects_by_key = {
            str(meta["path"]): parse_object_metadata(meta)
            for meta in listing["objects"]
            if meta["path"] != self.key
        }
        objects = {self._get_relative_name(key): entry for key, entry in objects_by_key.items()}
        # Ignore empty objects with the name of a folder, which some tools write.
        return _FolderListing(
            {name: entry for name, entry in objects.items() if entry.size_bytes or name not in folders},
            folders,
        )

    def _get_listing(self) -> dict[str, int]:
        """Return the size of each entry in this folder, keyed by name. Empty if the folder does not exist.

        Subfolders have the size `FOLDER_SIZE`. The listing is cached until `clear_listings` is called, or
        until a path of the same bucket is written.
        """
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
        """Clear the cached folder listings that this path shares with related paths.

        All paths that are derived from the same call of `RemotePath.from_url` share one cache.
        """
        self.bucket.listings.clear()

    def _find_size(self) -> int | None:
        """Return the size of the object in bytes, `FOLDER_SIZE` for a folder, or None if neither exists.

        If both exist, `FOLDER_SIZE` is returned.
        """
        if self.key != self.root and f"{self.key}/".startswith(f"{self.root}/" if self.root else ""):
            return self.parent._get_listing().get(self.name)
        if self._get_listing():
            return FOLDER_SIZE
        with suppress(FileNotFoundError):
            return self.fetch_status().size_bytes if self.key else None
        return None

    def exists(self) -> bool:
        """Return whether an object or a folder with this key exists."""
        return self._find_size() is not None

    def is_file(self) -> bool:
        """Return whether an object with this key exists, but no folder."""
        return self._find_size() not in (None, FOLDER_SIZE)

    def is_dir(self) -> bool:
        """Return whether a folder with this key exists in the store.

        A folder exists if the store contains an object whose key starts with the folder's key and a
        slash.
        """
        return self._find_size() == FOLDER_SIZE

    def iterdir(self) -> Iterator[RemotePath]:
        """Iterate over the objects and folders directly in this folder.

        Raises:
            FileNotFoundError: If the folder is empty and therefore does not exist.
            RemoteError: If the request fails. Also if the name of an object could lead to a path
                outside the folder, which is checked when the iterator is created.
        """
        names = self._get_listing()
        if not names:
            raise FileNotFoundError(2, "no such folder", str(self))
        return iter([self / name for name in names])

    def get_file_size(self) -> int:
        """Return the size of the object in bytes.

        Raises:
            OSError: If the object does not exist, or if the path is a folder.
        """
        size = self._find_size()
        if size is None:
            raise FileNotFoundError(2, "no such object", str(self))
        if size == FOLDER_SIZE:
            raise IsADirectoryError(21, "is a folder", str(self))
        return size

    def fetch_status(self) -> ListedFile:
        """Request the current size and version of the object, bypassing the cached listings.

        Raises:
            FileNotFoundError: If the object does not exist.
        """
        return parse_object_metadata(self.call_store("look up", lambda obs, store: obs.head(store, self.key)))

    # -- reading and writing ---------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """Read a small object completely."""
        return self.read_versioned().data

    def read_versioned(self) -> VersionedContent:
        """Read a small object completely, and return its content and version.

        The version can be passed to `write_bytes`, which then fails if the object has changed.
        """

        def read(obs: Any, store: Any) -> VersionedContent:
            response = obs.get(store, self.key)
            return VersionedContent(bytes(response.bytes()), _get_version(response.meta))

        return self.call_store("read", read)

    def read_range(self, start: int, stop: int) -> bytes:
        """Read the bytes [start, stop), or fewer bytes if the object ends before `stop`.

        If the range is empty, no request is sent.

        Raises:
            FileNotFoundError: If the object does not exist.
            RemoteError: If the object ends at or before `start`, or if the request fails.
        """
        _log.debug("%s: reading bytes %d to %d", self, start, stop)
        call = lambda obs, store: bytes(obs.get_range(store, self.key, start=start, end=stop))  # noqa: E731
        return self.call_store("read", call) if stop > start else b""

    def download_to(self, write_block: Callable[[Any], object]) -> ListedFile:
        """Download the object, and pass its content to a function block by block.

        Args:
            write_block: Function to call with each block of bytes. An exception that it raises, such as
                an OSError because the disk is full, ends the download and is raised unchanged.

        Returns:
            Size and version of the downloaded object.
        """
        response = self.call_store("read", lambda obs, store: obs.get(store, self.key))
        stream = response.stream(min_chunk_size=PART_BYTES)
        # Call `write_block` outside of `call_store`, which would report its errors as errors of the store.
        while block := self.call_store("read", lambda *_: next(stream, b"")):
            write_block(block)
        return parse_object_metadata(response.meta)

    def copy_to(self, target: RemotePath) -> None:
        """Copy the object to another path in any store. Does nothing if both paths are equal.

        Within a bucket, the store copies the object itself. To copy to another bucket, or to copy an object
        of 5 GiB or more, this process downloads and uploads the data.

        Raises:
            FileNotFoundError: If the object does not exist, even if both paths are equal.
            RemoteError: If a request fails.
        """
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
            # obstore requests the blocks in a separate thread, which must not call obstore. Therefore, read
            # each block in another thread.
            target._upload(iter(lambda: run_in_thread(block).result(), b""), size, target.call_store)

    def move_to(self, target: RemotePath) -> None:
        """Move the object to another path: copy it, and delete the original unless both paths are equal.

        Args:
            target: New path of the object, in any store.
        """
        self.copy_to(target)
        if self != target:
            self.unlink()

    def write_bytes(self, data: bytes, *, expected_version: Any = None) -> Any:
        """Write a small object in one request, replacing an existing object.

        Args:
            data: Content of the object.
            expected_version: Version that the existing object must have, from `read_versioned` or a
                previous `write_bytes`. If it is `""`, the object must not exist. If None, the object is
                written unconditionally.

        Returns:
            Version of the new object.

        Raises:
            ConflictError: If the existing object has a different version, because another process has
                written it. Also if this write succeeded but its response was lost, so that a retry found
                the new version. Read the object again to distinguish these cases.
            FileNotFoundError: If the object with `expected_version` was deleted. Some stores report a
                conflict instead.
            NoConditionalWritesError: If the store does not support conditional writes.
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
        """Upload a local file to this path. Several parts of a large file are sent concurrently."""
        self._upload(local_path, local_path.stat().st_size, self._call_store_with_retries)

    def _upload(
        self, data: Any, nbytes: int, call_store: Callable[[str, Callable[[Any, Any], Any]], Any]
    ) -> None:
        """Upload data to this path in parts.

        Args:
            data: Path of a local file, or an iterator over blocks of bytes.
            nbytes: Size of the data in bytes.
            call_store: Method that sends the requests: `call_store`, or `_call_store_with_retries`
                to upload again after a failure. Only a file can be uploaded again, because an
                iterator cannot be read twice.
        """
        options = {"chunk_size": compute_part_bytes(nbytes), "max_concurrency": get_max_connections()}
        call = lambda obs, store: obs.put(store, self.key, data, **options)  # noqa: E731
        with self.tolerate_lost_upload_response(nbytes):
            call_store("upload", call)

    @contextmanager
    def tolerate_lost_upload_response(self, expected_bytes: int) -> Iterator[None]:
        """Return a context manager for the request that completes an upload.

        If the response is lost, obstore retries the request. However, the store has already
        completed the upload, and returns an error. In this case, the upload counts as successful if
        the object has the expected size. The cached listings are cleared in every case.

        Args:
            expected_bytes: Size of the complete object in bytes.

        Raises:
            LostUploadError: If the object is missing or has a different size. This means that
                another process aborted the upload.
        """
        try:
            yield
        except LostUploadError:
            with suppress(FileNotFoundError):
                if self.fetch_status().size_bytes == expected_bytes:
                    return
            raise LostUploadError(
                f"{self}: another process aborted the upload; use a separate output folder for each run"
            ) from None
        finally:
            self.clear_listings()

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the object.

        Args:
            missing_ok: Ignored, because stores do not report whether the object existed.
        """
        self.parent.remove_objects([self.name])

    def remove_objects(self, names: Sequence[str]) -> None:
        """Delete objects in this folder, ignoring objects that do not exist.

        Args:
            names: Names of the objects, relative to this folder.
        """
        keys = [(self / name).key for name in names]
        try:
            if keys:
                self._call_store_with_retries("delete", lambda obs, store: obs.delete(store, keys))
        except FileNotFoundError:  # another process has already deleted an object
            for name in names if len(names) > 1 else ():
                self.remove_objects([name])
        self.clear_listings()


def parse_object_metadata(meta: Any) -> ListedFile:
    """Convert obstore's metadata of an object to a `ListedFile`.

    Its version is the ETag without quotation marks. If there is no ETag, it is the version, or else
    the modification time.
    """
    return ListedFile(
        int(meta["size"]), str(meta.get("e_tag") or meta.get("version") or meta["last_modified"]).strip('"')
    )


def _get_version(meta: Any) -> dict[str, str]:
    """Return the ETag and version from obstore's metadata, for use in conditional writes.

    A value that the store does not report is omitted.
    """
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _parse_url(url: str) -> _ParsedUrl:
    """Split a URL into the bucket and the key.

    Raises:
        RemoteError: See `RemotePath.from_url`.
    """
    protocol, _, rest = url.partition("://")
    protocol = protocol.lower()
    bucket, _, key = rest.partition("/")
    store_protocol = _ALIASES.get(protocol, protocol)
    if "@" in bucket and not (protocol in ("abfs", "abfss") and _AZURE_HOST.fullmatch(bucket)):
        raise RemoteError(
            f"{redact_credentials(url)}: credentials are not allowed in a URL; remove the credentials from "
            "the URL, and set environment variables such as AWS_ACCESS_KEY_ID"
        )
    if "?" in rest and not _MAGIC.search(key.partition("?")[0]) and "=" in rest:
        raise RemoteError(
            f"{redact_credentials(url)}: has a query string, as in a signed URL, so it cannot be used as a "
            "folder; remove the question mark and everything after it"
        )
    if name := parse_hub_page_url(url):
        raise RemoteError(f"{redact_credentials(url)}: is the web page of a repository; write {name} instead")
    if store_protocol == "hf":
        raise RemoteError(
            f"{redact_credentials(url)}: folders at hf:// cannot be listed; for a dataset, write "
            "owner/name without hf://, or use s3://, gs://, az:// or a folder"
        )
    if store_protocol not in OPTION_BUILDERS:
        problem = (
            f"files at {protocol}:// can be neither listed nor written"
            if protocol in ("http", "https")
            else f"{protocol}:// is not a supported object store"
        )
        raise RemoteError(f"{redact_credentials(url)}: {problem}; use s3://, gs://, az:// or a folder")
    if {".", ".."} & set(rest.split("/")):
        raise RemoteError(
            f"{redact_credentials(url)}: contains . or .. as a path segment, which is not supported; write "
            "the URL without these segments"
        )
    if not bucket:
        raise RemoteError(f"{redact_credentials(url)}: contains no bucket; write {protocol}://bucket/path")
    key = "/".join(part for part in key.split("/") if part)
    if key:
        validate_object_name(key, url)
    return _ParsedUrl(Bucket(store_protocol, bucket, protocol), key)


def find_matching_objects(path: RemotePath) -> dict[RemotePath, ListedFile]:
    """Find the objects that match a path with wildcards.

    `*`, `?`, and `[...]` match within one path component, and `**` matches any number of folders. At
    the end of the path, `**` matches all objects below the folder. Upper and lower case differ. Empty
    objects with the name of a folder never match.

    Args:
        path: Path to match. A path without wildcards matches only the object itself, so the path of a
            folder or bucket matches nothing.

    Returns:
        Size and version of each matching object, keyed by path. Empty if nothing matches.

    Raises:
        RemoteError: If a request fails, or if the name of a matching object could lead to a path
            outside the folder.
    """
    parts = path.key.split("/")
    fixed = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    folder, pattern = replace(path, key="/".join(parts[:fixed])), parts[fixed:]
    if not pattern:
        with suppress(FileNotFoundError):
            entry = path.fetch_status() if path.key else None
            if entry is not None and (entry.size_bytes or not path._get_listing()):
                return {path: entry}
        return {}
    fits: Callable[[str], bool] = lambda name: _matches_pattern(name.split("/"), pattern)  # noqa: E731
    objects = (
        folder._list_folder().objects
        if len(pattern) == 1 and pattern != ["**"]
        else folder.list_objects(fits)
    )
    return {folder / name: entry for name, entry in objects.items() if fits(name)}


def _matches_pattern(parts: list[str], pattern: list[str]) -> bool:
    """Return whether the components of a name match the components of a pattern.

    `**` matches any number of components.
    """
    if not pattern:
        return not parts
    if pattern[0] == "**" and _matches_pattern(parts, pattern[1:]):
        return True
    fits = bool(parts) and fnmatchcase(parts[0], pattern[0])
    return fits and _matches_pattern(parts[1:], pattern if pattern[0] == "**" else pattern[1:])


def abort_open_uploads(folder: RemotePath, *, recursive: bool = True) -> None:
    """Abort all unfinished uploads below a folder, usually left by interrupted processes.

    An upload that another process is still performing is also aborted, and fails in that process with
    a `LostUploadError`.

    This only works for S3 and requires boto3, because obstore cannot list uploads. In other cases,
    or if aborting fails, the uploads remain until the lifecycle rules of the bucket remove them.

    Args:
        folder: Folder that contains the objects.
        recursive: Whether to include uploads in nested folders.
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
    except Exception as error:  # boto3 is missing or raises any error
        _log.debug("%s: open uploads were not aborted: %s", folder, redact_credentials(str(error)))


_SIGNALS = 0.5  # Seconds between two checks for signals in the main thread


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a function in a new daemon thread, and return its result or exception as a future."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return result


def _run_interruptibly(call: Callable[[], T]) -> T:
    """Call a function, and return its result. In the main thread, Ctrl-C ends the wait for the result.

    obstore does not handle signals, so the main thread runs the function in another thread and waits
    for it. After Ctrl-C, the function continues to run in that thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    return wait_for_result(run_in_thread(call))


def wait_for_result(result: Future[T]) -> T:
    """Wait for the result of a thread and return it, handling signals while waiting.

    If the thread raised an exception, it is raised again.
    """
    # A signal to another thread does not end a wait without a timeout.
    while not wait([result], timeout=_SIGNALS).done:
        pass
    return result.result()
