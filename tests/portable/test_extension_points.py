"""docs/migrate.md has each extension point of the installed Trainer, TRL and Accelerate."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text("utf-8")
NAMED = set(re.findall(r"\b\w+\b", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))


def methods(of: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}


def arguments(of: Any) -> set[str]:
    return set(inspect.signature(of.__init__).parameters) - {"self"}


def test_extension_points_of_trainer_and_accelerate_are_documented() -> None:
    alike = {"on_last_process", "on_local_main_process", "on_local_process", "on_process"}
    assert methods(Trainer) | arguments(Trainer) <= NAMED
    assert {name for name in methods(TrainerCallback) if name.startswith("on_")} <= NAMED
    assert methods(Accelerator) - alike - {"local_main_process_first"} <= NAMED


def test_extension_points_of_trl_are_documented() -> None:
    trl: Any = pytest.importorskip("trl")
    assert {name for name in dir(trl) if name.endswith(("Trainer", "Callback"))} <= NAMED
