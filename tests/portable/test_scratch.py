"""What a killed process leaves among temporary files, the next one removes; nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from portable import temporary_folder
from portable.temporary_folder import lasting_folder, scratch_folder, temporary_files_in

KILLED = """
import os, signal
from portable.temporary_folder import scratch_folder
with scratch_folder("kind") as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_what_a_killed_process_left_is_removed(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = temporary.iterdir()
    assert str(left) == killed.stdout.strip()
    with scratch_folder("other"):
        assert left.exists()
    with scratch_folder("kind") as folder:
        assert [*temporary.iterdir()] == [folder]
        (folder / "file").touch()
    assert [*temporary.iterdir()] == []


def test_what_is_in_use_no_folder_or_anothers_stays(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (temporary / "kind-link").symlink_to(kept)
    (temporary / "kind-file").touch()
    with scratch_folder("kind") as one, scratch_folder("kind") as other:
        assert one != other
        assert one.exists()
        assert other.exists()
    assert kept.exists()
    assert sorted(path.name for path in temporary.iterdir()) == ["kind-file", "kind-link"]
    (temporary / "kind-theirs").mkdir()
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    with scratch_folder("kind"):
        assert (temporary / "kind-theirs").exists()


CHILD = """
import os, signal, tempfile
from portable.temporary_folder import lasting_folder
print(tempfile.mkdtemp(), lasting_folder(), os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_others_make_goes_with_the_launcher(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that libraries of a killed rank had made are within the one that the launcher removes."""
    monkeypatch.setattr(temporary_folder, "_MAX_SOCKET_PATH", 1000)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    with scratch_folder("kind") as folder:
        with temporary_files_in(folder):
            child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
        made, kept, cache = child.stdout.split()
        assert made.startswith(f"{folder}/")
        assert kept == str(temporary) == str(lasting_folder())
        assert cache.startswith(f"{temporary}/torchinductor_")
    assert dict(os.environ) == before
    assert [*temporary.iterdir()] == []
