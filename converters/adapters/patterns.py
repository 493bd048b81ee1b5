"""Match regular expressions from untrusted files in bounded time.

peft matches them with Python's `re`, which takes years for some of them. The package `regex` has
the same syntax and supports a timeout.
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

    regex = DeferredModule("regex")  # imported late: adapters with a list of modules do not need it

_TIMEOUT_SECONDS = 10.0
"""Time for all patterns of a file and all names, in seconds.

A thousand names and a thousand patterns take 1 s.
"""


class PatternError(ValueError):
    """Error raised if a pattern is not a regular expression or takes too long to match."""


class PatternMatcher:
    """Matcher for the patterns of one file. All matches share one time limit."""

    def __init__(self) -> None:
        self._remaining_seconds = _TIMEOUT_SECONDS
        self._compiled: dict[str, Any] = {}

    def check_pattern(self, pattern: str) -> None:
        """Check that a pattern is a regular expression, and cache its compiled form for later matches.

        Raises:
            PatternError: If the pattern is not a regular expression or is too long.
        """
        if pattern in self._compiled:
            return
        try:
            if len(pattern) > MAX_PATTERN:
                raise ValueError("too long")
            re.compile(pattern)
            self._compiled[pattern] = regex.compile(pattern)
        except (re.error, regex.error, ValueError, RecursionError, OverflowError) as error:
            raise PatternError(
                f"{pattern[:60]!r} is not a regular expression ({error}); correct the pattern"
            ) from None

    def match(self, pattern: str, text: str) -> Any:
        """Match the beginning of `text` like `re.match`.

        Raises:
            PatternError: If the pattern is invalid, or if the time limit of the file is exceeded.
        """
        return self._match_with_timeout(pattern, text, "match")

    def fullmatch(self, pattern: str, text: str) -> Any:
        """Match all of `text` like `re.fullmatch`.

        Raises:
            PatternError: If the pattern is invalid, or if the time limit of the file is exceeded.
        """
        return self._match_with_timeout(pattern, text, "fullmatch")

    def _match_with_timeout(self, pattern: str, text: str, method: str) -> Any:
        """Call `regex`'s `match` or `fullmatch`, and subtract the CPU time used from the time limit."""
        self.check_pattern(pattern)
        began = time.process_time()
        try:
            return getattr(self._compiled[pattern], method)(text, timeout=max(self._remaining_seconds, 0.001))
        except TimeoutError:
            raise PatternError(
                f"{pattern[:60]!r} takes too long to match; use names, or a simpler pattern"
            ) from None
        finally:
            self._remaining_seconds -= time.process_time() - began
