"""The reader of pickles and of their zips: no input makes it run code, hang or use much memory."""

from __future__ import annotations

import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.converters import CheckpointError, open_checkpoint
from portable.converters.containers.pickle_reader import (
    build_getattr_standin,
    build_inert_members,
    to_json_value,
    unpickle_without_code,
)
from portable.converters.containers.torchzip import MEMORY_FORMATS, TORCH_STANDINS
from tests.converters.compare import assert_same


def read(data: bytes, **more: Any) -> Any:
    return unpickle_without_code(data, location="f.pkl", standins=TORCH_STANDINS, **more)


VALUES: list[Any] = [
    None,
    [1, 255, 256, 65536, -1, 1 << 31, -(1 << 80), 1.5, float("inf"), True, False],
    {"a": (1,), "b": (1, 2), "c": (1, 2, 3), "d": (1, 2, 3, 4), "e": (), 5: {}, (1, "x"): []},
    "x" * 300 + "é\U0001f600",
    b"bytes" * 100,
    list(range(2000)),
    {i: str(i) for i in range(2000)},
    ["same"] * 3 + [["same"]] * 2,
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("index", range(len(VALUES)))
def test_unpickle_plain_values(protocol: int, index: int) -> None:
    assert read(pickle.dumps(VALUES[index], protocol)) == VALUES[index]


def test_unpickle_limits_depth_and_rejects_cycles() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        read(pickle.dumps(loop))
    for deep in (b"]" * 100_000 + b"a" * 99_999, b")" + b"\x85" * 100_000, b"]" * 300 + b"a" * 299):
        with pytest.raises(CheckpointError, match="nested more than"):
            read(b"\x80\x02" + deep + b".")
    value = read(b"\x80\x02" + b"]" * 150 + b"a" * 149 + b".")
    assert repr(value) == "[" * 150 + "]" * 150


class Evil:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize("call", [os.system, eval, exec, getattr, __import__, os.remove, pickle.loads])
def test_unpickle_calls_nothing(protocol: int, call: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(pickle.dumps({"x": [Evil(call, "false")]}, protocol))
    assert "f.pkl: " in str(caught.value)
    if protocol >= 1:
        assert call.__name__ in str(caught.value)
        assert "no code was run" in str(caught.value)


_ENUM = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
_READS = build_getattr_standin(build_inert_members({_ENUM: MEMORY_FORMATS}))


def by_getattr(owner: bytes, name: bytes) -> bytes:
    """Return the pickle of an enumeration member by Python 3.11.2: `getattr(owner, name)`."""
    named = b"X" + struct.pack("<I", len(name)) + name
    return b"\x80\x02c__builtin__\ngetattr\nq\x00" + owner + named + b"\x86R."


_LISTED = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
_CONTIGUOUS = by_getattr(_LISTED, b"TORCH_CONTIGUOUS_FORMAT")


def test_unpickle_reads_member_of_listed_enumeration() -> None:
    prefixes = ("torch.distributed.checkpoint.",)
    standins = {**TORCH_STANDINS, "builtins.getattr": _READS}
    found = unpickle_without_code(_CONTIGUOUS, location="f.pkl", standins=standins, allowed_prefixes=prefixes)
    assert found.key == f"{_ENUM}.TORCH_CONTIGUOUS_FORMAT"
    with pytest.raises(CheckpointError, match=r"f\.pkl: .*builtins\.getattr.* \(no code was run"):
        read(_CONTIGUOUS)  # no format without such members takes it


@pytest.mark.parametrize(
    "data",
    [
        by_getattr(b"cos\nsystem\n", b"TORCH_CONTIGUOUS_FORMAT"),
        by_getattr(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"TORCH_CONTIGUOUS_FORMAT"),
        by_getattr(_LISTED, b"__class__"),
        by_getattr(_LISTED, b"__subclasses__"),
        by_getattr(_LISTED, b"_member_map_"),
        by_getattr(_LISTED, b"TORCH_OTHER_FORMAT"),
        by_getattr(_CONTIGUOUS[2:-1], b"name"),  # nested
        by_getattr(b"c__builtin__\ngetattr\n", b"__call__"),
        by_getattr(b"X\x00\x00\x00\x00", b"join"),
        b"\x80\x02c__builtin__\ngetattr\n" + _LISTED + b"]\x86R.",
        b"\x80\x02c__builtin__\ngetattr\n" + _LISTED + b"\x85R.",
        b"\x80\x02c__builtin__\ngetattr\n" + _LISTED + b"X\x01\x00\x00\x00xN\x87R.",  # with a default
    ],
)
def test_unpickle_reads_no_other_attribute(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"f\.pkl: .*not on the allow-list \(no code was run\); export"):
        unpickle_without_code(
            data,
            location="f.pkl",
            standins={**TORCH_STANDINS, "builtins.getattr": _READS},
            allowed_prefixes=("torch.distributed.checkpoint.",),
        )


BOMBS = {
    "memo index": b"\x80\x02Nr\xff\xff\xff\xff.",
    "long string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    "long bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
    "long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "long int": b"\x80\x02\x8b" + struct.pack("<I", 1 << 30) + b"\xff" * 100 + b".",
    "bytearray of a size": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "hash of nested tuples": b"\x80\x02}K\x01" + b"2\x86" * 60 + b"Ns.",
    "unbalanced": b"\x80\x02NN.",
    "mark": b"\x80\x02(.",
    "empty stack": b"\x80\x02.",
    "empty": b"",
    "no stop": b"\x80\x02N",
    "protocol": b"\x80\x09N.",
    "extension": b"\x80\x02\x82\x01.",
    "buffer": b"\x80\x05\x97.",
    "unhashable": b"\x80\x02}]Ns.",
    "build on a list": b"\x80\x02]}b.",
    "call a string": b"\x80\x02X\x01\x00\x00\x00x)R.",
    "call a result": b"\x80\x02cbuiltins\ndict\n)R)R.",
    "append to a tuple": b"\x80\x02)Na.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_unpickle_rejects_bombs(name: str) -> None:
    if name in ("memo index", "long frame"):
        assert read(BOMBS[name]) is None  # the memo is a dict and frames are skipped: neither costs anything
        return
    with pytest.raises(CheckpointError, match=r"^f\.pkl: "):
        read(BOMBS[name])


def test_unpickle_limits_shared_references() -> None:
    value: Any = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(CheckpointError, match="is too large"):
        read(pickle.dumps(value))
    shared = list(range(100))  # as often as a library names one object
    assert read(pickle.dumps([shared] * 5)) == [shared] * 5
    long = "x" * 100_000
    with pytest.raises(CheckpointError, match="is too large"):
        read(pickle.dumps([long] * 1000))
    assert len(str(to_json_value([long] * 3, limit=2))) < 300_000


def memo(value: bytes, then: bytes, times: int) -> bytes:
    """Return a pickle that stores `value` in the memo and repeats `then`."""
    return b"\x80\x02]" + value + b"q\x010" + then * times + b"."


_TEXT = b"X" + struct.pack("<I", 1 << 19) + b"a" * (1 << 19)
_TUPLE = b"(" + b"N" * 300_000 + b"t"
WORK = {
    "encode": memo(_TEXT, b"c_codecs\nencode\nh\x01\x85Ra", 4000),
    "set": memo(_TUPLE, b"cbuiltins\nset\nh\x01\x85Ra", 4000),
    "size": memo(b"(" + b"K\x01" * 300_000 + b"t", b"ctorch\nSize\nh\x01\x85Ra", 4000),
    "arguments": memo(_TUPLE, b"ctorch\nTensor\nh\x01Ra", 4000),
    "keys": memo(_TUPLE, b"}h\x01Nsa", 40_000),
    "names": memo(_TEXT, b"h\x01h\x01\x93a", 4000),
    "tuples": memo(b")", b"", 0)[:-1] + b"h\x01" + b"2\x86" * 60 + b"a.",
    "dimensions": memo(
        b"(" + (b"\x8a\x1f" + b"\xff" * 30 + b"\x7f") * 60_000 + b"t",
        b"ctorch._utils\n_rebuild_tensor\n(Nh\x01h\x01h\x01tRa",
        10,
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_unpickle_work_is_bounded_by_length(name: str) -> None:
    """The small pickles caused copies, hashes or products for minutes, or gigabytes of memory."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=r"^f\.pkl: "):
            read(WORK[name])
        assert tracemalloc.get_traced_memory()[1] < 16 * len(WORK[name]) + (32 << 20)
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5


def test_unpickle_limits_allow_library_files() -> None:
    """Many parameters share a shape, dtype and container, as in `.metadata` and `optimizer.pt`."""
    one = (2048, 2048)
    groups = [{"params": list(range(5000)), "betas": (0.9, 0.95)}] * 3
    state = {index: {"shape": one, "path": ("model", "layers", index)} for index in range(5000)}
    value = {"state": state, "param_groups": groups}
    assert read(pickle.dumps(value)) == value


# -- torch.save's zips ---------------------------------------------------------------------------------------


def test_torch_zip_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(open_checkpoint(tmp_path / "a.pt").tensors["a"], torch.arange(5))


EMPTY = pickle.dumps({}, 2)


@pytest.mark.parametrize(
    ("members", "compression", "told"),
    [
        ([("a/data.pkl", EMPTY * 50)], zipfile.ZIP_DEFLATED, "compressed"),
        ([("a/other", b"")], zipfile.ZIP_STORED, "without data.pkl"),
        ([("a/data.pkl", EMPTY), ("b/x", b"")], zipfile.ZIP_STORED, "written by torch.save"),
        ([("a/data.pkl", EMPTY), ("a/byteorder", b"big")], zipfile.ZIP_STORED, "big-endian"),
        ([("a/data.pkl", EMPTY)] * 2, zipfile.ZIP_STORED, "two records"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_torch_zip_reader_rejects_other_zips(
    tmp_path: Path, members: list[tuple[str, bytes]], compression: int, told: str
) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", compression) as made:
        for member, data in members:
            made.writestr(member, data)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("data", [b"PK\3\4", b"", b"hello, world" * 10])
def test_torch_zip_reader_rejects_other_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="other"):
        open_checkpoint(tmp_path / "other.pt")


def test_torch_zip_reader_reads_zip64_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of a record above 4 GiB has its size in the zip64 field, which this small file imitates.

    Python writes such fields for all but the last record, whose other fields then have the maximum value.
    """
    torch.save({"a": torch.arange(4)}, tmp_path / "a.pt")
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 0)
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "b.pt").write_bytes((tmp_path / "b.pt").read_bytes()[: -len(end)] + end)
    assert_same(open_checkpoint(tmp_path / "b.pt").tensors["a"], torch.arange(4))


def test_torch_zip_tensor_larger_than_storage_is_rejected(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as made:
        members = {info.filename: made.read(info) for info in made.infolist()}
    members["a/data.pkl"] = members["a/data.pkl"].replace(b"K\x04\x85", b"K\x05\x85")
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as made:
        for name, data in members.items():
            made.writestr(name, data)
    with pytest.raises(CheckpointError, match=r"data\.pkl: damaged: a tensor is larger than its storage"):
        open_checkpoint(tmp_path / "b.pt")
