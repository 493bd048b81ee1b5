"""Define the errors that object stores raise. Their messages have one line and contain no credentials."""

from __future__ import annotations

import re

from portable.converters.errors import CheckpointError, redact_credentials, to_printable

_STATUS = re.compile(r"non-2xx status code: (\d{3})|status: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist", re.IGNORECASE)
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|token (?:\w+ )*expired", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(
    r"lacked valid authentication|169\.254\.169\.254|metadata\.google\.internal|invalid_grant"
    r"|credential provider",
    re.IGNORECASE,
)
_UPLOAD = re.compile(r"[?&]uploadId=")
_REDIRECTED = re.compile(r"redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
_TRANSIENT_STATUSES = {"408", "429", "500", "502", "503", "504"}
_CONNECTION_FAILURE = re.compile(
    r"HTTP error|connection|timed out|error decoding response body|incomplete", re.IGNORECASE
)
_RETRY_COUNT = re.compile(r"after (\d+) retries")


class RemoteError(CheckpointError):
    """Error raised if an operation on an object store fails, or if a URL is not valid.

    The message has one line and contains no credentials.
    """

    exit_code = 2


class AccessDeniedError(RemoteError):
    """Error raised if the store denies access, or if there are no valid credentials.

    The object may or may not exist.
    """


class RetriesExhaustedError(RemoteError):
    """Error raised if a possibly temporary failure persists after all retries."""


class ConflictError(RemoteError):
    """Error raised if a conditional write finds a different version of the object."""


class LostUploadError(RemoteError):
    """Error raised if the store no longer has a multipart upload.

    The upload was either aborted, or completed by a request whose response was lost.
    """


class NoConditionalWritesError(RemoteError):
    """Error raised if the store does not support conditional writes."""


def parse_hub_page_url(url: str) -> str | None:
    """Return the repository name if a URL is a repository page on the Hugging Face Hub, otherwise None.

    The name has the form `owner/name`, also for a dataset, and does not include a revision. Pages of
    Spaces, and of repositories without an owner, are not included.
    """
    page = re.fullmatch(
        r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?"
        r"(?!(?:datasets|spaces|docs|blog|collections|papers|api)/)"
        r"([\w.-]+/(?!(?:tree|blob|resolve|raw|discussions|commits)(?:[/?#]|$))[\w.-]+)(?:[/?#].*)?",
        url,
    )
    return None if page is None else page[1]


def translate_store_error(
    location: str, operation: str, error: BaseException, searched_credentials: str
) -> Exception:
    """Convert an obstore exception to an exception with a one-line message.

    Args:
        location: URL of the object.
        operation: Operation as a verb, such as `"read"`.
        error: Exception from obstore.
        searched_credentials: Description of the credentials that were tried. See
            `SEARCHED_CREDENTIALS`.

    Returns:
        A `RemoteError`, or a `FileNotFoundError` if the object does not exist. The caller raises it.
    """
    url, text, kind = redact_credentials(location), str(error), type(error).__name__
    reason = format_store_error(error)
    status_match = _STATUS.search(text)
    status = (status_match[1] or status_match[2]) if status_match else ""
    if _NO_BUCKET.search(text):
        return RemoteError(f"{url}: there is no such bucket; check the URL")
    if kind == "InvalidPathError":
        return RemoteError(f"{url}: the object name is not valid ({reason}); rename or delete the object")
    if kind in ("AlreadyExistsError", "PreconditionError") or status in ("409", "412"):
        return ConflictError(
            f"{url}: cannot {operation}, because another process has changed the object; run the command "
            "again"
        )
    if kind == "NotImplementedError" or status == "501":
        return NoConditionalWritesError(
            f"{url}: cannot {operation}: {reason}; use a store that supports conditional writes"
        )
    if _EXPIRED.search(text):
        return AccessDeniedError(
            f"{url}: the credentials have expired ({searched_credentials}); renew the credentials"
        )
    if kind == "UnauthenticatedError" or _NO_CREDENTIALS.search(text):
        return AccessDeniedError(
            f"{url}: no credentials found ({searched_credentials}): {reason}; set up one of these credentials"
        )
    if kind == "PermissionDeniedError" or status in ("401", "403"):
        return AccessDeniedError(
            f"{url}: access denied: the credentials have no permission to {operation} ({reason}); use other "
            "credentials, or grant this permission"
        )
    if _REDIRECTED.search(text):
        return RemoteError(
            f"{url}: the bucket is in another region ({reason}); set AWS_REGION to the region of the bucket"
        )
    if status == "404" and _UPLOAD.search(text):
        return LostUploadError(f"{url}: the store no longer has this upload; run the command again")
    if isinstance(error, FileNotFoundError) or status == "404":
        return FileNotFoundError(2, "no such object", url)
    if status in _TRANSIENT_STATUSES or (not status and _CONNECTION_FAILURE.search(text)):
        retries = _RETRY_COUNT.search(text)
        count = int(retries[1]) + 1 if retries else 1
        return RetriesExhaustedError(
            f"{url}: cannot {operation}, because {count} attempt{'' if count == 1 else 's'} failed (the last "
            f"error: {reason}); run the command again"
        )
    return RemoteError(f"{url}: cannot {operation}: {reason}; check the URL and the settings of the store")


def format_store_error(error: BaseException) -> str:
    """Format an obstore exception as one line of at most 300 characters without credentials.

    If the exception has no message, the name of its type is returned.

    If the exception contains a response from the store, only the status, error code, and message of the
    response are kept.
    """
    text = " ".join(str(error).partition("Debug source:")[0].split())
    head, separator, tail = text.partition("Server returned non-2xx status code: ")
    if separator:
        code, message = _CODE.search(tail), re.search(r"<Message>([^<]*)", tail)
        text = " ".join([tail.partition(":")[0], *(match[1] for match in (code, message) if match)])
    else:
        text = head.rpartition(" - ")[2]
    return to_printable(redact_credentials(text)[:300]) or type(error).__name__
