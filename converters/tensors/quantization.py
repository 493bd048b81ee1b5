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
from portable.converters.storage.byte_sources import Memory
from portable.converters.tensors.casting import round_to_dtype
from portable.converters.tensors.computed_rows import (
    BLOCK,
    build_computed_tensor,
    read_region,
    read_rows,
    require_tensor,
)
from portable.converters.tensors.dtypes import to_numpy_dtype
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from portable.converters.storage.byte_sources import Touched
    from portable.converters.tensors.computed_rows import RowFunction
    from portable.converters.tensors.tensor import Array, Shape

_MOST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0, "FP4": 6.0}
_FLOATS = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2), "FP4": (2, 1)}  # bits of exponent and of mantissa
_KEPT = 1024  # rows of a block whose scale is computed again for each use; higher ones are kept in memory
_EXPONENT_OF_FP4 = 2  # of its largest value, 6


@dataclass(frozen=True)
class QuantizationScheme:
    """How a matrix becomes codes.

    Attributes:
        codes: F8_E4M3, F8_E5M2, I8, FP4, or INT4 (INT2, INT8) for integers that are packed into words.
        height, width: of a block with a common scale; 0 for the matrix's own.
        rule: how scales come from magnitudes:

            - ``inverse``: in float32, as the reciprocal of its own reciprocal. Source: transformers
              `integrations/finegrained_fp8.py` (`Fp8Quantize`).
            - ``range``: the magnitude through half the codes' range, each operation rounded to the scale's
              dtype. Source: compressed-tensors `calculate_qparams`, `quantize`.
            - ``near``: a power of two, up from 1.75 of it. Source: compressed-tensors `generate_mx_scales`.
            - ``floor``: the power of two at or below. Source: OCP Microscaling Formats 1.0, 6.3.
        scale: the dtype of the scales; empty for the weight's.
    """

    codes: str
    height: int
    width: int
    rule: str
    scale: str = ""


