"""Stochastic rounding of fp32 values to bf16, with random bits that do not depend on the sharding.

A value is rounded up or down with probabilities that make the result exact on average. Updates that
are smaller than the distance between adjacent bf16 numbers therefore add up, whereas rounding to
nearest would lose them. The random bits of an element are a hash of a key and the index of the
element in the complete tensor. They are therefore the same on any number of ranks and after a
resume.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from portable.private import torch_internals

if TYPE_CHECKING:
    from torch import Tensor

_STEP_MULTIPLIER = 0x9E3779B1
"""Odd factor by which a step is multiplied, so that the keys of consecutive steps differ in all bits."""


def compute_rounding_key(seed: int, name: str) -> int:
    """Compute the 32-bit key from which a parameter's random bits for rounding are generated.

    Args:
        seed: Seed of the run.
        name: Name of the parameter.
    """
    return zlib.crc32(f"{seed} {name}".encode())


def list_element_indices(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the position of each local element in the complete, flattened parameter.

    A row consists of the elements of the complete parameter with the same first index. This rank
    may have only a part of each row.

    Args:
        parameter: A DTensor that this rank has a shard of, or a plain tensor.

    Returns:
        Two int32 tensors. The first, ``[local rows]``, contains the position at which each row
        begins in the complete parameter. The second, ``[local row size]``, contains the offset of
        each local element from the beginning of its row. The position of an element is the sum of
        the two. All values are modulo 2**32.
    """
    shape, device = tuple(parameter.shape) or (1,), parameter.device
    slices = tuple(slice(0, size) for size in shape)
    if isinstance(parameter, DTensor):
        slices = torch_internals.compute_shard_slices(parameter) or slices
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(1, len(shape)):
        positions = torch.arange(slices[dim].start, slices[dim].stop, device=device)
        offsets = (offsets[:, None] + positions * math.prod(shape[dim + 1 :])).flatten()
    rows = torch.arange(slices[0].start, slices[0].stop, device=device) * math.prod(shape[1:])
    return to_wrapped_int32(rows), to_wrapped_int32(offsets)


def to_wrapped_int32(values: Tensor) -> Tensor:
    """Convert int64 values to int32 modulo 2**32."""
    return ((values + 2**31) % 2**32 - 2**31).to(torch.int32)


def compute_step_key(key: int, step: Tensor) -> Tensor:
    """Derive a parameter's rounding key for one step, without a host-device sync.

    The key determines the random numbers of stochastic rounding in this step.

    Args:
        key: Rounding key of the parameter, from :func:`compute_rounding_key`.
        step: Number of the step, a scalar on the device.

    Returns:
        The key for this step, an int32 scalar on the device of ``step``.
    """
    return _mix_bits(to_wrapped_int32(key + step.to(torch.int64) * _STEP_MULTIPLIER))


def draw_random_bits(indices: Tensor, step_key: Tensor) -> Tensor:
    """Compute 32 random bits per element, as a hash of its index and a key.

    Args:
        indices: Indices of the elements modulo 2**32, int32 of any shape.
        step_key: Result of :func:`compute_step_key`.

    Returns:
        Random bits, int32 with the shape of ``indices``.
    """
    return _mix_bits(indices + step_key)


def round_stochastically(values: Tensor, random_bits: Tensor) -> Tensor:
    """Round finite fp32 values stochastically to bf16.

    Each value is rounded to one of the two nearest bf16 values. The expected result equals the
    value.

    Args:
        values: Finite values, fp32.
        random_bits: Random bits, int32 with the shape of ``values``. Only the lower 16 bits are
            used.

    Returns:
        Rounded values, bf16.
    """
    # bf16 has the upper 16 bits of fp32. The carry of the addition rounds the magnitude up.
    bits = values.view(torch.int32) + (random_bits & 0xFFFF)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def _mix_bits(values: Tensor) -> Tensor:
    """Hash int32 values with Wellons' 32-bit hash "lowbias32".

    Each input bit affects all output bits.
    """
    values = values ^ _shift_right(values, 16)
    values = values * 0x7FEB352D
    values = values ^ _shift_right(values, 15)
    values = values * (0x846CA68B - 2**32)
    return values ^ _shift_right(values, 16)


def _shift_right(values: Tensor, count: int) -> Tensor:
    """Shift int32 values to the right, filling with zeros. The operator >> would copy the sign."""
    shifted: torch.Tensor = (values >> count) & (2 ** (32 - count) - 1)
    return shifted
