"""Which tests xdist gives to one process together, and in which order: what takes longest goes first.

The last record tells which, or the list below.
"""

from __future__ import annotations

from collections import defaultdict
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
    "tests/test_engines.py",
    "tests/portable/test_planner.py",
    "tests/gpu/test_footprint.py",
    "tests/test_shared_layers.py",
    "tests/portable/test_moves.py",
    "tests/gpu/test_settings.py",
    "tests/portable/test_activations.py",
    "tests/portable/test_launch.py",
    "tests/portable/test_remote_runs.py",
    "tests/test_adapters.py",
    "tests/portable/test_user_optimizer.py",
    "tests/portable/test_api.py",
    "tests/test_shared_sequences.py",
    "tests/test_docs.py::test_commands_run[train]",
    "tests/gpu/test_micro_batch.py",
    "tests/portable/test_foreign.py",
    "tests/gpu/test_cuda.py",
    "tests/portable/test_preferences.py",
    "tests/converters/test_mutations.py",
    "tests/tpu/test_planned_steps.py",
)
"""The groups that take longest, where no record of all groups says which."""


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
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    seconds: dict[str, float] = defaultdict(float)
    for name, test in durations.read().get("tests", {}).items():
        seconds[group_of(name)] += durations.seconds_of(test)
    if not groups.keys() <= seconds.keys():  # of another environment, or of a few tests
        seconds = {**dict.fromkeys(groups, 0.0), **{name: 1e6 - at for at, name in enumerate(FIRST)}}
    return [item for group in sorted(groups, key=lambda group: -seconds[group]) for item in groups[group]]
