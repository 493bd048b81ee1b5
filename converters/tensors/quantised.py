"""Q8_0 of ggml: blocks of 32 elements, each a float16 scale and 32 signed bytes.

Source: https://github.com/ggml-org/ggml, src/ggml-quants.c (`quantize_row_q8_0_ref`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from converters.tensors.casting import rounded
from converters.tensors.dtypes import numpy_dtype
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from converters.storage.bytes import Touched
    from converters.tensors.tensor import Array

BLOCK, BLOCK_BYTES = 32, 34


class _Blocks:
    """The blocks of a tensor's rows; each is computed when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.columns = tensor.shape[-1]
        self.row_bytes = self.columns // BLOCK * BLOCK_BYTES
        self.nbytes = prod(tensor.shape[:-1]) * self.row_bytes

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        out, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(buffer):
            row, start = divmod(at + done, self.row_bytes)
            data = self._row(row, touched)
            count = min(len(buffer) - done, self.row_bytes - start)
            out[done : done + count] = data[start : start + count]
            done += count

    def _row(self, row: int, touched: Touched) -> Array:
        above = [int(n) for n in np.unravel_index(row, self.tensor.shape[:-1])]
        stored = np.empty((*[1] * len(above), self.columns), numpy_dtype(self.tensor.dtype))
        self.tensor.fill(stored, (*above, 0), touched)
        return quantise(rounded(stored.reshape(-1), "F32"))


def quantise(values: Array) -> Array:
    """The blocks, as bytes, of float32 values whose number is a multiple of 32."""
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        scaled = blocks * inverse
    whole = np.floor(np.abs(scaled) + np.float32(0.5))  # halves away from zero, as C's roundf
    made = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    with np.errstate(over="ignore"):
        made[:, :2] = scale.astype(np.float16).view(np.uint8)
    made[:, 2:] = (np.sign(scaled) * whole).astype(np.int8).view(np.uint8)
    return made.reshape(-1)


def q8_0(tensor: Tensor) -> Tensor:
    """`tensor` in Q8_0: bytes, in rows of 34 for each 32 elements of its last dimension."""
    source = _Blocks(tensor)
    shape = (*tensor.shape[:-1], source.row_bytes)
    return Tensor.contiguous(tensor.name, "U8", shape, source)
