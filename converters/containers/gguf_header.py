"""Read the header of a GGUF file: its settings, and the names, types and shapes of its tensors.

The reader of the package `gguf` is not used for this. It reads only local files, takes seconds for
the vocabulary of a tokenizer, and does not limit the work that a damaged file can cause. Only the
package's table of tensor types is used.

Source: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError, DamagedCheckpointError, prefix_checkpoint_errors
from portable.converters.limits import MAX_HEADER, MAX_TENSOR_NAME

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import CheckpointFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format code for the module `struct`, keyed by the number of a setting's type."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_READ_BYTES = 1 << 20


class GGUFTensor(NamedTuple):
    """Type, shape and size of a tensor in a GGUF file.

    Attributes:
        dtype: Name of the type, such as `F16` or `Q8_0`.
        shape: Shape in the order of torch. The file stores the reverse order.
        nbytes: Size in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class GGUFHeader(NamedTuple):
    """Parsed header of a GGUF file.

    Attributes:
        version: Version of the format.
        settings: Numbers, booleans and strings, keyed by name. Arrays are omitted.
        tensors: Tensors, keyed by name.
    """

    version: int
    settings: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(file: CheckpointFile) -> GGUFHeader:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: If the file is not a GGUF file of version 2 or 3, if it is truncated or
            damaged, or if the package `gguf` does not define the type of a tensor.
    """
    with prefix_checkpoint_errors(file.path):
        reader = _HeaderReader(file)
        version = reader.read_version()
        num_tensors, num_settings = reader.read_numbers("QQ")
        settings: dict[str, Any] = {}
        for _ in range(num_settings):
            name = reader.read_string()
            (kind,) = reader.read_numbers("I")
            if kind == _ARRAY:
                reader.skip_array(name)
            else:
                settings[name] = reader.read_value(kind, name)
        entries: dict[str, _TensorEntry] = {}
        for _ in range(num_tensors):
            name = reader.read_string()
            if len(name) > MAX_TENSOR_NAME:
                raise DamagedCheckpointError(
                    f"damaged: the tensor name {name[:100]!r}... is too long ({len(name):,} characters, at "
                    f"most {MAX_TENSOR_NAME:,})"
                )
            if name in entries:
                raise DamagedCheckpointError(f"damaged: the tensor {name[:100]!r} is listed twice")
            entries[name] = _read_tensor_entry(reader, name)
        alignment = settings.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise DamagedCheckpointError(
                f"damaged: {_ALIGNMENT_KEY} is {alignment!r}, which is not a positive integer"
            )
        data_start = -(-reader.position // alignment) * alignment
        for name, (offset, tensor) in entries.items():
            reader.check_end(data_start + offset + tensor.nbytes, f"the tensor {name!r}")
    return GGUFHeader(version, settings, {name: entry.tensor for name, entry in entries.items()})


class _TensorEntry(NamedTuple):
    """Header entry of a tensor.

    Attributes:
        offset: Offset of the tensor from the start of the data, in bytes.
        tensor: Type, shape and size.
    """

    offset: int
    tensor: GGUFTensor


def _read_tensor_entry(reader: _HeaderReader, name: str) -> _TensorEntry:
    """Read a tensor's header entry, except for the name, which the caller has already read.

    Args:
        reader: Reader of the header, positioned after the name.
        name: Name of the tensor, used in error messages.

    Raises:
        CheckpointError: If the entry is damaged, or if the package `gguf` does not define the type
            of the tensor.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # not at the top, because the import is slow

    (num_dimensions,) = reader.read_numbers("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise DamagedCheckpointError(
            f"damaged: the tensor {name!r} has {num_dimensions:,} dimensions, but GGUF allows at most "
            f"{_MAX_DIMENSIONS}"
        )
    shape = tuple(reversed(reader.read_numbers("Q" * num_dimensions)))
    type_number, offset = reader.read_numbers("IQ")
    try:
        dtype = GGMLQuantizationType(type_number)
    except ValueError:
        raise CheckpointError(
            f"the tensor {name!r} has the GGML type {type_number}, which the installed package gguf does not "
            "define; run: pip install --upgrade gguf"
        ) from None
    block_elements, block_bytes = GGML_QUANT_SIZES[dtype]
    if (shape[-1] if shape else 1) % block_elements:
        raise DamagedCheckpointError(
            f"damaged: the rows of the tensor {name!r} have the length {shape[-1] if shape else 1:,}, but "
            f"the GGML type {dtype.name} needs a multiple of {block_elements}"
        )
    tensor = GGUFTensor(dtype.name, shape, prod(shape) // block_elements * block_bytes)
    return _TensorEntry(offset, tensor)


class _HeaderReader:
    """Sequential reader for the header of a GGUF file.

    Args:
        file: GGUF file to read, from its start.
    """

    def __init__(self, file: CheckpointFile) -> None:
        self._file = file
        self._buffer = b""
        self._buffer_start = 0  # offset of the buffer in the file
        self._byte_order = "<"
        self.position = 0
        """Offset of the next byte in the file."""

    def read_version(self) -> int:
        """Read the start of the file, and return the GGUF version.

        The version number also reveals the byte order of the file. Later reads use this byte order.

        Raises:
            CheckpointError: If the file is not a GGUF file of a supported version.
        """
        if (magic := self._read_bytes(4)) != _MAGIC:
            raise CheckpointError(
                f"is not a GGUF file, because it begins with {magic!r} instead of {_MAGIC!r}; download or "
                "convert the file again"
            )
        number = self._read_bytes(4)
        little, big = (int.from_bytes(number, order) for order in ("little", "big"))
        self._byte_order = ">" if big in _VERSIONS else "<"
        version = big if big in _VERSIONS else little
        if version not in _VERSIONS:
            raise CheckpointError(
                f"has GGUF version {version}, but only versions 2 and 3 are supported; convert the model to "
                "GGUF again"
            )
        return version

    def read_numbers(self, codes: str) -> tuple[Any, ...]:
        """Read one or several numbers.

        Args:
            codes: Format codes of the module `struct`, one per number.
        """
        layout = struct.Struct(self._byte_order + codes)
        return layout.unpack(self._read_bytes(layout.size))

    def read_string(self) -> str:
        """Read a length-prefixed UTF-8 string. Invalid bytes are replaced with U+FFFD."""
        (length,) = self.read_numbers("Q")
        return self._read_bytes(length).decode("utf-8", "replace")

    def read_value(self, kind: int, name: str) -> Any:
        """Read the value of a setting that is not an array.

        Args:
            kind: Type of the value.
            name: Name of the setting, used in error messages.
        """
        return self.read_string() if kind == _STRING else self.read_numbers(_get_scalar_code(kind, name))[0]

    def skip_array(self, name: str) -> None:
        """Skip the value of a setting that is an array.

        Args:
            name: Name of the setting, used in error messages.

        Raises:
            CheckpointError: If the array is nested, because no program writes nested arrays. Also raised if
                the type of its elements is unknown, or if it extends beyond the end of the file or the
                size limit for headers.
        """
        kind, count = self.read_numbers("IQ")
        if kind != _STRING:
            self._skip_bytes(count * struct.calcsize("<" + _get_scalar_code(kind, name)))
            return
        self._check_header_end(self.position + 8 * count)  # each string has at least its length
        for _ in range(count):
            (length,) = self.read_numbers("Q")
            self._skip_bytes(length)

    def check_end(self, end: int, description: str) -> None:
        """Check that a section does not extend beyond the end of the file.

        Args:
            end: Offset of the end of the section.
            description: Description of the section, used in the error message.

        Raises:
            CheckpointError: If the file is shorter.
        """
        if end > self._file.nbytes:
            raise DamagedCheckpointError(
                f"truncated or damaged: {description} would end at byte {end:,}, but the file has "
                f"{self._file.nbytes:,} bytes"
            )

    def _check_header_end(self, end: int) -> None:
        """Check that an offset is within the file and within the size limit for headers."""
        self.check_end(end, "the header")
        if end > MAX_HEADER:
            raise DamagedCheckpointError(f"damaged: the header has more than {MAX_HEADER:,} bytes")

    def _skip_bytes(self, nbytes: int) -> None:
        self._check_header_end(self.position + nbytes)
        self.position += nbytes

    def _read_bytes(self, nbytes: int) -> bytes:
        """Read the next `nbytes` bytes of the header.

        The file is buffered. Each access reads a block of at least `_READ_BYTES`, unless the file
        ends earlier.
        """
        end = self.position + nbytes
        self._check_header_end(end)
        if end > self._buffer_start + len(self._buffer):
            piece_bytes = max(nbytes, min(_READ_BYTES, self._file.nbytes - self.position))
            self._buffer = self._file.read_bytes(self.position, piece_bytes)
            self._buffer_start = self.position
        start = self.position - self._buffer_start
        self.position = end
        return self._buffer[start : start + nbytes]


def _get_scalar_code(kind: int, name: str) -> str:
    """Return the `struct` format code for a type of setting.

    Args:
        kind: Type of the value, or of the elements of an array.
        name: Name of the setting, used in error messages.

    Raises:
        CheckpointError: If the type is not a number or boolean.
    """
    if (code := _SCALAR_CODES.get(kind)) is None:
        raise DamagedCheckpointError(f"damaged: the setting {name[:100]!r} has the unexpected type {kind}")
    return code
