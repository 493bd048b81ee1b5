"""Errors of object stores, reported in one line without credentials.

Protocol packages raise their own exceptions (botocore, aiohttp, gcsfs, ...). They are recognised by class
name along the chain of causes, so that none of these packages has to be imported.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def names_of(error: BaseException) -> set[str]:
    """Class names of `error`, base classes included."""
    return {kind.__name__ for kind in type(error).__mro__}


def status_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and the store's error code; (0, "") where the error has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(response.get("Error", {}).get("Code", ""))
        return (int(code) if code.isdigit() and not status else int(status or 0)), code
    number = str(getattr(error, "code", ""))  # gcsfs
    return (int(number), number) if "HttpError" in names_of(error) and number.isdigit() else (0, "")


def translated(where: str, what: str, error: Exception, causes: list[BaseException]) -> Exception:
    """The exception to raise instead of `error`, with a message of one line."""
    url = redact(where)
    codes = {code for status, code in map(status_of, causes)} | {str(status_of(cause)[0]) for cause in causes}
    if "NoSuchBucket" in codes or any("bucket does not exist" in str(cause).lower() for cause in causes):
        return RemoteError(f"{url}: there is no such bucket")
    if any(names_of(cause) & _NO_CREDENTIALS_NAMES for cause in causes):
        return RemoteError(
            f"{url}: no credentials found; configure them as for the store's own tools (docs/storage.md)"
        )
    if codes & _DENIED_CODES or any(isinstance(cause, PermissionError) for cause in causes):
        return AccessDeniedError(
            f"{url}: access denied, these credentials may not {what} here ({redact(reason_of(error))})"
        )
    if "404" in codes or any(isinstance(cause, FileNotFoundError) for cause in causes):
        return FileNotFoundError(2, "no such object", url)
    return RemoteError(f"{url}: cannot {what}: {redact(reason_of(error))}")


def reason_of(error: BaseException) -> str:
    """The message of `error`, or its class name."""
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
