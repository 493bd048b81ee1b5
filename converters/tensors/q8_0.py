"""Q8_0 of ggml, by the package `gguf`: blocks of 32 elements, each a float16 scale and 32 signed bytes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from converters.tensors.casting import rounded
from converters.tensors.dtypes import numpy_dtype
from converters.tensors.rearranged import source_of
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from converters.storage.bytes import Touched

BLOCK, BLOCK_BYTES = 32, 34
# Elements that are computed at once: little memory, and more than a row where rows are short.
_AT_ONCE = 1 << 16


class _Blocks:
    """The blocks of a tensor's rows; each is computed when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.columns = tensor.shape[-1]
        self.row_bytes = self.columns // BLOCK * BLOCK_BYTES
        self.nbytes = prod(tensor.shape[:-1]) * self.row_bytes

    def read_into(self, buffer: memoryview, at: int, touched: Touched) -> None:
        from gguf import GGMLQuantizationType, quants  # not at the top: slow to import

        source, kind = source_of(self.tensor), numpy_dtype(self.tensor.dtype)
        out, done = np.frombuffer(buffer, np.uint8), 0
        most = max(1, _AT_ONCE // self.columns)
        while done < out.size:
            row, start = divmod(at + done, self.row_bytes)
            rows = min(most, -(-(start + out.size - done) // self.row_bytes))
            stored = np.empty((rows, self.columns), kind)
            source.read_into(
                stored.view(np.uint8).data.cast("B"), row * self.columns * kind.itemsize, touched
            )
            with np.errstate(all="ignore"):  # as in C
                made = quants.quantize(rounded(stored, "F32"), GGMLQuantizationType.Q8_0).reshape(-1)
            part = made[start : start + out.size - done]
            out[done : done + part.size] = part
            done += part.size


def q8_0(tensor: Tensor) -> Tensor:
    """`tensor` in Q8_0: bytes, in rows of 34 for each 32 elements of its last dimension."""
    source = _Blocks(tensor)
    shape = (*tensor.shape[:-1], source.row_bytes)
    return Tensor.contiguous(tensor.name, "U8", shape, source)
