"""Read OCDBT, TensorStore's key-value store, in which Orbax stores its arrays.

Each version of the database is a B+ tree. The file `manifest.ocdbt` contains the roots of the most
recent versions. Only the newest version is read. The nodes of the tree are stored in data files
(`d/...`, also below `ocdbt.process_<n>/`), each with its length and a CRC-32C. A leaf contains keys
and small values. Larger values are stored in the data files without a checksum. Integers are
varints: base 128, least significant digit first.

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
# Limits on the estimated memory of a tree in bytes: a fixed amount, and an amount per stored byte.
_BASE_MEMORY_BYTES, _MEMORY_PER_STORED_BYTE = 256 << 20, 256
_ENTRY_BYTES = 512


@dataclass(frozen=True)
class _NodeLocation:
    """Location of a node in a data file.

    Attributes:
        base: Prefix to prepend to each data file name that the node stores.
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
    """Keys in one node of the B+ tree of an OCDBT database.

    All keys in a node begin with the same prefix, which is derived from the parent node. The node
    stores its keys without this prefix.

    Attributes:
        keys: Keys without the prefix of the node. An interior node has one key per child.
        shared_lengths: Number of bytes that each child adds to the prefix. The child's prefix
            consists of this node's prefix and the first bytes of the child's key in `keys`. Empty
            for a leaf.
    """

    keys: list[bytes]
    shared_lengths: list[int]


class _DataFileName(NamedTuple):
    """Name of a data file of an OCDBT database.

    Attributes:
        base: Leading part of `name`. The B+ tree nodes in this file store the names of other data
            files without this part.
        name: Path of the file, relative to the folder of the database.
    """

    base: str
    name: str


def read_ocdbt_values(folder: CheckpointFolder) -> dict[str, ByteSource]:
    """List the keys in the newest version of a database, and locate their values.

    Args:
        folder: Folder that contains `manifest.ocdbt`.

    Returns:
        Byte source of each value, keyed by the key. Values in data files are not read. Small values
        in the leaves of the tree are already in memory.

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
            raise DamagedCheckpointError(f"{data.path}: damaged: a node of the OCDBT tree has two parents")
        seen.add(node)
        fields = _read_checked_body(data, node_location.offset, node_location.length, _NODE_MAGIC, cost)
        if (node_height := fields.read_byte()) != height:
            raise fields.build_damage_error(
                f"an OCDBT node has the height {node_height}, but its parent records the height {height}"
            )
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
        CheckpointError: If the database has no versions, if it is damaged, or if its manifests are
            in numbered files, which are not supported.
    """
    fields.read_bytes(16)  # UUID of the database
    if fields.read_varint() != 0:
        raise UnsupportedCheckpointError(
            f"{fields.location}: OCDBT databases with numbered manifests are not supported"
        )
    fields.read_varints(2)  # Limits for the sizes of values and nodes
    fields.read_byte()  # Arity of the version tree
    if fields.read_varint():
        fields.read_bytes(4)  # Compression level
    names = _read_data_file_names(fields, "")
    count = fields.read_entry_count("versions")
    if count == 0:
        raise DamagedCheckpointError(f"{fields.location}: damaged: the OCDBT database contains no versions")
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
    """Add the values of a leaf node of the database's B+ tree to `values`.

    A leaf contains small values inline. Other values are in data files and are only located, not
    read.

    Args:
        folder: Folder of the database.
        fields: Reader of the leaf's fields, positioned after the keys.
        names: Data files that the leaf refers to.
        keys: Full keys of the leaf's values. Each begins with the key prefix that all keys of the
            leaf share.
        values: Dict to which the byte source of each value is added, keyed by the key.

    Raises:
        CheckpointError: If the leaf is damaged, or if one of its keys is already in `values`.
    """
    lengths = fields.read_varints(len(keys))
    kinds = fields.read_varints(len(keys))
    num_indirect = kinds.count(1)
    if num_indirect + kinds.count(0) != len(keys):
        raise fields.build_damage_error(
            "a value of the OCDBT database is stored neither inline nor in a data file"
        )
    files, offsets = iter(fields.read_varints(num_indirect)), iter(fields.read_varints(num_indirect))
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        try:
            name = key.decode()
        except UnicodeDecodeError:
            raise fields.build_damage_error("a key of the OCDBT database is not valid UTF-8") from None
        if name in values:
            raise fields.build_damage_error(f"the key {name!r} is stored twice")
        if kind:
            data = folder.get_file(fields.select_data_file(names, next(files)).name)
            values[name] = data.get_span(next(offsets), length, description=name)
        else:
            values[name] = InMemorySource(fields.read_bytes(length))


