"""OCDBT, the key-value store of TensorStore in which Orbax keeps its arrays.

`manifest.ocdbt` names the root of a B+ tree for each version; the newest is read. Its nodes lie in data files
(`d/...`, also below `ocdbt.process_<n>/`), each with its length and a CRC-32C. A leaf holds the keys and
small values; larger ones lie in the data files, without a checksum. Integers are little-endian base-128.

Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html ("Storage format"),
tensorstore/kvstore/ocdbt/format/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.containers.crc32c import crc32c
from converters.errors import CheckpointError
from converters.limits import MAX_NODE, MAX_PATH_NAME, MAX_TREE
from converters.numeric import np
from converters.storage.bytes import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.storage.bytes import Source, SourceFile
    from converters.storage.folder import Folder

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
# What a tree may cost in memory: so much in any case, so much for each stored byte of it.
_FREE, _FOR_EACH = 256 << 20, 256
_ENTRY = 512


@dataclass(frozen=True)
class _Place:
    """Bytes [offset, offset + length) of a data file; names in it begin with `base`."""

    base: str
    name: str
    offset: int
    length: int


def read_ocdbt(folder: Folder) -> dict[str, Source]:
    """The newest version of the database in `folder`: key -> value, which is not read yet.

    Raises:
        CheckpointError: a file is missing or damaged, or the database is of a kind that Orbax does not write.
    """
    cost = _Cost()
    file = folder.file(MANIFEST)
    height, root = _newest(_body(file, 0, file.nbytes, _MANIFEST_MAGIC, cost))
    found: dict[str, Source] = {}
    seen: set[tuple[object, int]] = set()
    pending = [(root, height, b"")]
    while pending:
        place, height, prefix = pending.pop()
        data = folder.file(place.name)
        node = data.identity(), place.offset
        if node in seen:
            raise CheckpointError(f"{data.path}: damaged, a node has two parents")
        seen.add(node)
        fields = _body(data, place.offset, place.length, _NODE_MAGIC, cost)
        if fields.byte() != height:
            raise fields.damaged("a node has another height than its parent says")
        names = _data_files(fields, place.base)
        keys, shared = _keys(fields, interior=height > 0)
        if height:
            places = _places(fields, names, len(keys))
            fields.varints(3 * len(keys))  # statistics
            below = zip(places, keys, shared, strict=True)
            pending += [(child, height - 1, prefix + key[:length]) for child, key, length in below]
        else:
            _leaf(folder, fields, names, [prefix + key for key in keys], found)
        fields.end()
    return found


def _newest(fields: _Fields) -> tuple[int, _Place]:
    """The height and the place of the newest root."""
    fields.take(16)  # uuid
    if fields.varint() != 0:
        raise CheckpointError(f"{fields.where}: an OCDBT database with numbered manifests is not supported")
    fields.varints(2)  # limits of the writer
    fields.byte()  # arity of the tree of versions
    if fields.varint():
        fields.take(4)  # level of the compression
    names = _data_files(fields, "")
    count = fields.count("versions")
    if count == 0:
        raise CheckpointError(f"{fields.where}: the database is empty")
    fields.varints(count)  # generations
    heights = fields.take(count)
    return heights[-1], _places(fields, names, count)[-1]


def _leaf(
    folder: Folder,
    fields: _Fields,
    names: Sequence[tuple[str, str]],
    keys: Sequence[bytes],
    found: dict[str, Source],
) -> None:
    lengths = fields.varints(len(keys))
    kinds = fields.varints(len(keys))
    apart = kinds.count(1)
    if apart + kinds.count(0) != len(keys):
        raise fields.damaged("a value is of an unknown kind")
    files, offsets = iter(fields.varints(apart)), iter(fields.varints(apart))
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        try:
            name = key.decode()
        except UnicodeDecodeError:
            raise fields.damaged("a key is no UTF-8") from None
        if name in found:
            raise fields.damaged(f"holds {name!r} twice")
        if kind:
            data = folder.file(fields.pick(names, next(files))[1])
            found[name] = data.span(next(offsets), length, what=name)
        else:
            found[name] = Memory(fields.take(length))


def _keys(fields: _Fields, *, interior: bool) -> tuple[list[bytes], list[int]]:
    """The keys of a node, and how long a prefix the keys below each share."""
    count = fields.count("entries")
    if count == 0:
        raise fields.damaged("a node has no entries")
    prefixes = [0, *fields.varints(count - 1)]
    suffixes = fields.varints(count)
    shared = fields.varints(count) if interior else []
    lengths = [prefix + suffix for prefix, suffix in zip(prefixes, suffixes, strict=True)]
    if max(lengths) > MAX_PATH_NAME:
        raise fields.damaged(f"a key has {max(lengths):,} bytes")
    fields.spend(sum(lengths))
    keys: list[bytes] = []
    last = b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        key = last[:prefix] + fields.take(suffix)
        if prefix > len(last) or (keys and key <= last):
            raise fields.damaged("its keys are out of order")
        keys.append(key)
        last = key
    if any(length > len(key) for length, key in zip(shared, keys, strict=False)):
        raise fields.damaged("a prefix is longer than its key")
    return keys, shared


def _data_files(fields: _Fields, base: str) -> list[tuple[str, str]]:
    """The table of data files: (what precedes the names in nodes of this file, the file)."""
    count = fields.count("data files")
    prefixes = [0, *fields.varints(count - 1)] if count else []
    suffixes, bases = fields.varints(count), fields.varints(count)
    found = []
    last = b""
    for prefix, suffix, length in zip(prefixes, suffixes, bases, strict=True):
        if prefix > len(last) or prefix + suffix > MAX_PATH_NAME or length > prefix + suffix:
            raise fields.damaged("the names of its data files do not fit")
        fields.spend(prefix + suffix)
        last = last[:prefix] + fields.take(suffix)
        try:
            found.append((base + last[:length].decode(), base + last.decode()))
        except UnicodeDecodeError:
            raise fields.damaged("the name of a data file is no UTF-8") from None
    return found


def _places(fields: _Fields, names: Sequence[tuple[str, str]], count: int) -> list[_Place]:
    files, offsets, lengths = (fields.varints(count) for _ in range(3))
    return [
        _Place(*fields.pick(names, file), offset, length)
        for file, offset, length in zip(files, offsets, lengths, strict=True)
    ]


def _body(file: SourceFile, offset: int, length: int, magic: int, cost: _Cost) -> _Fields:
    """What follows the header of a manifest or node, decompressed; its length and checksum are checked."""
    where = str(file.path)
    kind = "node" if magic == _NODE_MAGIC else "manifest"
    if length > MAX_NODE:
        raise CheckpointError(f"{where}: damaged, no OCDBT {kind} has {length:,} bytes")
    raw = file.read(offset, length)
    if len(raw) < 18 or raw[:4] != magic.to_bytes(4, "big"):
        raise CheckpointError(f"{where}: damaged, no OCDBT {kind} there")
    if int.from_bytes(raw[4:12], "little") != len(raw):
        raise CheckpointError(f"{where}: truncated or damaged, a length in it is wrong")
    if crc32c(memoryview(raw)[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise CheckpointError(f"{where}: damaged, the checksum of the OCDBT tree does not match")
    cost.stored += len(raw)
    fields = _Fields(raw[12:-4], where, cost)
    version, compression = fields.varint(), fields.varint()
    if version != 0 or compression not in (0, 1):
        raise CheckpointError(f"{where}: OCDBT version {version}, compression {compression} is not supported")
    body = fields.data[fields.at :]
    made = _Fields(_decompressed(body, where) if compression else body, where, cost)
    made.spend(len(made.data))
    return made


def _decompressed(data: bytes, where: str) -> bytes:
    import pyarrow  # not at the top: slow to import

    try:
        body: bytes = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd").read(MAX_NODE + 1)
    except OSError:
        raise CheckpointError(f"{where}: damaged, the OCDBT tree is no zstd data") from None
    if len(body) > MAX_NODE:
        raise CheckpointError(f"{where}: a node of the OCDBT tree has more than {MAX_NODE:,} bytes")
    return body


class _Cost:
    """What a tree takes in memory, beside the bytes that it is stored in: these may be compressed zeros."""

    def __init__(self) -> None:
        self.stored = 0
        self.spent = 0


class _Fields:
    """The fields of a manifest or node, read one after another."""

    def __init__(self, data: bytes, where: str, cost: _Cost) -> None:
        self.data = data
        self.where = where
        self.at = 0
        self._cost = cost

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: damaged, {what}")

    def spend(self, nbytes: int) -> None:
        cost = self._cost
        cost.spent += nbytes
        if cost.spent > min(_FREE + _FOR_EACH * cost.stored, MAX_TREE):
            raise self.damaged(f"{cost.stored:,} bytes of an OCDBT tree stand for {cost.spent:,} or more")

    def count(self, what: str) -> int:
        """How many of these follow, at a byte each or more."""
        count = self.varint()
        if count > len(self.data):
            raise self.damaged(f"holds {count:,} {what}")
        self.spend(_ENTRY * count)
        return count

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self.damaged("the OCDBT tree ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        return self.varints(1)[0]

    def varints(self, count: int) -> list[int]:
        """`count` integers, each of up to ten bytes with seven bits, the lowest first."""
        if count == 0:
            return []
        window = np.frombuffer(self.data, np.uint8, offset=self.at)[: 10 * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) < count:
            raise self.damaged("the OCDBT tree ends early")
        starts = np.concatenate(([0], ends[:-1] + 1))
        sizes = ends - starts + 1
        # 64 bits: all of them are set where an empty version has no root.
        if sizes.max() > 10 or (sizes.max() == 10 and window[ends[sizes == 10]].max() > 1):
            raise self.damaged("a number is too large")
        values = np.zeros(count, np.uint64)
        for place in range(int(sizes.max())):
            held = sizes > place
            bits = window[starts[held] + place].astype(np.uint64) & np.uint64(0x7F)
            values[held] |= bits << np.uint64(7 * place)
        self.at += int(ends[-1]) + 1
        made: list[int] = values.tolist()
        return made

    def pick(self, names: Sequence[tuple[str, str]], number: int) -> tuple[str, str]:
        if number >= len(names):
            raise self.damaged(f"names data file {number}, of {len(names)}")
        return names[number]

    def end(self) -> None:
        if self.at != len(self.data):
            raise self.damaged(f"a node has {len(self.data) - self.at:,} bytes more than its entries")
