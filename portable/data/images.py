"""Read and decode the images that records of conversations refer to.

The files are not trusted: only a few formats are decoded, file sizes and image sizes are limited,
paths must not leave the image folder, and URLs are read only if the settings allow them. As in
transformers, decoding returns the first frame in RGB, rotated according to the EXIF data.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import http.client
import io
import ipaddress
import re
import time
import urllib.error
import urllib.request
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.storage.path_or_url import strip_file_scheme
from portable.converters.storage.safe_open import LinkError, resolve_local_path_inside
from portable.data.sources.documents import MAX_IMAGE_FILE_BYTES, RecordError
from portable.errors import to_one_line
from portable.paths import open_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from portable.config.sections import DataConfig
    from portable.data.sources.documents import ImageReference

MAX_PIXELS = 100_000_000
"""Maximum number of pixels of an image. Decoding one takes 3 bytes per pixel."""
THUMBNAIL_PIXELS = 96
"""Maximum width and height of a thumbnail in the report."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that Pillow may decode."""
_URL_SECONDS = 30.0
"""Timeout in seconds for each response of a server."""
_DOWNLOAD_SECONDS = 300.0
"""Maximum duration of a download in seconds."""
_DOWNLOAD_CHUNK_BYTES = 1 << 20


class ImageSize(NamedTuple):
    """Width and height of an image in pixels."""

    width: int
    height: int


class ImageFile(NamedTuple):
    """Content of an image file, and the size to which the image is scaled."""

    data: bytes
    size: ImageSize


class ImageFileState(NamedTuple):
    """State of a local image file when it was read.

    Attributes:
        path: Path in the record. Relative paths are relative to the image folder.
        num_bytes: Size of the file in bytes. -1 if there was no file.
        modified_ns: Time of the last modification in nanoseconds. -1 if there was no file.
        digest: BLAKE2b digest of the file, as hexadecimal digits. Empty if the image could not
            be read or decoded.
    """

    path: str
    num_bytes: int
    modified_ns: int
    digest: str = ""


@dataclass(frozen=True)
class LoadedImage:
    """Image file of a record that was read and decoded successfully.

    Attributes:
        data: Content of the file.
        size: Size at which the image is passed to the model's processor.
    """

    data: bytes
    size: ImageSize

    @property
    def digest(self) -> bytes:
        """BLAKE2b digest of the file (16 bytes)."""
        return hashlib.blake2b(self.data, digest_size=16).digest()


