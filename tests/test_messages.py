"""Form of the messages that users read: see ``tests/messages.py``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.language.sources import parse_source
from tests.messages import (
    Kind,
    Message,
    find_messages,
    find_problems,
    iter_messages,
    load_product,
    print_messages,
    remove_holes,
    render_text,
)

ROOT = Path(__file__).resolve().parents[1]

EXCEPTIONS: dict[tuple[str, str], str] = {
    (", of which X are trained", "mark of-which"): "part of 'X parameters, of which Y are trained'",
    ("usage: portable-plan", "mark what-clause"): "an indirect question",
}
"""Reason of each exception, by the beginning of the message without values and by the rule."""


@cache
def load_messages() -> Sequence[Message]:
    """Load the messages of the product once for all tests."""
    return find_messages(load_product(ROOT))


def find_exception(message: Message, problem: str) -> tuple[str, str] | None:
    """Find the exception that allows a problem of a message."""
    text = remove_holes(message.text).strip()
    keys = (key for key in EXCEPTIONS if text.startswith(key[0].strip()) and problem.startswith(key[1]))
    return next(keys, None)


def test_messages_have_form_and_remedy() -> None:
    problems = [
        f"{message.path}:{message.line}: {problem}\n    {message.text}"
        for message in load_messages()
        for problem in find_problems(message)
        if find_exception(message, problem) is None
    ]
    assert not problems, "\n".join(problems)


def test_exceptions_are_needed() -> None:
    used = {
        find_exception(message, problem) for message in load_messages() for problem in find_problems(message)
    }
    assert not EXCEPTIONS.keys() - used


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ('raise UserError("train.steps: too low; set it to 1")', "pronoun"),
        ('raise UserError("data.source: it is empty; name a file")', "pronoun"),
        ('raise UserError("train.steps: too low; raise train.steps.")', "period"),
        ('raise UserError("Training failed; run the same command again")', "capital"),
        ('raise UserError(f"train.steps: {steps} is too low")', "remedy"),
        ('require(steps, f"--nproc: {steps} is too low")', "remedy"),
        ('raise CheckpointError(f"{path}: the end of the file is missing")', "remedy"),
        ('raise CheckpointError(f"{path}: the end is missing; a damaged file")', "imperative"),
        ('yield SettingProblem(("train.steps",), "train.steps: too low; a higher number")', "imperative"),
        ('raise UserError(f"{path}: is no folder; name a folder")', "mark is-no"),
        ('print_status("note: the run goes on")', "mark go-on"),
        ('reason = "is no folder"\nraise UserError(reason)', "mark is-no"),
        ('parser.add_argument("--to", help="the whole file")', "mark whole"),
        ('RefusedKey("Leave it out")', "capital"),
    ],
)
def test_each_rule_finds_planted_message(statement: str, rule: str) -> None:
    code = "\n".join(["class UserError(Exception): pass", "def check():", *_indent(statement)])
    messages = list(iter_messages("a.py", code, frozenset({"UserError", "CheckpointError", "require"})))
    problems = [problem for message in messages for problem in find_problems(message)]
    assert any(problem.startswith(rule) for problem in problems), problems


@pytest.mark.parametrize(
    "statement",
    [
        'require(steps, "a.b: too low; set a.b to 1" if low else "a.b: too high; set a.b to 2")',
        'raise UserError("train.steps: 0 is too low; set train.steps to 1, or remove train.steps")',
        'raise UserError(f"train.steps: {steps} is too low{hint}")',
        'raise UserError(f"{key}: unknown key; did you mean {key}?")',
        'raise ValueError("too low")',
        'raise CheckpointError(f"{path}: the end of the file is missing; copy the file again")',
        'raise DamagedCheckpointError(f"{path}: the end of the file is missing")',
        'print_status("note: DeepSpeed is not installed ...")',
        'parser.add_argument("--to", help="Format to write.")',
    ],
)
def test_rules_accept_good_message(statement: str) -> None:
    code = "\n".join(["def check():", *_indent(statement)])
    messages = list(iter_messages("a.py", code, frozenset({"UserError", "ValueError", "CheckpointError"})))
    assert messages
    assert [problem for message in messages for problem in find_problems(message)] == []


def test_texts_show_expressions() -> None:
    for code, text in [
        ('"a " "b"', "a b"),
        ('f"a {b.c:,} d"', "a {b.c} d"),
        ('"a " + b + f"{c}"', "a {b}{c}"),
        ("a + b", None),
        ("1", None),
    ]:
        assert render_text(ast.parse(code, mode="eval").body) == text
    assert remove_holes("a {f({'b': 1})} c") == "a X c"


def test_kinds_of_messages() -> None:
    code = '''
class RunError(Exception):
    """Not a message."""

def run(lines):
    """Not a message either."""
    reason = f"{lines} lines are missing"
    print_status("warning: too few lines")
    IgnoredKey("the default is used")
    parser.error("too few lines")
    text = "three words here"
    raise RunError(reason)

parser.add_argument("--lines", help="number of lines")
'''
    messages = find_messages([parse_source("portable/a.py", "portable", code)])
    assert [(message.kind, message.text) for message in messages] == [
        (Kind.ERROR, "{lines} lines are missing"),
        (Kind.STATUS, "warning: too few lines"),
        (Kind.ADVICE, "the default is used"),
        (Kind.ERROR, "too few lines"),
        (Kind.TEXT, "three words here"),
        (Kind.HELP, "number of lines"),
    ]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ('RefusedKey("set train.loss")', "[KEY: VALUE is not supported;] set train.loss"),
        (
            'RefusedKey("two losses; set train.loss")',
            "[KEY: VALUE is not supported:] two losses; set train.loss",
        ),
        ('NeverFalseKey("it is always on")', "[KEY: cannot be false:] it is always on"),
    ],
)
def test_list_shows_beginning_that_class_adds(call: str, line: str) -> None:
    (message,) = iter_messages("a.py", call, frozenset())
    assert str(message) == f"a.py:1: advice: {line}"


def test_list_shows_remedy_that_class_appends() -> None:
    code = """
