"""Floats as codes and scales, computed a few rows at a time while they are read.

The inverse of `portable.converters.tensors.dequantization`. Each function takes the float tensor of one
weight and returns the tensors that its format stores for it. A scale belongs to a block of a matrix and comes
from the largest magnitude in it, as the format's own program computes it without calibration data.
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
_FLOAT_BITS = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2), "FP4": (2, 1)}  # bits of exponent and of mantissa
_MAX_RECOMPUTED_HEIGHT = (
    1024  # rows of a block whose scale is computed again for each use; higher ones are kept in memory
)
_EXPONENT_OF_FP4 = 2  # of its largest value, 6


@dataclass(frozen=True)
class QuantizationScheme:
    """How a matrix becomes codes.

    Attributes:
        code_dtype: F8_E4M3, F8_E5M2, I8, FP4, or INT4 (INT2, INT8) for integers that are packed into words.
        block_height, block_width: of a block with a common scale; 0 for the matrix's own.
        scale_rule: how scales come from magnitudes:

            - ``inverse``: in float32, as the reciprocal of its own reciprocal. Source: transformers
              `integrations/finegrained_fp8.py` (`Fp8Quantize`).
            - ``range``: the magnitude through half the codes' range, each operation rounded to the scale's
              dtype. Source: compressed-tensors `calculate_qparams`, `quantize`.
            - ``near``: a power of two, up from 1.75 of it. Source: compressed-tensors `generate_mx_scales`.
            - ``floor``: the power of two at or below. Source: OCP Microscaling Formats 1.0, 6.3.
        scale_dtype: the dtype of the scales; empty for the weight's.
    """

    code_dtype: str
    block_height: int
    block_width: int
    scale_rule: str
    scale_dtype: str = ""


def _count_blocks(length: int, size: int) -> int:
    return -(-length // (size or max(1, length)))


class _BlockQuantizer:
    """A weight in blocks: its values, scales and codes.

    Args:
        transposed: take the columns of the stored matrices as rows.
    """

    def __init__(self, weight: Tensor, scheme: QuantizationScheme, *, transposed: bool = False) -> None:
        check_tensor(
            weight.dtype in ("F32", "F16", "BF16") and len(weight.shape) > 1, weight, "cannot be quantized"
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
        """Rows [first, first + count), float32."""
        if self.transposed:
            sizes = (*(1 for _ in matrix_index), self.columns, num_rows)
            values = read_region(self.weight, (*matrix_index, 0, first_row), sizes, unverified_spans)
            return np.ascontiguousarray(values.reshape(self.columns, num_rows).T).astype(np.float32)
        return read_rows(self.weight, matrix_index, first_row, num_rows, unverified_spans).astype(np.float32)

    def compute_block_magnitudes(
        self, matrix_index: Shape, first_block: int, stop_block: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """The largest magnitude in each block of the block rows [low, high)."""
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
        """The largest magnitude in each block of rows that begin with a block."""
        magnitude = np.abs(values)
        if not len(values) % self.block_height:
            magnitude = magnitude.reshape(-1, self.block_height, self.columns).max(axis=1)
        else:
            magnitude = np.maximum.reduceat(magnitude, np.arange(0, len(values), self.block_height), axis=0)
        return self._compute_column_block_maxima(magnitude)

    def _compute_column_block_maxima(self, magnitude: Array) -> Array:
        """(rows, blocks): the largest of each row in each block."""
        if self.columns == self.scale_shape[-1] * self.block_width:  # half as long as `max` along an axis
            starts = np.arange(0, magnitude.size, self.block_width)
            largest = np.maximum.reduceat(magnitude.reshape(-1), starts).reshape(len(magnitude), -1)
        else:
            largest = np.maximum.reduceat(magnitude, np.arange(0, self.columns, self.block_width), axis=1)
        if not np.isfinite(largest).all():
            raise CheckpointError(
                f"{self.weight.name}: holds infinite values or NaN, which no code stands for"
            )
        return largest

    def compute_scales(
        self, matrix_index: Shape, first_block: int, stop_block: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """The scales of block rows, in the dtype that they are stored in."""
        return self._compute_scales_from_magnitudes(
            self.compute_block_magnitudes(matrix_index, first_block, stop_block, unverified_spans)
        )

    def _compute_scales_from_magnitudes(self, magnitudes: Array) -> Array:
        rule, stored = self.scheme.scale_rule, to_numpy_dtype(self.scale_dtype)
        if rule == "inverse":
            scale = np.float32(1) / self._compute_inverse_scales(magnitudes)
            if stored == to_numpy_dtype("F8_E8M0"):  # up to a power of two
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
        # As torch divides a number by a tensor.
        return np.where(
            magnitudes > 0, np.float32(1) / magnitudes * np.float32(self._magnitude_divisor), np.float32(1)
        )

    @property
    def _magnitude_divisor(self) -> float:
        """What the magnitude of a block is divided by."""
        if self.scheme.code_dtype in _MAX_MAGNITUDES:
            return _MAX_MAGNITUDES[self.scheme.code_dtype]
        return float((1 << self.code_bits) - 1) / 2

    @property
    def code_bits(self) -> int:
        """Of an integer code."""
        return 8 if self.scheme.code_dtype == "I8" else int(self.scheme.code_dtype.removeprefix("INT"))

    def _round_to_arithmetic_dtype(self, values: Array) -> Array:
        return round_to_dtype(values, self._arithmetic_dtype).astype(np.float32)

    def quantize_rows(
        self, matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        """The codes of rows: in the dtype F8_E4M3, F8_E5M2 or I8; FP4 and packed integers as uint8."""
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
        codes = self.scheme.code_dtype
        if codes in _MAX_MAGNITUDES:
            most = np.float32(_MAX_MAGNITUDES[codes])
            np.clip(values, -most, most, out=values)
            if self.scheme.scale_rule == "near":
                values += np.float32(0)  # -0.0 becomes 0.0, as in the library
            encoded = encode_small_floats(values, *_FLOAT_BITS[codes])
            return encoded if codes == "FP4" else encoded.view(to_numpy_dtype(codes))
        half = 1 << (self.code_bits - 1)
        np.clip(np.rint(values, out=values), -half, half - 1, out=values)
        return values.astype(np.int8) if codes == "I8" else (values + half).astype(np.uint8)

    def build_scale_tensor(self, name: str, shape: Shape | None = None) -> Tensor:
        """The scales as a tensor; `shape` where they are stored in another one."""
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
        return self.block_height if self.block_height <= _MAX_RECOMPUTED_HEIGHT else 1


def encode_small_floats(values: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """The codes of floats of few bits, round to nearest, ties to even; several times as fast as ml_dtypes.

    Args:
        values: float32, of a magnitude that the codes can represent.
        exponent_bits, mantissa_bits: bits.

    Returns:
        uint8, of the sign, the exponent and the mantissa.
    """
    bias, cut = (1 << (exponent_bits - 1)) - 1, 23 - mantissa_bits
    magnitude = np.abs(values)
    bits = magnitude.view(np.int32)
    # Half of the last place, less one for an even code, carries into the exponent, which has another bias.
    codes = bits >> cut & 1
    codes += bits
    codes += (1 << (cut - 1)) - 1 - ((127 - bias) << 23)
    codes >>= cut
    # Below the least exponent codes are even steps: there these are the larger, and above it the smaller.
    magnitude *= np.float32(2.0 ** (bias - 1 + mantissa_bits))
    np.minimum(np.rint(magnitude, out=magnitude), np.float32(1 << mantissa_bits), out=magnitude)
    encoded: Array = np.maximum(codes, magnitude.astype(np.int32), out=codes).astype(np.uint8)
    encoded |= np.signbit(values).view(np.uint8) << np.uint8(exponent_bits + mantissa_bits)
    return encoded


def quantize_to_bytes(
    weight: Tensor, scheme: QuantizationScheme, scale_name: str, scale_shape: Shape | None = None
) -> dict[str, Tensor]:
    """Codes of 8 bits in the weight's own shape, and their scales.

    Args:
        scale_name: the name of the scales.
        scale_shape: of the scales, where it is another than one number for each block.
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
    """compressed-tensors' `pack-quantized`: see `dequantized.dequantize_packed_rows`."""
    quantizer = _BlockQuantizer(weight, scheme)
    check_tensor(
        len(weight.shape) == 2 and 32 % quantizer.code_bits == 0,
        weight,
        f"cannot be packed as {scheme.code_dtype}",
    )
    codes_per_word = 32 // quantizer.code_bits
    words = -(-quantizer.columns // codes_per_word)

    def pack_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        codes = quantizer.quantize_rows(matrix_index, first_row, num_rows, unverified_spans)
        if unfilled := words * codes_per_word - quantizer.columns:
            codes = np.pad(codes, ((0, 0), (0, unfilled)))
        # A word's lowest bits come first, as its lowest byte does.
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
    """Codes of so many bits in full bytes, the first in the lowest bits; uint8."""
    while bits < 8:
        pairs = codes.view("<u2")
        codes, bits = (pairs | pairs >> np.uint16(8 - bits)).astype(np.uint8), 2 * bits
    return codes


def _make_pair_packer(quantizer: _BlockQuantizer) -> RowFunction:
    def pack_rows(
        matrix_index: Shape, first_row: int, num_rows: int, unverified_spans: UnverifiedSpans
    ) -> Array:
        return _pack_codes(quantizer.quantize_rows(matrix_index, first_row, num_rows, unverified_spans), 4)

    return pack_rows


def quantize_to_fp4(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Pairs of FP4 codes in bytes, and exponents of their scales: see `dequantized.fp4`."""
    quantizer = _BlockQuantizer(weight, scheme)
    check_tensor(
        quantizer.columns % scheme.block_width == 0,
        weight,
        f"has rows that {scheme.block_width} does not divide",
    )
    shape = (*quantizer.leading_shape, quantizer.rows, quantizer.columns // 2)
    packed, scale = f"{weight.name}_packed", f"{weight.name}_scale"
    return {
        packed: build_computed_tensor(packed, "U8", shape, _make_pair_packer(quantizer)),
        scale: quantizer.build_scale_tensor(scale),
    }


def quantize_to_gpt_oss(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """MXFP4 as GPT-OSS stores it: see `dequantized.dequantize_gpt_oss`."""
    quantizer = _BlockQuantizer(weight, scheme, transposed=True)
    check_tensor(quantizer.columns % 32 == 0, weight, "has columns that 32 does not divide")
    shape = (*quantizer.leading_shape, quantizer.rows, quantizer.columns // 2)
    blocks, scales = f"{weight.name}_blocks", f"{weight.name}_scales"
    codes_shape = (*quantizer.leading_shape, quantizer.rows, quantizer.columns // 32, 16)
    return {
        blocks: build_computed_tensor(
            blocks, "U8", codes_shape, _make_pair_packer(quantizer), computed_shape=shape
        ),
        scales: quantizer.build_scale_tensor(scales),
    }
