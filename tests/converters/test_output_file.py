"""Files written in pieces, by several threads, in any order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import open_checkpoint, write_safetensors
from converters.storage import output_file as outfile
from converters.storage.folder import Folder
from converters.storage.output_file import OutputFile, write_file

DATA = bytes(range(256)) * 5000


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


def _written_by_others(folder: Path, sizes: dict[str, int]) -> Path:
    """A model in safetensors with a header of another length than ours."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {name: rng.integers(0, 99, size, np.int32) for name, size in sizes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt", "by": "x" * 300})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def _same(source: Path, out: Path) -> None:
    ours, theirs = open_checkpoint(out).tensors, open_checkpoint(source).tensors
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name].read(), theirs[name].read()) for name in theirs)


def test_data_keeps_its_place_in_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system shares whole blocks only."""
    source = _written_by_others(tmp_path / "source", {"a": 5_000, "b": 30_000, "c": 8, "d": 20_000})
    calls = []
    real = os.copy_file_range

    def copy(src: int, dst: int, count: int, offset_src: int, offset_dst: int) -> int:
        calls.append((offset_src, offset_dst, count))
        return real(src, dst, count, offset_src, offset_dst)

    monkeypatch.setattr(os, "copy_file_range", copy)
    write_safetensors(open_checkpoint(source), tmp_path / "out", max_shard_size=150_000, progress=False)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == 2
    assert all((start - there) % 4096 == 0 for start, there, _ in calls)
    assert all(start % 4096 == 0 for start, _, count in calls if count > 4096)
    assert all(int.from_bytes(shard.read_bytes()[:8], "little") % 8 == 0 for shard in shards)
    _same(source, tmp_path / "out")
