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


@pytest.mark.usefixtures("brief_runs")
def test_all_launches_are_one_run(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["wandb", "trackio", "swanlab"]
    libraries = [Library(name) for name in names]
    for library in libraries:
        monkeypatch.setitem(sys.modules, library.__name__, library)

    def launch(folder: Path, **settings: Any) -> list[dict[str, Any]]:
        train(configured(folder, corpus, train__steps=4, log__every_steps=1, log__trackers=names, **settings))
        return [library.begun[-1] for library in libraries]

    launched = launch(tmp_path / "group" / "one", train__stop_after=2)
    again = launch(tmp_path / "group" / "one", train__stop_after=None)
    for library, first, second in zip(libraries, launched, again, strict=True):
        assert first["project"] == "group" and first["name"] == "one" and first["resume"] == "allow"
        assert first["config"]["train.steps"] == 4
        del first["config"], second["config"]
        assert first == second and ("id" in first) == (library.__name__ != "trackio")
        assert [step for step, values in library.logged if "loss" in values] == [1, 2, 3, 4]
        assert library.ended == 2
        monkeypatch.setenv(f"{library.__name__.upper()}_PROJECT", "of the environment")
    others = launch(tmp_path / "group" / "two", log__name="mine", train__stop_after=1)
    for first, other in zip(launched, others, strict=True):
        assert (other["project"], other["name"]) == ("of the environment", "mine")
        assert other.get("id", "none") != first.get("id")
    given = launch(tmp_path / "group" / "two", log__project="set", train__stop_after=2)
    assert {one["project"] for one in given} == {"set"}
