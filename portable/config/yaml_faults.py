"""Explain syntax errors in YAML files, and locate the line to correct.

PyYAML reports the line at which its parser stopped, and describes the error in the terms of the
YAML specification. The mistake is often in an earlier line. For example, if a colon is missing, the
parser stops at a later colon.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import yaml

_CHECK_LAYOUT = "check the indentation, the quotes and the brackets"
"""Remedy for mistakes whose cause is not known."""


class YamlFault(NamedTuple):
    """A mistake in the syntax of a YAML file.

    Attributes:
        line_index: Index of the line with the mistake, from 0.
        reason: Description of the mistake.
        remedy: Instruction to correct the mistake.
    """

    line_index: int

    reason: str
    remedy: str


def find_yaml_fault(error: yaml.MarkedYAMLError, text: str) -> YamlFault:
    """Find the mistake that caused a parser error.

    Args:
        error: Parser error with a ``problem_mark``.
        text: The YAML document.
    """
    lines = text.splitlines() or [""]
    mark = error.problem_mark
    assert mark is not None
    problem, context = str(error.problem), str(error.context)
    error_line = min(mark.line, len(lines) - 1)
    start_mark = error.context_mark or mark
    start_line = min(start_mark.line, len(lines) - 1)
    if "\\t" in problem:
        return YamlFault(error_line, "the line contains a tab", "use spaces")
    if match := re.match(r"found character '(.)' that cannot start", problem):
        return YamlFault(error_line, f"text without quotes begins with {match[1]}", "put the text in quotes")
    if "escape" in problem:
        return YamlFault(
            error_line,
            "a text in double quotes contains an unknown escape sequence",
            "use single quotes, or write \\\\ for \\",
        )
    if "alias" in context or "alias" in problem:
        return YamlFault(error_line, "text without quotes begins with *", "put the text in quotes")
    if "expected ':'" in problem:
        return _explain_missing_colon(lines, start_line)
    if problem.startswith("mapping values"):
        return _explain_unexpected_colon(lines, error_line, mark.column)
    if "quoted scalar" in context:
        quote = lines[start_line][start_mark.column : start_mark.column + 1]
        return YamlFault(start_line, "a quote is not closed", f"write another {quote} at the end of the text")
    if "flow sequence" in context or "flow mapping" in context:
        bracket, closing, value = ("[", "]", "list") if "sequence" in context else ("{", "}", "mapping")
        if mark.line == start_mark.line:
            rest = lines[start_line][mark.column :].strip()[:60]
            reason = f"a comma or {closing} is missing before {rest!r}"
            return YamlFault(
                start_line, reason, "separate the items with commas, and put text with a colon in quotes"
            )
        remedy = f"write {closing} at the end of the {value}"
        return YamlFault(start_line, f"the bracket {bracket} is not closed", remedy)
    if "block mapping" in context or "block collection" in context:
        return _explain_indentation(lines, error_line, mark.column)
    return YamlFault(error_line, problem, _CHECK_LAYOUT)


def _explain_missing_colon(lines: list[str], line_index: int) -> YamlFault:
    """Explain an error in a line without a colon, or without a space after a dash or colon.

    Args:
        lines: Lines of the document.
        line_index: Index of the line with the mistake.
    """
    text = _remove_comment(lines[line_index])
    if match := re.match(r"-(?=[^\s-])(.+)", text):
        return YamlFault(line_index, f"{text[:60]!r} has no space after the dash", f"write - {match[1][:60]}")
    if match := re.match(r"([\w.]+)[:\uff1a](?=\S)(.+)", text):
        return YamlFault(
            line_index, f"{text[:60]!r} has no space after the colon", f"write {match[1]}: {match[2][:60]}"
        )
    key, _, value = text.partition(" ")
    value = value.lstrip("= ")
    example = f"{key}: {value}".rstrip() if key else "key: value"
    return YamlFault(line_index, f"{text[:60]!r} has no colon", f"write {example[:60]}")


def _explain_unexpected_colon(lines: list[str], line_index: int, column: int) -> YamlFault:
    """Explain an error at a colon that the parser did not expect.

    The function looks for a second colon in the line, a missing colon in the line above, and too
    much indentation. It reports the first of these causes that it finds. If it finds none, it only
    reports that the colon does not follow a key.

    Args:
        lines: Lines of the document.
        line_index: Index of the line where the parser stopped.
        column: Column of the colon.
    """
    text_before_colon = lines[line_index][:column]
    if match := re.search(r":\s+(?!['\"\[{])(\S.*)$", text_before_colon):  # a second colon in the same line
        value = match[1] + lines[line_index][column:]
        return YamlFault(
            line_index,
            f"the value {value.strip()[:60]!r} contains a colon",
            "put the value in quotes, or write each key on a separate line",
        )
    previous_index = next((line for line in range(line_index - 1, -1, -1) if _has_content(lines[line])), None)
    if previous_index is None:
        return YamlFault(line_index, "a colon does not follow a key", _CHECK_LAYOUT)
    if not re.search(r":(\s|$)", _remove_comment(lines[previous_index])):
        return _explain_missing_colon(lines, previous_index)
    if _count_leading_spaces(lines[line_index]) > _count_leading_spaces(lines[previous_index]):
        return _explain_indentation(lines, line_index)
    return YamlFault(line_index, "a colon does not follow a key", _CHECK_LAYOUT)


def _explain_indentation(lines: list[str], line_index: int, column: int = 0) -> YamlFault:
    """Explain a YAML error that is caused by indentation or by extra text after a value.

    The faulty line is compared with the nearest earlier line that is neither blank nor a comment.
    Indentation is reported as the cause if both conditions hold:

    - The two lines are indented differently.
    - The parser stopped in the indentation of the faulty line, or at the first character after it.

    Otherwise, the message reports the text that follows the end of a value.

    Args:
        lines: Lines of the document.
        line_index: Index of the line where the parser stopped.
        column: Column where the parser stopped.
    """
    previous_index = next(
        (line for line in range(line_index - 1, -1, -1) if _has_content(lines[line])), line_index
    )
    spaces = _count_leading_spaces(lines[line_index])
    if (
        previous_index == line_index
        or spaces == _count_leading_spaces(lines[previous_index])
        or column > spaces
    ):
        reason = f"{lines[line_index][column:].strip()[:60]!r} follows the end of a value"
        return YamlFault(line_index, reason, "put the complete value in quotes, or remove this text")
    return YamlFault(
        line_index,
        f"this line begins with {spaces} spaces, but line {previous_index + 1} begins with "
        f"{_count_leading_spaces(lines[previous_index])}",
        "begin all keys of a section with the same number of spaces",
    )


def _has_content(line: str) -> bool:
    """Return whether a line contains anything other than spaces and a comment."""
    return bool(_remove_comment(line))


def _remove_comment(line: str) -> str:
    """Return a line without its comment and without surrounding spaces.

    A ``#`` at the start of the line or after a space begins a comment, even inside quotes.
    """
    return re.split(r"(?:^|\s)#", line)[0].strip()


def _count_leading_spaces(line: str) -> int:
    """Return the number of spaces at the start of a line."""
    return len(line) - len(line.lstrip(" "))
