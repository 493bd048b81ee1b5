"""CRC-32C (Castagnoli), which zlib lacks: many stretches of the data at once, in numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

from portable.converters.lazy_numpy import np

_POLYNOMIAL = 0x82F63B78
# Stretches that are summed side by side; less data than this is not worth joining their sums.
_LANES, _MIN_BYTES_FOR_LANES = 1024, 1 << 16


@cache
def _build_byte_table() -> np.ndarray[Any, np.dtype[np.uint32]]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@cache
def _build_byte_table_list() -> list[int]:
    listed: list[int] = _build_byte_table().tolist()
    return listed


def compute_crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C of `data`, as RFC 3720 defines it."""
    values = np.frombuffer(data, np.uint8)
    length = len(values) // _LANES if len(values) >= _MIN_BYTES_FOR_LANES else 0
    # What the stretches leave over comes first, byte by byte.
    remainder = len(values) - length * _LANES
    crc, plain = 0xFFFFFFFF, _build_byte_table_list()
    for byte in values[:remainder].tolist():
        crc = plain[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    if length:
        table = _build_byte_table()
        lanes = np.zeros(_LANES, np.uint32)
        columns = np.ascontiguousarray(values[remainder:].reshape(_LANES, length).T)
        for column in columns:
            lanes = table[(lanes ^ column) & 0xFF] ^ (lanes >> np.uint32(8))
        shift = _build_zero_bytes_matrix(length)
        for lane in lanes.tolist():
            crc = _multiply_gf2_matrix(shift, crc) ^ lane
    return crc ^ 0xFFFFFFFF


@cache
def _build_zero_bytes_matrix(count: int) -> tuple[int, ...]:
    """The effect of `count` zero bytes on a CRC, as a matrix over GF(2): what each of its bits becomes."""
    power = tuple(int(_build_byte_table()[bit & 0xFF]) ^ (bit >> 8) for bit in (1 << i for i in range(32)))
    result = tuple(1 << i for i in range(32))
    while count:
        if count & 1:
            result = tuple(_multiply_gf2_matrix(power, row) for row in result)
        power = tuple(_multiply_gf2_matrix(power, row) for row in power)
        count >>= 1
    return result


def _multiply_gf2_matrix(matrix: tuple[int, ...], value: int) -> int:
    product = 0
    while value:
        low = value & -value
        product ^= matrix[low.bit_length() - 1]
        value ^= low
    return product
