"""Detect OOM kills during a launch by comparing the kernel's counters before and after it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

OomKillCounts = dict[str, int]
"""Number of OOM kills since boot in each counter, keyed by the path of its file."""


def read_oom_kills(root: Path = Path("/")) -> OomKillCounts:
    """Read all OOM kill counters that this process can access.

    The machine's counter is in ``/proc/vmstat``. The memory cgroup of this process and its parent
    cgroups, such as a container or a batch job, have counters in ``memory.events`` (cgroup v2) or
    ``memory.oom_control`` (v1).

    Args:
        root: Folder that contains ``proc`` and ``sys``.

    Returns:
        The counters. Empty if the system has none.
    """
    counters: OomKillCounts = {}
    for path in (root / "proc/vmstat", *_list_cgroup_counter_files(root)):
        with suppress(OSError, ValueError):
            fields = (line.split() for line in path.read_text().splitlines())
            counters |= {str(path): int(field[1]) for field in fields if field[:1] == ["oom_kill"]}
    return counters


def _list_cgroup_counter_files(root: Path) -> list[Path]:
    """List the possible counter files of this process's memory cgroup and its parents.

    Some of the files may not exist. Empty on systems without ``/proc/self/cgroup``.

    Args:
        root: Folder that contains ``proc`` and ``sys``.
    """
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    files = []
    for line in membership.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, file = ("memory", "memory.oom_control") if controllers else ("", "memory.events")
        group = root / "sys/fs/cgroup" / base / name.lstrip("/")
        top = root / "sys/fs/cgroup" / base
        # Check all parents, because any of them may have a limit. Inside a container, the path may be the
        # path on the host.
        levels = [level for level in (group, *group.parents) if level.is_relative_to(top)]
        files += [level / file for level in levels]
    return files


def has_new_oom_kill(before: OomKillCounts, after: OomKillCounts) -> bool | None:
    """Return whether an OOM kill occurred between two readings.

    The result is None if there are no counters. The counters do not identify the killed process,
    which may belong to another program.

    Args:
        before: First result of :func:`read_oom_kills`.
        after: Later result.
    """
    if not before:
        return None
    return any(after.get(path, count) > count for path, count in before.items())
