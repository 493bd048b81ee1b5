"""Hints can be followed: what each says to write loads, and each setting that one names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import portable
from portable.config import RunConfig, keys, load_config, parse_args
from portable.config.arguments import TrainOptions
from portable.config.importing.accelerate import WERE_SETTINGS
from portable.config.importing.trainers import TRAINERS, WORDS
from portable.config.load import parse_file
from portable.errors import UserError

TABLE, SECTIONS = keys.settings(RunConfig), keys.sections(RunConfig)
NAMED = {name: row for name, row in TRAINERS.items() if "." not in name}
ROWS = (*NAMED.values(), *WERE_SETTINGS.values())
HINTS = sorted({row.hint for row in ROWS if " " in row.hint})
_KEY = r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*"
_VALUE = r"\[[^\]]*\]|\{[^}]*\}|[A-Za-z0-9][\w.-]*"
_SET = re.compile(rf"\b(?:set|and|or) ({_KEY}) to ({_VALUE})((?:, [\w]+(?=,| or )|,? or [\w]+(?=$|[,;]))*)")
_WRITTEN = re.compile(rf"({_KEY}): ((?:{_VALUE})(?:\([^)]*\))?)$")
PROSE: dict[str, Any] = {"one": 0.5, "the": 16, "a": None}
"""What words stand for that are no value: "one divided by it", "the product of ...", "a file"."""
BESIDE: dict[str, dict[str, Any]] = {
    "train.eval_every_epochs": {"train.epochs": 1},
    "checkpoint.every_epochs": {"train.epochs": 1},
    "hub.push": {"hub.repo": "someone/something"},
}


def remedies(hint: str) -> Iterator[dict[str, Any]]:
    """What ``hint`` says to write, as settings by dotted key; alternatives one after the other."""
    together: dict[str, Any] = {}
    others: list[tuple[str, str]] = []
    for key, first, more in _SET.findall(hint):
        together[key] = first
        others += [(key, word) for word in re.findall(r"\w+", more) if word != "or"]
    if together:
        yield together
        yield from ({**together, key: word} for key, word in others)
    for part in hint.split("; "):
        if (found := _WRITTEN.search(part)) is not None:
            yield {found[1]: found[2]}


def config(given: dict[str, Any]) -> RunConfig:
    values = {key: PROSE.get(value, value) for key, value in given.items()}
    values = {
        key: yaml.safe_load(value) if isinstance(value, str) else value for key, value in values.items()
    }
    return load_config(None, {**{k: v for key in given for k, v in BESIDE.get(key, {}).items()}, **values})


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_can_be_followed(hint: str) -> None:
    found = list(remedies(hint))
    for given in found:
        config(given)
    named = set(re.findall(rf"(?:{'|'.join(SECTIONS)})\.[a-z_]+", hint)) | (
        set(hint.split()) & {*TABLE, *SECTIONS}
    )
    assert all(key in TABLE or key.startswith("model.config.") for key in named if "." in key), hint
    told = re.findall(r"--([a-z-]+)", hint)
    assert set(told) <= {name.replace("_", "-") for name in keys.settings(TrainOptions)}
    plain = ("leave it out", "remove it", "put a system message into each record")
    assert found or named or told or any(words in hint for words in plain)


POPULAR = Path(__file__).with_name("imports").joinpath("popular.txt").read_text("utf-8").split()
"""Used most in the examples of transformers, TRL, alignment-handbook, axolotl and LLaMA-Factory."""


@pytest.mark.parametrize("name", POPULAR)
def test_a_pasted_name_works_or_says_what_to_write(name: str) -> None:
    if name in TABLE:
        return
    with pytest.raises(UserError) as in_a_file:
        load_config({name: 1})
    with pytest.raises(UserError) as as_a_flag:
        parse_args([f"--{name}", "1"])
    row = TRAINERS.get(name)
    for text, start in ((str(in_a_file.value), "unknown key "), (str(as_a_flag.value), "unknown flag --")):
        told, _, remedy = text.partition("; ")
        assert name in told if name in SECTIONS else text.startswith(f"{start}{name}; ")
        assert "the top level takes" not in text and "--help lists" not in text
        assert row is None or not row.hint or row.hint.rstrip("?") in text
        if (row is None or not row.hint) and " " not in remedy.removeprefix("did you mean "):
            # An exact setting, not one that begins like it.
            assert remedy.removeprefix("did you mean ").removeprefix("--").rstrip("?") in TABLE


@pytest.mark.parametrize(
    ("key", "word", "meant"),
    [(k, w, m) for k, one in WORDS.items() for w, m in one.items()],
)
def test_a_word_that_is_meant_is_one(key: str, word: str, meant: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config({key: word} if "." not in key else {key.split(".")[0]: {key.split(".")[1]: word}})
    assert meant in str(refused.value)
    if meant.startswith("a list"):
        return
    written = yaml.safe_load(meant if meant.startswith("{") else re.split(r", | or ", meant)[0])
    load_config({key: written}) if isinstance(written, dict) else load_config(None, {key: written})


def constants() -> list[tuple[str, str]]:
    """Each text of the product that may be an error, with its place; ``{}`` where it has a value."""
    found = []
    for path in sorted(Path(portable.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values]
                found.append((f"{path.name}:{node.lineno}", "".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                found.append((f"{path.name}:{node.lineno}", node.value))
    rules = Path(portable.__file__).with_name("rules.yaml").read_text("utf-8")
    return found + [("rules.yaml", line) for line in re.findall(r"then: (.*)", rules)]


def test_every_rule_is_of_settings() -> None:
    for part in parse_file(Path(portable.__file__).with_name("rules.yaml")).value.values():
        for rule in part:
            named = [key for keys_ in rule["if"] for key in keys_.split(" | ") if "*" not in key]
            assert TABLE.keys() >= {*named, *re.findall(r"{(.*?)}", rule["then"])}


def test_every_setting_that_a_remedy_names_is_there() -> None:
    inner = ("model.config.", "data.eval.", "data.sources.", "train.schedule_params.", "log.txt")
    wrong = []
    for place, text in constants():
        remedy = text.partition("; ")[2]
        for key in re.findall(rf"(?<![\w./{{}}])(?:{'|'.join(SECTIONS)})\.[a-z][a-z_]+(?![\w(.])", remedy):
            if key not in TABLE and not key.startswith(inner):
                wrong.append(f"{place}: {key} in {text[:80]}")
        for key, value, _ in _SET.findall(remedy):
            setting = TABLE.get(key)
            words = setting is not None and setting.choices and not setting.takes(str)
            if words and value not in (*TABLE[key].choices, "{}", "null", "true", "false", *PROSE):
                wrong.append(f"{place}: {key} to {value}")
    assert not wrong, "\n".join(wrong)