def _read_keys(fields: _FieldReader, *, interior: bool) -> _NodeKeys:
    """Read the keys of a node in the B+ tree.

    Args:
        fields: Fields of the node.
        interior: Whether the node is an interior node instead of a leaf.

    Raises:
        CheckpointError: If the keys are missing, not sorted, or too long.
    """
    count = fields.read_entry_count("entries")
    if count == 0:
        raise fields.build_damage_error("an OCDBT node has no entries")
    prefixes = [0, *fields.read_varints(count - 1)]
    suffixes = fields.read_varints(count)
    shared = fields.read_varints(count) if interior else []
    lengths = [prefix + suffix for prefix, suffix in zip(prefixes, suffixes, strict=True)]
    if max(lengths) > MAX_PATH_NAME:
        raise fields.build_damage_error(
            f"a key of the OCDBT database is too long ({max(lengths):,} bytes, at most {MAX_PATH_NAME:,})"
        )
    fields.reserve_memory(sum(lengths))
    keys: list[bytes] = []
    last = b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        key = last[:prefix] + fields.read_bytes(suffix)
        if prefix > len(last) or (keys and key <= last):
            raise fields.build_damage_error("the keys of an OCDBT node are not sorted")
        keys.append(key)
        last = key
    if any(length > len(key) for length, key in zip(shared, keys, strict=False)):
        raise fields.build_damage_error("a key prefix in an OCDBT node is longer than the key")
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
        if prefix + suffix > MAX_PATH_NAME:
            raise fields.build_damage_error(
                f"the name of an OCDBT data file is too long ({prefix + suffix:,} bytes, at most "
                f"{MAX_PATH_NAME:,})"
            )
        if prefix > len(last) or length > prefix + suffix:
            raise fields.build_damage_error("the prefix lengths of the OCDBT data file names are invalid")
        fields.reserve_memory(prefix + suffix)
        last = last[:prefix] + fields.read_bytes(suffix)
        try:
            names.append(_DataFileName(base + last[:length].decode(), base + last.decode()))
        except UnicodeDecodeError:
            raise fields.build_damage_error("the name of an OCDBT data file is not valid UTF-8") from None
    return names


