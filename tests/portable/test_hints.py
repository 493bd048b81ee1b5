"""Hints can be followed: each setting that one names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from portable.config import RunConfig, keys, load_config, parse_args
from portable.config.arguments import TrainOptions
from portable.config.importing.accelerate import WERE_SETTINGS
from portable.config.importing.trainers import TRAINERS
from portable.errors import UserError

TABLE, SECTIONS = keys.settings(RunConfig), keys.sections(RunConfig)
NAMED = {name: row for name, row in TRAINERS.items() if "." not in name}
ROWS = (*NAMED.values(), *WERE_SETTINGS.values())
HINTS = sorted({row.hint for row in ROWS if " " in row.hint})


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_names_settings_that_there_are(hint: str) -> None:
    named = re.findall(rf"(?:{'|'.join(SECTIONS)})\.[a-z_]+", hint)
    assert all(key in TABLE or key.startswith("model.config.") for key in named)
    told = re.findall(r"--([a-z-]+)", hint)
    assert set(told) <= {name.replace("_", "-") for name in keys.settings(TrainOptions)}


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
