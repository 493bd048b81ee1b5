"""Map the dtype names of safetensors to NumPy and torch dtypes.

Source: https://github.com/huggingface/safetensors (`Dtype`), torch/storage.py (legacy storage
classes).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

from portable.converters.errors import UnsupportedCheckpointError
from portable.converters.lazy_numpy import ml_dtypes, np

_TABLE: tuple[tuple[str, int, str, str], ...] = (
    # safetensors name, bytes per element, torch dtype, torch storage class
    ("F64", 8, "float64", "DoubleStorage"),
    ("F32", 4, "float32", "FloatStorage"),
    ("F16", 2, "float16", "HalfStorage"),
    ("BF16", 2, "bfloat16", "BFloat16Storage"),
    ("I64", 8, "int64", "LongStorage"),
    ("I32", 4, "int32", "IntStorage"),
    ("I16", 2, "int16", "ShortStorage"),
    ("I8", 1, "int8", "CharStorage"),
    ("U64", 8, "uint64", ""),
    ("U32", 4, "uint32", ""),
    ("U16", 2, "uint16", ""),
    ("U8", 1, "uint8", "ByteStorage"),
    ("BOOL", 1, "bool", "BoolStorage"),
    ("F8_E4M3", 1, "float8_e4m3fn", ""),
    ("F8_E5M2", 1, "float8_e5m2", ""),
    ("F8_E8M0", 1, "float8_e8m0fnu", ""),
    ("C64", 8, "complex64", "ComplexFloatStorage"),
)

_SIZES: dict[str, int] = {name: size for name, size, _, _ in _TABLE}
SUPPORTED_DTYPES = frozenset(_SIZES)
_STRUCT_CODES = {
    "F64": "d",
    "F32": "f",
    "F16": "e",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U64": "Q",
    "U32": "I",
    "U16": "H",
    "U8": "B",
    "BOOL": "?",
}
FROM_TORCH: dict[str, str] = {torch: name for name, _, torch, _ in _TABLE}
TO_TORCH: dict[str, str] = {name: torch for name, _, torch, _ in _TABLE}
TO_STORAGE: dict[str, str] = {name: storage for name, _, _, storage in _TABLE if storage}
FROM_STORAGE: dict[str, str] = {storage: name for name, _, _, storage in _TABLE if storage}

# The dtypes that `--dtype` casts. 8-bit floats depend on their scales, so they are not cast.
CASTABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Dtypes of the codes of quantized weights, whose scales are separate tensors.
QUANTIZED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "U16", "I32", "U32"})


def get_itemsize(dtype: str) -> int:
    """Return the element size of a safetensors dtype in bytes.

    Raises:
        CheckpointError: If the dtype is unknown.
    """
    try:
        return _SIZES[dtype]
    except KeyError:
        raise UnsupportedCheckpointError(f"the dtype {dtype!r} is not supported") from None


def unpack_numbers(dtype: str, data: bytes) -> list[Any] | None:
    """Convert the bytes of a few elements to Python numbers without NumPy.

    Returns:
        The numbers, or None if the `struct` module does not support the dtype.
    """
    code = _STRUCT_CODES.get(dtype)
    return None if code is None else list(struct.unpack(f"<{len(data) // _SIZES[dtype]}{code}", data))


@cache
def to_numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy or ml_dtypes dtype for a safetensors dtype.

    Raises:
        CheckpointError: If the dtype is unknown.
    """
    get_itemsize(dtype)  # Raises an error if the dtype is unknown
    name = TO_TORCH[dtype]
    # ml_dtypes has the machine-learning dtypes, and NumPy the other dtypes, with the same names as torch.
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


@cache
def get_numpy_dtype_names() -> dict[np.dtype[Any], str]:
    """Return a mapping from each supported NumPy dtype to its safetensors name."""
    return {to_numpy_dtype(name): name for name in SUPPORTED_DTYPES}
