"""Which tests xdist gives to one process together, and in which order: what takes longest goes first.

The last record tells which, or the list below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

from tests import durations

if TYPE_CHECKING:
    import pytest

FIRST: tuple[str, ...] = (
    "TorchTPU",
    "tests/tpu/test_parity.py",
    "tests/tpu/test_scan.py",
    "tests/tpu/test_compile.py",
    "tests/portable/test_remote_runs.py",
    "tests/test_engines.py",
    "tests/converters/test_remote_convert.py",
    "tests/portable/test_planner.py",
    "tests/test_shared_layers.py",
    "tests/gpu/test_footprint.py",
    "tests/portable/test_moves.py",
    "tests/test_docs.py::test_commands_run[train]",
    "tests/portable/test_api.py",
    "tests/gpu/test_nodes.py",
    "tests/portable/test_launch.py",
    "tests/tpu/test_planned_steps.py",
    "tests/test_adapters.py",
    "tests/benchmarks/test_benchmarks.py",
    "tests/test_docs.py::test_commands_run[optimizers]",
    "tests/converters/test_gguf.py",
)
"""The groups that take longest, as far as no record says so."""


def group_of(nodeid: str) -> str:
    """Those on TPUs, which share what takes longest to start; those of a file; or the commands of a page."""
    file, _, test = nodeid.partition("::")
    if file.startswith("tests/torchtpu/") or "[tpu" in test:
        return "TorchTPU"
    return nodeid if test.startswith("test_commands_run") else file


class InGroups(LoadScopeScheduling):  # type: ignore[misc]
    """xdist's scheduler, by :func:`group_of`."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """``items`` by group, the longest first, otherwise as they were."""
    seconds: dict[str, float] = {group: 1e6 - at for at, group in enumerate(FIRST)}
    if recorded := durations.read().get("tests"):
        seconds = {}
        for name, test in recorded.items():
            seconds[group_of(name)] = seconds.get(group_of(name), 0.0) + durations.seconds_of(test)
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    first = sorted(groups, key=lambda group: -seconds.get(group, 0.0))
    return [item for group in first for item in groups[group]]
