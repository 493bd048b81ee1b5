"""Errors of object stores: retried where that can help, and reported in one line without credentials.

Protocol packages raise their own exceptions (botocore, aiohttp, gcsfs, ...). They are recognised by class
name along the chain of causes, so that none of these packages has to be imported.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The environment variables that set the limits, and their defaults.
ATTEMPTS, DEFAULT_ATTEMPTS = "PORTABLE_STORAGE_ATTEMPTS", 8
TIMEOUT, DEFAULT_TIMEOUT = "PORTABLE_STORAGE_TIMEOUT", 60.0
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 20.0  # seconds

_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_TRANSIENT_CODES = {
    "InternalError",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
}
# Exceptions of botocore, aiohttp, fsspec and gcsfs for connections that fail or break.
_TRANSIENT_NAMES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "FSTimeoutError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseParserError",
    "ResponseStreamingError",
    "TransportError",
}
_NO_CREDENTIALS_NAMES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "RefreshError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
}
_DENIED_CODES = {
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "Unauthorized",
    "401",
    "403",
}


class RemoteError(CheckpointError):
    """An object store or URL that cannot be used; one line, without credentials."""


class AccessDeniedError(RemoteError):
    """The store denies access with these credentials, whether or not the object exists."""


class RetriesUsedUpError(RemoteError):
    """A transient failure persisted through every attempt."""


def attempts() -> int:
    """Attempts per request, the first included (`PORTABLE_STORAGE_ATTEMPTS`, default 8)."""
    return max(1, int(_setting(ATTEMPTS, DEFAULT_ATTEMPTS)))


def timeout() -> float:
    """Seconds without a response after which a request fails (`PORTABLE_STORAGE_TIMEOUT`, default 60)."""
    return max(0.1, _setting(TIMEOUT, DEFAULT_TIMEOUT))


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise RemoteError(f"{name}: {text!r} is not a number") from None


def with_retries(where: str, what: str, call: Callable[[], T]) -> T:
    """`call()`, retried after transient failures: timeouts, throttling, 5xx, broken connections.

    Backoff doubles from 0.1 s to 20 s, with each wait drawn from the upper half of its range: hosts of a pod
    that fail together do not retry together.

    Args:
        where: the URL, for messages.
        what: the operation as a verb, for messages ("read").

    Raises:
        FileNotFoundError: there is no such object.
        RemoteError: any other failure; one line, without credentials.
    """
    limit = attempts()
    attempt = 0
    while True:
        attempt += 1
        try:
            return call()
        except CheckpointError:
            raise
        except Exception as error:
            causes = list(_chain(error))
            if not any(map(_is_transient, causes)):
                raise _translated(where, what, error, causes) from None
            reason = redact(_reason(error))
            if attempt == limit:
                raise RetriesUsedUpError(
                    f"{redact(where)}: cannot {what}, {limit} attempts failed; the last: {reason}"
                ) from None
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
            _log.debug(
                "%s: %s failed (%s), attempt %d of %d, next in %.1f s",
                redact(where),
                what,
                reason,
                attempt,
                limit,
                wait,
            )
            time.sleep(wait)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> tuple[int, str]:
    """HTTP status and the store's error code; (0, "") where the error has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(response.get("Error", {}).get("Code", ""))
        return (int(code) if code.isdigit() and not status else int(status or 0)), code
    number = str(getattr(error, "code", ""))  # gcsfs
    return (int(number), number) if "HttpError" in _names(error) and number.isdigit() else (0, "")


def _is_transient(error: BaseException) -> bool:
    status, code = _status(error)
    if status or code:
        return status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
    return isinstance(error, (TimeoutError, ConnectionError)) or bool(_names(error) & _TRANSIENT_NAMES)


def _translated(where: str, what: str, error: Exception, causes: list[BaseException]) -> Exception:
    """The exception to raise instead of `error`, with a message of one line."""
    url = redact(where)
    codes = {code for status, code in map(_status, causes)} | {str(_status(cause)[0]) for cause in causes}
    if "NoSuchBucket" in codes or any("bucket does not exist" in str(cause).lower() for cause in causes):
        return RemoteError(f"{url}: there is no such bucket")
    if any(_names(cause) & _NO_CREDENTIALS_NAMES for cause in causes):
        return RemoteError(
            f"{url}: no credentials found; configure them as for the store's own tools (docs/storage.md)"
        )
    if codes & _DENIED_CODES or any(isinstance(cause, PermissionError) for cause in causes):
        return AccessDeniedError(
            f"{url}: access denied, these credentials may not {what} here ({redact(_reason(error))})"
        )
    if "404" in codes or any(isinstance(cause, FileNotFoundError) for cause in causes):
        return FileNotFoundError(2, "no such object", url)
    return RemoteError(f"{url}: cannot {what}: {redact(_reason(error))}")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


_USERINFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^\s/@]*@", re.IGNORECASE)
_QUERY = re.compile(r"(?P<url>[a-z][a-z0-9+.-]*://[^\s?'\"<>]*)\?[^\s'\"<>]*", re.IGNORECASE)
_ACCESS_KEY_ID = re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b")
_PARAMETER = re.compile(
    r"(?P<name>\b[\w-]*(?:secret|token|password|passwd|signature|credential|api_?key|access_?key)[\w-]*"
    r"['\"]?\s*[=:]\s*['\"]?)(?P<value>[^\s'\",;&)}]+)",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"SECRET|TOKEN(?!IZER)|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_KEY|SAS|ACCOUNT_KEY"
)


def redact(text: str) -> str:
    """`text` without credentials: those in URLs, in `name=value` pairs, and those set in the environment."""
    text = _USERINFO.sub(r"\g<scheme>***@", text)
    text = _QUERY.sub(r"\g<url>?***", text)
    text = _PARAMETER.sub(r"\g<name>***", text)
    text = _ACCESS_KEY_ID.sub("***", text)
    for secret in _secrets():
        text = text.replace(secret, "***")
    return text


def _secrets() -> list[str]:
    """Values of the environment to redact, longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if len(value) >= 6 and _SECRET_NAME.search(name.upper()) and not _is_path(value)
    }
    return sorted(found, key=len, reverse=True)


def _is_path(value: str) -> bool:
    """Whether a variable such as GOOGLE_APPLICATION_CREDENTIALS names a file, which may be shown."""
    return value.startswith(("/", "~", "./")) and Path(value).expanduser().exists()
