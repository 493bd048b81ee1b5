"""Read torch.save files: uncompressed zip archives with a pickle and one member per storage.

A `.pt` file is one zip archive. In a `.distcp` file, each item is a complete zip archive at an
offset.

Source: torch/serialization.py, caffe2/serialize/inline_container.cc, and APPNOTE.TXT for the zip
format.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from isal import isal_zlib

from portable.converters.containers.pickle_reader import (
    DamagedPickleError,
    PickledGlobal,
    PickledInstance,
    PickleRefusedError,
    Standin,
    format_untrusted_value,
    unpickle_without_code,
)
from portable.converters.errors import CheckpointError, DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.limits import MAX_NAME
from portable.converters.tensors.dtypes import FROM_STORAGE, FROM_TORCH, get_itemsize
from portable.converters.tensors.tensor import View, is_shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.storage.byte_sources import CheckpointFile, FileSpan

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED = 1
# Name of the archive if torch.save writes to a stream. Otherwise, it names the archive after the file.
_UNNAMED = "archive"


@dataclass(frozen=True)
class ZipMember:
    """Member of a zip archive, as recorded in the central directory.

    Attributes:
        name: Name of the member.
        header_offset: Offset of the local header from the start of the archive, in bytes.
        nbytes: Size of the content in bytes.
        crc32: CRC32 of the content, or None if the archive has no checksums.
    """

    name: str
    header_offset: int
    nbytes: int
    crc32: int | None


class _Directory(NamedTuple):
    """Central directory of a zip archive.

    Attributes:
        members: Members, keyed by name.
        start: Offset of the directory from the start of the archive, in bytes.
        checksum: CRC32 of the directory.
    """

    members: dict[str, ZipMember]
    start: int
    checksum: int


class _MemberSizes(NamedTuple):
    """Sizes and header offset of a file in a zip archive, in bytes.

    Attributes:
        packed_bytes: Compressed size.
        nbytes: Uncompressed size.
        header: Offset of the file's local header in the archive.
    """

    packed_bytes: int
    nbytes: int
    header: int


class TorchZip:
    """Zip archive written by torch.save. Creating the object reads the directory.

    Args:
        file: File that contains the archive.
        offset: Offset of the archive in the file, in bytes.
        length: Size of the archive in bytes. By default, the archive extends to the end of the
            file.
        description: Description of the archive, used in error messages. Empty for a file with one
            archive.

    Attributes:
        members: Members, keyed by full name, `<archive>/<name>`.
        archive: Name of the archive. It is the first folder in the name of each member.
        checksum: CRC32 of the directory. The directory contains the CRC32 of each member.

    Raises:
        CheckpointError: If the file is not a zip archive of torch.save, is truncated, compressed,
            or encrypted, or was written on a big-endian machine. Also raised if members overlap or
            have the same name.
    """

    def __init__(
        self, file: CheckpointFile, offset: int = 0, length: int | None = None, description: str = ""
    ) -> None:
        self.lock = threading.Lock()
        self.file = file
        self.offset = offset
        self.length = file.nbytes - offset if length is None else length
        self.location = f"{file.path}: {description}" if description else str(file.path)
        if offset < 0 or self.length < 0 or offset + self.length > file.nbytes:
            raise DamagedCheckpointError(
                f"{self.location}: truncated or damaged: the data would end at byte "
                f"{offset + self.length:,}, but the file has {file.nbytes:,} bytes"
            )
        # A single read fetches the end records and, for a small archive, the complete directory.
        self._tail_offset = max(0, self.length - 4096)
        self._tail = file.read_bytes(offset + self._tail_offset, self.length - self._tail_offset)
        self.members, self._directory_start, self.checksum = self._read_directory()
        roots = {name.split("/", 1)[0] for name in self.members}
        if len(roots) != 1:
            raise CheckpointError(
                f"{self.location}: is a zip file, but was not written by torch.save; specify a file that "
                "torch.save wrote"
            )
        self.archive = roots.pop()
        if f"{self.archive}/data.pkl" not in self.members:
            raise CheckpointError(
                f"{self.location}: is a zip file without data.pkl, so it was not written by torch.save; "
                "specify a file that torch.save wrote"
            )
        if f"{self.archive}/byteorder" in self.members and self.read_member("byteorder") != b"little":
            raise CheckpointError(
                f"{self.location}: was written on a big-endian machine; load the file with torch.load on a "
                "little-endian machine, and save it again with torch.save"
            )

    def check_not_renamed(self) -> None:
        """Check that the file still has the name under which it was saved.

        A renamed file may belong to another rank or parameter. torch.save stores the file's name
        without its last extension in the archive, so only this part of the name is compared. If
        torch.save wrote to a stream, no file name is stored, and the check passes.

        Raises:
            CheckpointError: If the names differ.
        """
        if self.archive not in (PurePosixPath(str(self.file.path)).stem, _UNNAMED):
            raise self._build_damage_error(
                f"was saved under the name {format_untrusted_value(self.archive)}, so it belongs to another "
                "rank or parameter"
            )

    def _build_error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.location}: {reason}")

    def _build_damage_error(self, reason: str) -> CheckpointError:
        return DamagedCheckpointError(f"{self.location}: {reason}")

    def _read_bytes(self, start: int, count: int) -> bytes:
        """Read bytes of the archive.

        The constructor has already read the last 4096 bytes. A range that begins in them is not read
        again. A range that begins earlier is read from the file.

        Raises:
            CheckpointError: If the range extends beyond the archive.
        """
        if start < 0 or count < 0 or start + count > self.length:
            raise self._build_damage_error("the zip file is truncated or damaged")
        if start >= self._tail_offset:
            return self._tail[start - self._tail_offset : start - self._tail_offset + count]
        return self.file.read_bytes(self.offset + start, count)

    def _read_directory(self) -> _Directory:
        """Read and check the end records and the central directory of the zip file.

        If the recorded CRC32s of all members are 0, torch.save wrote the file without checksums.
        The attribute `crc32` of each member is then None.

        Raises:
            CheckpointError: If the file is not a zip file, if a record is damaged, or if the
                records contradict each other. Also raised if members are compressed or encrypted,
                overlap, or have the same name.
        """
        end_offset = self.length - _END.size
        if end_offset < 0 or self._read_bytes(end_offset, 4) != b"PK\5\6":
            raise self._build_not_a_zip_error()
        _, disk, start_disk, num_on_disk, count, size, start, comment = _END.unpack(
            self._read_bytes(end_offset, _END.size)
        )
        stop = end_offset
        locator_offset = end_offset - _LOCATOR64.size
        if locator_offset >= 0 and self._read_bytes(locator_offset, 4) == b"PK\6\7":
            _, _, stop, _ = _LOCATOR64.unpack(self._read_bytes(locator_offset, _LOCATOR64.size))
            record = self._read_bytes(stop, _END64.size)
            magic, record_size, _, _, _, _, here64, count64, size64, start64 = _END64.unpack(record)
            narrow = (
                (num_on_disk, here64, 16),
                (count, count64, 16),
                (size, size64, 32),
                (start, start64, 32),
            )
            agree = all(short in (long, (1 << bits) - 1) for short, long, bits in narrow)
            if magic != b"PK\6\6" or stop + 12 + record_size != locator_offset or not agree:
                raise self._build_damage_error("damaged zip file: the two end records contradict each other")
            num_on_disk, count, size, start = here64, count64, size64, start64
        if (
            disk
            or start_disk
            or num_on_disk != count
            or comment
            or start + size != stop
            or count * _CENTRAL.size > size
        ):
            raise self._build_damage_error("damaged zip file: the end record contradicts the archive")
        raw, position = self._read_bytes(start, size), 0
        records: list[tuple[str, int, int, int]] = []
        for _ in range(count):
            if position + _CENTRAL.size > size:
                raise self._build_damage_error("damaged zip file: the central directory is invalid")
            fields = _CENTRAL.unpack_from(raw, position)
            magic, _, _, flags, method, _, _, crc, packed, nbytes, n, extra, note, disk, _, _, header = fields
            position += _CENTRAL.size
            if magic != b"PK\1\2" or position + n + extra + note > size or disk or flags & _ENCRYPTED:
                raise self._build_damage_error("damaged zip file: the central directory is invalid")
            name = raw[position : position + n].decode("utf-8", "replace")
            packed, nbytes, header = self._parse_zip64_sizes(
                raw[position + n : position + n + extra], packed, nbytes, header
            )
            position += n + extra + note
            if method != 0 or packed != nbytes:
                raise self._build_error(
                    f"the record {name!r} is compressed, which torch.save never does; load the file with "
                    "torch.load, and save it again with torch.save"
                )
            records.append((name, header, nbytes, crc))
        if position != size:
            raise self._build_damage_error("damaged zip file: the central directory is invalid")
        records.sort(key=lambda member: member[1])
        for (name, header, nbytes, _), limit in zip(
            records, [m[1] for m in records[1:]] + [start], strict=True
        ):
            if header + _LOCAL.size + len(name) + nbytes > limit:
                raise self._build_damage_error(
                    f"damaged zip file: the record {name!r} overlaps the next record"
                )
        # torch.serialization.set_crc32_options(False) stores 0 for every member, so there are no checksums.
        recorded = any(crc for _, _, _, crc in records)
        members = {
            name: ZipMember(name, position, n, crc if recorded else None)
            for name, position, n, crc in records
        }
        if len(members) != len(records):
            raise self._build_damage_error("damaged zip file: two records have the same name")
        return _Directory(members, start, isal_zlib.crc32(raw))

    def _parse_zip64_sizes(self, extra: bytes, packed: int, nbytes: int, header: int) -> _MemberSizes:
        """Return the sizes and the header offset of a member. Reads its zip64 extra field if there is one.

        Args:
            extra: Extra field of the member in the directory.
            packed: Compressed size, or 0xFFFFFFFF if the size is in the zip64 field.
            nbytes: Uncompressed size, or 0xFFFFFFFF.
            header: Offset of the local header, or 0xFFFFFFFF.
        """
        values = [nbytes, packed, header]
        position = 0
        while position + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, position)
            if kind == 1 and position + 4 + size <= len(extra):
                wide = list(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
                for i, value in enumerate(values):
                    if value == 0xFFFFFFFF and wide:
                        values[i] = wide.pop(0)
            position += 4 + size
        return _MemberSizes(packed_bytes=values[1], nbytes=values[0], header=values[2])

    def _build_not_a_zip_error(self) -> CheckpointError:
        """Build the error for a file that lacks the end record of a zip archive.

        The message states the likely cause.
        """
        start = self.file.read_bytes(self.offset, min(16, self.length))
        if start.startswith(b"PK\3\4"):
            return self._build_damage_error("truncated: the end of the zip file is missing")
        if start.startswith(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20"):
            return self._build_error(
                "has the file format of torch versions before 1.6; load the file with torch.load, and save "
                "it again with torch.save"
            )
        return self._build_error("was not written by torch.save; specify a file that torch.save wrote")

    def get_member_span(self, name: str) -> FileSpan:
        """Return the content of a zip member as a span of the file, without reading the content.

        The span includes the CRC32 that the zip directory records for the member.

        Args:
            name: Name of the member in the top-level folder of the zip file, such as `data.pkl`.

        Raises:
            CheckpointError: If the member does not exist, or if its header does not match the
                directory.
        """
        member = self.members.get(f"{self.archive}/{name}")
        if member is None:
            raise self._build_damage_error(f"the record {name!r} is missing from the zip file")
        raw = self._read_bytes(member.header_offset, _LOCAL.size)
        magic, _, flags, method, _, _, _, _, _, n, extra = _LOCAL.unpack(raw)
        start = member.header_offset + _LOCAL.size
        if (
            magic != b"PK\3\4"
            or method
            or flags & _ENCRYPTED
            or self._read_bytes(start, n) != member.name.encode()
        ):
            raise self._build_damage_error(
                f"damaged zip file: the local header of the record {name!r} does not match the central "
                "directory"
            )
        start += n + extra
        if start + member.nbytes > self._directory_start:
            raise self._build_damage_error(
                f"damaged zip file: the record {name!r} overlaps the central directory"
            )
        return self.file.get_span(
            self.offset + start, member.nbytes, crc32=member.crc32, description=f"{self.archive}/{name}"
        )

    def read_member(self, name: str) -> bytes:
        """Read the content of the member `<archive>/<name>`, and verify its CRC32.

        Raises:
            CheckpointError: If the member does not exist or is damaged.
        """
        span = self.get_member_span(name)
        data = bytearray(span.nbytes)
        span.read_into(memoryview(data), 0, set())
        span.verify_crc()
        return bytes(data)

    def load_object(
        self, standins: Mapping[str, Standin | None] | None = None, allowed_prefixes: tuple[str, ...] = ()
    ) -> Any:
        """Load the pickled object without executing code from it. Tensors become `StoredTensor`s.

        Args:
            standins: Entries of the allow-list in addition to `TORCH_STANDINS`. They replace entries with
                the same key. See `unpickle_without_code`.
            allowed_prefixes: Prefixes of modules whose classes become `PickledInstance`s.

        Raises:
            CheckpointError: If the pickle contains an object that is not on the allow-list, if the type of
                a tensor is not supported, or if the archive is damaged.
        """
        table = {**TORCH_STANDINS, **standins} if standins else TORCH_STANDINS
        location = f"{self.location}: data.pkl"
        return unpickle_without_code(
            self.read_member("data.pkl"),
            location=location,
            standins=table,
            allowed_prefixes=allowed_prefixes,
            resolve_persistent_id=self._resolve_storage,
        )

    def _resolve_storage(self, persistent_id: Any) -> ZipStorage:
        """Return the storage that a persistent ID in the pickle refers to.

        Raises:
            CheckpointError: If the ID is damaged, if the storage type is not supported, or if the storage
                is missing or has a different size.
        """
        if not (
            type(persistent_id) is tuple
            and len(persistent_id) == 5
            and persistent_id[0] == "storage"
            and type(persistent_id[1]) is PickledGlobal
        ):
            raise DamagedCheckpointError(
                f"{self.location}: data.pkl contains an invalid reference to a tensor storage"
            )
        _, kind, key, _, numel = persistent_id
        if type(key) is not str or len(key) > MAX_NAME:
            raise DamagedCheckpointError(
                f"{self.location}: data.pkl refers to a tensor storage without a valid name"
            )
        name = kind.key.rpartition(".")[2]
        dtype = FROM_STORAGE.get(name)
        if dtype is None and name != "UntypedStorage":
            raise UnsupportedCheckpointError(
                f"{self.location}: tensors with the storage type {name} are not supported"
            )
        member = self.members.get(f"{self.archive}/data/{key}")
        nbytes = numel * (get_itemsize(dtype) if dtype else 1) if type(numel) is int else -1
        if member is None:
            raise DamagedCheckpointError(
                f"{self.location}: the tensor storage {format_untrusted_value(key)} is missing from the "
                "zip file"
            )
        if nbytes != member.nbytes:
            raise DamagedCheckpointError(
                f"{self.location}: the tensor storage {format_untrusted_value(key)} has {member.nbytes:,} "
                "bytes, which is not the size that data.pkl records"
            )
        return ZipStorage(self, key, dtype, nbytes)


class ZipStorage:
    """Storage that the pickle in a zip archive refers to. Several tensors may be views of one storage.

    Args:
        zip: Archive that contains the storage.
        key: Name of the storage in the archive.
        dtype: Safetensors dtype of the elements, or None if the storage is untyped.
        nbytes: Size of the storage in bytes.
    """

    __slots__ = ("_span", "dtype", "key", "nbytes", "zip")

    def __init__(self, zip: TorchZip, key: str, dtype: str | None, nbytes: int) -> None:
        self.zip = zip
        self.key = key
        self.dtype = dtype
        self.nbytes = nbytes
        self._span: FileSpan | None = None

    @property
    def span(self) -> FileSpan:
        """File span with the content of the storage. Created on first access and then shared."""
        # All tensors and threads share one span, because the span records which bytes have been read.
        with self.zip.lock:
            if self._span is None:
                self._span = self.zip.get_member_span(f"data/{self.key}")
            return self._span


class StoredTensor:
    """Pickled tensor: a strided view of a storage.

    The attributes have the names of the arguments, except for `shape` and `strides`, which contain
    `size` and `stride`.

    Args:
        storage: `ZipStorage` that contains the elements. No element is read.
        offset: Index of the first element in the storage.
        size: Shape of the tensor.
        stride: Strides of the tensor, in elements.
        dtype: Safetensors dtype. Defaults to the dtype of the storage.

    Raises:
        DamagedPickleError: If an argument in the pickle has a wrong type or an invalid value, if
            neither `dtype` nor the storage provides a dtype, or if the tensor extends beyond its
            storage.
    """

    __slots__ = ("dtype", "offset", "shape", "storage", "strides")

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None) -> None:
        if not isinstance(storage, ZipStorage) or type(size) is not tuple or type(stride) is not tuple:
            raise DamagedPickleError("a tensor has a storage, shape or strides of the wrong type")
        dtype = dtype or storage.dtype
        if dtype is None or len(size) != len(stride) or not all(map(is_shape, (size, stride, (offset,)))):
            raise DamagedPickleError("a tensor has an invalid dtype, shape, strides or offset")
        width = get_itemsize(dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if prod(size) and (last + 1) * width > storage.nbytes:
            raise DamagedPickleError("a tensor is larger than its storage")
        self.storage = storage
        self.offset = offset
        self.shape: tuple[int, ...] = size
        self.strides: tuple[int, ...] = stride
        self.dtype = dtype

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are stored in row-major order without gaps."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def to_byte_view(self) -> View:
        """Convert the tensor to a view with offset and strides in bytes."""
        width = get_itemsize(self.dtype)
        return View(self.storage.span, self.offset * width, tuple(step * width for step in self.strides))


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, bits: Any = None
) -> StoredTensor:
    """Rebuild a tensor with the dtype of its storage, like torch's function of this name.

    The arguments `grad` and `hooks` are ignored.

    Raises:
        PickleRefusedError: If the tensor is damaged, or is lazily conjugated or negated.
    """
    _check_math_bits(bits)
    return StoredTensor(storage, offset, size, stride)


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    bits: Any = None,
) -> Any:
    """Rebuild a tensor that has an untyped storage, like `torch._utils._rebuild_tensor_v3`.

    The dtype is a separate argument, because the storage does not define it. The arguments `grad`
    and `hooks` are ignored.

    Raises:
        PickleRefusedError: If the dtype is not supported, or if the tensor is damaged, or is lazily
            conjugated or negated.
    """
    _check_math_bits(bits)
    kind = (
        dtype.key.removeprefix("torch.")
        if isinstance(dtype, PickledGlobal)
        else format_untrusted_value(dtype)
    )
    name = FROM_TORCH.get(kind)
    if name is None:
        raise PickleRefusedError(f"contains a tensor of the element type {kind}, which is not supported")
    return StoredTensor(storage, offset, size, stride, name)


def _check_math_bits(bits: Any) -> None:
    """Check that a pickled tensor is not marked as lazily conjugated or negated.

    The values of such a tensor differ from its stored data.

    Args:
        bits: Last argument of the pickled call that rebuilds the tensor: a dict with the flags
            `conj` and `neg`, or None.

    Raises:
        PickleRefusedError: If a flag is set, or if the argument is not a dict.
    """
    if bits and (not isinstance(bits, dict) or any(bits.values())):
        raise PickleRefusedError(
            "contains a lazily conjugated or negated tensor, which is not supported unless resolve_conj() "
            "and resolve_neg() are called before torch.save"
        )


def _rebuild_device_tensor(data: Any, dtype: Any, *_: Any) -> Any:
    """Return the pickled CPU copy of a tensor that was on a device without storages, such as XLA.

    Args:
        data: CPU copy of the tensor.
        dtype: Recorded dtype of the tensor.

    Raises:
        DamagedPickleError: If `data` is not a tensor, or if its dtype differs from the recorded dtype.
    """
    name = FROM_TORCH.get(dtype.key.removeprefix("torch.")) if isinstance(dtype, PickledGlobal) else None
    if not isinstance(data, StoredTensor) or name != data.dtype:
        raise DamagedPickleError("the dtype of a tensor differs from the dtype of its CPU copy")
    return data


def _return_first(value: Any, *rest: Any) -> Any:
    """Return the first argument.

    During unpickling, this function is called instead of classes and functions of torch that only
    wrap a tensor, such as `Parameter(tensor)`.
    """
    return value


def _rebuild_from_type_v2(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Rebuild a tensor subclass as a plain tensor.

    During unpickling, this function is called instead of torch's function of the same name, which
    would rebuild the subclass.

    Args:
        function: Function that rebuilds the plain tensor.
        kind: Class of the tensor. Ignored.
        args: Arguments of `function`.
        state: State of the tensor. Ignored.

    Raises:
        PickleRefusedError: If `function` is not one of torch's functions that rebuild a tensor.
    """
    if not isinstance(function, PickledGlobal) or function.key not in _REBUILD:
        raise PickleRefusedError(
            "contains a tensor subclass with its own rebuild function, which is not supported"
        )
    return function(*args)


