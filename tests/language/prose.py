"""Extraction of prose from sources: docstrings, comments, error messages and pages of the documentation."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tests.language.sources import Source, get_last_name

BREAK = "¶"
"""Separates paragraphs, list items and table cells in `Passage.prose`."""

EXCERPT_LENGTH = 45
"""Number of characters that an excerpt shows before and after a phrase."""


class Kind(StrEnum):
    """Kind of prose."""

    DOCSTRING = "docstring"
    COMMENT = "comment"
    MESSAGE = "message"
    PAGE = "page"


@dataclass(frozen=True)
class Passage:
    """A piece of prose.

    Attributes:
        kind: Kind of the prose.
        line: Number of the first line in the file.
        text: Text, with the line breaks of the file.
        prose: Text of the same length, in which letters "x" replace code, spaces replace markup, and `BREAK`
            replaces line breaks between paragraphs.
        last_line: Number of the last line in the file, if the text does not have the line breaks of the file.
            Otherwise None.
    """

    kind: Kind
    line: int
    text: str
    prose: str
    last_line: int | None = None

    @cached_property
    def lower_prose(self) -> str:
        """The prose in lower case."""
        return self.prose.lower()

    def count_words(self) -> int:
        """Count the words. A code span is one word."""
        return len(_WORD.findall(self.prose))

    def locate(self, start: int, end: int) -> tuple[int, int]:
        """Return the numbers of the first and the last line of ``text[start:end]`` in the file."""
        if self.last_line is not None:
            return self.line, self.last_line
        first = self.line + self.text.count("\n", 0, start)
        return first, first + self.text.count("\n", start, end)

    def quote(self, start: int, end: int) -> str:
        """Return ``text[start:end]`` in brackets between the text before and after it, on one line."""
        before = self.text[max(0, start - EXCERPT_LENGTH) : start]
        after = self.text[end : end + EXCERPT_LENGTH]
        return " ".join(f"...{before}[{self.text[start:end]}]{after}...".split())


@dataclass
class Entry:
    """An entry of an ``Args:`` or ``Attributes:`` section.

    Attributes:
        start: Offset of the name in the docstring.
        description: Offset of the character after the colon.
        end: Offset of the end of the description.
    """

    start: int
    description: int
    end: int


_WORD = re.compile(r"[^\W\d_][\w'’-]*")

# Python.
_STRING_OR_COMMENT = re.compile(
    r"'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""
    r"|(?P<comment>#[^\n]*)",
    re.DOTALL,
)
_COMMENT_SIGN = re.compile(r"^[ \t]*#+", re.MULTILINE)
_DIRECTIVE = re.compile(
    r"#(?:!.*| ?-\*-.*| ?(?:noqa|type|mypy|ruff|fmt|pragma)\b"
    r"(?:: ?(?:[A-Z]+\d+(?:, ?[A-Z]+\d+)*|[a-z-]+(?:\[[^\]]*\])?))?)"
)

# Docstrings.
_SECTION = re.compile(r" *(?:Args|Arguments|Keyword Args|Attributes): *")
_ENTRY = re.compile(r" *(?P<name>\*{0,2}[`\w.]+(?:, \*{0,2}[`\w.]+)*)(?: \([^)]*\))?:(?=\s|$)")
_HEADER = re.compile(r"\n(?=[ \t]*(?:Args|Attributes|Returns|Yields|Raises|Notes?|Examples?|Warnings?):)")
_LITERAL_BLOCK = re.compile(r"(?<=::)\n[ \t]*\n(?P<indent> +)[^\n]*(?:\n(?:(?P=indent)[^\n]*|[ \t]*(?=\n)))*")
_DOCTEST = re.compile(r"^ *(?:>>>|\.\.\.) .*$", re.MULTILINE)

# Docstrings and Markdown.
_CODE_SPAN = re.compile(r"(?::[\w:]+:)?(?P<ticks>`+)[^`\n]+(?:\n[^`\n]+)?(?P=ticks)")
_URL = re.compile(r"\bhttps?://[^\s)>\]]+")
_BLANK_LINE = re.compile(r"\n(?=[ \t]*\n)")
_LIST_ITEM = re.compile(r"(?:^|\n)[ \t]*(?:[-*+]|\d+\.)(?= )")

# Markdown.
_CODE_BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence) *$", re.MULTILINE | re.DOTALL
)
_COMMENT_IN_CODE_BLOCK = re.compile(r"(?:^|(?<=\s))#(?!!)(?P<comment>[^\n]*)", re.MULTILINE)
_HTML_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK_TARGET = re.compile(r"(?<=\])\([^)\s]+\)|(?<=\])\[[^\]\n]*\]")
_CELL = re.compile(r"\|")
_MARKUP = re.compile(r"[*\[\]]|\b_|_\b")


def iter_passages(source: Source, error_callables: frozenset[str]) -> Iterator[Passage]:
    """Yield the prose of a file.

    Args:
        source: File to read.
        error_callables: Names of the callables whose string arguments are error messages.
    """
    if source.nodes is None:
        yield from _iter_page(source.text)
        return
    for string in source.nodes.strings:
        text = str(string.value)
        yield Passage(Kind.DOCSTRING, string.lineno, text, _mask_docstring(text))
    yield from _iter_comments(source.text)
    for call in source.nodes.calls:
        if get_last_name(call.func) in error_callables:
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                text, prose = _read_message(argument)
                if " " in prose:
                    last_line = argument.end_lineno or argument.lineno
                    yield Passage(Kind.MESSAGE, argument.lineno, text, _mask_code(prose), last_line)


def find_entries(docstring: str) -> list[Entry]:
    """Find the entries of the ``Args:`` and ``Attributes:`` sections of a docstring."""
    entries: list[Entry] = []
    section_indent: int | None = None  # None outside of a section
    entry_indent: int | None = None  # None before the first entry of a section
    end = -1
    for line in docstring.split("\n"):
        start, end = end + 1, end + 1 + len(line)
        indent = len(line) - len(line.lstrip(" "))
        if _SECTION.fullmatch(line):
            section_indent, entry_indent = indent, None
        elif section_indent is not None and line.strip():
            if indent <= section_indent:
                section_indent = None
                continue
            if entry_indent is None:
                entry_indent = indent
            match = _ENTRY.match(line) if indent == entry_indent else None
            if match:
                entries.append(Entry(start + match.start("name"), start + match.end(), end))
            elif entries:
                entries[-1].end = end
    return entries


def _mask(pattern: re.Pattern[str], text: str, fill: str) -> str:
    """Replace all characters of each match by `fill`, except for line breaks."""
    return pattern.sub(lambda match: "\n".join(fill * len(line) for line in match[0].split("\n")), text)


def _break_at(pattern: re.Pattern[str], text: str) -> str:
    """Replace the first character of each match by `BREAK` and the other characters by spaces."""
    return pattern.sub(lambda match: BREAK + " " * (len(match[0]) - 1), text)


def _mask_code(text: str) -> str:
    return _mask(_URL, _mask(_CODE_SPAN, text, "x"), "x")


def _mask_docstring(text: str) -> str:
    """Mask code and the names of parameters. Each description of a parameter is a separate paragraph."""
    prose = _mask(_DOCTEST, _mask(_LITERAL_BLOCK, text, " "), " ")
    for entry in find_entries(text):
        name = "x" * (entry.description - entry.start - 1)
        prose = prose[: entry.start] + name + BREAK + prose[entry.description :]
    for pattern in (_HEADER, _BLANK_LINE, _LIST_ITEM):
        prose = _break_at(pattern, prose)
    return _mask_code(prose)


def _iter_comments(text: str) -> Iterator[Passage]:
    """Yield the comments of a Python file. Comments on consecutive lines are one passage."""
    line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
    blocks: list[tuple[int, int, int]] = []  # number of the first line, start and end of a block of comments
    previous_line: int | None = None  # line of the previous comment, if there is no code before the comment
    for match in _STRING_OR_COMMENT.finditer(text):
        if match["comment"]:
            start, end = match.span("comment")
            line = bisect_right(line_starts, start)
            follows_code = bool(text[line_starts[line - 1] : start].strip())
            if previous_line == line - 1 and not follows_code:
                blocks[-1] = (*blocks[-1][:2], end)
            else:
                blocks.append((line, start, end))
            previous_line = None if follows_code else line
    for line, start, end in blocks:
        comment = text[start:end]
        prose = _mask(_COMMENT_SIGN, _mask(_DIRECTIVE, comment, " "), " ")
        yield Passage(Kind.COMMENT, line, comment, _mask_code(_break_at(_LIST_ITEM, prose)))


def _iter_page(text: str) -> Iterator[Passage]:
    """Yield the comments in the code blocks of a Markdown page, and the rest of the page."""
    for block in _CODE_BLOCK.finditer(text):
        for match in _COMMENT_IN_CODE_BLOCK.finditer(text, *block.span("code")):
            line = text.count("\n", 0, match.start()) + 1
            yield Passage(Kind.COMMENT, line, match["comment"], _mask_code(match["comment"]))
    prose = _mask(_HTML_COMMENT, _mask(_CODE_BLOCK, text, " "), " ")
    prose = _mask(_LINK_TARGET, _mask_code(prose), " ")
    for pattern in (_BLANK_LINE, _LIST_ITEM, _CELL):
        prose = _break_at(pattern, prose)
    yield Passage(Kind.PAGE, 1, text, _mask(_MARKUP, prose, " "))


def _read_message(argument: ast.expr) -> tuple[str, str]:
    """Read the literal parts of an error message.

    Returns:
        The text with ``{...}`` for each inserted value, and the prose with "xxxxx" for each inserted value.
        Both are empty if the argument is not a string.
    """
    match argument:
        case ast.Constant(value=str(text)):
            return text, text
        case ast.JoinedStr(values=values):
            parts = [
                _read_message(value) if isinstance(value, ast.Constant) else ("{...}", "xxxxx")
                for value in values
            ]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_read_message(left), _read_message(right)]
        case ast.IfExp(body=body, orelse=orelse):
            parts = [_read_message(body), (" ", BREAK), _read_message(orelse)]
        case _:
            return "", ""
    return "".join(text for text, _ in parts), "".join(prose for _, prose in parts)