@dataclass(frozen=True)
class ImageReader:
    """Reader of the images that records refer to.

    Attributes:
        root: Folder that contains all image files. It is the setting ``data.image_root`` or, if
            this is not set, the folder of the source. None if the source has no single local folder
            either.
        allow_urls: Whether URLs are read. ``private`` also allows servers with private addresses.
        max_pixels: Largest number of pixels of an image. Larger images are scaled down. None for no
            limit.
        no_root_reason: Reason why ``root`` is None, used in error messages.
        is_root_set: Whether ``root`` comes from ``data.image_root``.
    """

    root: Path | None
    allow_urls: bool | Literal["private"] = False
    max_pixels: int | None = None
    no_root_reason: str = "the source has no local folder"
    is_root_set: bool = False

    @property
    def cache_key(self) -> str:
        """Text that identifies all settings that determine how the images of a record are read.

        The text does not contain the folder of the source, so a source keeps its cache when it is moved.
        """
        return repr((self.root if self.is_root_set else None, self.allow_urls, self.max_pixels))

    def load_image(
        self, reference: ImageReference, location: str, states: list[ImageFileState] | None = None
    ) -> LoadedImage:
        """Read an image, and decode it to check that it is not damaged.

        Args:
            reference: Reference to the image in a record.
            location: Location of the record in its source, used in error messages.
            states: List to which the size, modification time and digest of a local image file are
                appended. They are appended even if the file cannot be read or decoded, but then
                without the digest. If None, they are not recorded.

        Raises:
            RecordError: If the image cannot be read or decoded.
        """
        path = None if reference.path is None else self._resolve_path(reference.path, location)
        state = None if path is None else _read_file_state(str(reference.path), path)
        try:
            image = self._load_image(reference, path, location)
            if state is not None:
                state = ImageFileState(*state[:3], digest=image.digest.hex())
        finally:
            if states is not None and state is not None:
                states.append(state)
        return image

    def _load_image(self, reference: ImageReference, path: Path | None, location: str) -> LoadedImage:
        """Read an image. See :meth:`load_image`.

        Args:
            reference: Reference to the image in a record.
            path: Path of the local file. None if the reference is not a path.
            location: Location of the record in its source, used in error messages.
        """
        name = _describe_reference(reference)
        try:
            data = self._read_reference(reference, path, location)
            if len(data) > MAX_IMAGE_FILE_BYTES:
                raise ValueError(f"the file is larger than the limit of {MAX_IMAGE_FILE_BYTES >> 20} MiB")
            width, height = decode_image(data).size
        except RecordError:
            raise
        except Exception as error:  # a damaged file can raise any exception in Pillow
            raise RecordError(
                f"data.source: {location}: cannot read the image {name} ({_describe_error(error)}); "
                "correct or remove the image"
            ) from error
        return LoadedImage(data, self._scale_down(width, height))

    def _scale_down(self, width: int, height: int) -> ImageSize:
        """Return the size of an image after scaling it down to at most ``max_pixels``."""
        if self.max_pixels is None or width * height <= self.max_pixels:
            return ImageSize(width, height)
        scale = (self.max_pixels / (width * height)) ** 0.5
        return ImageSize(max(1, int(width * scale)), max(1, int(height * scale)))

    def _read_reference(self, reference: ImageReference, path: Path | None, location: str) -> bytes:
        """Read the content of the image file that a reference refers to.

        At most ``MAX_IMAGE_FILE_BYTES + 1`` bytes of a local or remote file are returned. The
        additional byte allows the caller to detect a file that is too large.

        Args:
            reference: Reference to the image in a record: a path, a URL, or the content itself.
            path: Resolved path of the local file. None if the reference is not a path.
            location: Location of the record in its source, used in error messages.
        """
        if reference.data is not None:
            return reference.data
        if path is None:
            return self._read_url(reference.url or "", location)
        with open_file(path) as file:
            return file.read(MAX_IMAGE_FILE_BYTES + 1) or b""

    def _resolve_path(self, path: str, location: str) -> Path:
        """Return the path of a local file, with all links resolved.

        Args:
            path: Path in a record.
            location: Location of the record in its source, used in error messages.

        Raises:
            RecordError: If there is no image folder, or if the file is outside it. Also raised if
                ``path`` is invalid, or is a URL with another scheme than ``http`` and ``https``.
        """
        name = _quote_reference(path)
        if re.match(r"[a-z][a-z0-9+.-]+://", path):
            raise RecordError(
                f"data.source: {location}: the image {name} is neither a path nor an http or https URL; "
                "download the image, and specify its path"
            )
        if self.root is None:
            raise RecordError(
                f"data.image_root: {location}: the image {name} is a local path, but "
                f"{self.no_root_reason}; set data.image_root to the local folder of the images"
            )
        try:
            return Path(resolve_local_path_inside(self.root / path, self.root))
        except LinkError as error:
            raise RecordError(
                f"data.image_root: {location}: the image {name} is outside the image folder {self.root}; "
                "move the image into this folder, or set data.image_root to a folder that contains all images"
            ) from error
        except (OSError, ValueError) as error:  # the path is too long, or contains a null character
            raise RecordError(
                f"data.source: {location}: cannot read the image {name} ({_describe_error(error)}); "
                "correct the path, or remove the image"
            ) from error

    def _read_url(self, url: str, location: str) -> bytes:
        """Read the file at an ``http`` or ``https`` URL.

        If :attr:`allow_urls` is True, servers with private addresses are refused.

        Raises:
            RecordError: If :attr:`allow_urls` is False.
            Exception: If the download fails. See :func:`_download`.
        """
        if not self.allow_urls:
            raise RecordError(
                f"data.image_urls: {location}: the image {_quote_reference(url)} is a URL; set "
                "data.image_urls: true to download images"
            )
        return _download(url, allow_private=self.allow_urls == "private")


