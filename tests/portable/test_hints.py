"""Hints can be followed: what each says to write loads, and each setting that one names is there."""

from __future__ import annotations

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
from portable.config.importing.trainers import TRAINERS
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


def test_every_rule_is_of_settings() -> None:
    for part in parse_file(Path(portable.__file__).with_name("rules.yaml")).value.values():
        for rule in part:
            named = [key for keys_ in rule["if"] for key in keys_.split(" | ") if "*" not in key]
            assert TABLE.keys() >= {*named, *re.findall(r"{(.*?)}", rule["then"])}
