"""Element types by their safetensors names, and their names in numpy and torch.

Source: https://github.com/huggingface/safetensors (`Dtype`), torch/storage.py (legacy storage classes).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from converters.errors import CheckpointError

_TABLE: tuple[tuple[str, Any, str, str], ...] = (
    # safetensors name, numpy type, torch dtype, torch storage class
    ("F64", np.float64, "float64", "DoubleStorage"),
    ("F32", np.float32, "float32", "FloatStorage"),
    ("F16", np.float16, "float16", "HalfStorage"),
    ("BF16", ml_dtypes.bfloat16, "bfloat16", "BFloat16Storage"),
    ("I64", np.int64, "int64", "LongStorage"),
    ("I32", np.int32, "int32", "IntStorage"),
    ("I16", np.int16, "int16", "ShortStorage"),
    ("I8", np.int8, "int8", "CharStorage"),
    ("U64", np.uint64, "uint64", ""),
    ("U32", np.uint32, "uint32", ""),
    ("U16", np.uint16, "uint16", ""),
    ("U8", np.uint8, "uint8", "ByteStorage"),
    ("BOOL", np.bool_, "bool", "BoolStorage"),
    ("F8_E4M3", ml_dtypes.float8_e4m3fn, "float8_e4m3fn", ""),
    ("F8_E5M2", ml_dtypes.float8_e5m2, "float8_e5m2", ""),
    ("F8_E8M0", ml_dtypes.float8_e8m0fnu, "float8_e8m0fnu", ""),
    ("C64", np.complex64, "complex64", "ComplexFloatStorage"),
)

NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind, _, _ in _TABLE}
FROM_TORCH: dict[str, str] = {torch: name for name, _, torch, _ in _TABLE}
TO_TORCH: dict[str, str] = {name: torch for name, _, torch, _ in _TABLE}
TO_STORAGE: dict[str, str] = {name: storage for name, _, _, storage in _TABLE if storage}
FROM_STORAGE: dict[str, str] = {storage: name for name, _, _, storage in _TABLE if storage}
FROM_NUMPY: dict[np.dtype[Any], str] = {np.dtype(kind): name for name, kind, _, _ in _TABLE}

# The dtypes that `--dtype` casts. 8-bit floats depend on their scales, so they are not cast.
CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})
# Those of quantized weights; scales lie beside them.
QUANTIZED = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "U16", "I32", "U32"})


def itemsize(dtype: str) -> int:
    """Bytes per element of `dtype`."""
    return NUMPY[dtype].itemsize


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy (or ml_dtypes) dtype of a safetensors name; CheckpointError for an unknown name."""
    try:
        return NUMPY[dtype]
    except KeyError:
        raise CheckpointError(f"the element type {dtype!r} is not supported") from None
