"""Dequantize weights while they are read, a few rows at a time.

The quantized values (codes) are converted to float32 exactly. Zero points are subtracted and scales
are multiplied in float32. The result is rounded once, to the requested dtype. Each function accepts
the stored tensors of one weight, and returns a lazy float tensor. The docstrings cite the sources
of the formats.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.errors import DamagedCheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.tensors.computed_rows import (
    ComputedRowSource,
    build_computed_tensor,
    check_tensor,
    read_region,
    read_rows,
)
from portable.converters.tensors.dtypes import get_itemsize, to_numpy_dtype
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.tensors.tensor import Array, Shape

# Number of elements per block. Blocks are large, because each block of a transposed layout reads all bytes.
_TRANSPOSED_BLOCK = 1 << 21
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_SCALES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"})
_INT8_FACTOR = np.float32(7.874015718698502e-3)  # 1 / 127, with the digits that bitsandbytes uses


# Minimum number of elements with a common scale for which a table of products pays off, number of elements to
# compute at once with tables, and number of elements to look up per call. One call is long enough for threads
# to work in parallel, and its data fits in the cache of a core.
_WORTH_A_TABLE, _WITH_TABLES, _LOOKED_UP = 1 << 10, 1 << 20, 1 << 16


# -- scales --------------------------------------------------------------------------------------------------


def _to_finite_scale(tensor: Tensor, values: Array) -> Array:
    """Convert scales to float32, and check that they are finite.

    uint8 scales are interpreted as powers of two (the E8M0 format of the OCP).

    Args:
        tensor: Tensor that contains the scales. It determines the dtype, and is named in error
            messages.
        values: Scales to convert, as they are stored.

    Returns:
        The scales as float32, in the shape of `values`.

    Raises:
        CheckpointError: If the tensor does not contain scales, or if a scale is infinite or NaN.
    """
    check_tensor(tensor.dtype in _SCALES, tensor, "has a dtype that is not supported for scales")
    if values.dtype == np.uint8:
        values = values.view(to_numpy_dtype("F8_E8M0"))
    scale = values.astype(np.float32)
    if not np.isfinite(scale).all():
        raise DamagedCheckpointError(f"{tensor.name}: a scale is infinite or NaN")
    return scale


def _multiply_by_scale(values: Array, scale: Array, block_width: int, scale_tensor: Tensor) -> Array:
    """Multiply values in place by the scale of their block, and return them.

    Args:
        values: Values of shape `[rows, columns]`.
        scale: Scales of shape `[rows, column blocks]`.
        block_width: Number of columns that share a scale.
        scale_tensor: Tensor that contains the scales, used in error messages.

    Raises:
        CheckpointError: If a block with a scale of 0 contains a nonzero value.
    """
    count, columns = values.shape
    if not scale.all() and np.any(values[np.repeat(scale == 0, block_width, axis=1)[:, :columns]]):
        raise DamagedCheckpointError(
            f"{scale_tensor.name}: a scale is 0, but its block contains values other than 0"
        )
    if columns == scale.shape[1] * block_width:
        values.reshape(count, scale.shape[1], block_width)[...] *= scale[:, :, None]
        return values
    values *= np.repeat(scale, block_width, axis=1)[:, :columns]
    return values


class BlockShape(NamedTuple):
    """Size of the blocks of a weight, in rows and columns. All elements of a block share one scale."""

    rows: int
    columns: int


class _ScaleGrid:
    """Scales or zero points of a weight: one per tensor, per row, or per block.

    Args:
        scale: Tensor that contains the scales or zero points.
        shape: Shape of the weight.
        block: Block shape from the quantization settings. If None, it is computed from the tensor
            shapes.

    Raises:
        CheckpointError: If the shape of `scale` does not match the shape of the weight.
    """

    def __init__(self, scale: Tensor, shape: Shape, block: BlockShape | None = None) -> None:
        *lead, rows, columns = shape
        self.tensor = scale
        grid = tuple(scale.shape)
        if grid in ((), (1,)) and prod(lead) == 1:
            grid = (*lead, 1, 1)
        elif grid == (*lead, rows):
            grid = (*grid, 1)
        elif lead and grid == tuple(lead):
            grid = (*grid, 1, 1)
        self._shape = grid
        fits = grid[:-2] == tuple(lead) and len(grid) == len(shape)
        if fits and grid[-2:] == (1, 1):
            self.block_height, self.block_width = rows, columns
        elif fits and block is not None and grid[-2:] != (rows, 1):
            self.block_height, self.block_width = block
            fits = grid[-2:] == (-(-rows // block.rows), -(-columns // block.columns))
        else:
            fits = fits and not (rows % max(1, grid[-2]) or columns % max(1, grid[-1])) and 0 not in grid
            self.block_height, self.block_width = (rows // grid[-2], columns // grid[-1]) if fits else (1, 1)
        check_tensor(fits, scale, f"does not match a weight of shape {list(shape)}")

    def read_scale_rows(
        self, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Read the scales for rows of the weight. See `RowFunction` for the arguments.

        Returns:
            Array of shape `[num_rows, column blocks]` with the stored dtype.
        """
        low, high = first_row // self.block_height, (first_row + num_rows - 1) // self.block_height + 1
        # The tensor has one element, or one per row or per matrix.
        if len(self.tensor.shape) < len(self._shape):
            scale = read_region(
                self.tensor, (0,) * len(self.tensor.shape), self.tensor.shape, unverified_spans
            )
            rows: Array = scale.reshape(self._shape)[matrix_index][low:high]
        else:
            rows = read_rows(self.tensor, matrix_index, low, high - low, unverified_spans)
        if self.block_height == 1:
            return rows
        picked: Array = rows[np.arange(first_row, first_row + num_rows) // self.block_height - low]
        return picked

    def dequantize_by_table(
        self,
        table: Array,
        codes: Array,
        out: Array,
        matrix_index: Shape,
        first_row: int,
        unverified_spans: UnverifiedSpans,
    ) -> None:
        """Dequantize 8-bit codes by looking up the product of each code and its scale.

        For each block, the products of the 256 codes with the block's scale are computed once. Each
        code is then replaced by its product. If a block has many elements, this is faster than
        multiplying each element.

        Args:
            table: Lookup table with the float32 value of each of the 256 codes.
            codes: Codes of shape `[rows, columns]`, as uint8.
            out: Array of the same shape that receives the result.
            matrix_index: Index of the matrix along the leading dimensions of the weight.
            first_row: Index of the matrix row to which the first row of `codes` belongs.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.
        """
        count = len(codes)
        scale = _to_finite_scale(
            self.tensor, self.read_scale_rows(matrix_index, first_row, count, unverified_spans)
        )
        if not scale.all():
            out[...] = _multiply_by_scale(
                table.take(codes, mode="wrap"), scale, self.block_width, self.tensor
            )
            return
        columns = codes.shape[1]
        # For each column, the index at which the products for its block begin.
        tables = np.repeat(np.arange(scale.shape[1]) * len(table), self.block_width)[:columns]
        # Use the smallest dtype, because NumPy adds it faster.
        tables = tables.astype(np.min_scalar_type(tables[-1] + len(table)))
        places = np.empty((max(1, _LOOKED_UP // columns), columns), np.intp)
        narrow = np.empty_like(places, tables.dtype)
        low = 0
        while low < count:
            high = min(count, ((first_row + low) // self.block_height + 1) * self.block_height - first_row)
            products = (table * scale[low, :, None]).astype(out.dtype).reshape(-1)
            while low < high:
                some = slice(low, min(high, low + len(places)))
                place, sums = places[: some.stop - low], narrow[: some.stop - low]
                sums[...] = codes[some]
                sums += tables
                place[...] = sums
                products.take(place, out=out[some], mode="clip")
                low = some.stop

    def multiply_rows(
        self,
        values: Array,
        matrix_index: Shape,
        first_row: int,
        unverified_spans: UnverifiedSpans,
        extra_factor: np.float32 | None = None,
    ) -> Array:
        """Multiply rows of the weight in place by their scales, and return them.

        Args:
            values: Values of shape `[rows, columns]`.
            matrix_index: Index of the matrix along the leading dimensions of the weight.
            first_row: Index of the first row.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.
            extra_factor: Additional factor for the scales. None for no factor.
        """
        scale = _to_finite_scale(
            self.tensor, self.read_scale_rows(matrix_index, first_row, len(values), unverified_spans)
        )
        return _multiply_by_scale(
            values, scale if extra_factor is None else scale * extra_factor, self.block_width, self.tensor
        )


# -- codes of one byte or less, row by row -------------------------------------------------------------------


def _build_byte_value_table(tensor: Tensor) -> Array:
    """Return a lookup table that maps each of the 256 byte values to a float32 number.

    The table has the shape `[256]`. Entry `i` is the value of byte `i` in the dtype of `tensor`.

    Raises:
        CheckpointError: If the dtype is not `F8_E4M3`, `F8_E5M2`, or `I8`.
    """
    check_tensor(tensor.dtype in ("F8_E4M3", "F8_E5M2", "I8"), tensor, "does not contain 8-bit codes")
    return np.arange(256, dtype=np.uint8).view(to_numpy_dtype(tensor.dtype)).astype(np.float32)


def dequantize_bytes(
    name: str,
    dtype: str,
    weight: Tensor,
    scale: Tensor,
    *,
    block: BlockShape | None = None,
    zero_point: Tensor | None = None,
) -> Tensor:
    """Dequantize FP8 or INT8 codes, with one scale per tensor, per row, or per block.

    Source: deepseek-ai/DeepSeek-V3 inference/kernel.py (`weight_dequant`), compressed-tensors
    `dequantize`.

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        weight: Codes of shape `[..., rows, columns]`.
        scale: Scales. See `_ScaleGrid`.
        block: Block shape from the quantization settings. If None, it is computed from the tensor
            shapes.
        zero_point: Zero points with the same layout as the scales. None if the codes are symmetric.
    """
    table, shape = _build_byte_value_table(weight), weight.shape
    check_tensor(len(shape) >= 2, weight, "is not a matrix")
    grid = _ScaleGrid(scale, shape, block)
    zeros = None if zero_point is None else _ScaleGrid(zero_point, shape, block)

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        values = table.take(
            read_rows(weight, matrix_index, first_row, num_rows, unverified_spans).view(np.uint8), mode="wrap"
        )
        if zeros is not None:
            below = zeros.read_scale_rows(matrix_index, first_row, num_rows, unverified_spans).astype(
                np.float32
            )
            values -= np.repeat(below, zeros.block_width, axis=1)[:, : shape[-1]]
        return grid.multiply_rows(values, matrix_index, first_row, unverified_spans)

    def fill_rows(out: Array, matrix_index: Shape, first_row: int, unverified_spans: UnverifiedSpans) -> None:
        codes = read_rows(weight, matrix_index, first_row, len(out), unverified_spans).view(np.uint8)
        grid.dequantize_by_table(table, codes, out, matrix_index, first_row, unverified_spans)

    if zeros is not None or grid.block_height * grid.block_width < _WORTH_A_TABLE:
        return build_computed_tensor(name, dtype, shape, dequantize_rows)
    return Tensor.from_source(name, dtype, shape, ComputedRowSource(shape, dtype, fill_rows, 1, _WITH_TABLES))


_PAIRS = np.stack([_FP4[np.arange(256) & 15], _FP4[np.arange(256) >> 4]], axis=-1)


def dequantize_fp4(
    name: str,
    dtype: str,
    packed: Tensor,
    scale: Tensor,
    *,
    global_scale: Tensor | None = None,
    global_scale_divisor: Tensor | None = None,
) -> Tensor:
    """Dequantize FP4 (E2M1) codes, with one scale per 16 or 32 elements of a row.

    Each byte contains two codes, with the first code in the lower half.

    Source: OCP Microscaling Formats 1.0; compressed-tensors `nvfp4_quantized`, ModelOpt `NVFP4QTensor`.

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        packed: Packed codes of shape `[..., rows, columns / 2]`.
        scale: Scales of shape `[..., rows, column blocks]`.
        global_scale: Factor by which to multiply all block scales, as in ModelOpt's NVFP4. None for no
            factor.
        global_scale_divisor: Divisor of all block scales, as in the NVFP4 format of compressed-tensors.
            None for no divisor.
    """
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    check_tensor(
        packed.dtype in ("U8", "I8") and len(shape) >= 2, packed, "does not contain packed FP4 codes"
    )
    grid = _ScaleGrid(scale, shape)

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        codes = read_rows(packed, matrix_index, first_row, num_rows, unverified_spans).view(np.uint8)
        values = _PAIRS.take(codes, axis=0, mode="wrap").reshape(num_rows, shape[-1])
        factor = None
        if global_scale is not None:
            factor = _read_scalar(global_scale, unverified_spans)
        elif global_scale_divisor is not None:
            scales = _to_finite_scale(
                scale, grid.read_scale_rows(matrix_index, first_row, num_rows, unverified_spans)
            ) / _read_scalar(global_scale_divisor, unverified_spans)
            return _multiply_by_scale(values, scales, grid.block_width, scale)
        return grid.multiply_rows(values, matrix_index, first_row, unverified_spans, factor)

    return build_computed_tensor(name, dtype, shape, dequantize_rows)


def _read_scalar(tensor: Tensor, unverified_spans: UnverifiedSpans) -> np.float32:
    """Read a scale from a tensor with one element, and convert it to float32.

    Each file span whose CRC has not been verified yet is added to `unverified_spans`.

    Raises:
        CheckpointError: If the tensor has more than one element or none, if its dtype is not
            supported for scales, or if the scale is infinite or NaN.
    """
    check_tensor(tensor.numel == 1, tensor, "must have exactly one element")
    value = read_region(tensor, (0,) * len(tensor.shape), tensor.shape, unverified_spans)
    return np.float32(_to_finite_scale(tensor, value.reshape(-1))[0])


def dequantize_gpt_oss(name: str, dtype: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize MXFP4 weights in GPT-OSS's layout.

    The stored matrix is transposed. It consists of blocks of 16 bytes (32 codes), and each block has a
    one-byte exponent.

    Source: openai/gpt-oss torch/weights.py; transformers `convert_moe_packed_tensors`.

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        blocks: Codes of shape `[..., columns of the result, rows of the result / 32, 16]`.
        scales: Exponents with the shape of `blocks` without the last dimension.
    """
    *lead, columns, groups, width = blocks.shape if len(blocks.shape) >= 3 else (0, 0, 0)
    fits = blocks.dtype == "U8" and width == 16
    check_tensor(fits, blocks, "does not contain MXFP4 blocks of 16 bytes")
    fits = scales.dtype in ("U8", "F8_E8M0") and tuple(scales.shape) == tuple(blocks.shape[:-1])
    check_tensor(fits, scales, f"does not match the codes in {blocks.name}")

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        low, high = first_row // 32, -(-(first_row + num_rows) // 32)
        ones = tuple(1 for _ in matrix_index)
        codes = read_region(
            blocks, (*matrix_index, 0, low, 0), (*ones, columns, high - low, 16), unverified_spans
        )
        scale = read_region(scales, (*matrix_index, 0, low), (*ones, columns, high - low), unverified_spans)
        exponents = _to_finite_scale(scales, scale.reshape(columns, high - low))
        values = _PAIRS.take(codes.reshape(columns, -1), axis=0, mode="wrap").reshape(columns, -1)
        return _multiply_by_scale(values, exponents, 32, scales).T

    return build_computed_tensor(
        name,
        dtype,
        (*lead, 32 * groups, columns),
        dequantize_rows,
        row_alignment=32,
        block_elements=_TRANSPOSED_BLOCK,
    )


# -- codes in words of 32 bits -------------------------------------------------------------------------------


def unpack_codes(words: Array, bits: int) -> Array:
    """Unpack integer codes from 32-bit words along the first dimension. The lowest bits come first.

    A code may be split across two words. Before unpacking, words of zeros are appended until the
    words contain an integer number of codes.

    Args:
        words: Words of shape `[words, n]` with a 32-bit dtype.
        bits: Number of bits per code.

    Returns:
        Codes of shape `[codes, n]` as uint8. There may be more codes than were packed. The caller
        must ignore the extra codes at the end.
    """
    words = words.view(np.uint32)
    period = 32 // gcd(bits, 32)
    wide = period * bits // 32
    if short := -len(words) % wide:
        words = np.pad(words, ((0, short), (0, 0)))
    grouped = words.reshape(-1, wide, words.shape[1])
    codes = np.empty((len(grouped), period, words.shape[1]), np.uint8)
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        value = grouped[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            value = value | grouped[:, word + 1] << np.uint32(32 - shift)
        codes[:, i] = value & np.uint32((1 << bits) - 1)
    return codes.reshape(-1, words.shape[1])


def dequantize_packed_rows(
    name: str,
    dtype: str,
    packed: Tensor,
    scale: Tensor,
    shape: Shape,
    bits: int,
    *,
    zero_point: Tensor | None = None,
    column_groups: Tensor | None = None,
) -> Tensor:
    """Dequantize `pack-quantized` weights of compressed-tensors.

    Each row of signed codes is packed into words, and each group of columns in a row shares a scale.

    Source: compressed-tensors `unpack_from_int32`, `dequantize`.

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        packed: Words of shape `[rows, columns * bits / 32]`, rounded up.
        scale: Scales of shape `[rows, groups]`.
        shape: Rows and columns of the weight.
        bits: Number of bits per code.
        zero_point: Zero points, packed along the row dimension. None if the codes are symmetric.
        column_groups: Group index of each column. If None, the groups consist of equal numbers of
            consecutive columns.
    """
    offset = np.float32(1 << (bits - 1))
    count_rows, columns = shape
    fits = packed.dtype == "I32" and tuple(packed.shape) == (count_rows, -(-columns * bits // 32))
    check_tensor(fits, packed, f"does not contain {count_rows} x {columns} codes of {bits} bits")
    grid = _ScaleGrid(scale, shape if column_groups is None else (count_rows, scale.shape[-1]))
    wide = grid._shape[-1]
    if zero_point is not None:
        fits = zero_point.dtype == "I32" and tuple(zero_point.shape) == (-(-count_rows * bits // 32), wide)
        check_tensor(fits, zero_point, f"does not match the scales in {scale.name}")
    if column_groups is not None:
        check_tensor(
            tuple(column_groups.shape) == (columns,),
            column_groups,
            f"does not match the codes in {packed.name}",
        )

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        words = read_rows(packed, (), first_row, num_rows, unverified_spans)
        codes = unpack_codes(np.ascontiguousarray(words.T), bits)[:columns].T
        values = codes.astype(np.float32) - offset
        scales = _to_finite_scale(scale, grid.read_scale_rows((), first_row, num_rows, unverified_spans))
        below = None
        if zero_point is not None:
            low, high = first_row // 32 * bits, -(-(first_row + num_rows) * bits // 32)
            zeros = unpack_codes(
                read_region(zero_point, (low, 0), (high - low, wide), unverified_spans), bits
            )
            below = zeros[first_row % 32 :][:num_rows].astype(np.float32) - offset
        if column_groups is not None:
            index = _read_column_groups(column_groups, wide, unverified_spans)
            values -= 0 if below is None else below[:, index]
            return _multiply_by_scale(values, scales[:, index], 1, scale)
        if below is not None:
            values -= np.repeat(below, grid.block_width, axis=1)[:, :columns]
        return _multiply_by_scale(values, scales, grid.block_width, scale)

    return build_computed_tensor(name, dtype, shape, dequantize_rows)


def _read_column_groups(groups: Tensor, count: int, unverified_spans: UnverifiedSpans) -> Array:
    """Read the group index of each column.

    Args:
        groups: Tensor of shape `[columns]` with the group indices.
        count: Number of groups.
        unverified_spans: Set that collects the file spans whose CRC has not been verified yet.

    Raises:
        CheckpointError: If an index is negative or not less than `count`.
    """
    index = read_region(groups, (0,), groups.shape, unverified_spans)
    check_tensor(
        bool(index.size == 0 or 0 <= index.min() <= index.max() < count),
        groups,
        f"contains a group index that is not between 0 and {count - 1}",
    )
    return index


def dequantize_gptq(
    name: str,
    dtype: str,
    tensors: Mapping[str, Tensor],
    configured_bits: int | None = None,
    *,
    zero_point_offset: int,
) -> Tensor:
    """Dequantize GPTQ weights with 2, 3, 4, or 8 bits.

    Codes are packed into words along the input dimension, and zero points along the output dimension.

    Source: AutoGPTQ and GPTQModel, `TorchQuantLinear`.

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        tensors: `qweight` of shape `[inputs * bits / 32, outputs]`, `qzeros` `[groups, outputs * bits /
            32]`, `scales` `[groups, outputs]`, and `g_idx` `[inputs]`.
        configured_bits: Number of bits in the quantization settings. If given, the tensor shapes must
            match it.
        zero_point_offset: Number to add to each stored zero point: 1 for the format `gptq`, 0 for
            `gptq_v2`.
    """
    weight, zeros, scales, index = (tensors[key] for key in ("qweight", "qzeros", "scales", "g_idx"))
    inputs = index.numel
    (groups, outputs) = scales.shape if len(scales.shape) == 2 else (0, 0)
    bits = weight.shape[0] * 32 // inputs if len(weight.shape) == 2 and inputs else 0
    allowed = (2, 3, 4, 8) if configured_bits is None else (configured_bits,)
    fits = bits in allowed and weight.dtype == "I32"
    fits = fits and tuple(weight.shape) == (inputs * bits // 32, outputs)
    allowed_text = " or ".join(str(count) for count in allowed)
    check_tensor(fits, weight, f"does not contain {inputs} x {outputs} codes of {allowed_text} bits")
    fits = zeros.dtype == "I32" and tuple(zeros.shape) == (groups, outputs * bits // 32)
    check_tensor(fits, zeros, f"does not match the codes in {weight.name}")

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        group = _read_column_groups(index, groups, unverified_spans)
        words = read_region(weight, (0, first_row), (weight.shape[0], num_rows), unverified_spans)
        low, high = first_row * bits // 32, -(-(first_row + num_rows) * bits // 32)
        packed_zeros = read_region(zeros, (0, low), (groups, high - low), unverified_spans)
        below = unpack_codes(np.ascontiguousarray(packed_zeros.T), bits)[:num_rows].T
        below = (below + np.uint8(zero_point_offset)) & np.uint8((1 << bits) - 1)
        scale = _to_finite_scale(
            scales, read_region(scales, (0, first_row), (groups, num_rows), unverified_spans)
        )
        values = unpack_codes(words, bits)[:inputs].astype(np.float32) - below.astype(np.float32)[group]
        return _multiply_by_scale(values, scale[group], 1, scales).T

    return build_computed_tensor(
        name, dtype, (outputs, inputs), dequantize_rows, row_alignment=32, block_elements=_TRANSPOSED_BLOCK
    )


def dequantize_awq(name: str, dtype: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Dequantize 4-bit AWQ weights.

    Codes are packed into words along the output dimension, in the order that AWQ's matrix
    multiplication kernel requires.

    Source: AutoAWQ `awq/utils/packing_utils.py`.

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        tensors: `qweight` of shape `[inputs, outputs / 8]`, `qzeros` `[groups, outputs / 8]`, and
            `scales` `[groups, outputs]`.
    """
    weight, zeros, scales = (tensors[key] for key in ("qweight", "qzeros", "scales"))
    (groups, outputs) = scales.shape if len(scales.shape) == 2 else (0, 0)
    inputs = weight.shape[0] if weight.shape else 0
    fits = weight.dtype == "I32" and weight.shape[1:] == (outputs // 8,) and bool(groups) and outputs % 8 == 0
    check_tensor(fits and inputs % groups == 0, weight, f"does not match the scales in {scales.name}")
    fits = zeros.dtype == "I32" and tuple(zeros.shape) == (groups, outputs // 8)
    check_tensor(fits, zeros, f"does not match the codes in {weight.name}")

    def read_codes(tensor: Tensor, first: int, count: int, unverified_spans: UnverifiedSpans) -> Array:
        words = read_region(tensor, (0, first // 8), (tensor.shape[0], count // 8), unverified_spans).view(
            np.uint32
        )
        codes = np.empty((*words.shape, 8), np.uint8)
        for i, column in enumerate(_AWQ_ORDER):
            codes[..., column] = words >> np.uint32(4 * i) & np.uint32(15)
        return codes.reshape(len(words), count)

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        scale = _to_finite_scale(
            scales, read_region(scales, (0, first_row), (groups, num_rows), unverified_spans)
        )
        values = (
            read_codes(weight, first_row, num_rows, unverified_spans)
            .astype(np.float32)
            .reshape(groups, -1, num_rows)
        )
        values -= read_codes(zeros, first_row, num_rows, unverified_spans).astype(np.float32)[:, None]
        if not scale.all() and np.any(values[np.broadcast_to(scale[:, None] == 0, values.shape)]):
            raise DamagedCheckpointError(
                f"{scales.name}: a scale is 0, but its group contains values other than 0"
            )
        values *= scale[:, None]
        return values.reshape(inputs, num_rows).T

    return build_computed_tensor(
        name, dtype, (outputs, inputs), dequantize_rows, row_alignment=8, block_elements=_TRANSPOSED_BLOCK
    )


# -- bitsandbytes --------------------------------------------------------------------------------------------


class NestedQuantization(NamedTuple):
    """Settings of bitsandbytes' double quantization, which also quantizes the maxima of the blocks.

    Attributes:
        block_size: Number of maxima that share a scale.
        offset: Number to add to each dequantized maximum.
    """

    block_size: int
    offset: float


def dequantize_bnb_4bit(
    name: str,
    dtype: str,
    packed: Tensor,
    tensors: Mapping[str, Tensor],
    shape: Shape,
    block_size: int,
    nested: NestedQuantization | None,
) -> Tensor:
    """Dequantize NF4 or FP4 weights of bitsandbytes.

    Each byte contains two codes, which are indices into a lookup table. The first code is in the upper
    half.

    The dtype of `packed` does not matter. FSDP requires one dtype for all parameters, so
    `bnb_4bit_quant_storage` can store the bytes of the codes in the dtype of the other weights.

    Source: bitsandbytes `functional.py` (`dequantize_4bit`, `QuantState`).

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        packed: Packed codes of all elements, in row-major order.
        tensors: `absmax` and `quant_map`. With `nested`, also `nested_absmax` and `nested_quant_map`.
        shape: Shape of the weight.
        block_size: Number of elements that share a maximum.
        nested: Settings for dequantizing the maxima. None if the maxima are not quantized.
    """
    total = prod(shape)
    width = get_itemsize(packed.dtype)
    check_tensor(
        packed.numel * width == -(-total // 2),
        packed,
        f"does not contain the 4-bit codes of a weight of shape {list(shape)}",
    )
    count_max = -(-total // block_size)
    check_tensor(
        tensors["absmax"].shape == (count_max,),
        tensors["absmax"],
        f"does not match the codes in {packed.name}",
    )
    check_tensor(tensors["quant_map"].shape == (16,), tensors["quant_map"], "is not a table of 16 values")

    def read_flat(tensor: Tensor, low: int, high: int, unverified_spans: UnverifiedSpans) -> Array:
        """Read the elements [low, high) of a tensor with shape `[n]` or `[n, 1]`.

        Each file span whose CRC has not been verified yet is added to `unverified_spans`.
        """
        # The tensors may be stored with the shape (n, 1).
        ends = (1,) * (len(tensor.shape) - 1)
        return read_region(tensor, (low, *(0 for _ in ends)), (high - low, *ends), unverified_spans).reshape(
            -1
        )

    def read_codes(low: int, high: int, unverified_spans: UnverifiedSpans) -> Array:
        """Read the bytes [low, high) of the packed codes.

        Each file span whose CRC has not been verified yet is added to `unverified_spans`.
        """
        first = low // width
        elements = np.ascontiguousarray(read_flat(packed, first, -(-high // width), unverified_spans))
        return elements.view(np.uint8)[low - first * width : high - first * width]

    def read_maxima(low: int, high: int, unverified_spans: UnverifiedSpans) -> Array:
        """Read the maxima of the quantization blocks [low, high).

        The maximum of a block (`absmax`) is its largest magnitude. If the maxima are quantized,
        they are dequantized. Each file span whose CRC has not been verified yet is added to
        `unverified_spans`.
        """
        quantized = read_flat(tensors["absmax"], low, high, unverified_spans)
        if nested is None:
            return _to_finite_scale(tensors["absmax"], quantized)
        check_tensor(
            quantized.dtype == np.uint8, tensors["absmax"], "does not contain the 8-bit codes of the maxima"
        )
        size, offset = nested
        table = read_flat(tensors["nested_quant_map"], 0, 256, unverified_spans)
        above = read_flat(tensors["nested_absmax"], low // size, -(-high // size), unverified_spans)
        picked = above[np.arange(low, high) // size - low // size]
        return _to_finite_scale(tensors["nested_absmax"], table[quantized] * picked + np.float32(offset))

    columns = shape[-1]

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        low, high = first_row * columns, (first_row + num_rows) * columns
        stored = read_codes(low // 2, -(-high // 2), unverified_spans)
        table = read_flat(tensors["quant_map"], 0, 16, unverified_spans).astype(np.float32)
        codes = np.stack([stored >> 4, stored & 15], axis=-1).reshape(-1)[low - low // 2 * 2 :][: high - low]
        values = table[codes]
        scale = read_maxima(low // block_size, -(-high // block_size), unverified_spans)
        values *= scale[np.arange(low, high) // block_size - low // block_size]
        return values.reshape(num_rows, columns)

    return build_computed_tensor(
        name, dtype, shape, dequantize_rows, computed_shape=(prod(shape[:-1]), columns)
    )


def dequantize_bnb_8bit(name: str, dtype: str, weight: Tensor, maxima: Tensor) -> Tensor:
    """Dequantize LLM.int8 weights of bitsandbytes.

    Each code is multiplied by the largest magnitude in its row and divided by 127.

    Source: bitsandbytes `functional.py` (`int8_vectorwise_dequant`).

    Args:
        name: Name of the result.
        dtype: Safetensors dtype of the result.
        weight: Codes of shape `[rows, columns]`.
        maxima: Largest magnitude in each row.
    """
    check_tensor(weight.dtype == "I8" and len(weight.shape) == 2, weight, "is not a matrix of 8-bit codes")
    grid = _ScaleGrid(maxima, weight.shape)

    def dequantize_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        codes = read_rows(weight, (), first_row, num_rows, unverified_spans)
        values = grid.multiply_rows(codes.astype(np.float32), (), first_row, unverified_spans)
        values *= _INT8_FACTOR
        return values

    return build_computed_tensor(name, dtype, weight.shape, dequantize_rows)
