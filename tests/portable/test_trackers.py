"""Output of a run in addition to its checkpoints: trackers, viewers, terminal and log file.

Trackers get one run for all launches. Their libraries are fake here, because the real ones need accounts.
"""

from __future__ import annotations

import gzip
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from portable import train
from portable.callbacks import Run
from portable.config import RunConfig, keys
from portable.reporting.profiling import NUM_RECORDED_STEPS
from portable.run.rank import LaunchMode, run_rank
from portable.terminal import set_quiet
from tests.ranks import RankPool
from tests.runs import configured


def library(name: str) -> Any:
    """Return a fake library that records its calls, and is also its run and its config."""
    made = MagicMock(__name__=name, __version__="4.0", __spec__=ModuleSpec(name, None))
    made.init.return_value = made.start.return_value = made.config = made
    return made


def begun(library: Any) -> dict[str, Any]:
    """Return the arguments of the last start of a run, for which comet_ml has another function."""
    (given,) = (call.call_args.kwargs for call in (library.init, library.start) if call.called)
    return {key.removesuffix("_name"): value for key, value in given.items()}


def steps_logged(library: Any) -> list[int]:
    """Return the steps whose loss was logged. comet_ml gets one number per call."""
    one_by_one = [call.kwargs["step"] for call in library.log_metric.call_args_list if call.args[0] == "loss"]
    return one_by_one + [call.kwargs["step"] for call in library.log.call_args_list if "loss" in call.args[0]]


def test_tracker_names_match_accelerate() -> None:
    choices = keys.get_setting_fields(RunConfig)["log.trackers"].choices
    assert {str(getattr(name, "value", name)) for name in LOGGER_TYPE_TO_CLASS} == set(choices or ())


