"""Failures of object stores: said in one line without credentials, tried again where that can help.

Protocol packages raise their own exceptions (botocore, aiohttp, gcsfs ...). They are told apart by name,
along the chain of causes, so that none of these packages has to be imported.
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
# Exceptions of botocore, aiohttp, fsspec and gcsfs for connections that fail or break off.
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
    """A place in an object store that cannot be used; one line, without credentials."""


class AccessDeniedError(RemoteError):
    """The store knows the place, or will not say, and does not let these credentials in."""


class RetriesUsedUpError(RemoteError):
    """A failure that may pass did not, as often as it was tried."""


def attempts() -> int:
    """How often one request is tried, the first time included (`PORTABLE_STORAGE_ATTEMPTS`, 8)."""
    return max(1, int(_setting(ATTEMPTS, DEFAULT_ATTEMPTS)))


def timeout() -> float:
    """Seconds without an answer after which a request has failed (`PORTABLE_STORAGE_TIMEOUT`, 60)."""
    return max(0.1, _setting(TIMEOUT, DEFAULT_TIMEOUT))


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise RemoteError(f"{name}: {text!r} is not a number") from None


def with_retries(where: str, what: str, call: Callable[[], T]) -> T:
    """`call()`, again after failures that may pass: timeouts, throttling, 5xx, broken connections.

    Waits double from 0.1 s up to 20 s, each drawn at random from its upper half, so that the hosts of a pod
    that failed together do not come back together.

    Args:
        where: the URL, for messages.
        what: the operation as a verb, for messages ("read").

    Raises:
        FileNotFoundError: there is no such object.
        RemoteError: everything else; one line, without credentials.
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
                raise _said(where, what, error, causes) from None
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
    """HTTP status and the store's own code, (0, "") where the error carries none."""
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


def _said(where: str, what: str, error: Exception, causes: list[BaseException]) -> Exception:
    """The exception that says in one line why `error` ended it."""
    place = redact(where)
    codes = {code for status, code in map(_status, causes)} | {str(_status(cause)[0]) for cause in causes}
    if "NoSuchBucket" in codes or any("bucket does not exist" in str(cause).lower() for cause in causes):
        return RemoteError(f"{place}: there is no such bucket")
    if any(_names(cause) & _NO_CREDENTIALS_NAMES for cause in causes):
        return RemoteError(
            f"{place}: no credentials found; set them up as for the store's own tools (docs/storage.md)"
        )
    if codes & _DENIED_CODES or any(isinstance(cause, PermissionError) for cause in causes):
        return AccessDeniedError(
            f"{place}: access denied, these credentials may not {what} here ({redact(_reason(error))})"
        )
    if "404" in codes or any(isinstance(cause, FileNotFoundError) for cause in causes):
        return FileNotFoundError(2, "no such object", place)
    return RemoteError(f"{place}: cannot {what}: {redact(_reason(error))}")


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
    """`text` without credentials: none in URLs or `name=value` pairs, nor any that the environment holds."""
    text = _USERINFO.sub(r"\g<scheme>***@", text)
    text = _QUERY.sub(r"\g<url>?***", text)
    text = _PARAMETER.sub(r"\g<name>***", text)
    text = _ACCESS_KEY_ID.sub("***", text)
    for secret in _secrets():
        text = text.replace(secret, "***")
    return text


def _secrets() -> list[str]:
    """Values that must not be shown, longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if len(value) >= 6 and _SECRET_NAME.search(name.upper()) and not _is_path(value)
    }
    return sorted(found, key=len, reverse=True)


def _is_path(value: str) -> bool:
    """Whether a variable such as GOOGLE_APPLICATION_CREDENTIALS names a file; messages may name it too."""
    return value.startswith(("/", "~", "./")) and Path(value).expanduser().exists()
