"""Spans, checksums and joins, against the bytes themselves."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from converters import CheckpointError
from converters.storage import folder as folder_module
from converters.storage.bytes import FileSpan, Joined, Memory, Slice, Touched
from converters.storage.folder import Folder

DATA = random.Random(0).randbytes(3 << 20)


def span(folder: Path, crc32: int | None = None) -> FileSpan:
    (folder / "f").write_bytes(b"head" + DATA + b"tail")
    return Folder(folder).file("f").span(4, len(DATA), crc32=crc32, what="f/0")


def read(source: FileSpan | Joined | Slice, at: int, count: int) -> bytes:
    buffer = bytearray(count)
    source.read_into(memoryview(buffer), at, set())
    return bytes(buffer)


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


def test_sequential_reading_needs_no_second_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = span(tmp_path, zlib.crc32(DATA))
    for at in range(0, len(DATA), 1000):
        read(source, at, min(1000, len(DATA) - at))
    monkeypatch.setattr(source.file, "read_into", lambda *args: pytest.fail("read again"))
    source.verify()


def test_joined_and_sliced(tmp_path: Path) -> None:
    source = span(tmp_path)
    joined = Joined([Slice(source, 10, 5), Memory(b""), Memory(b"abc"), Slice(source, 0, 4)])
    expected = DATA[10:15] + b"abc" + DATA[:4]
    assert joined.nbytes == len(expected)
    for at in range(len(expected)):
        for count in range(len(expected) - at + 1):
            assert read(joined, at, count) == expected[at : at + count]
    with pytest.raises(CheckpointError):
        read(joined, 5, 8)
    with pytest.raises(CheckpointError):
        Slice(source, len(DATA) - 1, 2)


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
