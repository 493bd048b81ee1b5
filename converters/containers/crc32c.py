"""Compute the CRC-32C (Castagnoli) in NumPy, for many chunks of the data in parallel."""

from __future__ import annotations

from functools import cache
from typing import Any

from portable.converters.lazy_numpy import np

_POLYNOMIAL = 0x82F63B78
# Number of parts ("lanes") whose CRCs are computed in parallel, and minimum size of the data in bytes. Below
# this size, combining the CRCs of the lanes would take longer than it saves.
_LANES, _MIN_BYTES_FOR_LANES = 1024, 1 << 16


@cache
def _build_byte_table() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Build the lookup table of the CRC-32C, with one entry per byte value."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@cache
def _build_byte_table_list() -> list[int]:
    """Return the byte table of CRC-32C as a list, because lists are indexed faster than arrays."""
    listed: list[int] = _build_byte_table().tolist()
    return listed


def compute_crc32c(data: bytes | memoryview) -> int:
    """Compute the CRC-32C of data, as defined in RFC 3720."""
    values = np.frombuffer(data, np.uint8)
    length = len(values) // _LANES if len(values) >= _MIN_BYTES_FOR_LANES else 0
    # The lanes have equal lengths. The remaining bytes come first and are processed one by one.
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
    """Return the matrix over GF(2) that appends `count` zero bytes to a CRC register.

    The matrix is used to combine the CRCs of adjacent chunks. Element i of the result is the new
    register for an input register in which only bit i is set.
    """
    power = tuple(int(_build_byte_table()[bit & 0xFF]) ^ (bit >> 8) for bit in (1 << i for i in range(32)))
    result = tuple(1 << i for i in range(32))
    while count:
        if count & 1:
            result = tuple(_multiply_gf2_matrix(power, row) for row in result)
        power = tuple(_multiply_gf2_matrix(power, row) for row in power)
        count >>= 1
    return result


def _multiply_gf2_matrix(matrix: tuple[int, ...], value: int) -> int:
    """Multiply a matrix over GF(2) by a vector.

    Args:
        matrix: Columns of the matrix. Bit `i` of each integer is the element in row `i`.
        value: Vector. Bit `i` of the integer is element `i`.

    Returns:
        Product, as an integer whose bits are the elements.
    """
    product = 0
    while value:
        low = value & -value
        product ^= matrix[low.bit_length() - 1]
        value ^= low
    return product
