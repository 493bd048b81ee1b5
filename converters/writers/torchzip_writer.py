"""Write torch.save archives without torch.

Source: torch/serialization.py, caffe2/serialize/inline_container.cc, APPNOTE.TXT, PEP 307 (protocol
2).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.containers.torchzip import TorchZip
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.tensors.dtypes import TO_STORAGE, TO_TORCH, get_itemsize
from portable.converters.tensors.entry import OutputTensor
from portable.converters.tensors.tensor import Tensor, compute_row_major_strides
from portable.converters.writers.plan import CrcTrailer, FilePart

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from portable.converters.storage.path_or_url import AnyPath

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR = struct.Struct("<4sL2Q")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
# The sizes and the CRC follow the data (bit 3), and names are UTF-8 (bit 11), as in files from torch.save.
_FLAGS = 0x0808
_ARCHIVE = "archive"
_ALIGNED = 64


@dataclass(frozen=True)
class PickledGlobal:
    """Class, function, or dtype to pickle by name."""

    module: str
    name: str


@dataclass(frozen=True)
class PickledCall:
    """Function or class to call when the pickle is loaded."""

    function: PickledGlobal
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)  # hashed by identity, so that it can be a dict key
class PickledObject:
    """Object to write to a pickle.

    When the pickle is loaded, the object is created with `kind.__new__(kind)`, without a call of
    `__init__`. `state` is then passed to its `__setstate__`. Without this method, `state` must be a
    dict, which updates the attributes of the object.
    """

    kind: PickledGlobal
    state: Any


@dataclass(frozen=True)
class PickledPersistentId:
    """Persistent ID that refers to a storage in a torch.save pickle.

    Attributes:
        value: The string `storage`, the storage class, the index of the storage in the archive as a
            string, the device, and the number of elements, or of bytes for an `UntypedStorage`.
    """

    value: tuple[Any, ...]


PickleMemo = dict["Hashable", bytes]
"""For each memoized value, the opcodes that push it on the stack.

