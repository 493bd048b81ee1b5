"""Quantize weights while they are read, a few rows at a time.

This is the inverse of `portable.converters.tensors.dequantization`. Each function accepts the float
tensor of one weight, and returns the tensors that a quantization format stores for this weight.
Each block of a matrix has a scale, which is computed from the largest magnitude in the block. The
results match the format's reference implementation, when it is run without calibration data.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.converters.errors import CheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.computed_rows import (
    BLOCK_ELEMENTS,
    build_computed_tensor,
    check_tensor,
    read_region,
    read_rows,
)
from portable.converters.tensors.dtypes import to_numpy_dtype
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.tensors.computed_rows import RowFunction
    from portable.converters.tensors.tensor import Array, Shape

_MAX_MAGNITUDES = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0, "FP4": 6.0}
# Number of exponent bits and of mantissa bits
_FLOAT_BITS = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2), "FP4": (2, 1)}
# Maximum block height at which scales are recomputed for each use. The magnitudes of taller blocks are
# cached.
_MAX_RECOMPUTED_HEIGHT = 1024
_EXPONENT_OF_FP4 = 2  # Exponent of the largest FP4 value, 6


@dataclass(frozen=True)
class QuantizationScheme:
    """Scheme for quantizing a matrix.

    Attributes:
        code_dtype: Dtype of the quantized values (codes): `F8_E4M3`, `F8_E5M2`, `I8`, `FP4`,
            `INT2`, `INT4`, or `INT8`. The last three are integers that are packed into words.
        block_height: Number of rows that share a scale, or 0 for all rows.
        block_width: Number of columns that share a scale, or 0 for all columns.
        scale_rule: Rule for computing a block's scale from the largest magnitude in the block:

            - ``inverse``: the reciprocal of the scale (largest code / magnitude) is computed in
              float32, and inverted. Source: transformers `integrations/finegrained_fp8.py`
              (`Fp8Quantize`).
            - ``range``: the magnitude divided by half of the codes' range. Each operation is
              rounded to the dtype of the scales. Source: compressed-tensors `calculate_qparams`,
              `quantize`.
            - ``near``: the magnitude rounded to a power of two, divided by 4, because the largest
              FP4 value is 6. The magnitude is rounded up if it is at least 1.75 times the next
              lower power of two, otherwise down. For example, 1.75 becomes 2, and 1.7 becomes 1.
              Source: compressed-tensors `generate_mx_scales`.
            - ``floor``: like ``near``, but the magnitude is always rounded down to a power of two.
              Source: OCP Microscaling Formats 1.0, section 6.3.
        scale_dtype: Safetensors dtype of the scales. If it is empty, the scales have the dtype of
            the weight.
    """

    code_dtype: str
    block_height: int
    block_width: int
    scale_rule: str
    scale_dtype: str = ""


def _count_blocks(length: int, size: int) -> int:
    """Return the number of blocks with `size` elements along a dimension. A size of 0 means one block."""
    return -(-length // (size or max(1, length)))


class _BlockQuantizer:
    """Quantizer for one weight, which computes its scales and its codes.

    Args:
        weight: Weight of shape `[..., rows, columns]` in float32, float16, or bfloat16.
        scheme: Quantization scheme.
        transposed: Whether to quantize the transposed matrices.

    Raises:
        CheckpointError: If the weight has a different dtype or is not a matrix.
    """

    def __init__(self, weight: Tensor, scheme: QuantizationScheme, *, transposed: bool = False) -> None:
        check_tensor(
            weight.dtype in ("F32", "F16", "BF16") and len(weight.shape) > 1,
            weight,
            "cannot be quantized, because it is not a matrix in float32, float16 or bfloat16; convert the "
            "weight to bfloat16",
            CheckpointError,
        )
        *lead, rows, columns = weight.shape
        self.weight, self.scheme, self.transposed = weight, scheme, transposed
        self.leading_shape = tuple(lead)
        self.rows, self.columns = (columns, rows) if transposed else (rows, columns)
        self.block_height, self.block_width = (
            scheme.block_height or self.rows,
            scheme.block_width or self.columns,
        )
        self.scale_dtype = scheme.scale_dtype or weight.dtype
        self.scale_shape = (
            *lead,
            _count_blocks(self.rows, self.block_height),
            _count_blocks(self.columns, self.block_width),
        )
        exact = self.scale_dtype in ("F16", "BF16") and scheme.scale_rule == "range"
        self._arithmetic_dtype = (
            self.scale_dtype if exact else weight.dtype if scheme.scale_rule == "near" else "F32"
        )
        self._cached_magnitudes: dict[tuple[Shape, int], Array] = {}
        self._lock = threading.Lock()

    def read_values(
        self, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Read rows of the (possibly transposed) weight as float32. See `RowFunction`."""
        if self.transposed:
            sizes = (*(1 for _ in matrix_index), self.columns, num_rows)
            values = read_region(self.weight, (*matrix_index, 0, first_row), sizes, unverified_spans)
            return np.ascontiguousarray(values.reshape(self.columns, num_rows).T).astype(np.float32)
        return read_rows(self.weight, matrix_index, first_row, num_rows, unverified_spans).astype(np.float32)

    def compute_block_magnitudes(
        self, matrix_index: Shape, first_block: int, stop_block: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Compute the largest magnitude in each block.

        The magnitudes of blocks with more than `_MAX_RECOMPUTED_HEIGHT` rows are cached. The caller
        quantizes such a block a few rows at a time. Without the cache, it would read the entire
        block again for each part.

        Args:
            matrix_index: Index of the matrix along the leading dimensions.
            first_block: Index of the first row of blocks.
            stop_block: Index of the last row of blocks, exclusive.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.

        Returns:
            Array of shape `[stop_block - first_block, column blocks]` in float32.
        """
        if self.block_height > _MAX_RECOMPUTED_HEIGHT:
            with self._lock:
                for row in range(first_block, stop_block):
                    if (matrix_index, row) not in self._cached_magnitudes:
                        self._cached_magnitudes[matrix_index, row] = self._compute_high_block_magnitudes(
                            matrix_index, row, unverified_spans
                        )
            return np.concatenate(
                [self._cached_magnitudes[matrix_index, row] for row in range(first_block, stop_block)]
            )
        first, end = first_block * self.block_height, min(stop_block * self.block_height, self.rows)
        at_once = max(1, BLOCK_ELEMENTS // max(1, self.columns * self.block_height)) * self.block_height
        return np.concatenate(
            [
                self._compute_block_maxima(
                    self.read_values(matrix_index, row, min(at_once, end - row), unverified_spans)
                )
                for row in range(first, end, at_once)
            ]
        )

    def _compute_high_block_magnitudes(
        self, matrix_index: Shape, row: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Compute the largest magnitude of each block in one row of blocks.

        Blocks of many rows are too high to be read at once. The function therefore reads a few rows
        at a time.

        Args:
            matrix_index: Index of the matrix along the leading dimensions.
            row: Index of the row of blocks.
            unverified_spans: Set that collects the file spans whose CRC has not been verified yet.

        Returns:
            Array of shape `[1, column blocks]` in float32.
        """
        end = min((row + 1) * self.block_height, self.rows)
        at_once = max(1, BLOCK_ELEMENTS // max(1, self.columns))
        largest = np.zeros((1, self.scale_shape[-1]), np.float32)
        for first in range(row * self.block_height, end, at_once):
            values = self.read_values(matrix_index, first, min(at_once, end - first), unverified_spans)
            np.maximum(
                largest,
                self._compute_column_block_maxima(np.abs(values).max(axis=0, keepdims=True)),
                out=largest,
            )
        return largest

    def _compute_block_maxima(self, values: Array) -> Array:
        """Compute the largest magnitude in each block of the given rows.

        Args:
            values: Consecutive rows of the weight, of shape `[rows, columns]`. The first row must
                be the first row of a block. The last block may be incomplete.

        Returns:
            Array with one element per block, of shape `[blocks along the rows, blocks along the
            columns]`.
        """
        magnitude = np.abs(values)
        if not len(values) % self.block_height:
            magnitude = magnitude.reshape(-1, self.block_height, self.columns).max(axis=1)
        else:
            magnitude = np.maximum.reduceat(magnitude, np.arange(0, len(values), self.block_height), axis=0)
        return self._compute_column_block_maxima(magnitude)

    def _compute_column_block_maxima(self, magnitude: Array) -> Array:
        """Reduce each block of columns to its largest magnitude.

        Args:
            magnitude: Magnitudes of shape `[rows, columns]`.

        Returns:
            Array of shape `[rows, column blocks]`.

        Raises:
            CheckpointError: If a value is infinite or NaN.
        """
        # This takes half of the time of `max` along an axis.
        if self.columns == self.scale_shape[-1] * self.block_width:
            starts = np.arange(0, magnitude.size, self.block_width)
            largest = np.maximum.reduceat(magnitude.reshape(-1), starts).reshape(len(magnitude), -1)
        else:
            largest = np.maximum.reduceat(magnitude, np.arange(0, self.columns, self.block_width), axis=1)
        if not np.isfinite(largest).all():
            raise CheckpointError(
                f"{self.weight.name}: contains NaN or infinite values, which cannot be quantized; quantize "
                "the weights of an earlier step"
            )
        return largest

    def compute_scales(
        self, matrix_index: Shape, first_block: int, stop_block: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Compute the scales of the blocks in a range of block rows.

        A block row consists of all blocks that cover the same rows of the matrix. The scales have
        the dtype in which they are stored. See `compute_block_magnitudes` for the arguments.
        """
        return self._compute_scales_from_magnitudes(
            self.compute_block_magnitudes(matrix_index, first_block, stop_block, unverified_spans)
        )

    def _compute_scales_from_magnitudes(self, magnitudes: Array) -> Array:
        """Compute the scales of blocks from the largest magnitude of each block.

        The scales have the dtype in which they are stored. If the scheme's `scale_rule` is `near`
        or `floor`, the scales are powers of two, and are returned as uint8 exponents (E8M0).
        """
        rule, stored = self.scheme.scale_rule, to_numpy_dtype(self.scale_dtype)
        if rule == "inverse":
            scale = np.float32(1) / self._compute_inverse_scales(magnitudes)
            if stored == to_numpy_dtype("F8_E8M0"):  # Round up to a power of two.
                fraction, exponent = np.frexp(np.maximum(scale, np.finfo(np.float32).tiny))
                scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
            return scale.astype(stored)
        if rule == "range":
            scale = self._round_to_arithmetic_dtype(magnitudes / np.float32(self._magnitude_divisor))
            least = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}[self._arithmetic_dtype]
            return np.where(scale == 0, np.float32(least), scale).astype(stored)
        fraction, exponent = np.frexp(magnitudes)
        up = fraction >= 0.875 if rule == "near" else 0
        exponent = np.where(magnitudes > 0, exponent - 1 + up - _EXPONENT_OF_FP4 + 127, 0)
        return np.clip(exponent, 0, 254).astype(np.uint8)

    def _compute_inverse_scales(self, magnitudes: Array) -> Array:
        # torch also computes the reciprocal first if it divides a number by a tensor.
        return np.where(
            magnitudes > 0, np.float32(1) / magnitudes * np.float32(self._magnitude_divisor), np.float32(1)
        )

    @property
    def _magnitude_divisor(self) -> float:
        """Number by which a block's largest magnitude is divided to compute the block's scale."""
        if self.scheme.code_dtype in _MAX_MAGNITUDES:
            return _MAX_MAGNITUDES[self.scheme.code_dtype]
        return float((1 << self.code_bits) - 1) / 2

    @property
    def code_bits(self) -> int:
        """Number of bits per integer code."""
        return 8 if self.scheme.code_dtype == "I8" else int(self.scheme.code_dtype.removeprefix("INT"))

    def _round_to_arithmetic_dtype(self, values: Array) -> Array:
        """Round float32 values to the dtype in which the format's reference implementation computes.

        The rounded values are returned as float32.
        """
        return round_to_dtype(values, self._arithmetic_dtype).astype(np.float32)

    def quantize_rows(
        self, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """Quantize rows of a matrix. See `RowFunction` for the arguments.

        Returns:
            Array of codes, one per element. If the scheme's `code_dtype` is `F8_E4M3`, `F8_E5M2`, or
            `I8`, the codes have this dtype. Codes that will be packed (`FP4`, `INT2`, `INT4`, or
            `INT8`) have the dtype uint8. They are not packed yet.
        """
        values = self.read_values(matrix_index, first_row, num_rows, unverified_spans)
        low, high = first_row // self.block_height, -(-(first_row + num_rows) // self.block_height)
        if self.block_height <= _MAX_RECOMPUTED_HEIGHT and first_row == low * self.block_height:
            largest = self._compute_block_maxima(values)
        else:
            largest = self.compute_block_magnitudes(matrix_index, low, high, unverified_spans)
        scale = self._compute_scales_from_magnitudes(largest)
        if scale.dtype == np.uint8:
            scale = scale.view(to_numpy_dtype("F8_E8M0"))
        inverse = self.scheme.scale_rule == "inverse"
        factor = (
            self._compute_inverse_scales(largest)
            if inverse and scale.dtype == np.float32
            else scale.astype(np.float32)
        )
        wide = factor[np.arange(first_row, first_row + num_rows) // self.block_height - low]
        if self.columns == self.scale_shape[-1] * self.block_width:
            blocks, wide = values.reshape(num_rows, -1, self.block_width), wide[:, :, None]
        else:
            blocks, wide = values, np.repeat(wide, self.block_width, axis=1)[:, : self.columns]
        if inverse and scale.dtype == np.float32:
            blocks *= wide
        else:
            blocks = self._round_to_arithmetic_dtype(np.divide(blocks, wide, out=blocks))
        return self._encode_scaled_values(blocks.reshape(num_rows, self.columns))

    def _encode_scaled_values(self, values: Array) -> Array:
        """Convert scaled values to codes. `values` is modified in place."""
        codes = self.scheme.code_dtype
        if codes in _MAX_MAGNITUDES:
            most = np.float32(_MAX_MAGNITUDES[codes])
            np.clip(values, -most, most, out=values)
            if self.scheme.scale_rule == "near":
                values += np.float32(0)  # -0.0 becomes 0.0, as in compressed-tensors
            encoded = encode_small_floats(values, *_FLOAT_BITS[codes])
            return encoded if codes == "FP4" else encoded.view(to_numpy_dtype(codes))
        half = 1 << (self.code_bits - 1)
        np.clip(np.rint(values, out=values), -half, half - 1, out=values)
        return values.astype(np.int8) if codes == "I8" else (values + half).astype(np.uint8)

    def build_scale_tensor(self, name: str, shape: Shape | None = None) -> Tensor:
        """Build the lazy tensor that contains the scales of the quantized weight.

        Args:
            name: Name of the tensor.
            shape: Shape in which the scales are stored. None for the shape with one element per
                block.
        """
        return build_computed_tensor(
            name,
            self.scale_dtype,
            self.scale_shape if shape is None else shape,
            lambda matrix, first, count, touched: self.compute_scales(matrix, first, first + count, touched),
            block_elements=max(
                1, BLOCK_ELEMENTS // (min(self.block_height, _MAX_RECOMPUTED_HEIGHT) * self.block_width)
            ),
            computed_shape=self.scale_shape,
        )

    @property
    def row_alignment(self) -> int:
        """Alignment of the row ranges that are quantized in one step, as a number of rows.

        Each range begins at a multiple of this number. Normally, the number is the height of a
        quantization block. A range then begins at the first row of a block, so the largest
        magnitude of each block can be computed from the rows in memory. If the blocks are too tall
        for this, the number is 1. The largest magnitude of a block is then computed once from the
        complete block and cached, so a range may begin at any row.
        """
        return self.block_height if self.block_height <= _MAX_RECOMPUTED_HEIGHT else 1


def encode_small_floats(values: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """Encode float32 values as small floats, rounded to nearest with ties to even.

    This is several times faster than ml_dtypes.

    Args:
        values: Float32 values whose magnitudes can be represented.
        exponent_bits: Number of exponent bits.
        mantissa_bits: Number of mantissa bits.

    Returns:
        Codes as uint8, which contain the sign, the exponent, and the mantissa.
    """
    bias, cut = (1 << (exponent_bits - 1)) - 1, 23 - mantissa_bits
    magnitude = np.abs(values)
    bits = magnitude.view(np.int32)
    # Round by adding half of the last place, minus one for an even code. A carry goes into the exponent. The
    # bias of the exponent is changed at the same time.
    codes = bits >> cut & 1
    codes += bits
    codes += (1 << (cut - 1)) - 1 - ((127 - bias) << 23)
    codes >>= cut
    # Subnormal codes are equidistant. Below the smallest normal number, they exceed the codes computed above,
    # and otherwise they do not, so the maximum is correct.
    magnitude *= np.float32(2.0 ** (bias - 1 + mantissa_bits))
    np.minimum(np.rint(magnitude, out=magnitude), np.float32(1 << mantissa_bits), out=magnitude)
    encoded: Array = np.maximum(codes, magnitude.astype(np.int32), out=codes).astype(np.uint8)
    encoded |= np.signbit(values).view(np.uint8) << np.uint8(exponent_bits + mantissa_bits)
    return encoded


def quantize_to_bytes(
    weight: Tensor, scheme: QuantizationScheme, scale_name: str, scale_shape: Shape | None = None
) -> dict[str, Tensor]:
    """Quantize a weight to 8-bit codes.

    Args:
        weight: Weight to quantize.
        scheme: Quantization scheme.
        scale_name: Name of the tensor for the scales.
        scale_shape: Shape in which the scales are stored, such as `[1]` instead of `[1, 1]`. None
            to store them in the shape of the grid of blocks.

    Returns:
        The codes, which keep the weight's name and shape, and the scales, keyed by name.
    """
    quantizer = _BlockQuantizer(weight, scheme)
    codes = build_computed_tensor(
        weight.name,
        scheme.code_dtype,
        weight.shape,
        quantizer.quantize_rows,
        row_alignment=quantizer.row_alignment,
    )
    return {weight.name: codes, scale_name: quantizer.build_scale_tensor(scale_name, scale_shape)}


def quantize_to_packed_rows(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Quantize a weight to the `pack-quantized` format of compressed-tensors.

    See `dequantization.dequantize_packed_rows`.

    Returns:
        The codes, the scales, and the shape, keyed by name.
    """
    quantizer = _BlockQuantizer(weight, scheme)
    check_tensor(
        len(weight.shape) == 2 and 32 % quantizer.code_bits == 0,
        weight,
        f"cannot be packed as {scheme.code_dtype}; use --quantize fp8 or --quantize int8",
        CheckpointError,
    )
    codes_per_word = 32 // quantizer.code_bits
    words = -(-quantizer.columns // codes_per_word)

    def pack_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        codes = quantizer.quantize_rows(matrix_index, first_row, num_rows, unverified_spans)
        if unfilled := words * codes_per_word - quantizer.columns:
            codes = np.pad(codes, ((0, 0), (0, unfilled)))
        # The lowest bits of a word come first, as its lowest byte does in memory.
        return _pack_codes(codes, quantizer.code_bits).view("<i4")

    packed, scale, shape_name = (f"{weight.name}_{suffix}" for suffix in ("packed", "scale", "shape"))
    packed_tensor = build_computed_tensor(
        packed,
        "I32",
        (quantizer.rows, words),
        pack_rows,
        block_elements=max(1, BLOCK_ELEMENTS // codes_per_word),
    )
    sizes = np.array(weight.shape, np.int64)
    return {
        packed: packed_tensor,
        scale: quantizer.build_scale_tensor(scale),
        shape_name: Tensor.from_source(shape_name, "I64", (2,), InMemorySource(sizes.tobytes())),
    }


def _pack_codes(codes: Array, bits: int) -> Array:
    """Pack codes of 1, 2, 4, or 8 bits into bytes. The first code occupies the lowest bits.

    Args:
        codes: Codes as uint8, one per element. The number of columns is divisible by the number of
            codes per byte.
        bits: Number of bits per code: 1, 2, 4, or 8. Codes of 8 bits are returned unchanged.
    """
    while bits < 8:
        pairs = codes.view("<u2")
        codes, bits = (pairs | pairs >> np.uint16(8 - bits)).astype(np.uint8), 2 * bits
    return codes


def _make_pair_packer(quantizer: _BlockQuantizer) -> RowFunction:
    """Create a function that computes rows of packed 4-bit codes (two per byte)."""

    def pack_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        return _pack_codes(quantizer.quantize_rows(matrix_index, first_row, num_rows, unverified_spans), 4)

    return pack_rows


def quantize_to_fp4(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Quantize a weight to packed FP4 codes (two per byte) with power-of-two scales.

    See `dequantization.dequantize_fp4`.

    Returns:
        The codes and the scales, keyed by name.
    """
    quantizer = _BlockQuantizer(weight, scheme)
    check_tensor(
        quantizer.columns % scheme.block_width == 0,
        weight,
        f"has {quantizer.columns} columns, which are not divisible by the block size {scheme.block_width}; "
        "use --quantize fp8 or --quantize int8",
        CheckpointError,
    )
    shape = (*quantizer.leading_shape, quantizer.rows, quantizer.columns // 2)
    packed, scale = f"{weight.name}_packed", f"{weight.name}_scale"
    return {
        packed: build_computed_tensor(packed, "U8", shape, _make_pair_packer(quantizer)),
        scale: quantizer.build_scale_tensor(scale),
    }


def quantize_to_gpt_oss(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Quantize a weight to MXFP4 in GPT-OSS's layout. See `dequantization.dequantize_gpt_oss`.

    Returns:
        The codes and the scales, keyed by name.
    """
    quantizer = _BlockQuantizer(weight, scheme, transposed=True)
    check_tensor(
        quantizer.columns % 32 == 0,
        weight,
        f"has {quantizer.columns} rows, which are not divisible by the block size 32; use --quantize fp8 or "
        "--quantize int8",
        CheckpointError,
    )
    shape = (*quantizer.leading_shape, quantizer.rows, quantizer.columns // 2)
    blocks, scales = f"{weight.name}_blocks", f"{weight.name}_scales"
    codes_shape = (*quantizer.leading_shape, quantizer.rows, quantizer.columns // 32, 16)
    return {
        blocks: build_computed_tensor(
            blocks, "U8", codes_shape, _make_pair_packer(quantizer), computed_shape=shape
        ),
        scales: quantizer.build_scale_tensor(scales),
    }