def _rebuild_dict(*args: Any) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for pair in args[0] if args else ():
        key, value = pair
        if not isinstance(key, (str, int, float, bool, type(None))):
            raise PickleRefusedError("contains a dict with a key that is not a string, a number or None")
        result[key] = value
    return result


def _rebuild_size(dims: Any = ()) -> tuple[int, ...]:
    if any(type(dim) is not int for dim in dims):
        raise DamagedPickleError("a torch.Size contains a value that is not an integer")
    return tuple(dims)


def _join_path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts if isinstance(part, str))


def _encode_text(text: Any, *_: Any) -> bytes:
    return bytes(text.encode("latin-1"))


def _rebuild_list(items: Any = ()) -> list[Any]:
    return list(items) if isinstance(items, (list, tuple, set)) else []


def _rebuild_instance(*args: Any) -> PickledInstance:
    """Create a `PickledInstance` for the class that `copyreg._reconstructor` would instantiate."""
    kind = args[0] if args and isinstance(args[0], PickledGlobal) else None
    return PickledInstance(kind.key if kind else "object", args)


MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
"""Member names of torch's enumerations of memory formats."""

_REBUILD: dict[str, Standin | None] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_device_tensor,
    "torch._utils._rebuild_parameter": _return_first,
    "torch._utils._rebuild_parameter_with_state": _return_first,
}
"""Stand-ins for the functions of torch that rebuild tensors, keyed by `module.name`."""

