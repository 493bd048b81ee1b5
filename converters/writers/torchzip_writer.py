"""torch.save files written without torch.

Source: torch/serialization.py, caffe2/serialize/inline_container.cc, APPNOTE.TXT, PEP 307 (protocol 2).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

from converters.tensors.dtypes import TO_STORAGE, TO_TORCH, itemsize
from converters.tensors.tensor import row_major
from converters.writers.conversion import Entry, Part, Trailer

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR = struct.Struct("<4sL2Q")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
# Sizes and CRC follow the data (bit 3), names are UTF-8 (bit 11), as written by torch.
_FLAGS = 0x0808
_ARCHIVE = "archive"
_MEMBERS = 3


@dataclass(frozen=True)
class Name:
    """A global, pickled by name: a class, function or dtype."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A call of a function or class, run when the pickle is loaded."""

    function: Name
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)  # a dict key by identity
class Made:
    """An object of a class, constructed without arguments, and its state."""

    kind: Name
    state: Any


@dataclass(frozen=True)
class Persistent:
    """A persistent id, by which torch.save references a storage."""

    value: tuple[Any, ...]


def pickle(value: Any) -> bytes:
    """A protocol 2 pickle of plain containers and the objects above; TypeError for anything else."""
    out = bytearray(b"\x80\x02")
    _emit(value, out)
    return bytes(out + b".")


def _emit(value: Any, out: bytearray) -> None:
    if value is None:
        out += b"N"
    elif value is True or value is False:
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(data)]) + data if value < 0 or value > 255 else bytes([0x4B, value])
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<L", len(data)) + data
    elif isinstance(value, (tuple, list)):
        out += b"(" if isinstance(value, tuple) else b"]("
        for item in value:
            _emit(item, out)
        out += b"t" if isinstance(value, tuple) else b"e"
    elif isinstance(value, dict):
        out += b"}("
        for key, item in value.items():
            _emit(key, out)
            _emit(item, out)
        out += b"u"
    elif isinstance(value, Name):
        out += b"c" + f"{value.module}\n{value.name}\n".encode()
    elif isinstance(value, Call):
        _emit(value.function, out)
        _emit(value.args, out)
        out += b"R"
    elif isinstance(value, Made):
        _emit(value.kind, out)
        out += b")\x81"
        _emit(value.state, out)
        out += b"b"
    elif isinstance(value, Persistent):
        _emit(value.value, out)
        out += b"Q"
    else:
        raise TypeError(f"{type(value).__name__} cannot be pickled here")


def tensor_parts(entry: Entry) -> list[Part]:
    """A complete torch.save file with one tensor, as parts of a planned file."""
    width = itemsize(entry.dtype)
    storage = TO_STORAGE.get(entry.dtype)
    kind = Name("torch", storage) if storage else Name("torch.storage", "UntypedStorage")
    count = entry.tensor.numel if storage else entry.nbytes
    strides = tuple(step // width for step in row_major(entry.tensor.shape, width))
    place = (Persistent(("storage", kind, "0", "cpu", count)), 0, entry.tensor.shape, strides, False)
    hooks = Call(Name("collections", "OrderedDict"), ())
    if storage:
        value = Call(Name("torch._utils", "_rebuild_tensor_v2"), (*place, hooks))
    else:
        dtype = Name("torch", TO_TORCH[entry.dtype])
        value = Call(Name("torch._utils", "_rebuild_tensor_v3"), (*place, hooks, dtype))
    return _with_data(pickle(value), entry)


def value_bytes(value: Any) -> bytes:
    """A complete torch.save file with one plain value."""
    out, directory = _members(pickle(value))
    return bytes(out + directory + _end(_MEMBERS, len(directory), len(out)))


def _members(pickled: bytes) -> tuple[bytearray, bytearray]:
    """The small members of every file, and their directory entries."""
    out, directory = bytearray(), bytearray()
    for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
        crc = zlib.crc32(data)
        directory += _central(name, crc, len(data), len(out))
        out += _local(name) + data + _DESCRIPTOR.pack(b"PK\7\x08", crc, len(data), len(data))
    return out, directory


def _with_data(pickled: bytes, entry: Entry) -> list[Part]:
    out, directory = _members(pickled)
    header, nbytes = len(out), entry.nbytes
    out += _local("data/0")

    def trailer(crc: int) -> bytes:
        end = _DESCRIPTOR.pack(b"PK\7\x08", crc, nbytes, nbytes)
        listed = bytes(directory) + _central("data/0", crc, nbytes, header)
        return end + listed + _end(_MEMBERS + 1, len(listed), len(out) + nbytes + len(end))

    return [bytes(out), entry, Trailer(len(trailer(0)), trailer)]


def _local(name: str) -> bytes:
    path = f"{_ARCHIVE}/{name}".encode()
    # The zip64 field makes the sizes in the data descriptor 64 bits wide.
    extra = struct.pack("<2H2Q", 1, 16, 0, 0)
    wide = 0xFFFFFFFF
    return _LOCAL.pack(b"PK\3\4", 45, _FLAGS, 0, 0, 0, 0, wide, wide, len(path), len(extra)) + path + extra


def _central(name: str, crc: int, nbytes: int, header: int) -> bytes:
    path = f"{_ARCHIVE}/{name}".encode()
    narrow = nbytes if nbytes < 0xFFFFFFFF else 0xFFFFFFFF
    extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if narrow != nbytes else b""
    sizes = (narrow, narrow, len(path), len(extra), 0, 0, 0, 0, header)
    return _CENTRAL.pack(b"PK\1\2", 45, 45, _FLAGS, 0, 0, 0, crc, *sizes) + path + extra


def _end(count: int, size: int, start: int) -> bytes:
    wide = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR64.pack(b"PK\6\7", 0, start + size, 1)
    return wide + locator + _END.pack(b"PK\5\6", 0, 0, count, count, size, min(start, 0xFFFFFFFF), 0)
