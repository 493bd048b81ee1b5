"""The protobuf wire format: just enough to read a compiler's messages, and to write its options.

No message is declared here. A reader names fields by number, and skips over bytes that nobody asks for, so
that a module of a hundred megabytes is searched and not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


class WireError(ValueError):
    """The bytes are no protobuf message."""


class Message:
    """The fields of a serialized message, by number.

    Raises:
        WireError: if the bytes are cut off or malformed.
    """

    __slots__ = ("_fields",)

    def __init__(self, data: bytes | memoryview) -> None:
        self._fields: dict[int, list[int | memoryview]] = {}
        for number, value, _, _ in fields(memoryview(data)):
            self._fields.setdefault(number, []).append(value)

    def number(self, field: int) -> int:
        """An integer, enum or bool; 0 where it is absent."""
        value = self._fields.get(field, [0])[-1]
        return value if isinstance(value, int) else 0

    def numbers(self, field: int) -> list[int]:
        """A repeated integer, packed or not."""
        found: list[int] = []
        for value in self._fields.get(field, ()):
            if isinstance(value, int):
                found.append(value)
            else:
                found += _varints(value)
        return found

    def signed(self, field: int) -> int:
        """An ``int64``, which may be negative."""
        value = self.number(field)
        return value - (1 << 64) if value >> 63 else value

    def bytes(self, field: int) -> memoryview:
        """Bytes, or a serialized message; empty where it is absent."""
        value = self._fields.get(field, [memoryview(b"")])[-1]
        return memoryview(b"") if isinstance(value, int) else value

    def text(self, field: int) -> str:
        """A string."""
        return str(self.bytes(field), "utf-8", "replace")

    def message(self, field: int) -> Message:
        """A message; an empty one where it is absent."""
        return Message(self.bytes(field))

    def messages(self, field: int) -> Iterator[Message]:
        """A repeated message."""
        for value in self._fields.get(field, ()):
            if not isinstance(value, int):
                yield Message(value)

    def __contains__(self, field: int) -> bool:
        return field in self._fields


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview, int, int]]:
    """The number and value of each field, and where it begins and ends."""
    at, end = 0, len(data)
    while at < end:
        start = at
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        value: int | memoryview
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in _FIXED_SIZES:
            size = _FIXED_SIZES[kind]
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        else:
            raise WireError(f"wire type {kind} at byte {at}")
        if at > end:
            raise WireError(f"{at - end} bytes are missing")
        yield number, value, start, at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
    except IndexError:
        raise WireError("a number is cut off") from None


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def field(number: int, value: int | bytes | str) -> bytes:
    """One serialized field: an integer (a negative one as ``int64``), bytes, text or a message."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """An integer in base 128."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
