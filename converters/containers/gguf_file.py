"""GGUF: a table of typed values, the places of the tensors, and their aligned bytes. Written, and read back.

Source: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.storage.bytes import SourceFile

ALIGNMENT = 32
# Element type -> its number in the file; Q8_0 is stored as bytes, 34 for each 32 elements.
TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28, "BF16": 30}
_MAGIC = b"GGUF\x03\0\0\0"
_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_I32 = 5


@dataclass(frozen=True)
class Float:
    """A number that is written as float32."""

    value: float


@dataclass(frozen=True)
class Described:
    """A tensor of a file: `shape` in torch's order, `kind` one of `TYPES`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int


def header(values: Mapping[str, Any], tensors: Sequence[Described]) -> bytes:
    """Everything before the data, padded to where it begins; each tensor's data is padded likewise.

    Args:
        values: str, bool, int, `Float`, or a list of strings or integers.
    """
    out = bytearray(_MAGIC + struct.pack("<2Q", len(tensors), len(values)))
    for key, value in values.items():
        out += _text(key) + _value(value)
    at = 0
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        out += _text(tensor.name) + struct.pack(f"<L{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<LQ", TYPES[tensor.kind], at)
        at += padded(tensor.nbytes)
    return bytes(out) + bytes(-len(out) % ALIGNMENT)


def padded(nbytes: int) -> int:
    """`nbytes`, up to the next multiple of the alignment."""
    return nbytes + -nbytes % ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<L?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<2L", _U32, value)
    if isinstance(value, Float):
        return struct.pack("<Lf", _F32, value.value)
    if isinstance(value, str):
        return struct.pack("<L", _STRING) + _text(value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<2LQ{len(value)}i", _ARRAY, _I32, len(value), *value)
    return struct.pack("<2LQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))


def data_of(file: SourceFile, start: int, tensors: Sequence[Described]) -> dict[str, Tensor]:
    """The tensors of a file that `header` began; Q8_0 as bytes.

    Raises:
        CheckpointError: the file is too short.
    """
    found: dict[str, Tensor] = {}
    at = start
    for tensor in tensors:
        span = file.span(at, tensor.nbytes, what=repr(tensor.name))
        dtype, shape = tensor.kind, tensor.shape
        if dtype == "Q8_0":
            dtype, shape = "U8", (*shape[:-1], tensor.nbytes // max(1, prod(shape[:-1])))
        found[tensor.name] = Tensor.contiguous(tensor.name, dtype, shape, span)
        at += padded(tensor.nbytes)
    if at != file.nbytes:
        raise CheckpointError(f"{file.path}: is {file.nbytes} bytes long, not {at}")
    return found
