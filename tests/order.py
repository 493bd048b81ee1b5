"""Groups of tests that xdist gives to one process, in order of their time: the longest group is first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest

FIRST: tuple[str, ...] = (
    "TorchTPU",
    "tests/tpu/test_parity.py",
    "tests/tpu/test_scan.py",
    "tests/tpu/test_compile.py",
    "tests/test_engines.py",
    "tests/portable/test_planner.py",
    "tests/gpu/test_footprint.py",
    "tests/test_tensor_parallel.py",
    "tests/portable/test_moves.py",
    "tests/gpu/test_settings.py",
    "tests/portable/test_activations.py",
    "tests/portable/test_launch.py",
    "tests/portable/test_remote_runs.py",
    "tests/test_adapters.py",
    "tests/portable/test_api.py",
    "tests/test_docs.py::test_docs_commands_run[train]",
    "tests/test_composite_models.py",
    "tests/test_docs.py::test_docs_commands_run[data]",
    "tests/test_docs.py::test_docs_commands_run[README]",
    "tests/converters/test_mutations.py",
    "tests/tpu/test_planned_steps.py",
)
"""The groups that take longest, by the sums of ``--durations=0``."""


def group_of(nodeid: str) -> str:
    """Return the group of a test: all tests on TPUs, which start slowly, a file, or one docs page."""
    file, _, test = nodeid.partition("::")
    if file.startswith("tests/torchtpu/") or "[tpu" in test:
        return "TorchTPU"
    return nodeid if test.startswith("test_docs_commands_run") else file


class InGroups(LoadScopeScheduling):  # type: ignore[misc]
    """xdist's scheduler with groups by :func:`group_of`."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort ``items`` by group, the longest group first, and otherwise keep their order."""
    groups: dict[str, list[Any]] = {name: [] for name in FIRST}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    return [item for group in groups.values() for item in group]
