"""Whether the kernel has killed processes for memory: its own counters, read before and after."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

Counters = dict[str, int]
"""Kills for memory since boot, by the file that counts them."""


def oom_kills(root: Path = Path("/")) -> Counters:
    """Read every counter that this process can see; none where the system keeps none.

    The machine's is in ``/proc/vmstat``, those of the memory cgroup of this process and of the ones around it
    (a container, a batch job) in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1).

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    counters: Counters = {}
    for path in (root / "proc/vmstat", *_cgroup_files(root)):
        with suppress(OSError, ValueError):
            fields = (line.split() for line in path.read_text().splitlines())
            counters |= {str(path): int(field[1]) for field in fields if field[:1] == ["oom_kill"]}
    return counters


def _cgroup_files(root: Path) -> list[Path]:
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
        # A limit may stand at any level above; inside a container the path may be the host's.
        levels = [level for level in (group, *group.parents) if level.is_relative_to(top)]
        files += [level / file for level in levels]
    return files


def killed_since(before: Counters, after: Counters) -> bool | None:
    """Whether the kernel has killed a process for memory between the readings; None where nothing counts."""
    if not before:
        return None
    return any(after.get(path, count) > count for path, count in before.items())
