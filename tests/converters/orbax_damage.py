"""An encoder of OCDBT for databases that no program writes: malicious ones, and small deep ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow

from portable.converters.containers.crc32c import compute_crc32c

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


def varint(value: int) -> bytes:
    made = b""
    while value >= 128:
        made += bytes([value & 127 | 128])
        value >>= 7
    return made + bytes([value])


def column(*values: int) -> bytes:
    return b"".join(map(varint, values))


def sealed(magic: int, body: bytes, *, compress: bool = False, length: int | None = None) -> bytes:
    """Return a manifest or node with the given body."""
    if compress:
        body = pyarrow.Codec("zstd").compress(body, asbytes=True)
    size = 12 + 2 + len(body) + 4 if length is None else length
    data = magic.to_bytes(4, "big") + size.to_bytes(8, "little") + b"\0" + bytes([compress]) + body
    return data + compute_crc32c(data).to_bytes(4, "little")


def files(*names: str) -> bytes:
    """Return a table of data files that share no prefixes."""
    raw = [name.encode() for name in names]
    none = [0] * len(raw)
    return varint(len(raw)) + column(*none[1:]) + column(*map(len, raw)) + column(*none) + b"".join(raw)


def keys(*names: str, shared: list[int] | None = None) -> bytes:
    raw = [name.encode() for name in names]
    return column(*[0] * (len(raw) - 1)) + column(*map(len, raw)) + column(*(shared or [])) + b"".join(raw)


def leaf(values: dict[str, bytes]) -> bytes:
    """Return the body of a leaf with small values, by sorted keys."""
    body = b"\0" + files() + varint(len(values)) + keys(*values)
    return body + column(*map(len, values.values())) + column(*[0] * len(values)) + b"".join(values.values())


def apart(name: str, key: str, offset: int, length: int) -> bytes:
    """Return the body of a leaf whose only value is stored in a data file."""
    return b"\0" + files(name) + varint(1) + keys(key) + column(length, 1, 0, offset)


def interior(height: int, name: str, children: list[tuple[str, int, int, int]]) -> bytes:
    """Return the body of an interior node.

    Each child is (key, length of the shared prefix, offset, length).
    """
    count = len(children)
    body = bytes([height]) + files(name) + varint(count)
    body += keys(*(child[0] for child in children), shared=[child[1] for child in children])
    body += (
        column(*[0] * count)
        + column(*(child[2] for child in children))
        + column(*(child[3] for child in children))
    )
    return body + column(*[1] * (3 * count))


def manifest(name: str, offset: int, length: int, *, height: int = 0, kind: int = 0) -> bytes:
    body = bytes(16) + column(kind, 1024, 10**8) + b"\4" + varint(0)
    body += files(name) + varint(1) + varint(1) + bytes([height]) + column(0, offset, length)
    return sealed(MANIFEST, body + column(1, 1, 1) + bytes(8) + varint(0), compress=True)


def database(folder: Path, node: bytes, **more: Any) -> None:
    """Write a database whose root is `node`."""
    (folder / "d").mkdir(exist_ok=True)
    (folder / "d" / "data").write_bytes(node)
    (folder / "manifest.ocdbt").write_bytes(manifest("d/data", 0, len(node), **more))


def unchecked_spans(data: bytes) -> list[tuple[int, int]]:
    """Return the spans between the nodes of a data file: values, which have no checksum."""
    spans, at, magic = [], 0, NODE.to_bytes(4, "big")
    while (found := data.find(magic, at)) >= 0:
        length = int.from_bytes(data[found + 4 : found + 12], "little")
        spans.append((at, found))
        at = max(found + 4, found + length) if found + length <= len(data) else found + 4
    return [*spans, (at, len(data))]
