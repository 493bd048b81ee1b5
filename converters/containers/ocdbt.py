"""Read OCDBT, TensorStore's key-value store, in which Orbax stores its arrays.

The file `manifest.ocdbt` contains the root of a B+ tree for each version of the database. Only the
newest version is read. The nodes of the tree are stored in data files (`d/...`, also below
`ocdbt.process_<n>/`), each with its length and a CRC-32C. A leaf contains keys and small values.
Larger values are stored in the data files without a checksum. Integers are varints: base 128, least
significant digit first.

Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html ("Storage format"),
tensorstore/kvstore/ocdbt/format/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.containers.crc32c import compute_crc32c
from portable.converters.errors import CheckpointError, DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.limits import MAX_NODE, MAX_PATH_NAME, MAX_TREE
from portable.converters.storage.byte_sources import InMemorySource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.converters.storage.byte_sources import ByteSource, CheckpointFile
    from portable.converters.storage.folder import CheckpointFolder

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
# Memory that a tree may require in bytes: a fixed amount, and an amount for each stored byte.
_BASE_MEMORY_BYTES, _MEMORY_PER_STORED_BYTE = 256 << 20, 256
_ENTRY_BYTES = 512


@dataclass(frozen=True)
class _NodeLocation:
    """Location of a node in a data file.

    Attributes:
        base: Prefix of all data file names that are stored in the node.
        name: Path of the data file that contains the node.
        offset: Offset of the node in the data file, in bytes.
        length: Size of the node in bytes.
    """

    base: str
    name: str
    offset: int
    length: int


class _Root(NamedTuple):
    """Root node of one version of the database, and the height of its tree."""

    height: int
    location: _NodeLocation


class _NodeKeys(NamedTuple):
    """Keys of a node.

    Attributes:
        keys: Keys without the prefix of the node.
        shared_lengths: Length in bytes of the prefix that each child's keys share. Empty for a leaf.
    """

    keys: list[bytes]
    shared_lengths: list[int]


class _DataFileName(NamedTuple):
    """Name of a data file.

    Attributes:
        base: Leading part of `name`. Nodes in this file store other file names relative to it.
        name: Path of the file, relative to the folder of the database.
    """

    base: str
    name: str


def read_ocdbt_values(folder: CheckpointFolder) -> dict[str, ByteSource]:
    """List the keys in the newest version of a database, and locate their values.

    Args:
        folder: Folder that contains `manifest.ocdbt`.

    Returns:
        Byte source of each value, keyed by the key. The values are not read.

    Raises:
        CheckpointError: If a file is missing or damaged, or if the database uses features that Orbax
            does not use.
    """
    cost = _MemoryCost()
    file = folder.get_file(MANIFEST)
    height, root = _read_newest_root(_read_checked_body(file, 0, file.nbytes, _MANIFEST_MAGIC, cost))
    values: dict[str, ByteSource] = {}
    seen: set[tuple[object, int]] = set()
    pending = [(root, height, b"")]
    while pending:
        node_location, height, prefix = pending.pop()
        data = folder.get_file(node_location.name)
        node = data.get_file_identity(), node_location.offset
        if node in seen:
            raise DamagedCheckpointError(f"{data.path}: damaged: a node has two parents")
        seen.add(node)
        fields = _read_checked_body(data, node_location.offset, node_location.length, _NODE_MAGIC, cost)
        if fields.read_byte() != height:
            raise fields.build_damage_error("the height of a node differs from the height in its parent")
        names = _read_data_file_names(fields, node_location.base)
        keys, shared = _read_keys(fields, interior=height > 0)
        if height:
            child_locations = _read_node_locations(fields, names, len(keys))
            fields.read_varints(3 * len(keys))  # Statistics
            children = zip(child_locations, keys, shared, strict=True)
            pending += [(child, height - 1, prefix + key[:length]) for child, key, length in children]
        else:
            _add_leaf_values(folder, fields, names, [prefix + key for key in keys], values)
        fields.check_fully_read()
    return values


def _read_newest_root(fields: _FieldReader) -> _Root:
    """Read the root of the newest version from the manifest.

    Raises:
        CheckpointError: If the database is empty, damaged, or has numbered manifests.
    """
    fields.read_bytes(16)  # UUID of the database
    if fields.read_varint() != 0:
        raise UnsupportedCheckpointError(
            f"{fields.location}: an OCDBT database with numbered manifests is not supported"
        )
    fields.read_varints(2)  # Limits for the sizes of values and nodes
    fields.read_byte()  # Arity of the version tree
    if fields.read_varint():
        fields.read_bytes(4)  # Compression level
    names = _read_data_file_names(fields, "")
    count = fields.read_entry_count("versions")
    if count == 0:
        raise DamagedCheckpointError(f"{fields.location}: the database is empty")
    fields.read_varints(count)  # Generation numbers
    heights = fields.read_bytes(count)
    return _Root(heights[-1], _read_node_locations(fields, names, count)[-1])


def _add_leaf_values(
    folder: CheckpointFolder,
    fields: _FieldReader,
    names: Sequence[_DataFileName],
    keys: Sequence[bytes],
    values: dict[str, ByteSource],
) -> None:
    """Add the values of a leaf to `values`.

    Args:
        folder: Folder of the database.
        fields: Fields of the leaf after the keys.
        names: Data files of the node.
        keys: Keys of the leaf.
        values: Dict to which the byte source of each value is added, keyed by the key.
    """
    lengths = fields.read_varints(len(keys))
    kinds = fields.read_varints(len(keys))
    num_indirect = kinds.count(1)
    if num_indirect + kinds.count(0) != len(keys):
        raise fields.build_damage_error("a value has an unknown kind")
    files, offsets = iter(fields.read_varints(num_indirect)), iter(fields.read_varints(num_indirect))
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        try:
            name = key.decode()
        except UnicodeDecodeError:
            raise fields.build_damage_error("a key is not valid UTF-8") from None
        if name in values:
            raise fields.build_damage_error(f"contains {name!r} twice")
        if kind:
            data = folder.get_file(fields.select_data_file(names, next(files)).name)
            values[name] = data.get_span(next(offsets), length, description=name)
        else:
            values[name] = InMemorySource(fields.read_bytes(length))


def _read_keys(fields: _FieldReader, *, interior: bool) -> _NodeKeys:
    """Read the keys of a node.

    Args:
        fields: Fields of the node.
        interior: Whether the node is not a leaf.
    """
    count = fields.read_entry_count("entries")
    if count == 0:
        raise fields.build_damage_error("a node has no entries")
    prefixes = [0, *fields.read_varints(count - 1)]
    suffixes = fields.read_varints(count)
    shared = fields.read_varints(count) if interior else []
    lengths = [prefix + suffix for prefix, suffix in zip(prefixes, suffixes, strict=True)]
    if max(lengths) > MAX_PATH_NAME:
        raise fields.build_damage_error(f"a key has {max(lengths):,} bytes")
    fields.reserve_memory(sum(lengths))
    keys: list[bytes] = []
    last = b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        key = last[:prefix] + fields.read_bytes(suffix)
        if prefix > len(last) or (keys and key <= last):
            raise fields.build_damage_error("the keys of a node are not sorted")
        keys.append(key)
        last = key
    if any(length > len(key) for length, key in zip(shared, keys, strict=False)):
        raise fields.build_damage_error("a prefix is longer than its key")
    return _NodeKeys(keys, shared)


def _read_data_file_names(fields: _FieldReader, base: str) -> list[_DataFileName]:
    """Read the table of the data files that a node or a manifest refers to.

    Args:
        fields: Fields of the node or the manifest.
        base: Prefix that is prepended to all names in the table.
    """
    count = fields.read_entry_count("data files")
    prefixes = [0, *fields.read_varints(count - 1)] if count else []
    suffixes, bases = fields.read_varints(count), fields.read_varints(count)
    names = []
    last = b""
    for prefix, suffix, length in zip(prefixes, suffixes, bases, strict=True):
        if prefix > len(last) or prefix + suffix > MAX_PATH_NAME or length > prefix + suffix:
            raise fields.build_damage_error("the lengths of the data file names do not match")
        fields.reserve_memory(prefix + suffix)
        last = last[:prefix] + fields.read_bytes(suffix)
        try:
            names.append(_DataFileName(base + last[:length].decode(), base + last.decode()))
        except UnicodeDecodeError:
            raise fields.build_damage_error("the name of a data file is not valid UTF-8") from None
    return names


def _read_node_locations(
    fields: _FieldReader, names: Sequence[_DataFileName], count: int
) -> list[_NodeLocation]:
    """Read the locations of `count` nodes.

    Args:
        fields: Fields of the node or the manifest that refers to the nodes.
        names: Table of data files of the node or the manifest.
        count: Number of locations.
    """
    files, offsets, lengths = (fields.read_varints(count) for _ in range(3))
    return [
        _NodeLocation(*fields.select_data_file(names, file), offset, length)
        for file, offset, length in zip(files, offsets, lengths, strict=True)
    ]


def _read_checked_body(
    file: CheckpointFile, offset: int, length: int, magic: int, cost: _MemoryCost
) -> _FieldReader:
    """Read a manifest or a node, and return a reader of the fields after its header.

    Checks the length and the checksum, and decompresses the body.

    Args:
        file: File that contains the manifest or the node.
        offset: Offset in the file, in bytes.
        length: Size in bytes.
        magic: Expected magic number, `_MANIFEST_MAGIC` or `_NODE_MAGIC`.
        cost: Memory cost of the complete tree. Updated in place.

    Raises:
        CheckpointError: If the manifest or the node is damaged or too large.
    """
    location = str(file.path)
    kind = "node" if magic == _NODE_MAGIC else "manifest"
    if length > MAX_NODE:
        raise DamagedCheckpointError(f"{location}: damaged: an OCDBT {kind} cannot have {length:,} bytes")
    raw = file.read_bytes(offset, length)
    if len(raw) < 18 or raw[:4] != magic.to_bytes(4, "big"):
        raise DamagedCheckpointError(
            f"{location}: damaged: there is no OCDBT {kind} at the recorded position"
        )
    if int.from_bytes(raw[4:12], "little") != len(raw):
        raise DamagedCheckpointError(f"{location}: truncated or damaged: a recorded length does not match")
    if compute_crc32c(memoryview(raw)[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise DamagedCheckpointError(f"{location}: damaged: the checksum of the OCDBT tree does not match")
    cost.stored_bytes += len(raw)
    fields = _FieldReader(raw[12:-4], location, cost)
    version, compression = fields.read_varint(), fields.read_varint()
    if version != 0 or compression not in (0, 1):
        raise UnsupportedCheckpointError(
            f"{location}: OCDBT version {version} with compression {compression} is not supported"
        )
    body = fields.data[fields.position :]
    content = _FieldReader(_decompress(body, location) if compression else body, location, cost)
    content.reserve_memory(len(content.data))
    return content


def _decompress(data: bytes, location: str) -> bytes:
    """Decompress zstd data to at most `MAX_NODE` bytes.

    Raises:
        CheckpointError: If the data is damaged or larger.
    """
    import pyarrow  # Imported here because the import is slow.

    try:
        body: bytes = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd").read(MAX_NODE + 1)
    except OSError:
        raise DamagedCheckpointError(f"{location}: damaged: the OCDBT tree is not zstd data") from None
    if len(body) > MAX_NODE:
        raise DamagedCheckpointError(f"{location}: a node of the OCDBT tree has more than {MAX_NODE:,} bytes")
    return body


class _MemoryCost:
    """Size of a tree on disk and its estimated size in memory.

    The memory is limited relative to the size on disk. Otherwise, a small file of compressed zeros
    could require a lot of memory.

    Attributes:
        stored_bytes: Number of bytes that have been read from the files.
        spent_bytes: Estimated number of bytes in memory.
    """

    def __init__(self) -> None:
        self.stored_bytes = 0
        self.spent_bytes = 0


class _FieldReader:
    """Reader for the fields of a manifest or a node. Fields must be read in order.

    Args:
        data: Decompressed bytes of the manifest or the node.
        location: File that contains the bytes, used in error messages.
        cost: Memory cost of the complete tree.
    """

    def __init__(self, data: bytes, location: str, cost: _MemoryCost) -> None:
        self.data = data
        self.location = location
        self.position = 0
        self._cost = cost

    def build_damage_error(self, reason: str) -> CheckpointError:
        """Return an error that reports damage to this file. The caller raises it."""
        return DamagedCheckpointError(f"{self.location}: damaged: {reason}")

    def reserve_memory(self, nbytes: int) -> None:
        """Add `nbytes` to the estimated memory of the tree.

        Raises:
            CheckpointError: If the tree requires too much memory for its stored size.
        """
        cost = self._cost
        cost.spent_bytes += nbytes
        if cost.spent_bytes > min(_BASE_MEMORY_BYTES + _MEMORY_PER_STORED_BYTE * cost.stored_bytes, MAX_TREE):
            raise self.build_damage_error(
                f"{cost.stored_bytes:,} bytes of an OCDBT tree expand to {cost.spent_bytes:,} or more"
            )

    def read_entry_count(self, unit: str) -> int:
        """Read the number of entries that follow, and reserve memory for them.

        Args:
            unit: Plural noun for the entries, used in error messages. An entry has at least one byte.
        """
        count = self.read_varint()
        if count > len(self.data):
            raise self.build_damage_error(f"a node declares {count:,} {unit}, more than its size allows")
        self.reserve_memory(_ENTRY_BYTES * count)
        return count

    def read_bytes(self, count: int) -> bytes:
        """Read the next `count` bytes.

        Raises:
            CheckpointError: If fewer bytes remain.
        """
        if count > len(self.data) - self.position:
            raise self.build_damage_error("the OCDBT tree ends early")
        self.position += count
        return self.data[self.position - count : self.position]

    def read_byte(self) -> int:
        """Read the next byte as an integer."""
        return self.read_bytes(1)[0]

    def read_varint(self) -> int:
        """Read the next varint."""
        return self.read_varints(1)[0]

    def read_varints(self, count: int) -> list[int]:
        """Read the next `count` varints.

        A varint has up to ten bytes with seven bits each, and the lowest bits come first.
        """
        if count == 0:
            return []
        window = np.frombuffer(self.data, np.uint8, offset=self.position)[: 10 * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) < count:
            raise self.build_damage_error("the OCDBT tree ends early")
        starts = np.concatenate(([0], ends[:-1] + 1))
        sizes = ends - starts + 1
        # The largest value has 64 bits, because all of them are set if an empty version has no root.
        if sizes.max() > 10 or (sizes.max() == 10 and window[ends[sizes == 10]].max() > 1):
            raise self.build_damage_error("a number is too large")
        values = np.zeros(count, np.uint64)
        for byte_index in range(int(sizes.max())):
            is_longer = sizes > byte_index
            bits = window[starts[is_longer] + byte_index].astype(np.uint64) & np.uint64(0x7F)
            values[is_longer] |= bits << np.uint64(7 * byte_index)
        self.position += int(ends[-1]) + 1
        numbers: list[int] = values.tolist()
        return numbers

    def select_data_file(self, names: Sequence[_DataFileName], index: int) -> _DataFileName:
        """Return the data file at an index of the table.

        Raises:
            CheckpointError: If the index is too large.
        """
        if index >= len(names):
            raise self.build_damage_error(f"data file {index} does not exist, there are {len(names)}")
        return names[index]

    def check_fully_read(self) -> None:
        """Check that there are no bytes after the last field.

        Raises:
            CheckpointError: If unread bytes remain.
        """
        if self.position != len(self.data):
            raise self.build_damage_error(
                f"a node has {len(self.data) - self.position:,} extra bytes after its entries"
            )
