"""Match regular expressions from untrusted files in bounded time.

peft matches such expressions with Python's `re`, which can take years for some of them. The package
`regex` accepts the same syntax and supports a timeout. Its additional syntax for fuzzy matching and
POSIX classes is literal text for `re`, and is therefore escaped.
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
"""Time limit in seconds for matching all patterns of a file with all names.

A thousand names and a thousand patterns take 1 s.
"""


# Escape sequences, character classes, and braces that are not a repetition.
_TOKENS = re.compile(
    r"\\N\{[^}]*\}|\\.|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<brace>\{(?!(?:\d+(?:,\d*)?|,\d*)\}))",
    re.DOTALL,
)


def _escape_additional_syntax(pattern: str) -> str:
    """Escape syntax of `regex` that is literal text for `re`: `x{e<=1}` and `[[:alpha:]]`.

    Args:
        pattern: Regular expression that `re` accepts.
    """

    def escape_token(match: re.Match[str]) -> str:
        if match["brace"]:
            return r"\{"
        if members := match["set"]:
            inner = re.sub(r"\\.|\[", lambda part: part[0] if len(part[0]) > 1 else r"\[", members[1:])
            return f"[{inner}"
        return match[0]

    return _TOKENS.sub(escape_token, pattern)


class PatternError(ValueError):
    """Error raised if a pattern is invalid, is too long, or takes too long to match."""


class PatternMatcher:
    """Matcher for the regular expressions in the settings file of one adapter.

    The package `regex` is used instead of `re`, because it supports a timeout. The file is not
    trusted, and a regular expression can take years to match. All matches of one matcher therefore
    share a limit of `_TIMEOUT_SECONDS` of CPU time. After that, each match may take 1 ms.
    """

    def __init__(self) -> None:
        self._remaining_seconds = _TIMEOUT_SECONDS
        self._compiled: dict[str, Any] = {}

    def check_pattern(self, pattern: str) -> None:
        """Check that a regular expression is valid, and cache its compiled form.

        Raises:
            PatternError: If `re` or `regex` does not accept the pattern, or if it has more than
                `MAX_PATTERN` characters.
        """
        if pattern in self._compiled:
            return
        if len(pattern) > MAX_PATTERN:
            raise PatternError(
                f"the regular expression {pattern[:60]!r}... is too long ({len(pattern):,} characters, at "
                f"most {MAX_PATTERN:,}); use a shorter pattern"
            )
        try:
            re.compile(pattern)
            self._compiled[pattern] = regex.compile(_escape_additional_syntax(pattern))
        except (re.error, regex.error, ValueError, RecursionError, OverflowError) as error:
            raise PatternError(
                f"{pattern[:60]!r} is not a regular expression ({error}); correct the pattern"
            ) from None

    def match(self, pattern: str, text: str) -> Any:
        """Match the beginning of `text` like `re.match`.

        Raises:
            PatternError: If the pattern is invalid, or if all matches of this matcher together take
                longer than the time limit.
        """
        return self._match_with_timeout(pattern, text, "match")

    def fullmatch(self, pattern: str, text: str) -> Any:
        """Match all of `text` like `re.fullmatch`.

        Raises:
            PatternError: If the pattern is invalid, or if all matches of this matcher together take
                longer than the time limit.
        """
        return self._match_with_timeout(pattern, text, "fullmatch")

    def _match_with_timeout(self, pattern: str, text: str, method: str) -> Any:
        """Call `regex`'s `match` or `fullmatch` with the remaining time as the timeout.

        All matches of one matcher share a time budget, from which the CPU time of this call is
        subtracted. If less than 1 ms remains, the timeout is 1 ms.

        Args:
            pattern: Regular expression.
            text: Text to match.
            method: Name of the method to call, `match` or `fullmatch`.

        Returns:
            The match, or None if the text does not match.

        Raises:
            PatternError: If the pattern is not a regular expression, is too long, or takes too
                long to match.
        """
        self.check_pattern(pattern)
        began = time.process_time()
        try:
            return getattr(self._compiled[pattern], method)(text, timeout=max(self._remaining_seconds, 0.001))
        except TimeoutError:
            raise PatternError(
                f"the pattern {pattern[:60]!r} takes too long to match; use a simpler pattern, or list the "
                "names of the modules"
            ) from None
        finally:
            self._remaining_seconds -= time.process_time() - began