TORCH_STANDINS: dict[str, Standin | None] = {
    **_REBUILD,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type_v2,
    "torch.Size": _rebuild_size,
    "torch.device": _join_path,
    "torch.serialization._get_layout": None,
    "torch.storage.UntypedStorage": None,
    "torch.nn.parameter.Parameter": _return_first,
    "torch.Tensor": None,
    "collections.OrderedDict": _rebuild_dict,
    "collections.defaultdict": lambda *args: {},
    "collections.Counter": None,
    "collections.deque": None,
    "builtins.dict": _rebuild_dict,
    "builtins.set": _rebuild_list,
    "builtins.frozenset": _rebuild_list,
    "builtins.list": _rebuild_list,
    "builtins.object": None,
    "builtins.slice": None,
    "builtins.complex": None,
    "builtins.int": None,
    "builtins.float": None,
    "_codecs.encode": _encode_text,
    "copyreg._reconstructor": _rebuild_instance,
    "argparse.Namespace": None,
    "types.SimpleNamespace": None,
    "pathlib.Path": _join_path,
    "pathlib.PosixPath": _join_path,
    "pathlib._local.PosixPath": _join_path,
    "pathlib.PurePosixPath": _join_path,
    "numpy.dtype": None,
    "numpy.ndarray": None,
    "numpy.core.multiarray.scalar": None,
    "numpy._core.multiarray.scalar": None,
    "numpy.core.multiarray._reconstruct": None,
    "numpy._core.multiarray._reconstruct": None,
    **{f"torch.{name}": None for name in (*FROM_TORCH, *FROM_STORAGE, "complex128", "strided")},
}
"""Stand-ins for all globals that torch writes into pickles, keyed by `module.name`."""
