"""Identify the tensors that contain quantized weights.

Integer tensors may also be lookup tables, masks, or counters. The codes (integer or packed values)
of a quantized weight are recognized by their names, by the scales that belong to them, or by an
8-bit floating-point dtype. Some scales and zero points also have such a name or dtype, and are then
treated as codes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.converters.tensors.dtypes import QUANTIZED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from portable.converters.tensors.tensor import Tensor

# A parameter that transformers declares as `weight` is never an integer unless it is quantized.
_CODES = re.compile(
    r"(.*[._])?(weight|(q|packed_|quantized_)?weights?|weight_packed|qzeros|codes|_data|_packed_weight|blocks"
    r"|packed|qdata|scales)|.*\.weight\.\w+"
)
_SCALES = ("_scale", "_scale_inv", "_scale_2", "_scales", "_global_scale", "_zero_point", ".absmax", ".SCB")


def is_quantized_code(name: str, tensor: Tensor, names: Container[str]) -> bool:
    """Return whether a tensor contains the codes of a quantized weight.

    The result is also True for some scales and zero points, such as scales with the dtype `F8_E4M3` and
    tensors named `qzeros`.

    Args:
        name: Name of the tensor.
        tensor: The tensor.
        names: Names of all tensors of the checkpoint.
    """
    if tensor.dtype not in QUANTIZED_DTYPES or not tensor.shape:
        return False
    if tensor.dtype.startswith("F8"):
        return True
    return bool(_CODES.fullmatch(name)) or any(f"{name}{suffix}" in names for suffix in _SCALES)


def find_quantized_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of all quantized weights and of the modules that contain them.

    The name of the module is empty for a weight at the top level.
    """
    codes = [name for name, tensor in tensors.items() if is_quantized_code(name, tensor, tensors)]
    return {*codes, *(name.rpartition(".")[0] for name in codes)}
