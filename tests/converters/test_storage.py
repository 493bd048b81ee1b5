"""Names of files, many files, and files in pieces."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from portable.converters import CheckpointError
from portable.converters.storage import folder as folder_module
from portable.converters.storage import output_file as outfile
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import remove_folder
from portable.converters.storage.listed_file import ListedFile
from portable.converters.storage.output_file import OutputFile

DATA = random.Random(0).randbytes(3 << 20)


@pytest.mark.parametrize("name", ["../f", "/etc/passwd", "a/../../f", "", "a\0b", "a\\b"])
def test_checkpoint_folder_rejects_names_outside(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="points outside of the checkpoint folder"):
        CheckpointFolder(tmp_path).get_file(name)


def test_checkpoint_folder_limits_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_MAX_OPEN_FILES", 30)
    folder = CheckpointFolder(tmp_path)
    for i in range(100):
        (tmp_path / str(i)).write_text(str(i))
    for _ in range(2):
        for i in range(100):
            assert folder.get_file(str(i)).read_bytes(0, len(str(i))) == str(i).encode()
    with pytest.raises(CheckpointError, match="truncated"):
        folder.get_file("7").read_bytes(0, 1 << 40)


def test_remove_folder_deletes_links_but_not_their_targets(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_bytes(b"kept")
    for name in ("step-000001", ".step-000001.partial"):
        (tmp_path / name).symlink_to("disk")
        remove_folder(tmp_path / name)
        remove_folder(tmp_path / name)  # nothing there is no error
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "file"]


# -- files written in pieces, by several threads, in any order -----------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 99])
def test_kernel_copy_falls_back_if_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """If the copy stops half-way, the piece is unchanged, and the progress is reset."""
    if not hasattr(os, "copy_file_range"):
        pytest.skip("no copy_file_range here")
    (tmp_path / "source").write_bytes(DATA)
    span = CheckpointFolder(tmp_path).get_file("source").get_span(1000, 900_000)
    real, left = os.copy_file_range, [steps]

    def copy(*args: Any, **kwargs: Any) -> int:
        if not left[0]:
            raise OSError("across filesystems")
        left[0] -= 1
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "copy_file_range", copy)
    monkeypatch.setattr(outfile, "_KERNEL_COPY", 200_000)
    monkeypatch.setattr(outfile, "FLUSH_BYTES", 150_000)
    told: list[int] = []
    piece = OutputFile(tmp_path / "file").get_piece(0)
    piece.write(b"head")
    copied = piece.copy(span, told.append)
    assert copied == (steps == 99)
    assert sum(told) == (900_000 if copied else 0)
    if not copied:
        piece.write(DATA[1000:901_000])
    piece.write(b"tail")
    piece.finish()
    assert (tmp_path / "file").read_bytes() == b"head" + DATA[1000:901_000] + b"tail"


def test_listed_file_keeps_text_that_digests_contain() -> None:
    """Digests of remote data and names of downloaded files contain this text. A change would lose them."""
    assert repr(ListedFile(10, "v1")) == "Object(size=10, version='v1')"
