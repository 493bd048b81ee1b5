"""The kernel's counters of kills for memory, in files laid out like its own."""

from __future__ import annotations

from pathlib import Path

from portable.ranks.oom_kills import killed_since, oom_kills


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_level_is_read_in_both_versions(tmp_path: Path) -> None:
    put(tmp_path / "proc/vmstat", "nr_free_pages 7\noom_kill 4\n")
    put(tmp_path / "proc/self/cgroup", "4:cpu,memory:/batch/job1\n1:name=systemd:/x\n0::/batch/job1\n")
    put(tmp_path / "sys/fs/cgroup/memory/batch/job1/memory.oom_control", "under_oom 0\noom_kill 2\n")
    put(tmp_path / "sys/fs/cgroup/batch/memory.events", "low 0\noom 3\noom_kill 3\n")
    before = oom_kills(tmp_path)
    assert sorted(before.values()) == [2, 3, 4]
    assert killed_since(before, oom_kills(tmp_path)) is False
    put(tmp_path / "sys/fs/cgroup/batch/memory.events", "low 0\noom 4\noom_kill 4\n")
    assert killed_since(before, oom_kills(tmp_path)) is True


def test_where_nothing_counts_nothing_is_said(tmp_path: Path) -> None:
    put(tmp_path / "proc/vmstat", "nr_free_pages 7\n")
    assert oom_kills(tmp_path) == {}
    assert killed_since({}, {}) is None
