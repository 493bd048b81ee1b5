"""Names of functions and of local variables."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.language.findings import Finding, Tally
from tests.language.sources import Function, Nodes, get_last_name

VAGUE_LOCALS = frozenset({"at", "found", "given", "held", "kept", "known", "made", "one", "told", "where"})

VERB_ADVICE = "begin the name with a verb, for example read_, build_ or check_"
PARTICIPLE_ADVICE = "name the function by a verb and its object, for example open_checkpoint"
LOCAL_ADVICE = "name the variable by its content, for example match, index or config"

_WORDS = {
    name: frozenset(words.split())
    for name, words in tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8")).items()
}
_VERBS = _WORDS["verbs"] | _WORDS["predicates_and_conversions"]
_COMPOUND_VERBS = tuple(verb for verb in _WORDS["verbs"] | _WORDS["verbs_or_nouns"] if "_" in verb)
_NOT_PARTICIPLES = _WORDS["nouns_like_participles"] | _WORDS["verbs"]

_EXEMPT_DECORATORS = {
    *("cached_property", "deleter", "getter", "property", "setter"),  # properties are nouns
    *(
        "fixture",
        "hookimpl",
        "overload",
        "override",
    ),  # the name is an argument of tests, or defined elsewhere
}
_EXEMPT_METHODS = {
    *("backward", "extra_repr", "named_parameters", "parameters", "state_dict", "zero_grad"),  # of torch
    *("fileno", "items", "keys", "readable", "seekable", "values", "writable"),  # of Python
}
_EXEMPT_PREFIXES = ("on_", "pytest_", "test_")
"""Prefixes of event handlers, hooks of pytest and tests."""


def begins_with_verb(name: str) -> bool:
    """Return whether the name of a function begins with a verb."""
    snake_case = _to_snake_case(name).removeprefix("maybe_")
    if any(snake_case == verb or snake_case.startswith(f"{verb}_") for verb in _COMPOUND_VERBS):
        return True
    first, *others = snake_case.split("_")
    if others[:1] == ["of"]:
        return False
    is_compound_noun = not _WORDS["heads"].isdisjoint(others)
    return first in _VERBS or (first in _WORDS["verbs_or_nouns"] and not is_compound_noun)


def is_participle(name: str) -> bool:
    """Return whether the name of a function is a single participle, such as `opened` or `opening`."""
    word = _to_snake_case(name)
    if word in _NOT_PARTICIPLES:
        return False
    return word in _WORDS["irregular_participles"] or bool(re.fullmatch(r"[a-z]{2,}(?:ed|ing)", word))


def tally_function_names(path: str, nodes: Nodes) -> tuple[Tally, Tally]:
    """Find functions whose names do not begin with a verb, and functions whose names are participles.

    Properties, tests, pytest fixtures, and methods and hooks that a library prescribes are not examined.

    Returns:
        A tally of the names that do not begin with a verb, and a tally of the participles.
    """
    functions = [function for function in nodes.functions if not _is_exempt(function)]
    nouns, participles = Tally(examined=len(functions)), Tally(examined=len(functions))
    for function in functions:
        line, text = function.lineno, f"def {function.name}"
        if not begins_with_verb(function.name):
            nouns.findings.append(Finding(path, line, line, "noun", text, VERB_ADVICE))
        if is_participle(function.name):
            participles.findings.append(Finding(path, line, line, "participle", text, PARTICIPLE_ADVICE))
    return nouns, participles


def tally_locals(path: str, nodes: Nodes) -> Tally:
    """Find local variables with a vague name. The examined places are all bindings of local variables."""
    findings = [
        Finding(path, line, line, f"local {name}", name, LOCAL_ADVICE)
        for name, line in nodes.locals
        if name in VAGUE_LOCALS
    ]
    return Tally(findings, len(nodes.locals))


def _to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip("_")).lower()


def _is_exempt(function: Function) -> bool:
    name = function.name
    parameters = [*function.args.posonlyargs, *function.args.args]
    is_method = bool(parameters) and parameters[0].arg in ("self", "cls", "ctx")
    return (
        (name.startswith("__") and name.endswith("__"))
        or name.startswith(_EXEMPT_PREFIXES)
        or name in ("_", "main")
        or (is_method and name in _EXEMPT_METHODS)
        or any(get_last_name(decorator) in _EXEMPT_DECORATORS for decorator in function.decorator_list)
    )
