"""Implement dropout with a mask that is sharded like the tensor.

The compiler does not partition its random bit generator: under SPMD, each device would draw and
store the random numbers for all devices. Here, a random number is a hash of its position and of a
key that is drawn for each call. Each device therefore only computes its part of the mask, and the
mask does not depend on the number of devices.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

# The first line contains the multipliers of a 32-bit hash (lowbias32 in Wellons, "Prospecting for Hash
# Functions"). The second line contains an odd number for each word of the key. Positions are multiplied by
# these numbers.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
_SPREAD = 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32)


@cache  # once per process
def use_positional_dropout() -> None:
    """Make all dropout on XLA use :func:`draw_dropout_mask`.

    This includes dropout in torch's attention. The function registers a kernel for
    ``aten::dropout`` in this process. Only the first call has an effect.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _apply_dropout, "AutogradXLA")
    _registered_libraries.append(library)  # keep it, because it unregisters its functions when it is freed


_registered_libraries: list[Any] = []


def _apply_dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Apply dropout with a newly drawn random key. Replaces ``aten::dropout`` on XLA."""
    if not train or p == 0:
        return tensor
    # Draw floats, because the compiler computes 64-bit integers in many steps, and takes minutes to compile a
    # random one.
    first, second = (torch.rand(2, device=tensor.device) * (1 << 24)).int()
    mask = draw_dropout_mask(tensor.shape, (first, second), 1 - p)
    return torch.where(mask, tensor * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def draw_dropout_mask(shape: torch.Size, key_words: tuple[Tensor, Tensor], keep_probability: float) -> Tensor:
    """Draw a mask of independent random bools.

    Each element is computed from a hash of the key and the position of the element. The same
    arguments therefore always give the same mask.

    Args:
        shape: Shape of the mask.
        key_words: Random key, as two int32 scalars on the device of the mask.
        keep_probability: Probability that an element is true, rounded to a multiple of 2 ** -31.

    Returns:
        A bool tensor.
    """
    # First hash the key with the row index, because this result is much smaller than the mask. Then hash it
    # with the column index.
    *rows, columns = shape if len(shape) else (1,)
    stride, row = 1, torch.zeros((), dtype=torch.int32, device=key_words[0].device)
    for dim, size in reversed(list(enumerate(rows))):
        row = row + _compute_positions(size, len(rows) - dim, key_words[0].device) * stride
        stride *= size
    first, second = _hash_words(key_words[0] + 1, key_words[1]), _hash_words(key_words[1], key_words[0])
    first, second = first + row * _SPREAD[0], second + row * _SPREAD[1]
    first, second = _hash_words(first, second), _hash_words(second, first)
    first = first + _compute_positions(columns, 0, key_words[0].device) * _SPREAD[0]
    bits = _hash_words(first, second) & 0x7FFFFFFF
    bound = round(keep_probability * (1 << 31))
    mask = bits < bound if bound < 1 << 31 else torch.ones_like(bits, dtype=torch.bool)
    return mask.view(shape)


def _compute_positions(size: int, trailing_dims: int, device: torch.device) -> Tensor:
    """Return the indices along a dim as int32 ``[size, 1, ...]``, with ``trailing_dims`` dims of size 1."""
    return torch.arange(size, dtype=torch.int32, device=device).view(-1, *[1] * trailing_dims)


def _hash_words(value: Tensor, other: Tensor) -> Tensor:
    """Hash each pair of 32-bit words at the same position in two tensors to an int32 word.

    The hash is not symmetric: swapping ``value`` and ``other`` changes the result.
    """
    value = _xor_shifted_bits(value, 16) * _FIRST
    value = _xor_shifted_bits(value ^ other, 15) * _SECOND
    return _xor_shifted_bits(value, 16)


def _xor_shifted_bits(value: Tensor, bits: int) -> Tensor:
    # An int32 shift copies the sign bit, so mask it.
    return value ^ ((value >> bits) & ((1 << (32 - bits)) - 1))
