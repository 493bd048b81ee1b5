"""Regular expressions from a file, matched in bounded time.

peft matches its own with Python's `re`, which takes years over some. The package `regex` has the same
language, and ends a match after a given time.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from portable.converters.limits import MAX_PATTERN

if TYPE_CHECKING:
    import regex
else:
    from portable.converters.lazy_imports import DeferredModule

    regex = DeferredModule("regex")  # a megabyte, which an adapter with a list of modules does not need

# For all patterns of a file and all names: a thousand of each take one.
_TIMEOUT_SECONDS = 10.0


class PatternError(ValueError):
    """A pattern is no regular expression, or takes too long to match."""


class PatternMatcher:
    """Matches the patterns of one file, which share a few seconds of computing."""

    def __init__(self) -> None:
        self._remaining_seconds = _TIMEOUT_SECONDS
        self._compiled: dict[str, Any] = {}

    def check_pattern(self, pattern: str) -> None:
        """Raise PatternError if `pattern` is no regular expression."""
        if pattern in self._compiled:
            return
        try:
            if len(pattern) > MAX_PATTERN:
                raise ValueError("too long")
            re.compile(pattern)
            self._compiled[pattern] = regex.compile(pattern)
        except (re.error, regex.error, ValueError, RecursionError, OverflowError) as error:
            raise PatternError(f"{pattern[:60]!r} is not a regular expression ({error})") from None

    def match(self, pattern: str, text: str) -> Any:
        """As `re.match`; PatternError where the time is used up."""
        return self._match_with_timeout(pattern, text, "match")

    def fullmatch(self, pattern: str, text: str) -> Any:
        """As `re.fullmatch`; PatternError where the time is used up."""
        return self._match_with_timeout(pattern, text, "fullmatch")

    def _match_with_timeout(self, pattern: str, text: str, method: str) -> Any:
        self.check_pattern(pattern)
        began = time.process_time()
        try:
            return getattr(self._compiled[pattern], method)(text, timeout=max(self._remaining_seconds, 0.001))
        except TimeoutError:
            raise PatternError(
                f"{pattern[:60]!r} takes too long to match; give names, or a simpler pattern"
            ) from None
        finally:
            self._remaining_seconds -= time.process_time() - began
