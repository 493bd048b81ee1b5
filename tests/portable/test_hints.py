"""Hints in messages can be followed: each setting that a hint names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from portable.command_line import TrainOptions, parse_train_args
from portable.config import RunConfig, keys, load_config
from portable.errors import UserError
from portable.importing.hints import FOREIGN_VOCABULARY
from portable.registry import World
from portable.run.length import (
    MIN_USEFUL_STEPS,
    build_few_steps_warning,
    build_rare_checkpoints_warning,
    format_run_length,
)

TABLE, SECTIONS = keys.get_setting_fields(RunConfig), keys.get_section_descriptions(RunConfig)
HINTS = sorted({meaning.advice for meaning in FOREIGN_VOCABULARY.keys.values() if meaning.advice})


@pytest.mark.parametrize("hint", HINTS)
def test_hint_names_existing_settings(hint: str) -> None:
    named = re.findall(rf"(?:{'|'.join(SECTIONS)})\.[a-z_]+", hint)
    assert all(key in TABLE or key.startswith("model.config.") for key in named)
    told = re.findall(r"--([a-z-]+)", hint)
    assert set(told) <= {name.replace("_", "-") for name in keys.get_setting_fields(TrainOptions)}


POPULAR = Path(__file__).with_name("imports").joinpath("popular.txt").read_text("utf-8").split()
"""Used most in the examples of transformers, TRL, alignment-handbook, axolotl and LLaMA-Factory."""


@pytest.mark.parametrize("name", POPULAR)
def test_popular_name_is_setting_or_has_remedy(name: str) -> None:
    if name in TABLE:
        return
    with pytest.raises(UserError) as in_a_file:
        load_config({name: 1})
    with pytest.raises(UserError) as as_a_flag:
        parse_train_args([f"--{name}", "1"])
    remedy_of_name = "".join(FOREIGN_VOCABULARY.keys.get(name, ""))  # a setting or advice
    for text, start in ((str(in_a_file.value), "unknown key "), (str(as_a_flag.value), "unknown flag --")):
        told, _, remedy = text.replace(f"{name}: ", f"{name}; ").partition("; ")  # a reason follows a colon
        assert name in told if name in SECTIONS else text.startswith((f"{start}{name}; ", f"{start}{name}: "))
        assert "use one of backend" not in text and "--help lists" not in text
        assert not remedy_of_name or remedy_of_name in text
        if not remedy_of_name and " " not in remedy.removeprefix("did you mean "):
            # An exact setting, not only the beginning of a setting.
            assert remedy.removeprefix("did you mean ").removeprefix("--").rstrip("?") in TABLE


@pytest.mark.parametrize(
    ("epochs", "batch", "samples", "ranks", "remedies"),
    [
        (1.0, 16, 9, 1, {"epochs": 54}),
        (1.0, 16, 172, 1, {"global_batch_size": 5, "epochs": 3}),
        (2.0, 16, 172, 4, {"global_batch_size": 8, "epochs": 3}),
        (0.5, 8, 300, 1, {"global_batch_size": 5, "epochs": 1}),
        (1.0, 16, 480, 1, {}),
        (None, 16, 9, 1, {}),
    ],
)
def test_few_steps_warning_suggests_enough_steps(
    epochs: float | None, batch: int, samples: int, ranks: int, remedies: dict[str, float]
) -> None:
    settings = {"train.epochs": epochs, "train.global_batch_size": batch}
    if epochs is None:
        settings["train.steps"] = 2
    warning = build_few_steps_warning(load_config(None, settings), samples, World(ranks))
    assert (warning is None) == (not remedies)
    named = {key: int(value) for key, value in re.findall(r"train\.(\w+) to (\d+)", warning or "")}
    assert named == remedies
    for key, value in named.items():
        config = load_config(None, settings | {f"train.{key}": value})
        assert (config.train.epochs or 0) * samples / config.train.global_batch_size > MIN_USEFUL_STEPS - 1
        assert config.train.global_batch_size % ranks == 0


def test_format_run_length_prints_steps_and_epochs() -> None:
    config = load_config(None, {"train.epochs": 3, "train.global_batch_size": 16})
    assert format_run_length(config, 87, 464) == "87: 3 epochs of 464 samples"
    config = load_config(None, {"train.steps": 40, "train.global_batch_size": 8})
    assert format_run_length(config, 40, 640) == "40: 0.5 epochs of 640 samples"
    assert format_run_length(config, 40, None) == "40"


@pytest.mark.parametrize(
    ("settings", "samples", "warns"),
    [
        ({"adapter.type": "lora", "train.epochs": 1}, 80_000, True),
        ({"adapter.type": "lora", "train.epochs": 0.01}, 80_000, False),
        ({"adapter.type": "lora", "train.epochs": 1}, 800, False),
        ({"adapter.type": "lora", "train.epochs": 1, "checkpoint.every_steps": 500}, 80_000, False),
        ({"adapter.type": "lora", "train.epochs": 1, "checkpoint.every_epochs": 1}, 80_000, False),
        ({"train.epochs": 1}, 80_000, False),
    ],
)
def test_rare_checkpoints_warning_counts_steps(settings: dict[str, Any], samples: int, warns: bool) -> None:
    warning = build_rare_checkpoints_warning(
        load_config(None, {**settings, "train.global_batch_size": 8}), samples
    )
    assert (warning is not None) == warns
    assert warning is None or "10,000 steps" in warning
