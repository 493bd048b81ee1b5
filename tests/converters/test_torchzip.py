"""torch.save files, read without torch."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from converters import CheckpointError, Tensor
from converters.containers.torchzip import StoredTensor, TorchZip
from converters.storage.folder import Folder
from converters.tensors.tensor import Box
from tests.converters.compare import assert_same


def opened(path: Path, offset: int = 0, length: int | None = None) -> TorchZip:
    return TorchZip(Folder(path.parent).file(path.name), offset, length)


def tensor(stored: Any) -> Tensor:
    assert isinstance(stored, StoredTensor)
    zeros = (0,) * len(stored.shape)
    return Tensor("t", stored.dtype, stored.shape, [Box(zeros, stored.shape, stored.view)])


def test_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    root = opened(tmp_path / "a.pt").load()
    assert_same(tensor(root["a"]), torch.arange(5))


def test_other_zips_are_refused(tmp_path: Path) -> None:
    def write(name: str, *members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w", compression) as made:
            for member, data in members:
                made.writestr(member, data)
        return tmp_path / name

    empty = pickle.dumps({}, 2)
    cases = {
        "compressed": write("a", ("a/data.pkl", empty * 50), compression=zipfile.ZIP_DEFLATED),
        "without data.pkl": write("b", ("a/other", b"")),
        "written by torch.save": write("c", ("a/data.pkl", empty), ("b/x", b"")),
        "big-endian": write("d", ("a/data.pkl", empty), ("a/byteorder", b"big")),
    }
    for what, path in cases.items():
        with pytest.raises(CheckpointError, match=what):
            opened(path).load()
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = write("e", ("a/data.pkl", empty), ("a/data.pkl", empty))
    with pytest.raises(CheckpointError, match="two records"):
        opened(twice)
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6"):
        opened(tmp_path / "old.pt")
    (tmp_path / "short").write_bytes(b"PK\3\4")
    (tmp_path / "none").write_bytes(b"")
    (tmp_path / "text").write_text("hello, world" * 10)
    for name in ("short", "none", "text"):
        with pytest.raises(CheckpointError, match=name):
            opened(tmp_path / name)


def test_zip64_sizes(tmp_path: Path) -> None:
    """The directory of a record above 4 GiB keeps its size in the zip64 field; so does this small one."""
    torch.save(torch.arange(4), tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.pt") as made:
        infos, start = made.infolist(), made.start_dir
    directory = b""
    for info in infos:
        name = info.filename.encode()
        extra = struct.pack("<2H3Q", 1, 24, info.file_size, info.file_size, info.header_offset)
        sizes = (0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
        directory += (
            struct.pack("<4s6H3L5H2L", b"PK\1\2", 45, 45, 8, 0, 0, 0, info.CRC, *sizes) + name + extra
        )
    end = start + len(directory)
    count, size = len(infos), len(directory)
    directory += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    directory += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    directory += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "b.pt").write_bytes(data[:start] + directory)
    assert_same(tensor(opened(tmp_path / "b.pt").load()), torch.arange(4))


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    value = torch.arange(4)
    torch.save(value, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as made:
        members = {info.filename: made.read(info) for info in made.infolist()}
    members["a/data.pkl"] = members["a/data.pkl"].replace(b"K\x04\x85", b"K\x05\x85")
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as made:
        for name, data in members.items():
            made.writestr(name, data)
    with pytest.raises(CheckpointError, match=r"data\.pkl: not a readable pickle"):
        opened(tmp_path / "b.pt").load()
