"""Do boxes tile a tensor exactly once?"""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

Extent = tuple[tuple[int, ...], tuple[int, ...]]

# Corners that are looked at in any case, and dimensions whose corners are.
_CORNERS, _MAX_CUT = 1 << 16, 4


def check_boxes_tile(name: str, shape: tuple[int, ...], boxes: Sequence[Extent]) -> None:
    """Raise CheckpointError unless the boxes (offsets, sizes) cover `shape` once: no gap, no overlap.

    Boxes that lie inside the shape, do not overlap, and have its volume together must tile it, so it is
    enough to look for overlaps. Sorted along the dimension that cuts most, only neighbours need comparing
    when the tensor is cut along one dimension.
    """
    live: list[Extent] = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{name}: a piece has {len(sizes)} dimensions, the tensor {len(shape)}")
        for offset, size, length in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > length:
                raise CheckpointError(
                    f"{name}: the piece at {list(offsets)} of {list(sizes)} lies outside {list(shape)}"
                )
        if prod(sizes):
            live.append((offsets, sizes))
    volume, expected = sum(prod(sizes) for _, sizes in live), prod(shape)
    if not expected and boxes:
        # Nothing to cover, so the volumes say nothing: the pieces must at least reach the tensor's edges.
        reach = tuple(max(low[d] + size[d] for low, size in boxes) for d in range(len(shape)))
        if reach != shape:
            raise CheckpointError(f"{name}: empty pieces reach {list(reach)}, the tensor is {list(shape)}")
    if volume < expected:
        raise CheckpointError(
            f"{name}: {expected - volume} of {expected} elements are missing from the files"
        )
    if volume > expected:
        raise CheckpointError(f"{name}: pieces overlap, {volume} elements are stored for {expected}")
    if len(live) < 2:
        return
    # Where one cut is all, neighbours tell; else every corner does.
    dim = max(range(len(shape)), key=lambda d: len({str(offsets[d]) for offsets, _ in live}))
    live.sort(key=lambda box: box[0][dim])
    if all(low[0][dim] + low[1][dim] <= high[0][dim] for low, high in pairwise(live)):
        return
    point = _uneven(name, shape, live)
    if point is not None:
        cut, at = point
        both = [
            box
            for box in live
            if all(box[0][d] <= n < box[0][d] + box[1][d] for d, n in zip(cut, at, strict=True))
        ]
        if not both:
            raise CheckpointError(f"{name}: elements are missing from the files, and pieces overlap")
        where = " and ".join(str(list(offsets)) for offsets, _ in both[:2])
        raise CheckpointError(f"{name}: the pieces at {where} overlap")


def _uneven(
    name: str, shape: tuple[int, ...], boxes: Sequence[Extent]
) -> tuple[list[int], tuple[int, ...]] | None:
    """The first place that the boxes, of the volume of `shape`, do not cover once; None where there is none.

    Each box puts a sign on each of its corners, - where it ends along an odd number of dimensions, else +.
    How often a place is covered is the sum of the signs that lie before it along every dimension, and so
    the signs follow from what is covered, too. The boxes therefore cover `shape` once exactly if their signs
    and its own add up to the same at every corner. That takes n log n, however they lie.

    Returns:
        The dimensions that are cut, and the place along them.
    """
    cut = [d for d in range(len(shape)) if any(sizes[d] != shape[d] for _, sizes in boxes)]
    if len(boxes) << len(cut) > max(_CORNERS, len(boxes) << _MAX_CUT):
        raise CheckpointError(f"{name}: cut along {len(cut)} dimensions, which is not supported")
    corners: list[tuple[tuple[int, ...], int]] = []
    for sign, (offsets, sizes) in ((-1, ((0,) * len(shape), shape)), *((1, box) for box in boxes)):
        edges = [((offsets[d], 1), (offsets[d] + sizes[d], -1)) for d in cut]
        for corner in product(*edges):
            corners.append((tuple(at for at, _ in corner), sign * prod(one for _, one in corner)))
    corners.sort()
    total, last = 0, corners[0][0]
    for at, sign in corners:
        if at != last:
            if total:
                return cut, last
            total, last = 0, at
        total += sign
    return (cut, last) if total else None