class _PrivateAddressError(OSError):
    """Raised if a connection leads to a private address."""


def _check_address_is_public(connection: http.client.HTTPConnection) -> None:
    """Check that an open connection leads to a public address, and close it otherwise.

    Must be called before a request is sent. Checking the host name instead would not be safe, because
    the name could resolve to a different address when the connection is opened.

    Raises:
        _PrivateAddressError: If the address is private, such as an address of this machine.
    """
    address = str(connection.sock.getpeername()[0]).partition("%")[0]
    if not ipaddress.ip_address(address).is_global:
        connection.close()
        raise _PrivateAddressError(
            f"{address} is a private address, but only data.image_urls: private allows downloads from "
            "private addresses"
        )


class _PublicHTTPConnection(http.client.HTTPConnection):
    """HTTP connection that refuses servers with a private address."""

    def connect(self) -> None:
        """Open the connection. Raises _PrivateAddressError if the address is private."""
        super().connect()
        _check_address_is_public(self)


class _PublicHTTPSConnection(http.client.HTTPSConnection):
    """Encrypted connection that refuses servers with a private address.

    The address is checked after the connection is opened, but before a request is sent. The
    address of a proxy is not checked, because the user has set the proxy.
    """

    is_tunnel = False

    def set_tunnel(self, *arguments: Any, **options: Any) -> None:
        """Set the host to which the proxy connects.

        Overrides ``HTTPConnection.set_tunnel`` and has the same arguments. It also marks the
        connection as a tunnel, so that :meth:`connect` does not check the address of the proxy.
        """
        self.is_tunnel = True
        super().set_tunnel(*arguments, **options)

    def connect(self) -> None:
        """Open the connection.

        Raises:
            _PrivateAddressError: If the address is private. Not raised if the connection leads
                through a proxy.
        """
        super().connect()
        if not self.is_tunnel:
            _check_address_is_public(self)


class _PublicHTTPHandler(urllib.request.HTTPHandler):
    """Handler of ``http`` URLs that refuses private addresses, also after a redirect.

    If a proxy is used, addresses are not checked. See :meth:`http_open`.
    """

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a URL. Without a proxy, refuse a server with a private address.

        With a proxy, no address is checked, because the user has set the proxy, and the proxy connects
        to the server.
        """
        return self.do_open(http.client.HTTPConnection if req.has_proxy() else _PublicHTTPConnection, req)


class _PublicHTTPSHandler(urllib.request.HTTPSHandler):
    """Handler of ``https`` URLs that refuses private addresses, also after a redirect.

    If a proxy is used, addresses are not checked. See :meth:`https_open`.
    """

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open an ``https`` URL. Without a proxy, refuse a server with a private address.

        With a proxy, no address is checked, because the user has set the proxy, and the proxy connects
        to the server.
        """
        return self.do_open(_PublicHTTPSConnection, req)


