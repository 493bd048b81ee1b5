"""Compare what several ranks should hold alike, by a sample of the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from converters.errors import CheckpointError
from converters.tensors.casting import rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.tensors.tensor import Array, Tensor

# Elements at the start, in the middle and at the end of each tensor, about.
_SAMPLE = 4096


def same(copies: Sequence[Tensor], where: str, why: str = "files of two runs or steps") -> None:
    """CheckpointError, with a reason, if the ranks' copies of one tensor differ."""
    first, *others = copies
    sample = [part.tobytes() for part in _sample(first)]
    for other in others:
        alike = (other.shape, other.dtype) == (first.shape, first.dtype)
        if not alike or [part.tobytes() for part in _sample(other)] != sample:
            raise CheckpointError(f"{where}: the ranks' copies of it differ; {why}")


def rounds_to_copy(master: Tensor, copy: Tensor) -> bool:
    """Whether a master, rounded to the dtype of its copy of the same shape, equals it; NaN equals NaN."""
    for ours, theirs in zip(_sample(master), _sample(copy), strict=True):
        cast = rounded(ours, copy.dtype)
        if not np.all((cast == theirs) | ((cast != cast) & (theirs != theirs))):
            return False
    return True


def _sample(tensor: Tensor) -> list[Array]:
    if not tensor.shape:
        return [tensor.read()]
    rows = tensor.shape[0]
    count = max(1, _SAMPLE * rows // max(1, tensor.numel))
    starts = sorted({0, max(0, rows // 2 - count // 2), max(0, rows - count)})
    return [tensor.read(slice(start, start + count)) for start in starts]
