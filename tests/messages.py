"""List the messages that users read: ``python -m tests.messages [--package NAME] [--kind KIND] [PATH ...]``.

The messages are read from the syntax trees of the product, so none of its modules is imported. An inserted
value is shown as the expression in braces. ``--check`` prints only the messages that break a rule of
``find_problems``, with the rule. ``tests/test_messages.py`` holds the rules.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.language.marks import MARKS
from tests.language.names import begins_with_verb
from tests.language.prose import Kind as ProseKind
from tests.language.prose import Passage
from tests.language.sources import (
    PRODUCT,
    Source,
    SourceError,
    find_error_callables,
    get_last_name,
    parse_source,
)

ROOT = Path(__file__).resolve().parents[1]

PROBLEM_CALLABLES = frozenset({"SettingProblem"})
"""Callables of the product that are not errors, but whose last argument is an error message."""

STATUS_CALLABLES = frozenset({"print_status", "print_on_rank0", "print_error", "print_line"})
ADVICE_CALLABLES = frozenset({"RefusedKey", "IgnoredKey", "NeverFalseKey", "NoEffect", "NoCounterpart"})
HELP_KEYWORDS = frozenset({"help", "description", "epilog"})
MIN_TEXT_WORDS = 3
"""Number of words from which a string of unknown use is taken for a part of a message."""


class Kind(StrEnum):
    """Kind of message."""

    ERROR = "error"
    STATUS = "status"
    ADVICE = "advice"
    HELP = "help"
    TEXT = "text"


KIND_DESCRIPTIONS = {
    Kind.ERROR: "text of an exception, or of a check that reports a wrong setting",
    Kind.STATUS: "line that begins with error, warning, note or hint, or that a status function prints",
    Kind.ADVICE: "remark about a key of another program",
    Kind.HELP: "description of a command or an option",
    Kind.TEXT: "other string of several words, mostly a part of a message",
}


@dataclass(frozen=True, order=True)
class Message:
    """A message in a source file.

    Attributes:
        path: Path of the file, relative to the root of the project.
        line: Number of the first line.
        last_line: Number of the last line.
        kind: Kind of the message.
        text: Text with each inserted value as an expression in braces.
        callable: Name of the function or class that gets the text as an argument. Empty if there is none.
    """

    path: str
    line: int
    last_line: int
    kind: Kind
    text: str
    callable: str = ""

    @property
    def package(self) -> str:
        """The first two folders of the path, or the first if there is no second."""
        return "/".join(Path(self.path).parent.parts[:2])

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


class _Collector(ast.NodeVisitor):
    """Visitor that collects the messages of a module."""

    def __init__(self, path: str, error_callables: frozenset[str]) -> None:
        self.messages: list[Message] = []
        self._path = path
        self._error_callables = error_callables | PROBLEM_CALLABLES
        self._error_names: frozenset[str] = frozenset()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # not a docstring
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = get_last_name(node.func)
        self.visit(node.func)
        for argument in node.args:
            self._visit_value(argument, self._get_call_kind(node, name), name)
        for keyword in node.keywords:
            kind = Kind.HELP if keyword.arg in HELP_KEYWORDS else self._get_call_kind(node, name)
            self._visit_value(keyword.value, kind, name)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        self._visit_value(node.value, Kind.ERROR if names & self._error_names else None)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._visit_value(node, None)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._visit_value(node, None)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._visit_value(node, None)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer_names = self._error_names
        self._error_names = outer_names | _find_error_names(node, self._error_callables)
        self.generic_visit(node)
        self._error_names = outer_names

    def _get_call_kind(self, node: ast.Call, name: str) -> Kind | None:
        """Return the kind of the string arguments of a call. None if only their texts decide."""
        if name in ADVICE_CALLABLES:
            return Kind.ADVICE
        if name in self._error_callables or (name == "error" and len(node.args) == 1):
            return Kind.ERROR
        return Kind.STATUS if name in STATUS_CALLABLES else None

    def _visit_value(self, node: ast.expr, kind: Kind | None, callable_name: str = "") -> None:
        """Add the message of an expression, or visit the expression if it is not a string.

        Args:
            node: An expression.
            kind: Kind of the message. None if only its text decides.
            callable_name: Name of the function or class that gets the value as an argument.
        """
        if kind and isinstance(node, ast.IfExp):
            self._visit_value(node.body, kind, callable_name)
            self._visit_value(node.orelse, kind, callable_name)
            return
        text = render_text(node)
        if text is None:
            self.generic_visit(node)
            return
        if re.match("(?:error|warning|note|hint): ", text):
            kind = Kind.STATUS
        if kind is None and count_words(text) >= MIN_TEXT_WORDS:
            kind = Kind.TEXT
        if kind and " " in text:
            last_line = node.end_lineno or node.lineno
            self.messages.append(Message(self._path, node.lineno, last_line, kind, text, callable_name))


def _find_error_names(function: ast.AST, error_callables: frozenset[str]) -> frozenset[str]:
    """Find the local variables that a function passes to a callable of errors."""
    return frozenset(
        argument.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and get_last_name(node.func) in error_callables
        for argument in node.args
        if isinstance(argument, ast.Name)
    )


def render_text(node: ast.expr) -> str | None:
    """Return the text of a string, an f-string or a concatenation, or None for another expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(
                str(value.value) if isinstance(value, ast.Constant) else _render_hole(value)
                for value in values
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = render_text(left), render_text(right)
            if texts == (None, None):
                return None
            sides = zip((left, right), texts, strict=True)
            return "".join(f"{{{ast.unparse(side)}}}" if text is None else text for side, text in sides)
    return None


def _render_hole(node: ast.expr) -> str:
    return f"{{{ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)}}}"


def count_words(text: str) -> int:
    """Count the words of a text outside of its inserted values."""
    return len(re.findall(r"(?<![\w{./-])[a-zA-Z][a-z']*(?![\w/(=.]\w)", remove_holes(text)))


def remove_holes(text: str) -> str:
    """Replace each inserted value by `X`."""
    result, depth = [], 0
    for character in text:
        depth -= character == "}"
        if depth == 0:
            result.append("X" if character == "}" else "" if character == "{" else character)
        depth += character == "{"
        depth = max(depth, 0)
    return "".join(result)


def load_product(root: Path) -> list[Source]:
    """Read and parse the Python files of the product.

    Raises:
        SourceError: If a file cannot be read or has a syntax error.
    """
    sources = []
    for package in PRODUCT:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            try:
                sources.append(parse_source(name, package, path.read_text("utf-8")))
            except (OSError, UnicodeDecodeError, SyntaxError) as error:
                raise SourceError(f"{name}: cannot be read or parsed: {error}") from error
    return sources


def find_messages(sources: Sequence[Source]) -> list[Message]:
    """Find all messages in the files, sorted by path and line."""
    error_callables = find_error_callables(sources)
    return sorted(
        message for source in sources for message in iter_messages(source.path, source.text, error_callables)
    )


def iter_messages(path: str, text: str, error_callables: frozenset[str]) -> Iterator[Message]:
    """Yield the messages of a module.

    Args:
        path: Path of the module, relative to the root of the project.
        text: Content of the module.
        error_callables: Names of the callables whose string arguments are error messages.
    """
    collector = _Collector(path, error_callables)
    collector.visit(ast.parse(text))
    yield from collector.messages


def find_problems(message: Message) -> list[str]:
    """Find the rules that a message breaks.

    Args:
        message: The message.

    Returns:
        One description per broken rule, beginning with the name of the rule.
    """
    text = remove_holes(message.text)
    problems = [f"mark {problem}" for problem in _find_marks(text)]
    if message.kind in (Kind.HELP, Kind.TEXT):
        return problems
    if _is_one_sentence_with_period(text):
        problems.append("period: remove the period at the end")
    if _CAPITAL.match(text) and not _NAME.match(text):
        problems.append("capital: begin with a small letter")
    if match := _PRONOUN.search(text):
        problems.append(f"pronoun: write the key instead of the pronoun: {match[0].strip()}")
    if message.kind is Kind.ERROR and message.callable in REMEDY_CALLABLES | CHECKPOINT_CALLABLES:
        *rest, remedy = _REMEDY.split(text)
        needs_remedy = message.callable in CHECKPOINT_CALLABLES or (
            _KEY.match(text) and not text.endswith(")")
        )
        if not rest and needs_remedy and not text.endswith(("X", "?", "--help)")):
            problems.append("remedy: add '; ' and what to do")
        if rest and not _begins_with_imperative(remedy):
            problems.append(f"imperative: begin the remedy with a verb: {remedy}")
    return problems


def _find_marks(text: str) -> Iterator[str]:
    """Yield the name, the phrase and the advice of each mark of unidiomatic prose."""
    passage = Passage(ProseKind.MESSAGE, 1, text, text, 1)
    for mark in MARKS:
        for start, end in mark.find(passage):
            yield f"{mark.name}: {mark.advice}: {text[start:end]}"


def _is_one_sentence_with_period(text: str) -> bool:
    return text.endswith(".") and not text.endswith("...") and ". " not in text


REMEDY_CALLABLES = frozenset({"UserError", "SettingProblem", "require"})
"""Callables whose messages need a remedy, because the user can correct the input."""

CHECKPOINT_CALLABLES = frozenset(
    {
        "AccessDeniedError",
        "CheckpointError",
        "CommandError",
        "ConflictError",
        "LostUploadError",
        "RemoteError",
    }
)
"""Errors of the converters, whose messages need a remedy. Other classes, such as `DamagedCheckpointError`, "
"add one."""

_CAPITAL = re.compile(r"[A-Z][a-z]*\b")
_NAME = re.compile(
    r"(?:X|A?[A-Z]{2,}|Accelerate|Adam|DeepSpeed|Hugging|Liger|LLaMA|MaxText|Megatron|Null|Python|RANK|RUN|TRL"
    r"|Transformers|ZeRO|[A-Z][a-z]+[A-Z])\b|[A-Z_]+[ =:]"
)
"""Names, variables and arguments at the beginning of a message."""

_PRONOUN = re.compile(
    r"; (?:change|choose|give|lower|name|raise|set|turn|write) (?:it|that|them)\b"
    r"|^X?(?:[\w.-]+: )?it (?:adds|has|is|leaves|must|needs|shows)\b"
)
_REMEDY = re.compile(r"; (?!last good checkpoint)")
_KEY = re.compile(r"(?:--)?[a-z_]+(?:\.[a-z_*]+)*(?::| X)")
_LEAD = re.compile(r"(?:(?:to|if|for|in) [\w .]+, |or |then |at least )?(?P<word>[\w-]*)")
"""Beginning of a remedy: a condition or a purpose may precede the verb."""

_FURTHER_IMPERATIVES = frozenset(
    {"change", "correct", "let", "name", "pip", "portable-convert", "treat", "unset", "upgrade"}
)
"""First words of remedies that are commands, or verbs with which no function name begins."""


def _begins_with_imperative(remedy: str) -> bool:
    match = _LEAD.match(remedy)
    word = match["word"] if match else ""
    return word in _FURTHER_IMPERATIVES or word.startswith("X") or begins_with_verb(word)


def print_messages(messages: Sequence[Message]) -> None:
    """Print messages by package, and their number by package and kind."""
    counts = Counter((message.package, message.kind) for message in messages)
    package = ""
    for message in messages:
        if message.package != package:
            package = message.package
            print(f"\n{package}\n")
        print(f"{message.path}:{message.line}: {message.kind}: {message.text}")
    print()
    for package in sorted({package for package, _ in counts}):
        cells = [f"{counts[package, kind]:>8}" for kind in Kind]
        print(f"{package:32}" + "".join(cells))
    print(f"{'':32}" + "".join(f"{kind:>8}" for kind in Kind))


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    kinds = "; ".join(f"{kind}: {description}" for kind, description in KIND_DESCRIPTIONS.items())
    parser = argparse.ArgumentParser(
        "python -m tests.messages", description="List the messages of the product."
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders to list; by default all")
    parser.add_argument("--package", action="append", help=f"list only this package: {', '.join(PRODUCT)}")
    parser.add_argument("--kind", action="append", choices=list(Kind), help=f"list only this kind. {kinds}")
    parser.add_argument("--check", action="store_true", help="list only messages that break a rule")
    options = parser.parse_args(arguments)
    paths = [*options.paths, *(options.package or ())]
    messages = [
        message
        for message in find_messages(load_product(ROOT))
        if (not options.kind or message.kind in options.kind)
        and (not paths or any(Path(message.path).is_relative_to(path) for path in paths))
    ]
    if options.check:
        for message in messages:
            for problem in find_problems(message):
                print(f"{message.path}:{message.line}: {problem}\n    {message.text}")
        return 0
    print_messages(messages)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