def _download(url: str, *, allow_private: bool) -> bytes:
    """Download the file at a URL.

    Returns at most one byte more than :data:`MAX_IMAGE_FILE_BYTES`, so that the caller can detect a
    file that is too large. The download ends soon after this size.

    Args:
        url: ``http`` or ``https`` URL.
        allow_private: Whether the server may have a private address.

    Raises:
        OSError: If the server does not answer or returns an HTTP error, if it has a private
            address that is not allowed, or if the download takes too long.
        Exception: If the URL or the answer of the server is malformed. The type varies.
    """
    opener = urllib.request.OpenerDirector()  # has no handlers for local files and other protocols
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler if allow_private else _PublicHTTPHandler,
        urllib.request.HTTPSHandler if allow_private else _PublicHTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    request = urllib.request.Request(url, headers={"User-Agent": "portable-trainer"})
    end = time.monotonic() + _DOWNLOAD_SECONDS
    data = bytearray()
    with opener.open(request, timeout=_URL_SECONDS) as response:
        while len(data) <= MAX_IMAGE_FILE_BYTES and (chunk := response.read1(_DOWNLOAD_CHUNK_BYTES)):
            data += chunk
            if time.monotonic() > end:
                raise TimeoutError(
                    f"the download took longer than the limit of {_DOWNLOAD_SECONDS:.0f} seconds"
                )
    return bytes(data[: MAX_IMAGE_FILE_BYTES + 1])