def _read_node_locations(
    fields: _FieldReader, names: Sequence[_DataFileName], count: int
) -> list[_NodeLocation]:
    """Read the locations of nodes of the B+ tree from their parent node or from the manifest.

    Args:
        fields: Fields of the parent node or the manifest, positioned at the first location.
        names: Table of data files in the parent node or the manifest. A location refers to a data
            file by its index in this table.
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
        cost: Memory estimate of the complete tree. Updated in place.

    Raises:
        CheckpointError: If the manifest or the node is damaged or too large, or if its version or
            compression is not supported.
    """
    location = str(file.path)
    kind = "node" if magic == _NODE_MAGIC else "manifest"
    if length > MAX_NODE:
        raise DamagedCheckpointError(
            f"{location}: damaged: an OCDBT {kind} has {length:,} bytes, but at most {MAX_NODE:,} are allowed"
        )
    raw = file.read_bytes(offset, length)
    if len(raw) < 18 or raw[:4] != magic.to_bytes(4, "big"):
        raise DamagedCheckpointError(f"{location}: damaged: there is no OCDBT {kind} at byte {offset:,}")
    if (recorded_length := int.from_bytes(raw[4:12], "little")) != len(raw):
        raise DamagedCheckpointError(
            f"{location}: truncated or damaged: an OCDBT {kind} has {len(raw):,} bytes, but its header "
            f"records {recorded_length:,} bytes"
        )
    if compute_crc32c(memoryview(raw)[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise DamagedCheckpointError(
            f"{location}: damaged: the checksum of the OCDBT {kind} at byte {offset:,} does not match"
        )
    cost.stored_bytes += len(raw)
    fields = _FieldReader(raw[12:-4], location, cost)
    version, compression = fields.read_varint(), fields.read_varint()
    if version != 0 or compression not in (0, 1):
        raise UnsupportedCheckpointError(
            f"{location}: has OCDBT version {version} and compression {compression}, but only version 0 with "
            "compression 0 (none) or 1 (zstd) is supported"
        )
    body = fields.data[fields.position :]
    content = _FieldReader(_decompress(body, location) if compression else body, location, cost)
    content.reserve_memory(len(content.data))
    return content


def _decompress(data: bytes, location: str) -> bytes:
    """Decompress a node or manifest that was compressed with zstd.

    Raises:
        CheckpointError: If the data is damaged, or if it has more than `MAX_NODE` bytes after
            decompression.
    """
    import pyarrow  # Imported here because the import is slow.

    try:
        body: bytes = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd").read(MAX_NODE + 1)
    except OSError:
        raise DamagedCheckpointError(
            f"{location}: damaged: an OCDBT node or manifest cannot be decompressed with zstd"
        ) from None
    if len(body) > MAX_NODE:
        raise DamagedCheckpointError(
            f"{location}: damaged: an OCDBT node or manifest has more than {MAX_NODE:,} bytes after "
            "decompression"
        )
    return body


class _MemoryCost:
    """Size of the B+ tree's nodes on disk, and an estimate of their size in memory.

    The memory is limited in proportion to the size on disk. Otherwise, a small file of compressed
    zeros could require a lot of memory.

    Attributes:
        stored_bytes: Number of bytes that have been read from the files.
        spent_bytes: Estimated number of bytes in memory.
    """

    def __init__(self) -> None:
        self.stored_bytes = 0
        self.spent_bytes = 0


class _FieldReader:
    """Reader for the fields of the manifest or of one B+ tree node. Fields must be read in order.

    Args:
        data: Decompressed bytes of the manifest or the node.
        location: File that contains the bytes, used in error messages.
        cost: Memory estimate of the complete B+ tree, to which each read adds its share.
    """

    def __init__(self, data: bytes, location: str, cost: _MemoryCost) -> None:
        self.data = data
        self.location = location
        self.position = 0
        self._cost = cost

    def build_damage_error(self, reason: str) -> CheckpointError:
        """Build the error for damage to this file. The caller raises it."""
        return DamagedCheckpointError(f"{self.location}: damaged: {reason}")

    def reserve_memory(self, nbytes: int) -> None:
        """Add `nbytes` to the estimate of the memory that the B+ tree needs.

        The limit of this estimate grows with the size of the tree's nodes in the files. A small
        file of compressed zeros therefore cannot require a lot of memory.

        Raises:
            CheckpointError: If the estimate exceeds its limit.
        """
        cost = self._cost
        cost.spent_bytes += nbytes
        max_bytes = min(_BASE_MEMORY_BYTES + _MEMORY_PER_STORED_BYTE * cost.stored_bytes, MAX_TREE)
        if cost.spent_bytes > max_bytes:
            raise self.build_damage_error(
                f"the OCDBT tree has {cost.stored_bytes:,} bytes in the files, but needs at least "
                f"{cost.spent_bytes:,} bytes of memory (at most {max_bytes:,} are allowed)"
            )

    def read_entry_count(self, unit: str) -> int:
        """Read the number of entries that follow, and add their size to the memory estimate.

        Each entry takes at least one byte, so the number cannot exceed the length of the data.

        Args:
            unit: Plural noun for the entries, used in error messages.

        Raises:
            CheckpointError: If the number is too large for the data, or if the tree needs too much
                memory.
        """
        count = self.read_varint()
        if count > len(self.data):
            raise self.build_damage_error(
                f"an OCDBT node or manifest of {len(self.data):,} bytes cannot contain {count:,} {unit}"
            )
        self.reserve_memory(_ENTRY_BYTES * count)
        return count

    def read_bytes(self, count: int) -> bytes:
        """Read the next `count` bytes.

        Raises:
            CheckpointError: If fewer bytes remain.
        """
        if count > len(self.data) - self.position:
            raise self.build_damage_error("an OCDBT node or manifest is truncated")
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

        Raises:
            CheckpointError: If fewer varints remain, or if a value has more than 64 bits.
        """
        if count == 0:
            return []
        window = np.frombuffer(self.data, np.uint8, offset=self.position)[: 10 * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) < count:
            raise self.build_damage_error("an OCDBT node or manifest is truncated")
        starts = np.concatenate(([0], ends[:-1] + 1))
        sizes = ends - starts + 1
        # Allow 64 bits, because all of them are set if an empty version has no root.
        if sizes.max() > 10 or (sizes.max() == 10 and window[ends[sizes == 10]].max() > 1):
            raise self.build_damage_error(
                "an OCDBT node or manifest contains an integer of more than 64 bits"
            )
        values = np.zeros(count, np.uint64)
        for byte_index in range(int(sizes.max())):
            is_longer = sizes > byte_index
            bits = window[starts[is_longer] + byte_index].astype(np.uint64) & np.uint64(0x7F)
            values[is_longer] |= bits << np.uint64(7 * byte_index)
        self.position += int(ends[-1]) + 1
        numbers: list[int] = values.tolist()
        return numbers

    def select_data_file(self, names: Sequence[_DataFileName], index: int) -> _DataFileName:
        """Return the data file that an entry refers to by its index.

        Args:
            names: Table of data files.
            index: Index in the table.

        Raises:
            CheckpointError: If the index is out of range.
        """
        if index >= len(names):
            raise self.build_damage_error(
                f"an OCDBT node or manifest refers to the data file with index {index:,}, but the number of "
                f"data files in its list is {len(names):,}"
            )
        return names[index]

    def check_fully_read(self) -> None:
        """Check that there are no bytes after the last field.

        Raises:
            CheckpointError: If unread bytes remain.
        """
        if self.position != len(self.data):
            raise self.build_damage_error(
                "an OCDBT node continues after its entries (unexpected bytes: "
                f"{len(self.data) - self.position:,})"
            )
