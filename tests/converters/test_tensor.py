"""Tensors in pieces, against numpy."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
import pytest

from converters import CheckpointError, Tensor
from converters.names.tied_weights import same_values
from converters.storage.bytes import Memory
from converters.tensors import tensor as tensor_module
from converters.tensors.tensor import Box, View
from converters.tensors.tiling import check_boxes_tile

Cut = tuple[tuple[int, ...], tuple[int, ...]]


def cut(rng: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> list[Cut]:
    """A random guillotine tiling."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if depth == 0 or not dims:
        return [(offsets, sizes)]
    dim = rng.choice(dims)
    at = rng.randrange(1, sizes[dim])
    left = (*sizes[:dim], at, *sizes[dim + 1 :])
    right = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
    start = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    return cut(rng, offsets, left, depth - 1) + cut(rng, start, right, depth - 1)


def region(cut: Cut) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(*cut, strict=True))


def scattered(rng: random.Random, array: np.ndarray[Any, Any], cuts: list[Cut]) -> list[Box]:
    """The pieces of `array`, each a view of a larger storage, some with their dimensions permuted."""
    boxes = []
    for piece in cuts:
        part = array[region(piece)]
        order = rng.sample(range(part.ndim), part.ndim)
        padded = np.zeros([size + rng.randrange(2) for size in np.transpose(part, order).shape], part.dtype)
        inside = padded[tuple(slice(-size, None) for size in np.transpose(part, order).shape)]
        inside[...] = np.transpose(part, order)
        at = inside.__array_interface__["data"][0] - padded.__array_interface__["data"][0]
        strides = [0] * part.ndim
        for dim, stride in zip(order, inside.strides, strict=True):
            strides[dim] = stride
        boxes.append(Box(*piece, View(Memory(padded.tobytes()), at, tuple(strides))))
    return boxes


@pytest.mark.parametrize("seed", range(15))
def test_boxes_read_like_numpy(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(tensor_module, "SCRATCH_BYTES", rng.choice([16, 64, 4 << 20]))
    shape = tuple(rng.randrange(1, 8) for _ in range(rng.randrange(1, 5)))
    array = np.arange(prod(shape), dtype=rng.choice(["<i8", "<f4", "u1"])).reshape(shape)
    boxes = scattered(rng, array, cut(rng, (0,) * len(shape), shape, rng.randrange(6)))
    rng.shuffle(boxes)
    dtype = {"i": "I64", "f": "F32", "u": "U8"}[array.dtype.kind]
    tensor = Tensor("t", dtype, shape, boxes)
    assert np.array_equal(tensor.read(), array)
    for _ in range(20):
        index = tuple(slice(*sorted((rng.randrange(n + 1), rng.randrange(n + 1)))) for n in shape)
        assert np.array_equal(tensor.read(index), array[index])
    for size in (1, 16, 100, 1 << 20):
        blocks = [block.copy() for block in tensor.blocks(size, set())]
        assert max(block.nbytes for block in blocks) <= max(size, array.itemsize)
        assert np.array_equal(np.concatenate(blocks), array.reshape(-1))


@pytest.mark.parametrize("seed", range(12))
def test_tiling_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randrange(2, 7) for _ in range(rng.randrange(1, 4)))
    cuts = cut(rng, (0,) * len(shape), shape, 5)
    check_boxes_tile("t", shape, [*cuts, ((0,) * len(shape), (0, *shape[1:]))])
    for _ in range(30):
        wrong = [list(map(list, piece)) for piece in cuts]
        piece = rng.choice(wrong)
        piece[rng.randrange(2)][rng.randrange(len(shape))] += rng.choice([-1, 1])
        boxes = [(tuple(low), tuple(size)) for low, size in wrong]
        if rng.random() < 0.3:
            boxes = [*boxes[1:], rng.choice(cuts)]
        inside = all(
            low >= 0 and size >= 0 and low + size <= length
            for box in boxes
            for low, size, length in zip(*box, shape, strict=True)
        )
        count = np.zeros(shape, int)
        if inside:
            for box in boxes:
                count[region(box)] += 1
        if inside and (count == 1).all():
            check_boxes_tile("t", shape, boxes)
        else:
            with pytest.raises(CheckpointError):
                check_boxes_tile("t", shape, boxes)


def test_tiling_of_many_pieces_is_quick() -> None:
    check_boxes_tile("t", (1 << 38, 8), [((i << 24, 0), (1 << 24, 8)) for i in range(1 << 14)])
    grid = [((i, j), (1, 1)) for i in range(64) for j in range(256)]
    check_boxes_tile("t", (64, 256), grid)


def test_impossible_tensors_are_refused() -> None:
    for shape in ((1 << 62, 1 << 62), (-1,), (1,) * 65):
        with pytest.raises(CheckpointError, match="impossible"):
            Tensor.contiguous("t", "F32", shape, Memory(b""))
    with pytest.raises(CheckpointError, match="Q9"):
        Tensor.contiguous("t", "Q9", (1,), Memory(b"    "))
    with pytest.raises(CheckpointError, match="dimensions"):
        Tensor("t", "F32", (1, 1), [Box((0,), (1,), View(Memory(b"    "), 0, (4,)))])


def test_values_are_the_same_bit_for_bit() -> None:
    def of(*values: float) -> Tensor:
        return Tensor.contiguous("x", "F32", (2,), Memory(np.array(values, np.float32).tobytes()))

    assert same_values(of(1, 0), of(1, 0))
    assert not same_values(of(1, 0), of(1, 2))
    assert not same_values(of(1, 0), of(1, -0.0))