def _read_file_state(name: str, path: Path) -> ImageFileState:
    """Read the size and the modification time of a local image file.

    The digest in the result is empty. Both numbers are -1 if the file does not exist.

    Args:
        name: Path of the file, as written in the data record.
        path: Resolved path of the file.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ImageFileState(name, -1, -1)
    return ImageFileState(name, status.st_size, status.st_mtime_ns)


class ImageFileComparison(NamedTuple):
    """Result of checking whether local image files have changed since they were read.

    Attributes:
        changed_path: Path of the first file whose content has changed. None if no content has
            changed.
        verified_digest: Digest of the current sizes and modification times of all files. Set only
            if a size or time has changed but no content has changed, otherwise empty.
    """

    changed_path: str | None
    verified_digest: str = ""


def find_changed_image_file(
    root: Path | None, states: Sequence[ImageFileState], verified_digest: str = ""
) -> ImageFileComparison:
    """Find a local image file whose content has changed since it was read.

    A file is read again only if its size or modification time has changed. Deleted files are
    ignored. A file that could not be read or decoded earlier counts as changed if it has been
    created, modified or deleted since then.

    Args:
        root: Image folder. None means the current folder.
        states: States of the files when they were read.
        verified_digest: Digest of the sizes and modification times of all files, returned by an
            earlier comparison that found no changed content. If the files still have these sizes
            and times, no file is read.

    Returns:
        The path of the first changed file, if there is one. If files were read again and no content
        has changed, the result has a new digest. Pass it as ``verified_digest`` to later
        comparisons. If no file was read, the digest in the result is empty, and the previous
        ``verified_digest`` can still be used.
    """
    folder = Path() if root is None else root
    current = [_read_file_state(state.path, folder / state.path) for state in states]
    touched = [
        state
        for state, now in zip(states, current, strict=True)
        if now[:3] != state[:3] and not (now.num_bytes < 0 and state.digest)
    ]
    if not touched:
        return ImageFileComparison(None)
    digest = hashlib.blake2b(digest_size=16)
    for now in current:
        digest.update(f"{now.num_bytes} {now.modified_ns}\n".encode())
    if digest.hexdigest() == verified_digest:
        return ImageFileComparison(None)
    for state in touched:
        if not state.digest or state.digest != _compute_file_digest(folder / state.path):
            return ImageFileComparison(state.path)
    return ImageFileComparison(None, digest.hexdigest())


def _compute_file_digest(path: Path) -> str:
    """Compute the digest of a file, as in :attr:`ImageFileState.digest`. Empty if it cannot be read."""
    try:
        with open_file(path) as file:
            return hashlib.blake2b(file.read(MAX_IMAGE_FILE_BYTES + 1) or b"", digest_size=16).hexdigest()
    except OSError:
        return ""


def _describe_reference(reference: ImageReference) -> str:
    """Describe an image reference for an error message."""
    if reference.data is not None:
        return f"of {len(reference.data):,} bytes"
    return _quote_reference(reference.path or reference.url or "")


def _quote_reference(text: str) -> str:
    """Quote a path or a URL, truncated to 200 characters."""
    return repr(to_one_line(text) if len(text) <= 200 else to_one_line(text[:197]) + "...")


def _describe_error(error: BaseException) -> str:
    """Describe an exception in at most 200 characters.

    The result is the message without the type. It is the name of the type if there is no message.
    For an image in an unknown format, the message lists the supported formats.
    """
    # Compare the name, because Pillow may not be installed.
    if type(error).__name__ == "UnidentifiedImageError":
        return f"not a {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} file"
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        error = error.reason if isinstance(error.reason, BaseException) else error
    text = getattr(error, "strerror", None) or to_one_line(error) or type(error).__name__
    text = re.sub(r" ?<_io\.BytesIO object at 0x[0-9a-f]+>", "", text)
    return text[:200]


def decode_image(data: bytes, size: ImageSize | None = None) -> Any:
    """Decode the first frame of an image file to a Pillow image in RGB.

    The image is rotated according to its EXIF data before it is scaled.

    Args:
        data: Content of the file.
        size: Size to scale the image to. None keeps its original size.

    Raises:
        ValueError: If the image has more than :data:`MAX_PIXELS` pixels.
        Exception: If the file is damaged or its format is not supported. Pillow raises many
            types of exceptions.
    """
    from PIL import Image, ImageOps

    Image.init()  # registers the formats at the first call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about large images, but the size is checked below
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(
                    f"the image has {image.width:,} x {image.height:,} pixels, more than the limit of "
                    f"{MAX_PIXELS // 1_000_000} million"
                )
            image.load()
            decoded = ImageOps.exif_transpose(image).convert("RGB")
    return decoded if size is None or decoded.size == size else decoded.resize((size.width, size.height))


def read_image_file(path: Path) -> ImageFile:
    """Read an image file that the user has selected, and decode it to check that it is not damaged.

    Raises:
        ValueError: If the file cannot be read or decoded. The message is the reason.
    """
    try:
        if not path.is_file():
            raise FileNotFoundError("there is no regular file at this path")
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_FILE_BYTES + 1)
        if len(data) > MAX_IMAGE_FILE_BYTES:
            raise ValueError(f"the file is larger than the limit of {MAX_IMAGE_FILE_BYTES >> 20} MiB")
        return ImageFile(data, ImageSize(*decode_image(data).size))
    except Exception as error:  # a damaged file can raise any exception in Pillow
        raise ValueError(_describe_error(error)) from error


def build_thumbnail(data: bytes) -> str:
    """Scale an image down to :data:`THUMBNAIL_PIXELS` on its longer side.

    Args:
        data: Content of the image file.

    Returns:
        JPEG data URL (``data:image/jpeg;base64,...``) of at most about 10,000 characters.
    """
    thumbnail = decode_image(data)
    thumbnail.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    thumbnail.save(buffer, format="JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def build_image_reader(data: DataConfig) -> ImageReader:
    """Build the image reader of a source.

    Args:
        data: The ``data`` section for this source.
    """
    reader = ImageReader(None, data.image_urls, data.image_max_pixels)
    if data.image_root is not None:
        return replace(reader, root=Path(data.image_root), is_root_set=True)
    sources = (data.source,) if isinstance(data.source, str) else data.source or ()
    folders = {_find_source_folder(strip_file_scheme(source)) for source in sources}
    if len(folders) > 1:
        return replace(reader, no_root_reason="the files of the source are in several folders")
    return replace(reader, root=next(iter(folders), None))


def _find_source_folder(name: str) -> Path | None:
    """Return the local folder of a source's files. None if the source is not local.

    For a file, this is its parent folder. For a pattern, it is the folder before the first
    wildcard.
    """
    path = Path(name)
    parts = [index for index, part in enumerate(path.parts) if glob.has_magic(part)]
    folder = Path(*path.parts[: parts[0]]) if parts else path if path.is_dir() else path.parent
    return folder if folder.is_dir() and (parts or path.exists()) else None
