"""Retries of requests to object stores, and their limits."""

from __future__ import annotations

import logging
import os
import random
import time
from typing import TYPE_CHECKING, TypeVar

from converters.errors import CheckpointError
from converters.storage.store_errors import (
    RemoteError,
    RetriesUsedUpError,
    chain_of,
    names_of,
    reason_of,
    redact,
    status_of,
    translated,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The environment variables that set the limits, and their defaults.
ATTEMPTS, DEFAULT_ATTEMPTS = "PORTABLE_STORAGE_ATTEMPTS", 8
TIMEOUT, DEFAULT_TIMEOUT = "PORTABLE_STORAGE_TIMEOUT", 60.0
CONNECTIONS, DEFAULT_CONNECTIONS = "PORTABLE_STORAGE_CONNECTIONS", 4
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


def attempts() -> int:
    """Attempts per request, the first included (`PORTABLE_STORAGE_ATTEMPTS`, default 8)."""
    return max(1, int(_setting(ATTEMPTS, DEFAULT_ATTEMPTS)))


def timeout() -> float:
    """Seconds without a response after which a request fails (`PORTABLE_STORAGE_TIMEOUT`, default 60)."""
    return max(0.1, _setting(TIMEOUT, DEFAULT_TIMEOUT))


def connections() -> int:
    """Parts that a conversion reads and sends at a time (`PORTABLE_STORAGE_CONNECTIONS`, default 4)."""
    return max(1, int(_setting(CONNECTIONS, DEFAULT_CONNECTIONS)))


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
            causes = list(chain_of(error))
            if not any(map(_is_transient, causes)):
                raise translated(where, what, error, causes) from None
            reason = redact(reason_of(error))
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


def _is_transient(error: BaseException) -> bool:
    status, code = status_of(error)
    if status or code:
        return status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
    return isinstance(error, (TimeoutError, ConnectionError)) or bool(names_of(error) & _TRANSIENT_NAMES)
