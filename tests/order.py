"""Which process runs which tests under xdist, and in which order.

A file's tests stay together, so that its fixtures are made once. Those that need XLA devices are one group:
the processes that hold the devices are started once. Groups that take longest go first; the last record tells
which, or the list below.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests import durations

if TYPE_CHECKING:
    import pytest

XLA = "xla"
_USES_XLA = re.compile(r"^tests/tpu/test_(run|parity|footprint)|^tests/(?!converters).*\[(.*\W)?xla\W")
FIRST: tuple[str, ...] = (
    XLA,
    "tests/test_docs.py",
    "tests/portable/test_moves.py",
    "tests/portable/test_remote_runs.py",
    "tests/converters/test_remote_convert.py",
    "tests/portable/test_launch.py",
    "tests/test_engines.py",
)
"""The longest groups, as far as no record says so."""


def group_of(nodeid: str) -> str:
    """The group that a test belongs to: its file, or XLA's."""
    return XLA if _USES_XLA.search(nodeid) else nodeid.partition("::")[0]


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """``items`` by group, the longest first, otherwise as they were."""
    seconds: dict[str, float] = {group: 1e6 - at for at, group in enumerate(FIRST)}
    if recorded := durations.read().get("tests"):
        seconds = {}
        for name, test in recorded.items():
            seconds[group_of(name)] = seconds.get(group_of(name), 0.0) + durations.seconds_of(test)
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    first = sorted(groups, key=lambda group: -seconds.get(group, 0.0))
    return [item for group in first for item in groups[group]]


def scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's scheduler of scopes, with our groups as its scopes."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)