class DamagedError(Exception):
    def __str__(self):
        return f"{self.reason}; copy the file again"

def check():
    raise DamagedError("the end is missing")
"""
    (message,) = (m for m in find_messages([parse_source("a.py", "a", code)]) if m.callable)
    assert str(message) == "a.py:7: error: the end is missing [; copy the file again]"


def test_list_shows_remedy_of_exception_that_contains_message() -> None:
    code = """
class DamagedError(Exception):
    def __str__(self):
        return f"{self.reason}; copy the file again"

class ParseError(Exception):
    pass

class OtherError(Exception):
    pass

def build_error(path, reason) -> Exception:
    return DamagedError(f"{path}: {reason}")

def check(path):
    try:
        raise ParseError("no end")
    except ParseError as error:
        raise DamagedError(f"{path}: {error}")
    try:
        raise OtherError("no data")
    except OtherError as error:
        raise DamagedError(f"{path}: damaged")
    raise build_error(path, "no start")
"""
    messages = find_messages([parse_source("a.py", "a", code)])
    suffixes = {message.text: message.suffix for message in messages}
    assert suffixes["no end"] == suffixes["no start"] == "; copy the file again"
    assert suffixes["no data"] == ""


def test_list_is_grouped_by_package(capsys: pytest.CaptureFixture[str]) -> None:
    print_messages(
        [
            Message("portable/data/a.py", 3, 3, Kind.ERROR, "no file"),
            Message("portable/run/b.py", 7, 8, Kind.STATUS, "note: no file"),
        ]
    )
    output = capsys.readouterr().out
    assert output.startswith("\nportable/data\n\nportable/data/a.py:3: error: no file\n\nportable/run\n")
    assert output.index("b.py:7: status: note: no file") < output.rindex("portable/data")


def _indent(code: str) -> list[str]:
    return [f"    {line}" for line in code.split("\n")]
