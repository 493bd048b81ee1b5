"""In which order files are tested under xdist: those that take longest go first.

The last record tells which, or the list below.
"""

from __future__ import annotations

import pytest

from tests import durations

FIRST: tuple[str, ...] = (
    "tests/test_docs.py",
    "tests/torchtpu/test_torchtpu.py",
    "tests/portable/test_remote_runs.py",
    "tests/test_engines.py",
    "tests/portable/test_moves.py",
    "tests/converters/test_remote_convert.py",
    "tests/portable/test_planner.py",
    "tests/test_shared_layers.py",
    "tests/gpu/test_footprint.py",
    "tests/portable/test_api.py",
    "tests/gpu/test_nodes.py",
)
"""The longest files, as far as no record says so."""


def file_of(nodeid: str) -> str:
    """The file that a test is in."""
    return nodeid.partition("::")[0]


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """``items`` by file, the longest first, otherwise as they were."""
    seconds: dict[str, float] = {group: 1e6 - at for at, group in enumerate(FIRST)}
    if recorded := durations.read().get("tests"):
        seconds = {}
        for name, test in recorded.items():
            seconds[file_of(name)] = seconds.get(file_of(name), 0.0) + durations.seconds_of(test)
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(file_of(item.nodeid), []).append(item)
    first = sorted(groups, key=lambda group: -seconds.get(group, 0.0))
    return [item for group in first for item in groups[group]]
