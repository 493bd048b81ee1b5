"""List the messages that users read: ``python -m tests.messages [--package NAME] [--kind KIND] [PATH ...]``.

The messages are read from the syntax trees of the product, so none of its modules is imported. An inserted
value is shown as the expression in braces. The beginning or the remedy that a class adds is shown in square
brackets. ``--check`` prints only the messages that break a rule of
``find_problems``, with the rule. ``tests/test_messages.py`` holds the rules.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

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
ADVICE_BEGINNINGS = {
    "RefusedKey": "KEY: VALUE is not supported",
    "IgnoredKey": "KEY: VALUE has no effect",
    "NeverFalseKey": "KEY: cannot be false",
}
"""Beginning of the message that a class of table entries makes of its advice."""
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
        suffix: Text that the class of the exception appends. Empty if there is none.
    """

    path: str
    line: int
    last_line: int
    kind: Kind
    text: str
    callable: str = ""
    suffix: str = ""

    @property
    def package(self) -> str:
        """The first two folders of the path, or the first if there is no second."""
        return "/".join(Path(self.path).parent.parts[:2])

    def __str__(self) -> str:
        prefix = ""
        if beginning := ADVICE_BEGINNINGS.get(self.callable):
            is_remedy = "; " not in self.text and self.callable != "NeverFalseKey"
            prefix = f"[{beginning}{';' if is_remedy else ':'}] "
        suffix = f" [{self.suffix}]" if self.suffix else ""
        return f"{self.path}:{self.line}: {self.kind}: {prefix}{self.text}{suffix}"


class _Collector(ast.NodeVisitor):
    """Visitor that collects the messages of a module."""

    def __init__(self, path: str, error_callables: frozenset[str], suffixes: Mapping[str, str]) -> None:
        self.messages: list[Message] = []
        self._path = path
        self._suffixes = suffixes
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
            suffix = self._suffixes.get(callable_name, "") if kind is Kind.ERROR else ""
            self.messages.append(
                Message(self._path, node.lineno, last_line, kind, text, callable_name, suffix)
            )


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
    suffixes = find_suffixes(sources)
    for source in sources:
        suffixes |= find_converted_suffixes(source, suffixes)
    return sorted(
        message
        for source in sources
        for message in iter_messages(
            source.path, source.text, error_callables, {**suffixes, **find_factory_suffixes(source, suffixes)}
        )
    )


def find_suffixes(sources: Sequence[Source]) -> dict[str, str]:
    """Find the texts that exception classes append to their reason in `__str__`, by the name of the class."""
    suffixes = {}
    for source in sources:
        for node in source.nodes.classes if source.nodes else ():
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__str__":
                    last_statement = method.body[-1]
                    value = last_statement.value if isinstance(last_statement, ast.Return) else None
                    text = render_text(value) if value else None
                    if text and text.startswith("{self.reason}"):
                        suffixes[node.name] = text.removeprefix("{self.reason}")
    return suffixes


def find_converted_suffixes(source: Source, suffixes: Mapping[str, str]) -> dict[str, str]:
    """Find the suffixes of classes whose exceptions the module that defines them converts to another class.

    The message of the first exception must be the end of the reason of the second exception.

    Args:
        source: The module.
        suffixes: Text that an exception class appends, by the name of the class.

    Returns:
        Text that is appended after the conversion, by the name of the first class.
    """
    if source.nodes is None:
        return {}
    classes = {node.name for node in source.nodes.classes}
    converted = {}
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.ExceptHandler) and node.name and node.type:
            name, last_statement = get_last_name(node.type), node.body[-1]
            if name in classes and isinstance(last_statement, ast.Raise):
                converted[name] = _find_wrapped_suffix(last_statement.exc, {node.name}, suffixes)
    return {name: suffix for name, suffix in converted.items() if suffix}


def find_factory_suffixes(source: Source, suffixes: Mapping[str, str]) -> dict[str, str]:
    """Find the suffixes of functions that return an exception whose reason ends with an argument.

    Args:
        source: The module of the functions and of their calls.
        suffixes: Text that an exception class appends, by the name of the class.

    Returns:
        Text that is appended, by the name of the function.
    """
    factory_suffixes = {}
    for function in source.nodes.functions if source.nodes else ():
        last_statement = function.body[-1]
        if isinstance(last_statement, ast.Return):
            names = {argument.arg for argument in function.args.args}
            if suffix := _find_wrapped_suffix(last_statement.value, names, suffixes):
                factory_suffixes[function.name] = suffix
    return factory_suffixes


def _find_wrapped_suffix(value: ast.expr | None, names: set[str], suffixes: Mapping[str, str]) -> str:
    """Return the suffix of an exception whose reason ends with one of the variables, otherwise `""`."""
    if not isinstance(value, ast.Call) or len(value.args) != 1:
        return ""
    text = render_text(value.args[0]) or ""
    ends_with_variable = any(text.endswith(f"{{{name}}}") for name in names)
    return suffixes.get(get_last_name(value.func), "") if ends_with_variable else ""


def iter_messages(
    path: str, text: str, error_callables: frozenset[str], suffixes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Message]:
    """Yield the messages of a module.

    Args:
        path: Path of the module, relative to the root of the project.
        text: Content of the module.
        error_callables: Names of the callables whose string arguments are error messages.
        suffixes: Text that an exception class appends, by the name of the class.
    """
    collector = _Collector(path, error_callables, suffixes)
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
        print(message)
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
