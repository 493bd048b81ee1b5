"""Files written in pieces, by several threads, in any order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from converters.storage import output_file as outfile
from converters.storage.folder import Folder
from converters.storage.output_file import OutputFile, write_file

if TYPE_CHECKING:
    from pathlib import Path

DATA = bytes(range(256)) * 5000


def test_pieces_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(outfile, "FLUSH_BYTES", 100_000)
    path = tmp_path / "file"
    file = OutputFile(path, pieces=2)
    second, first = file.piece(700_000), file.piece(0)
    second.write(DATA[700_000:])
    second.finish()
    assert not synced
    first.write(memoryview(DATA)[:300_000])
    first.write(DATA[300_000:700_000])
    first.finish()
    assert len(synced) == 1
    assert path.read_bytes() == DATA


def test_an_existing_file_is_never_touched(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"mine")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", b"yours")
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("steps", [0, 1, 2, 99])
def test_the_kernel_copies_until_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Where it stops half-way the piece is as if nothing had been copied, and the progress is taken back."""
    if not hasattr(os, "copy_file_range"):
        pytest.skip("no copy_file_range here")
    (tmp_path / "source").write_bytes(DATA)
    span = Folder(tmp_path).file("source").span(1000, 900_000)
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
    piece = OutputFile(tmp_path / "file").piece(0)
    piece.write(b"head")
    copied = piece.copy(span, told.append)
    assert copied == (steps == 99)
    assert sum(told) == (900_000 if copied else 0)
    if not copied:
        piece.write(DATA[1000:901_000])
    piece.write(b"tail")
    piece.finish()
    assert (tmp_path / "file").read_bytes() == b"head" + DATA[1000:901_000] + b"tail"