Strings and `PickledGlobal` objects are their own keys. Other values have keys that the callers
of `append_memo_put` choose.
"""


def encode_pickle(value: Any) -> bytes:
    """Encode a value as a protocol 2 pickle.

    Args:
        value: Plain containers, strings, numbers, and `Pickled...` objects of this module.

    Returns:
        The pickle.

    Raises:
        TypeError: If the value contains an object of an unsupported type.
    """
    out = bytearray(b"\x80\x02")
    append_pickled(value, out, {})
    return bytes(out + b".")


def append_pickled(value: Any, out: bytearray, memo: PickleMemo) -> None:
    """Append the opcodes that create a value.

    A container that occurs several times is written several times, and is not shared after loading.

    Args:
        value: Value to pickle.
        out: Pickle to extend.
        memo: Memo of the pickle. Strings and globals in it are fetched instead of created again.
            New strings and globals are added to it.

    Raises:
        TypeError: If the value contains an object of an unsupported type.
    """
    if value is None:
        out += b"N"
    elif value is True or value is False:
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(data)]) + data if value < 0 or value > 255 else bytes([0x4B, value])
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, (str, PickledGlobal)):
        memo_index = memo.get(value)
        if memo_index is not None:
            out += memo_index
            return
        if isinstance(value, PickledGlobal):
            out += b"c" + f"{value.module}\n{value.name}\n".encode()
        else:
            data = value.encode("utf-8", "surrogatepass")
            out += b"X" + struct.pack("<L", len(data)) + data
        append_memo_put(value, out, memo)
    elif isinstance(value, (tuple, list)):
        out += b"(" if isinstance(value, tuple) else b"]("
        for item in value:
            append_pickled(item, out, memo)
        out += b"t" if isinstance(value, tuple) else b"e"
    elif isinstance(value, dict):
        out += b"}("
        for key, item in value.items():
            append_pickled(key, out, memo)
            append_pickled(item, out, memo)
        out += b"u"
    elif isinstance(value, PickledCall):
        append_pickled(value.function, out, memo)
        append_pickled(value.args, out, memo)
        out += b"R"
    elif isinstance(value, PickledObject):
        append_pickled(value.kind, out, memo)
        out += b")\x81"
        append_pickled(value.state, out, memo)
        out += b"b"
    elif isinstance(value, PickledPersistentId):
        append_pickled(value.value, out, memo)
        out += b"Q"
    else:
        raise TypeError(
            f"objects of type {type(value).__name__} cannot be written to a torch.save file; use numbers, "
            "strings, lists, tuples and dicts"
        )


def append_memo_put(key: Hashable, out: bytearray, memo: PickleMemo) -> None:
    """Append the opcode that stores the top of the stack in the memo.

    Args:
        key: Key to add to `memo`. Its value is the opcode that fetches the stored object.
        out: Pickle to extend.
        memo: Memo of the pickle.
    """
    number = len(memo)
    short = number < 256
    position = bytes([number]) if short else struct.pack("<L", number)
    out += (b"q" if short else b"r") + position
    memo[key] = (b"h" if short else b"j") + position


def build_torch_size(shape: tuple[int, ...]) -> PickledCall:
    """Build a call that creates a `torch.Size`."""
    return PickledCall(PickledGlobal("torch", "Size"), (shape,))


class _NumberedEntry(NamedTuple):
    """Tensor with its number in the archive.

    Attributes:
        number: Index of the tensor's storage in the archive.
        entry: Tensor to write.
    """

    number: int
    entry: OutputTensor


class _TensorMember(NamedTuple):
    """Archive member that contains the storage of a tensor.

    Attributes:
        name: Name of the member, without the folder of the archive.
        nbytes: Size of the storage in bytes.
        offset: Byte offset of the member's header in the file.
    """

    name: str
    nbytes: int
    offset: int


def plan_torch_file(value: Any) -> list[FilePart]:
    """Plan the parts of a file in the format of torch.save.

    With several tensors, the file has the same layout as torch's files: the data of each tensor is
    aligned to 64 bytes. The zip directory at the end of the file contains the CRC32 of every
    tensor, so it is written after all other parts of the output.

    With a single tensor, the data is not aligned, and the file is written from start to end,
    because the DCP writer concatenates such files into a larger file.

    Args:
        value: Plain containers, `Pickled...` objects of this module, and an `OutputTensor` for each
            tensor. An `OutputTensor` that occurs twice is written once, as two tensors with a
            shared storage.

    Returns:
        The parts of the file. Without a tensor, the file is a single byte string.

    Raises:
        TypeError: If the value contains an object of an unsupported type.
    """
    entries: dict[int, _NumberedEntry] = {}
    pickled = encode_pickle(_replace_tensors_by_calls(value, entries))
    members = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
    out, directory, offset = bytearray(), bytearray(), 0
    for name, data in members:
        crc = zlib.crc32(data)
        directory += _build_central_header(name, crc, len(data), offset)
        out += _build_local_header(name) + data + _build_descriptor(crc, len(data))
        offset = len(out)
    if not entries:
        return [bytes(out + directory + _build_end_record(len(members), len(directory), offset))]
    parts: list[FilePart] = [bytes(out)]
    has_several_tensors = len(entries) > 1
    tensor_members: list[_TensorMember] = []
    crcs = [0] * len(entries)
    for number, entry in entries.values():
        name, nbytes = f"data/{number}", entry.nbytes
        header = _build_local_header(name, offset if has_several_tensors else None)
        tensor_members.append(_TensorMember(name, nbytes, offset))
        offset += len(header) + nbytes + _DESCRIPTOR.size
        parts += [
            header,
            entry,
            CrcTrailer(_DESCRIPTOR.size, partial(_record_crc_and_build_descriptor, crcs, number, nbytes)),
        ]

    def build_directory(_: int = 0) -> bytes:
        every = bytes(directory) + b"".join(
            _build_central_header(name, crc, nbytes, start)
            for (name, nbytes, start), crc in zip(tensor_members, crcs, strict=True)
        )
        return every + _build_end_record(len(members) + len(tensor_members), len(every), offset)

    return [*parts, CrcTrailer(len(build_directory()), build_directory, is_written_last=has_several_tensors)]


def reopen_tensors(values: Mapping[str, Any], folder: AnyPath) -> dict[str, Tensor]:
    """Open the tensors of torch.save files after the files have been written.

    Args:
        values: Values that were passed to `plan_torch_file`, keyed by file name.
        folder: Folder or URL that contains the files.

    Returns:
        The tensors, keyed by `OutputTensor.name`. Their data is only read on request.
    """
    written, tensors = CheckpointFolder(folder), dict[str, Tensor]()
    pending = [(value, TorchZip(written.get_file(name)).load_object()) for name, value in values.items()]
    while pending:
        planned, loaded = pending.pop()
        if isinstance(planned, OutputTensor):
            tensors[planned.name] = to_lazy_tensor(loaded, planned.name)
        elif isinstance(planned, (dict, list, tuple)):
            keys = planned if isinstance(planned, dict) else range(len(planned))
            pending += [(planned[key], loaded[key]) for key in keys]
    return tensors


def _record_crc_and_build_descriptor(crcs: list[int], number: int, nbytes: int, crc: int) -> bytes:
    """Record the CRC32 of a tensor, and build the data descriptor that follows the tensor.

    The zip directory at the end of the file repeats the CRC32.

    Args:
        crcs: CRC32s of all tensors. Updated in place.
        number: Index of the tensor.
        nbytes: Size of the tensor in bytes.
        crc: CRC32 of the tensor's data.
    """
    crcs[number] = crc
    return _build_descriptor(crc, nbytes)


def _replace_tensors_by_calls(value: Any, entries: dict[int, _NumberedEntry]) -> Any:
    """Copy a nested value, and replace each tensor with a `PickledCall` that rebuilds it.

    Args:
        value: Nested dicts, lists, and tuples that may contain `OutputTensor` objects.
        entries: Dict that maps the `id` of each `OutputTensor` to the tensor and the index of its
            storage in the archive. This function adds the tensors that it finds.
    """
    if isinstance(value, OutputTensor):
        number, _ = entries.setdefault(id(value), _NumberedEntry(len(entries), value))
        return _build_tensor_call(value, number)
    if isinstance(value, dict):
        return {key: _replace_tensors_by_calls(item, entries) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replace_tensors_by_calls(item, entries) for item in value)
    return value


def _build_tensor_call(entry: OutputTensor, number: int) -> PickledCall:
    """Build the pickled call that rebuilds a tensor from a storage in the archive.

    The tensor is contiguous. A dtype without a typed storage class, such as an 8-bit float, uses an
    `UntypedStorage` and is recorded as an argument of the call.

    Args:
        entry: Tensor to write.
        number: Index of the tensor's storage in the archive.
    """
    width = get_itemsize(entry.dtype)
    storage = TO_STORAGE.get(entry.dtype)
    kind = PickledGlobal("torch", storage) if storage else PickledGlobal("torch.storage", "UntypedStorage")
    count = entry.tensor.numel if storage else entry.nbytes
    strides = tuple(step // width for step in compute_row_major_strides(entry.tensor.shape, width))
    storage_id = PickledPersistentId(("storage", kind, str(number), "cpu", count))
    call_args = (storage_id, 0, entry.tensor.shape, strides, False)
    hooks = PickledCall(PickledGlobal("collections", "OrderedDict"), ())
    if storage:
        return PickledCall(PickledGlobal("torch._utils", "_rebuild_tensor_v2"), (*call_args, hooks))
    dtype = PickledGlobal("torch", TO_TORCH[entry.dtype])
    return PickledCall(PickledGlobal("torch._utils", "_rebuild_tensor_v3"), (*call_args, hooks, dtype))


def _build_descriptor(crc: int, nbytes: int) -> bytes:
    return _DESCRIPTOR.pack(b"PK\7\x08", crc, nbytes, nbytes)


def _build_local_header(name: str, align_from: int | None = None) -> bytes:
    """Build the header that precedes the data of an archive member.

    Args:
        name: Name of the member, without the folder of the archive.
        align_from: Byte offset of the header in the file, from which the padding that aligns the
            data is computed. If None, the header is not padded.
    """
    path = f"{_ARCHIVE}/{name}".encode()
    # With the zip64 field, the sizes in the data descriptor are 64 bits wide.
    extra = struct.pack("<2H2Q", 1, 16, 0, 0)
    if align_from is not None:
        bare = align_from + _LOCAL.size + len(path) + len(extra) + 4
        padding = -bare % _ALIGNED
        extra += struct.pack("<2s1H", b"FB", padding) + b"Z" * padding
    wide = 0xFFFFFFFF
    return _LOCAL.pack(b"PK\3\4", 45, _FLAGS, 0, 0, 0, 0, wide, wide, len(path), len(extra)) + path + extra


def _build_central_header(name: str, crc: int, nbytes: int, header_offset: int) -> bytes:
    """Build the zip directory entry for an archive member."""
    path = f"{_ARCHIVE}/{name}".encode()
    wide = [value for value in (nbytes, nbytes, header_offset) if value >= 0xFFFFFFFF]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    narrow, start = min(nbytes, 0xFFFFFFFF), min(header_offset, 0xFFFFFFFF)
    sizes = (narrow, narrow, len(path), len(extra), 0, 0, 0, 0, start)
    return _CENTRAL.pack(b"PK\1\2", 45, 45, _FLAGS, 0, 0, 0, crc, *sizes) + path + extra


def _build_end_record(num_members: int, directory_nbytes: int, directory_offset: int) -> bytes:
    """Build the end of the archive: the zip64 record, its locator, and the end record."""
    wide = _END64.pack(
        b"PK\6\6", 44, 45, 45, 0, 0, num_members, num_members, directory_nbytes, directory_offset
    )
    locator = _LOCATOR64.pack(b"PK\6\7", 0, directory_offset + directory_nbytes, 1)
    few, narrow = (
        min(num_members, 0xFFFF),
        (min(directory_nbytes, 0xFFFFFFFF), min(directory_offset, 0xFFFFFFFF)),
    )
    return wide + locator + _END.pack(b"PK\5\6", 0, 0, few, few, *narrow, 0)
