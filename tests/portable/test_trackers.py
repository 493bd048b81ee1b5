"""wandb and its like get one run for all launches. They are stand-ins here: the real ones need accounts."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from portable import train
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path


class Library(ModuleType):
    """Records the calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended = 0

    def init(self, **given: Any) -> None:
        self.begun.append(given)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended += 1


@pytest.fixture(params=["wandb", "trackio", "swanlab"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(request.param)
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def test_all_launches_are_one_run(
    tmp_path: Path, corpus: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = library.__name__

    def launch(folder: Path, **settings: Any) -> dict[str, Any]:
        train(
            configured(folder, corpus, train__steps=4, log__every_steps=1, log__trackers=[name], **settings)
        )
        return library.begun[-1]

    first = launch(tmp_path / "group" / "one", train__stop_after=2)
    again = launch(tmp_path / "group" / "one", train__stop_after=None)
    assert first["project"] == "group" and first["name"] == "one" and first["resume"] == "allow"
    assert first["config"]["train.steps"] == 4
    del first["config"], again["config"]
    assert first == again and ("id" in first) == (name != "trackio")
    assert [step for step, values in library.logged if "loss" in values] == [
        1,
        2,
        3,
        4,
    ] and library.ended == 2
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "of the environment")
    other = launch(tmp_path / "group" / "two", log__name="mine", train__stop_after=1)
    assert (other["project"], other["name"]) == ("of the environment", "mine")
    assert launch(tmp_path / "group" / "two", log__project="set", train__stop_after=2)["project"] == "set"
    if "id" in other:
        assert other["id"] != first["id"]
