"""What a run shows on the terminal, and what goes into its log instead."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portable import UserError, train
from portable.run.callbacks import Run
from portable.terminal import be_quiet
from tests.runs import configured

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
    be_quiet(False)


def own(folder: Path, corpus: Path, **settings: Any) -> Any:
    return configured(
        folder, corpus, train__steps=3, log__every_steps=1, train__callbacks=f"{__name__}:Noisy", **settings
    )


def test_warnings_of_libraries_go_into_the_log(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shows, prints = warnings.showwarning, logging.StreamHandler()  # a library that prints its own log
    OF_A_LIBRARY.addHandler(prints)
    train(own(tmp_path / "run", corpus))
    OF_A_LIBRARY.warning("after the run")  # all is as it was
    OF_A_LIBRARY.removeHandler(prints)
    assert warnings.showwarning is shows
    before, shown, _ = capsys.readouterr().err.partition("after the run")
    assert shown
    assert [told for told in ("it is deprecated", "it is slow", "it is odd") if told in before] == []
    assert before.count("it is broken") == 1  # an error is shown as well
    assert f"{tmp_path / 'run' / 'log.txt'}, with 4 warnings of libraries" in before
    log = (tmp_path / "run" / "log.txt").read_text()
    for line in ("some_library: it is slow", "without.a.handler: it is odd", "step 3/3  loss "):
        assert log.count(line) == 1
    assert log.count("it is deprecated") == 2  # and the line of code
    assert log.count("ERROR some_library: it is broken") == 1
    assert "after the run" not in log


def test_a_refused_run_shows_what_libraries_warned_of(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        warnings.warn("this is why", UserWarning, stacklevel=1)
        raise UserError("refused")

    monkeypatch.setattr("portable.run.rank.prepare", refused)
    with pytest.raises(UserError, match="refused"):
        train(own(tmp_path / "run", corpus))
    assert "this is why" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_quiet_prints_warnings_only_and_the_log_has_all(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # where bars would be drawn
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("NO_COLOR", "1")
    broken = tmp_path / "run" / "checkpoints" / "step-000009"
    broken.mkdir(parents=True)
    train(own(tmp_path / "run", corpus, log__quiet=True))
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert lines and all(line.startswith("warning: ") or line == "it is broken" for line in lines), lines
    assert not shown.out
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "step 3/3" in log and "starting" in log and f"WARNING portable: warning: {broken}" in log


def test_attempts_to_reach_the_hub_are_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the real client, at an address where nobody listens."""
    from huggingface_hub.utils import http_backoff

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with pytest.raises(Exception, match="refused"):
        http_backoff("HEAD", "http://127.0.0.1:9/config.json", max_retries=3)
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["warning: 127.0.0.1:9 does not answer; trying again, for up to half a minute a file"]
