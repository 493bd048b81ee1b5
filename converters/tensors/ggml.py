"""Quantize tensors to ggml's block formats. The package `gguf` computes the blocks.

A block consists of a scale and quantized values with 8 or 4 bits each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.computed_rows import build_computed_tensor, read_rows

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.tensors.tensor import Array, Shape, Tensor

GGML_KINDS = frozenset({"Q8_0", "Q4_0", "MXFP4"})
BLOCK_ELEMENTS = 32  # Number of elements per block in each of these formats


def quantize_to_ggml(tensor: Tensor, kind: str) -> Tensor:
    """Quantize a tensor lazily to ggml blocks along its last dimension.

    Args:
        tensor: Tensor whose last dimension is divisible by `BLOCK_ELEMENTS`.
        kind: `Q8_0`, `Q4_0`, or `MXFP4`.

    Returns:
        Bytes of the blocks as a tensor of dtype `U8`.
    """
    # Imported here because the import is slow.
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    number = GGMLQuantizationType[kind]
    size, columns = GGML_QUANT_SIZES[number][1], tensor.shape[-1]

    def quantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        stored = read_rows(tensor, matrix_index, first_row, num_rows, unverified_spans)
        blocks: Array = quants.quantize(round_to_dtype(stored, "F32"), number)
        return blocks

    return build_computed_tensor(
        tensor.name, "U8", (*tensor.shape[:-1], columns // BLOCK_ELEMENTS * size), quantize_rows
    )