@pytest.mark.usefixtures("brief_runs")
def test_trackers_get_one_run_for_all_launches(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["wandb", "trackio", "swanlab", "comet_ml"]
    libraries = {name: library(name) for name in names}
    for name, stand_in in libraries.items():
        monkeypatch.setitem(sys.modules, name, stand_in)

    def launch(folder: Path, **settings: Any) -> list[dict[str, Any]]:
        train(configured(folder, corpus, train__steps=4, log__every_steps=1, log__trackers=names, **settings))
        return [begun(one) for one in libraries.values()]

    launched = launch(tmp_path / "group" / "one", train__stop_after=2)
    again = launch(tmp_path / "group" / "one", train__stop_after=None)
    for (name, one), first, second in zip(libraries.items(), launched, again, strict=True):
        assert first == second and first["project"] == "group"
        if name == "comet_ml":
            assert first["experiment_key"].isalnum() and 32 <= len(first["experiment_key"]) <= 50
        else:
            assert first["name"] == "one" and first["resume"] == "allow"
            assert ("id" in first) == (name != "trackio")
        settings = (one.log_parameters if name == "comet_ml" else one.update).call_args.args[0]
        assert settings["train.steps"] == 4
        assert steps_logged(one) == [1, 2, 3, 4]
        assert one.finish.call_count + one.end.call_count == 2
        monkeypatch.setenv(f"{name.upper()}_PROJECT", "of the environment")
    others = launch(tmp_path / "group" / "two", log__name="mine", train__stop_after=1)
    for first, other in zip(launched, others, strict=True):
        assert other["project"] == "of the environment" and other.get("name", "mine") == "mine"
        if lasting := {"id", "experiment_key"} & first.keys():
            assert other[lasting.pop()] not in first.values()
    given = launch(tmp_path / "group" / "two", log__project="set", train__stop_after=2)
    assert {one["project"] for one in given} == {"set"}


class Own(GeneralTracker):  # type: ignore[misc]
    """Custom tracker whose server may become unavailable."""

    name = "own"
    requires_logging_directory = False
    seen: list[tuple[Any, ...]] = []  # noqa: RUF012

    def __init__(self, project: str, breaks: str = "") -> None:
        super().__init__()
        self.breaks = breaks
        self.seen.append((project, breaks))

    @property
    def tracker(self) -> Own:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.seen.append(("log", step))
        if self.breaks == "log":
            raise ConnectionError("gone\naway")

    def finish(self) -> None:
        self.seen.append(("finish",))


@pytest.mark.usefixtures("brief_runs")
@pytest.mark.parametrize(("breaks", "told"), [("", None), ("log", "ConnectionError: gone away")])
def test_custom_tracker_failure_does_not_end_run(
    breaks: str, told: str | None, tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues without the tracker."""
    settings = {"train__steps": 2, "log__every_steps": 1, "data__eval_fraction": 0.0}
    Own.seen.clear()
    name = f"{__name__}:Own(breaks={breaks!r})"
    train(configured(tmp_path / "group" / "run", corpus, log__trackers=name, **settings))
    steps = [("log", 1)] if breaks == "log" else [("log", 1), ("log", 2)]
    assert [one for one in Own.seen if one != ("finish",)] == [("group", breaks), *steps]
    assert breaks == "log" or Own.seen[-1] == ("finish",)
    warnings = [line for line in caplog.messages if line.startswith("warning: log.trackers")]
    assert len(warnings) == bool(told) and all(str(told) in line for line in warnings)
    assert (tmp_path / "group" / "run" / "final").is_dir()


# -- traces ----------------------------------------------------------------------------------------------


def profiled(folder: Path, corpus: Path) -> int:
    return run_rank("cpu", configured(folder, corpus, train__micro_batch_size=3), LaunchMode(profile=True))


def test_profiler_writes_trace_on_every_rank(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    assert ranks.run(2, profiled, tmp_path / "run", corpus) == 0
    for rank in range(2):
        with gzip.open(tmp_path / "run" / "profile" / f"rank{rank}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert len({name for name in names if str(name).startswith("ProfilerStep")}) == NUM_RECORDED_STEPS
        assert any("all_gather" in str(name) for name in names)
        assert "aten::mm" in names


# -- the terminal and the log ----------------------------------------------------------------------------


OF_A_LIBRARY = logging.getLogger("some_library")


class Noisy:
    """Warns as libraries do, in the middle of the steps."""

    def on_step(self, run: Run) -> None:
        if run.step == 2:
            warnings.warn("it is deprecated", UserWarning, stacklevel=1)
            OF_A_LIBRARY.warning("it is slow")
            logging.getLogger("without.a.handler").warning("it is odd")
            OF_A_LIBRARY.error("it is broken")


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    yield
    set_quiet(False)


def noisy(folder: Path, corpus: Path, **settings: Any) -> Any:
    return configured(
        folder, corpus, train__steps=3, log__every_steps=1, train__callbacks=f"{__name__}:Noisy", **settings
    )


def test_library_warnings_are_logged(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shows, prints = warnings.showwarning, logging.StreamHandler()  # a library that prints its noisy log
    OF_A_LIBRARY.addHandler(prints)
    train(noisy(tmp_path / "run", corpus))
    OF_A_LIBRARY.warning("after the run")  # all is as it was
    OF_A_LIBRARY.removeHandler(prints)
    assert warnings.showwarning is shows
    before, shown, _ = capsys.readouterr().err.partition("after the run")
    assert shown
    assert [told for told in ("it is deprecated", "it is slow", "it is odd") if told in before] == []
    assert before.count("it is broken") == 1  # an error is shown as well
    assert f"{tmp_path / 'run' / 'log.txt'}, with 4 library warnings" in before
    log = (tmp_path / "run" / "log.txt").read_text()
    for line in ("some_library: it is slow", "without.a.handler: it is odd", "step 3/3  loss "):
        assert log.count(line) == 1
    assert log.count("it is deprecated") == 2  # and the line of code
    assert log.count("ERROR some_library: it is broken") == 1
    assert "after the run" not in log
    train(noisy(tmp_path / "quiet", corpus, log__quiet=True))
    assert all(line.startswith("warning: ") for line in capsys.readouterr().err.splitlines())
    assert "step 3/3" in (tmp_path / "quiet" / "log.txt").read_text()
