"""Where the time of a test session goes: a record of it, and its twenty longest tests and files.

Every session writes ``.durations.json`` in the project's folder: each test with the seconds of its phases and
the process that ran it, and each start of something that tests share (ranks, devices, a server, samples).
``python -m tests`` adds its checks, and the wall and processor time of the whole.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = Path(__file__).resolve().parents[1] / ".durations.json"
LONGEST = 20
_starts: list[dict[str, Any]] = []
"""What this process has started for its tests."""


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Record how long the block takes to start ``what``, on top of being part of some test's set-up."""
    begin = time.monotonic()
    try:
        yield
    finally:
        _starts.append({"what": what, "seconds": round(time.monotonic() - begin, 3)})


class Durations:
    """A pytest plugin; under xdist, that of a worker hands its starts to the controller's."""

    def __init__(self, worker_output: dict[str, Any] | None) -> None:
        self._worker_output = worker_output
        self._tests: dict[str, dict[str, Any]] = {}
        self._begin = time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self._tests.setdefault(report.nodeid, {"worker": getattr(report, "worker_id", "main")})
        test[report.when] = round(report.duration, 3)
        if report.when == "call" or report.outcome != "passed":
            test["outcome"] = report.outcome

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for start in getattr(node, "workeroutput", {}).get("starts", ()):
            _starts.append({**start, "worker": node.gateway.id})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self._worker_output is not None:
            self._worker_output["starts"] = _starts
            return
        seconds = round(time.monotonic() - self._begin, 1)
        if self._tests:
            write({"pytest": {"seconds": seconds}, "tests": self._tests, "starts": _starts})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if len(self._tests) <= LONGEST:
            return
        terminalreporter.section(f"the {LONGEST} longest (all: {RECORD.name})")
        for line in longest(self._tests):
            terminalreporter.write_line(line)
        terminalreporter.section(f"the {LONGEST} longest files")
        for file, seconds in list(by_file(self._tests).items())[:LONGEST]:
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")


def seconds_of(test: dict[str, Any]) -> float:
    """A test's set-up, call and tear-down together."""
    return float(sum(test.get(phase, 0.0) for phase in ("setup", "call", "teardown")))


def longest(tests: dict[str, dict[str, Any]], most: int = LONGEST) -> list[str]:
    """A line each for the tests that took longest."""
    ordered = sorted(tests.items(), key=lambda item: -seconds_of(item[1]))[:most]
    return [
        f"{seconds_of(test):7.1f} s  {name}  (of which set-up {test.get('setup', 0.0):.1f})"
        for name, test in ordered
    ]


def by_file(tests: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds of each file's tests, most first."""
    sums: dict[str, float] = {}
    for name, test in tests.items():
        file = name.partition("::")[0]
        sums[file] = sums.get(file, 0.0) + seconds_of(test)
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def read() -> dict[str, Any]:
    """The last record; empty where there is none."""
    try:
        record = json.loads(RECORD.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write(record: dict[str, Any]) -> None:
    partial = RECORD.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    partial.rename(RECORD)
