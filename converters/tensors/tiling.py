"""Do boxes tile a tensor exactly once?"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

Extent = tuple[tuple[int, ...], tuple[int, ...]]


def check_boxes_tile(name: str, shape: tuple[int, ...], boxes: Sequence[Extent]) -> None:
    """Raise CheckpointError unless the boxes (offsets, sizes) cover `shape` once: no gap, no overlap.

    Boxes that lie inside the shape, do not overlap, and have its volume together must tile it, so it is
    enough to look for overlaps. Sorted along the dimension that cuts most, only neighbours need comparing
    when the tensor is cut along one dimension; a grid costs the boxes that share a slab.
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
    dim = max(range(len(shape)), key=lambda d: len({offsets[d] for offsets, _ in live}))
    live.sort(key=lambda box: box[0][dim])
    if all(low[0][dim] + low[1][dim] <= high[0][dim] for low, high in pairwise(live)):
        return
    active: list[Extent] = []
    for box in live:
        start = box[0][dim]
        active = [other for other in active if other[0][dim] + other[1][dim] > start]
        for other in active:
            if _meet(box, other):
                raise CheckpointError(f"{name}: the pieces at {list(other[0])} and {list(box[0])} overlap")
        active.append(box)


def _meet(left: Extent, right: Extent) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(left[0], left[1], right[0], right[1], strict=True)
    )
