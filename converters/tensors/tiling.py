"""Check that the boxes of a tensor cover each element exactly once."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from portable.converters.errors import DamagedCheckpointError, UnsupportedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Start index and size of a box along each dimension."""

# Number of corners that may be checked for any tensor, and number of split dimensions that may be checked for
# any number of boxes.
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
                f"{name}: a piece has {len(sizes)} dimensions, but the tensor has {len(shape)}"
            )
        for offset, size, length in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > length:
                raise DamagedCheckpointError(
                    f"{name}: the piece at {list(offsets)} with shape {list(sizes)} is outside of the "
                    f"tensor with shape {list(shape)}"
                )
        if prod(sizes):
            live.append((offsets, sizes))
    volume, expected = sum(prod(sizes) for _, sizes in live), prod(shape)
    if not expected and boxes:
        # All volumes are 0, so check that the boxes reach the end of each dimension.
        reach = tuple(max(low[d] + size[d] for low, size in boxes) for d in range(len(shape)))
        if reach != shape:
            raise DamagedCheckpointError(
                f"{name}: empty pieces reach {list(reach)}, but the tensor has shape {list(shape)}"
            )
    if volume < expected:
        raise DamagedCheckpointError(
            f"{name}: {expected - volume} of {expected} elements are missing from the files"
        )
    if volume > expected:
        raise DamagedCheckpointError(
            f"{name}: pieces overlap, because {volume} elements are stored for {expected}"
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
        raise DamagedCheckpointError(f"{name}: elements are missing from the files, and pieces overlap")


def _has_gap_or_overlap(name: str, shape: tuple[int, ...], boxes: Sequence[Extent]) -> bool:
    """Return whether boxes with the same total volume as `shape` leave gaps or overlap.

    Each corner of a box has a sign: -1 if the box ends at the corner along an odd number of dimensions,
    otherwise +1. The number of boxes that cover a point is the sum of the signs of all corners at or
    before the point along every dimension. Conversely, these numbers determine the sum of the signs at
    each corner. The boxes therefore cover `shape` exactly once if and only if the signs at each corner
    add up to the sign of `shape` itself. The check takes time proportional to the number of boxes,
    regardless of their layout.

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