def _count_blocks(length: int, size: int) -> int:
    return -(-length // (size or max(1, length)))


class _BlockQuantizer:
    """A weight in blocks: its values, scales and codes.

    Args:
        turned: take the columns of the stored matrices as rows.
    """

    def __init__(self, weight: Tensor, scheme: QuantizationScheme, *, turned: bool = False) -> None:
        require_tensor(
            weight.dtype in ("F32", "F16", "BF16") and len(weight.shape) > 1, weight, "cannot be quantized"
        )
        *lead, rows, columns = weight.shape
        self.weight, self.scheme, self.turned = weight, scheme, turned
        self.lead = tuple(lead)
        self.rows, self.columns = (columns, rows) if turned else (rows, columns)
        self.height, self.width = scheme.height or self.rows, scheme.width or self.columns
        self.scale_dtype = scheme.scale or weight.dtype
        self.grid = (*lead, _count_blocks(self.rows, self.height), _count_blocks(self.columns, self.width))
        exact = self.scale_dtype in ("F16", "BF16") and scheme.rule == "range"
        self._native = self.scale_dtype if exact else weight.dtype if scheme.rule == "near" else "F32"
        self._known: dict[tuple[Shape, int], Array] = {}
        self._lock = threading.Lock()

    def read_values(self, matrix: Shape, first: int, count: int, touched: Touched) -> Array:
        """Rows [first, first + count), float32."""
        if self.turned:
            sizes = (*(1 for _ in matrix), self.columns, count)
            values = read_region(self.weight, (*matrix, 0, first), sizes, touched)
            return np.ascontiguousarray(values.reshape(self.columns, count).T).astype(np.float32)
        return read_rows(self.weight, matrix, first, count, touched).astype(np.float32)

    def compute_magnitudes(self, matrix: Shape, low: int, high: int, touched: Touched) -> Array:
        """The largest magnitude in each block of the block rows [low, high)."""
        if self.height > _KEPT:
            with self._lock:
                for row in range(low, high):
                    if (matrix, row) not in self._known:
                        self._known[matrix, row] = self._compute_high_block_magnitudes(matrix, row, touched)
            return np.concatenate([self._known[matrix, row] for row in range(low, high)])
        first, end = low * self.height, min(high * self.height, self.rows)
        at_once = max(1, BLOCK // max(1, self.columns * self.height)) * self.height
        return np.concatenate(
            [
                self._reduce_blocks(self.read_values(matrix, row, min(at_once, end - row), touched))
                for row in range(first, end, at_once)
            ]
        )

    def _compute_high_block_magnitudes(self, matrix: Shape, row: int, touched: Touched) -> Array:
        end = min((row + 1) * self.height, self.rows)
        at_once = max(1, BLOCK // max(1, self.columns))
        largest = np.zeros((1, self.grid[-1]), np.float32)
        for first in range(row * self.height, end, at_once):
            values = self.read_values(matrix, first, min(at_once, end - first), touched)
            np.maximum(largest, self._reduce_columns(np.abs(values).max(axis=0, keepdims=True)), out=largest)
        return largest

    def _reduce_blocks(self, values: Array) -> Array:
        """The largest magnitude in each block of rows that begin with a block."""
        magnitude = np.abs(values)
        if not len(values) % self.height:
            magnitude = magnitude.reshape(-1, self.height, self.columns).max(axis=1)
        else:
            magnitude = np.maximum.reduceat(magnitude, np.arange(0, len(values), self.height), axis=0)
        return self._reduce_columns(magnitude)

    def _reduce_columns(self, magnitude: Array) -> Array:
        """(rows, blocks): the largest of each row in each block."""
        if self.columns == self.grid[-1] * self.width:  # half as long as `max` along an axis
            starts = np.arange(0, magnitude.size, self.width)
            largest = np.maximum.reduceat(magnitude.reshape(-1), starts).reshape(len(magnitude), -1)
        else:
            largest = np.maximum.reduceat(magnitude, np.arange(0, self.columns, self.width), axis=1)
        if not np.isfinite(largest).all():
            raise CheckpointError(
                f"{self.weight.name}: holds infinite values or NaN, which no code stands for"
            )
        return largest

    def compute_scales(self, matrix: Shape, low: int, high: int, touched: Touched) -> Array:
        """The scales of block rows, in the dtype that they are stored in."""
        return self._scale_from_magnitude(self.compute_magnitudes(matrix, low, high, touched))

    def _scale_from_magnitude(self, largest: Array) -> Array:
        rule, stored = self.scheme.rule, to_numpy_dtype(self.scale_dtype)
        if rule == "inverse":
            scale = np.float32(1) / self._invert_scales(largest)
            if stored == to_numpy_dtype("F8_E8M0"):  # up to a power of two
                fraction, exponent = np.frexp(np.maximum(scale, np.finfo(np.float32).tiny))
                scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
            return scale.astype(stored)
        if rule == "range":
            scale = self._round_values(largest / np.float32(self._max_code))
            least = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}[self._native]
            return np.where(scale == 0, np.float32(least), scale).astype(stored)
        fraction, exponent = np.frexp(largest)
        up = fraction >= 0.875 if rule == "near" else 0
        exponent = np.where(largest > 0, exponent - 1 + up - _EXPONENT_OF_FP4 + 127, 0)
        return np.clip(exponent, 0, 254).astype(np.uint8)

    def _invert_scales(self, largest: Array) -> Array:
        # As torch divides a number by a tensor.
        return np.where(largest > 0, np.float32(1) / largest * np.float32(self._max_code), np.float32(1))

    @property
    def _max_code(self) -> float:
        """What the magnitude of a block is divided by."""
        if self.scheme.codes in _MOST:
            return _MOST[self.scheme.codes]
        return float((1 << self.bits) - 1) / 2

    @property
    def bits(self) -> int:
        """Of an integer code."""
        return 8 if self.scheme.codes == "I8" else int(self.scheme.codes.removeprefix("INT"))

    def _round_values(self, values: Array) -> Array:
        return round_to_dtype(values, self._native).astype(np.float32)

    def quantize_rows(self, matrix: Shape, first: int, count: int, touched: Touched) -> Array:
        """The codes of rows: in the dtype F8_E4M3, F8_E5M2 or I8; FP4 and packed integers as uint8."""
        values = self.read_values(matrix, first, count, touched)
        low, high = first // self.height, -(-(first + count) // self.height)
        if self.height <= _KEPT and first == low * self.height:
            largest = self._reduce_blocks(values)
        else:
            largest = self.compute_magnitudes(matrix, low, high, touched)
        scale = self._scale_from_magnitude(largest)
        if scale.dtype == np.uint8:
            scale = scale.view(to_numpy_dtype("F8_E8M0"))
        inverse = self.scheme.rule == "inverse"
        factor = (
            self._invert_scales(largest)
            if inverse and scale.dtype == np.float32
            else scale.astype(np.float32)
        )
        wide = factor[np.arange(first, first + count) // self.height - low]
        if self.columns == self.grid[-1] * self.width:
            blocks, wide = values.reshape(count, -1, self.width), wide[:, :, None]
        else:
            blocks, wide = values, np.repeat(wide, self.width, axis=1)[:, : self.columns]
        if inverse and scale.dtype == np.float32:
            blocks *= wide
        else:
            blocks = self._round_values(np.divide(blocks, wide, out=blocks))
        return self._encode_values(blocks.reshape(count, self.columns))

    def _encode_values(self, values: Array) -> Array:
        codes = self.scheme.codes
        if codes in _MOST:
            most = np.float32(_MOST[codes])
            np.clip(values, -most, most, out=values)
            if self.scheme.rule == "near":
                values += np.float32(0)  # -0.0 becomes 0.0, as in the library
            encoded = encode_small_floats(values, *_FLOATS[codes])
            return encoded if codes == "FP4" else encoded.view(to_numpy_dtype(codes))
        half = 1 << (self.bits - 1)
        np.clip(np.rint(values, out=values), -half, half - 1, out=values)
        return values.astype(np.int8) if codes == "I8" else (values + half).astype(np.uint8)

    def build_scale_tensor(self, name: str, shape: Shape | None = None) -> Tensor:
        """The scales as a tensor; `shape` where they are stored in another one."""
        return build_computed_tensor(
            name,
            self.scale_dtype,
            self.grid if shape is None else shape,
            lambda matrix, first, count, touched: self.compute_scales(matrix, first, first + count, touched),
            elements=max(1, BLOCK // (min(self.height, _KEPT) * self.width)),
            computed_shape=self.grid,
        )

    @property
    def align(self) -> int:
        return self.height if self.height <= _KEPT else 1


def encode_small_floats(values: Array, exponent: int, mantissa: int) -> Array:
    """The codes of floats of few bits, round to nearest, ties to even; several times as fast as ml_dtypes.

    Args:
        values: float32, of a magnitude that the codes can represent.
        exponent, mantissa: bits.

    Returns:
        uint8, of the sign, the exponent and the mantissa.
    """
    bias, cut = (1 << (exponent - 1)) - 1, 23 - mantissa
    magnitude = np.abs(values)
    bits = magnitude.view(np.int32)
    # Half of the last place, less one for an even code, carries into the exponent, which has another bias.
    codes = bits >> cut & 1
    codes += bits
    codes += (1 << (cut - 1)) - 1 - ((127 - bias) << 23)
    codes >>= cut
    # Below the least exponent codes are even steps: there these are the larger, and above it the smaller.
    magnitude *= np.float32(2.0 ** (bias - 1 + mantissa))
    np.minimum(np.rint(magnitude, out=magnitude), np.float32(1 << mantissa), out=magnitude)
    encoded: Array = np.maximum(codes, magnitude.astype(np.int32), out=codes).astype(np.uint8)
    encoded |= np.signbit(values).view(np.uint8) << np.uint8(exponent + mantissa)
    return encoded


def quantize_to_bytes(
    weight: Tensor, scheme: QuantizationScheme, scale: str, shape: Shape | None = None
) -> dict[str, Tensor]:
    """Codes of 8 bits in the weight's own shape, and their scales.

    Args:
        scale: the name of the scales.
        shape: of the scales, where it is another than one number for each block.
    """
    cut = _BlockQuantizer(weight, scheme)
    codes = build_computed_tensor(weight.name, scheme.codes, weight.shape, cut.quantize_rows, align=cut.align)
    return {weight.name: codes, scale: cut.build_scale_tensor(scale, shape)}


def quantize_to_packed_rows(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """compressed-tensors' `pack-quantized`: see `dequantized.dequantize_packed_rows`."""
    cut = _BlockQuantizer(weight, scheme)
    require_tensor(
        len(weight.shape) == 2 and 32 % cut.bits == 0, weight, f"cannot be packed as {scheme.codes}"
    )
    per = 32 // cut.bits
    words = -(-cut.columns // per)

    def pack_rows(matrix: Shape, first: int, count: int, touched: Touched) -> Array:
        codes = cut.quantize_rows(matrix, first, count, touched)
        if unfilled := words * per - cut.columns:
            codes = np.pad(codes, ((0, 0), (0, unfilled)))
        # A word's lowest bits come first, as its lowest byte does.
        return _pack_codes(codes, cut.bits).view("<i4")

    packed, scale, shape_name = (f"{weight.name}_{suffix}" for suffix in ("packed", "scale", "shape"))
    packed_tensor = build_computed_tensor(
        packed, "I32", (cut.rows, words), pack_rows, elements=max(1, BLOCK // per)
    )
    sizes = np.array(weight.shape, np.int64)
    return {
        packed: packed_tensor,
        scale: cut.build_scale_tensor(scale),
        shape_name: Tensor.from_source(shape_name, "I64", (2,), Memory(sizes.tobytes())),
    }


def _pack_codes(codes: Array, bits: int) -> Array:
    """Codes of so many bits in full bytes, the first in the lowest bits; uint8."""
    while bits < 8:
        pairs = codes.view("<u2")
        codes, bits = (pairs | pairs >> np.uint16(8 - bits)).astype(np.uint8), 2 * bits
    return codes


def _pack_pairs(cut: _BlockQuantizer) -> RowFunction:
    def pack_rows(matrix: Shape, first: int, count: int, touched: Touched) -> Array:
        return _pack_codes(cut.quantize_rows(matrix, first, count, touched), 4)

    return pack_rows


def quantize_to_fp4(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Pairs of FP4 codes in bytes, and exponents of their scales: see `dequantized.fp4`."""
    cut = _BlockQuantizer(weight, scheme)
    require_tensor(cut.columns % scheme.width == 0, weight, f"has rows that {scheme.width} does not divide")
    shape = (*cut.lead, cut.rows, cut.columns // 2)
    packed, scale = f"{weight.name}_packed", f"{weight.name}_scale"
    return {
        packed: build_computed_tensor(packed, "U8", shape, _pack_pairs(cut)),
        scale: cut.build_scale_tensor(scale),
    }


def quantize_to_gpt_oss(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """MXFP4 as GPT-OSS stores it: see `dequantized.dequantize_gpt_oss`."""
    cut = _BlockQuantizer(weight, scheme, turned=True)
    require_tensor(cut.columns % 32 == 0, weight, "has columns that 32 does not divide")
    shape = (*cut.lead, cut.rows, cut.columns // 2)
    blocks, scales = f"{weight.name}_blocks", f"{weight.name}_scales"
    codes_shape = (*cut.lead, cut.rows, cut.columns // 32, 16)
    return {
        blocks: build_computed_tensor(blocks, "U8", codes_shape, _pack_pairs(cut), computed_shape=shape),
        scales: cut.build_scale_tensor(scales),
    }
