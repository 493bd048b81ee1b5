"""Where the time of a test session goes: a record of it.

Every session writes ``.durations.json`` in the project's folder: each test with the seconds of its phases and
the process that ran it, and each start of something that tests share (ranks, devices, a server, samples).
``python -m tests`` adds its checks, and the wall and processor time of the whole; ``--durations=20`` of
pytest tells the longest tests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).resolve().parents[1] / ".durations.json"
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


def seconds_of(test: dict[str, Any]) -> float:
    """A test's set-up, call and tear-down together."""
    return float(sum(test.get(phase, 0.0) for phase in ("setup", "call", "teardown")))


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
