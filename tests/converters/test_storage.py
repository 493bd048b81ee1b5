"""Bytes: spans, checksums, files in pieces, jobs on threads."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from converters import CheckpointError, open_checkpoint, write_safetensors
from converters.storage import folder as folder_module
from converters.storage import output_file as outfile
from converters.storage.bytes import FileSpan, Touched
from converters.storage.folder import Folder
from converters.storage.output_file import OutputFile, write_file
from converters.writers import parallel
from converters.writers.parallel import in_parallel, interleaved

if TYPE_CHECKING:
    from converters.writers.parallel import Job, Progress

DATA = random.Random(0).randbytes(3 << 20)


def span(folder: Path, crc32: int | None = None) -> FileSpan:
    (folder / "f").write_bytes(b"head" + DATA + b"tail")
    return Folder(folder).file("f").span(4, len(DATA), crc32=crc32, what="f/0")


@pytest.mark.parametrize("seed", range(3))
def test_parts_in_any_order_make_one_checksum(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    good, bad = span(tmp_path, zlib.crc32(DATA)), span(tmp_path, zlib.crc32(DATA) ^ 1)
    touched: Touched = set()
    for _ in range(30):
        start, stop = sorted(rng.choices(range(len(DATA)), k=2))
        buffer = bytearray(stop - start)
        for source in (good, bad):
            source.read_into(memoryview(buffer), start, touched)
            assert buffer == DATA[start:stop]
    assert touched == {good, bad}
    good.verify()
    good.verify()
    assert good.resolved
    with pytest.raises(CheckpointError, match="checksum of f/0"):
        bad.verify()
    with pytest.raises(CheckpointError, match="checksum"):
        bad.verify()


@pytest.mark.parametrize("name", ["../f", "/etc/passwd", "a/../../f", "", "a\0b", "a\\b"])
def test_no_name_leaves_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="leaves the checkpoint folder"):
        Folder(tmp_path).file(name)


def test_more_files_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_MAX_OPEN_FILES", 30)
    folder = Folder(tmp_path)
    for i in range(100):
        (tmp_path / str(i)).write_text(str(i))
    for _ in range(2):
        for i in range(100):
            assert folder.file(str(i)).read(0, len(str(i))) == str(i).encode()
    with pytest.raises(CheckpointError, match="truncated"):
        folder.file("7").read(0, 1 << 40)


# -- files written in pieces, by several threads, in any order -----------------------------------------------


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


# -- jobs on threads -----------------------------------------------------------------------------------------


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: 3)


def forever(progress: Progress) -> None:
    while True:
        progress(0)
        time.sleep(0.001)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("where", ["in a job", "while drawing"])
def test_the_first_error_ends_all(where: str) -> None:
    def fails(progress: Progress) -> None:
        raise CheckpointError("damaged")

    def jobs() -> Iterator[Job]:
        yield forever
        yield forever
        if where == "in a job":
            yield fails
        raise CheckpointError("damaged")

    before = threading.active_count()
    with pytest.raises(CheckpointError, match="damaged"):
        in_parallel(jobs(), lambda _: None)
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile


@pytest.mark.usefixtures("several")
def test_ctrl_c_ends_all() -> None:
    before = threading.active_count()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        in_parallel(iter([forever] * 5), lambda _: None)
    timer.join()
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile


def test_groups_take_turns() -> None:
    """A group is a file, in which one thread can write at a time."""
    groups: Any = map(iter, ("abc", "d", "efg"))
    assert "".join(map(str, interleaved(groups, 2))) == "adbcefg"
