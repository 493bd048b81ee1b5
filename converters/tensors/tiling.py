"""Check that the boxes of a tensor cover each of its elements exactly once.

A box is a rectangular piece of a tensor, for example the shard of one rank.
"""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from portable.converters.errors import DamagedCheckpointError, UnsupportedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Start index and size of a box along each dimension."""

# A tensor is accepted if its boxes have at most this many corners, or if it is split along at most this many
# dimensions.
_CORNERS, _MAX_CUT = 1 << 16, 4


def check_boxes_cover_once(name: str, shape: tuple[int, ...], boxes: Sequence[Extent]) -> None:
    """Check that boxes cover each element of a tensor exactly once, without gaps or overlaps.

    This is the case if the boxes are inside the shape, have its total volume, and do not overlap. For a
    tensor that is split along one dimension, comparing adjacent boxes is sufficient to detect overlaps.

    Args:
        name: Name of the tensor, used in error messages.
        shape: Shape of the tensor.
        boxes: Start index and size of each box.

    Raises:
        CheckpointError: If there are gaps or overlaps, or if a box extends beyond the shape.
    """
    live: list[Extent] = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise DamagedCheckpointError(
                f"{name}: a piece has a different number of dimensions ({len(sizes)} sizes, "
                f"{len(offsets)} offsets) than the tensor ({len(shape)})"
            )
        for offset, size, length in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > length:
                raise DamagedCheckpointError(
                    f"{name}: the piece at {list(offsets)} with shape {list(sizes)} extends beyond the "
                    f"tensor, which has shape {list(shape)}"
                )
        if prod(sizes):
            live.append((offsets, sizes))
    volume, expected = sum(prod(sizes) for _, sizes in live), prod(shape)
    if not expected and boxes:
        # All volumes are 0, so check that the boxes reach the end of each dimension.
        reach = tuple(max(low[d] + size[d] for low, size in boxes) for d in range(len(shape)))
        if reach != shape:
            raise DamagedCheckpointError(
                f"{name}: the pieces of the tensor together have shape {list(reach)}, but the tensor has "
                f"shape {list(shape)}"
            )
    if volume < expected:
        raise DamagedCheckpointError(
            f"{name}: elements are missing from the files ({expected - volume} of {expected})"
        )
    if volume > expected:
        raise DamagedCheckpointError(
            f"{name}: pieces of the tensor overlap: the files contain {volume} elements, but the tensor has "
            f"only {expected}"
        )
    if len(live) < 2:
        return
    # Compare adjacent boxes along the dimension with the most splits. If they overlap in this dimension,
    # check every corner.
    dim = max(range(len(shape)), key=lambda d: len({str(offsets[d]) for offsets, _ in live}))
    live.sort(key=lambda box: box[0][dim])
    if all(low[0][dim] + low[1][dim] <= high[0][dim] for low, high in pairwise(live)):
        return
    if _has_gap_or_overlap(name, shape, live):
        raise DamagedCheckpointError(
            f"{name}: some elements of the tensor are missing from the files, and others are stored twice"
        )


def _has_gap_or_overlap(name: str, shape: tuple[int, ...], boxes: Sequence[Extent]) -> bool:
    """Return whether boxes with the same total volume as `shape` leave gaps or overlap.

    The coverage of a point is the number of boxes that contain it. The function checks that the
    coverage of every point of the tensor is 1.

    For this purpose, each corner of a box is given a sign: -1 if the box ends at the corner along
    an odd number of dimensions, otherwise +1. By the inclusion-exclusion principle, the coverage of
    a point is the sum of the signs of all corners at or before the point along every dimension. If
    the signs of corners at the same position are added up, these sums determine the coverage of
    every point. Conversely, the coverage determines the sums. The boxes therefore cover the tensor
    exactly once if and only if they have the same sums as one box that covers the complete tensor.

    The check takes time proportional to the number of boxes, regardless of their layout.

    Args:
        name: Name of the tensor, used in the error message.
        shape: Shape of the tensor.
        boxes: Start index and size of each box.

    Raises:
        CheckpointError: If there are too many corners, because the tensor is split along too many
            dimensions.
    """
    cut = [d for d in range(len(shape)) if any(sizes[d] != shape[d] for _, sizes in boxes)]
    if len(boxes) << len(cut) > max(_CORNERS, len(boxes) << _MAX_CUT):
        raise UnsupportedCheckpointError(
            f"{name}: is sharded along {len(cut)} dimensions, which is not supported"
        )
    corners: dict[str, int] = {}
    for sign, (offsets, sizes) in ((-1, ((0,) * len(shape), shape)), *((1, box) for box in boxes)):
        edges = [((offsets[d], 1), (offsets[d] + sizes[d], -1)) for d in cut]
        for corner in product(*edges):
            # Use text, because the hashes of chosen numbers could collide.
            corner_key = repr([edge for edge, _ in corner])
            corners[corner_key] = corners.get(corner_key, 0) + sign * prod(
                edge_sign for _, edge_sign in corner
            )
    return any(corners.values())
