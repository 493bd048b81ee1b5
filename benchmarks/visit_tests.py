"""A pytest plugin that records each test's outcome as it comes, and leaves out those that passed before.

``pytest -p benchmarks.visit_tests --outcomes FILE``: one JSON object a line. A run that is killed goes on
with the tests that have not passed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_DONE = ("passed", "skipped")
_PASSED_BEFORE = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="FILE", help="record outcomes here, and skip what passed before")


def _recorded(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # the line during which an earlier run was killed
            continue


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = config.stash.get(_PASSED_BEFORE, [])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--outcomes"):
        session.exitstatus = pytest.ExitCode.OK  # all had passed before


class _Recorder:
    """With pytest-xdist, in the process that leads the workers, which all outcomes reach."""

    def __init__(self, path: Path, done: list[str]) -> None:
        self._path = path
        self._done = done

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        # Also one that replaces another later must find the same tests.
        node.workerinput["passed_before"] = self._done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.failed:
            row["error"] = str(report.longrepr)[-4000:]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--outcomes")) is None:
        return
    if (given := getattr(config, "workerinput", None)) is not None:
        config.stash[_PASSED_BEFORE] = given["passed_before"]
        return
    done = [row["test"] for row in _recorded(Path(path)) if row["outcome"] in _DONE]
    config.stash[_PASSED_BEFORE] = done
    config.pluginmanager.register(_Recorder(Path(path), done))
