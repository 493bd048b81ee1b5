"""Explain why a YAML file is not valid, with the line to correct.

PyYAML reports where its parser stopped, which is often a line after the mistake, in the terms of the YAML
specification. A person who forgot a colon needs the line without the colon.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import yaml


class Fault(NamedTuple):
    """A mistake in a YAML file."""

    line: int
    """Line number, from 0."""

    reason: str
    remedy: str


def explain_fault(error: yaml.MarkedYAMLError, text: str) -> Fault:
    """Find the mistake that made the parser stop.

    Args:
        error: The parser's error. Its `problem_mark` is set.
        text: The whole document.
    """
    lines = text.splitlines() or [""]
    mark = error.problem_mark
    assert mark is not None
    problem, context = str(error.problem), str(error.context)
    stopped = min(mark.line, len(lines) - 1)
    start = error.context_mark or mark
    started = min(start.line, len(lines) - 1)
    if "\\t" in problem:
        return Fault(stopped, "a tab", "indent with spaces")
    if match := re.match(r"found character '(.)' that cannot start", problem):
        return Fault(stopped, f"a text that begins with {match[1]}", "put it in quotes")
    if "expected ':'" in problem:
        return _explain_missing_colon(lines, started)
    if problem.startswith("mapping values"):
        return _explain_unexpected_colon(lines, stopped, mark.column)
    if "quoted scalar" in context:
        quote = lines[started][start.column : start.column + 1]
        return Fault(started, "a quote is not closed", f"write another {quote} at the end of the text")
    if "flow sequence" in context or "flow mapping" in context:
        bracket, closing = ("[", "]") if "sequence" in context else ("{", "}")
        return Fault(started, f"the bracket {bracket} is not closed", f"write {closing} where it ends")
    if "block mapping" in context or "block collection" in context:
        return _explain_indentation(lines, stopped, mark.column)
    return Fault(stopped, problem, "check indentation, quotes and brackets")


def _explain_missing_colon(lines: list[str], number: int) -> Fault:
    words = lines[number].split("#")[0].split()
    example = f"{words[0]}: {' '.join(words[1:])}".rstrip() if words else "key: value"
    return Fault(number, f"{' '.join(words)[:60]!r} has no colon", f"write {example[:60]}")


def _explain_unexpected_colon(lines: list[str], number: int, column: int) -> Fault:
    """Explain a colon in a value: of a line that is indented too far, or of a text without quotes."""
    before = lines[number][:column]
    if match := re.search(r":\s+(?!['\"\[{])(\S.*)$", before):  # a second colon in the same line
        value = match[1] + lines[number][column:]
        return Fault(
            number,
            f"a second colon in {value.strip()[:60]!r}",
            "put a text with a colon in quotes, and each key on a line of its own",
        )
    above = next((line for line in range(number - 1, -1, -1) if _has_content(lines[line])), None)
    if above is None:
        return Fault(number, "a colon that ends no key", "check indentation, quotes and brackets")
    if ":" not in lines[above]:
        return _explain_missing_colon(lines, above)
    if _count_spaces(lines[number]) > _count_spaces(lines[above]):
        return _explain_indentation(lines, number, column)
    return Fault(number, "a colon that ends no key", "check indentation, quotes and brackets")


def _explain_indentation(lines: list[str], number: int, column: int = 0) -> Fault:
    """Explain a line with another indentation than its neighbors, or text after the end of a value."""
    above = next((line for line in range(number - 1, -1, -1) if _has_content(lines[line])), number)
    spaces = _count_spaces(lines[number])
    if above == number or spaces == _count_spaces(lines[above]):
        reason = f"{lines[number][column:].strip()[:60]!r} after the end of a value"
        return Fault(number, reason, "put the whole value in quotes, or remove it")
    return Fault(
        number,
        f"this line begins with {spaces} spaces, and line {above + 1} with {_count_spaces(lines[above])}",
        "begin all keys of a section with the same number of spaces",
    )


def _has_content(line: str) -> bool:
    return bool(line.split("#")[0].strip())


def _count_spaces(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
