"""Tensors in pieces and casts of tensors, compared with numpy and torch."""

from __future__ import annotations

import random
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from portable.converters import CheckpointError, Tensor
from portable.converters.cli import main
from portable.converters.names.tied_weights import are_tensors_equal
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.tensors import tensor as tensor_module
from portable.converters.tensors.casting import CastLosses, iter_cast_blocks
from portable.converters.tensors.dtypes import to_numpy_dtype
from portable.converters.tensors.tensor import Box, View
from portable.converters.tensors.tiling import check_boxes_cover_once

Cut = tuple[tuple[int, ...], tuple[int, ...]]


def cut(rng: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> list[Cut]:
    """Return a random guillotine tiling."""
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
    """Return the pieces of `array`, each a view of a larger storage, some with permuted dimensions."""
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
        boxes.append(Box(*piece, View(InMemorySource(padded.tobytes()), at, tuple(strides))))
    return boxes


@pytest.mark.parametrize("seed", range(15))
def test_tensor_of_boxes_reads_like_numpy(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        blocks = [block.copy() for block in tensor.iter_blocks(size, set())]
        assert max(block.nbytes for block in blocks) <= max(size, array.itemsize)
        assert np.array_equal(np.concatenate(blocks), array.reshape(-1))


@pytest.mark.parametrize("seed", range(12))
def test_check_boxes_cover_once_accepts_only_exact_tilings(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randrange(2, 7) for _ in range(rng.randrange(1, 4)))
    cuts = cut(rng, (0,) * len(shape), shape, 5)
    check_boxes_cover_once("t", shape, [*cuts, ((0,) * len(shape), (0, *shape[1:]))])
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
            check_boxes_cover_once("t", shape, boxes)
        else:
            with pytest.raises(CheckpointError):
                check_boxes_cover_once("t", shape, boxes)


def test_are_tensors_equal_compares_bits() -> None:
    def of(*values: float) -> Tensor:
        return Tensor.from_source("x", "F32", (2,), InMemorySource(np.array(values, np.float32).tobytes()))

    assert are_tensors_equal(of(1, 0), of(1, 0))
    assert not are_tensors_equal(of(1, 0), of(1, 2))
    assert not are_tensors_equal(of(1, 0), of(1, -0.0))


# -- casts ---------------------------------------------------------------------------------------------------


def cast(values: np.ndarray[Any, Any], source: str, target: str) -> np.ndarray[Any, Any]:
    tensor = Tensor.from_source("t", source, values.shape, InMemorySource(values.tobytes()))
    losses = CastLosses()
    made = np.concatenate(
        [block.copy() for block in iter_cast_blocks(tensor, target, set(), block_bytes=4096, losses=losses)]
    )
    with np.errstate(all="ignore"):
        before, after = (
            np.frombuffer(values.tobytes(), to_numpy_dtype(source)).astype(np.float64),
            made.astype(np.float64),
        )
    assert losses.num_infinite == np.count_nonzero(np.isinf(after) & ~np.isinf(before))
    assert losses.num_zero == np.count_nonzero((after == 0) & (before != 0))
    return made


def hard_cases() -> np.ndarray[Any, Any]:
    """Return ties of bfloat16 and their neighbors in float64, subnormals, limits, infinities, and NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, 4000).astype(np.uint32) << 16
    ties = (bits | 0x8000).view(np.float32).astype(np.float64)
    around = [ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), ties * (1 + 2.0**-40)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1e-45, 3.4e38, 3.3961e38, 1e39, -1e300]
    return np.concatenate([*around, rng.standard_normal(2000), np.array(special)])


def nearest_bfloat16(value: float) -> float:
    """Round to bfloat16 by exact arithmetic."""
    if not np.isfinite(value) or value == 0:
        return value
    exact = Fraction(value)
    exponent = max(int(np.frexp(value)[1]) - 8, -133)
    step = Fraction(2) ** exponent
    count = round(exact / step)  # Python rounds ties to even
    rounded = count * step
    if abs(rounded) >= Fraction(2) ** 128:
        return float(np.copysign(np.inf, value))
    return float(np.copysign(float(rounded), value))


@pytest.mark.filterwarnings("ignore")
def test_cast_float64_to_bfloat16_rounds_once() -> None:
    values = hard_cases()
    ours = cast(values, "F64", "BF16").astype(np.float64)
    theirs = np.array([nearest_bfloat16(float(value)) for value in values])
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours), np.signbit(theirs) | (np.isnan(ours) & np.signbit(ours)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "target"),
    [("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("F16", "BF16"), ("BF16", "F16"), ("F64", "F32")],
)
def test_cast_matches_torch(source: str, target: str) -> None:
    """The values are all 16-bit values, or for fp32 random bits of every exponent, ties, and NaN payloads."""
    types = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    values = torch.from_numpy(hard_cases()).to(types[source])
    if values.element_size() == 2:
        values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(types[source])
    if source == "F32":
        draws = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
        nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F80FFFF], np.uint32)
        values = torch.cat([values, *(torch.from_numpy(bits.view(np.float32)) for bits in (draws, nans))])
    raw = values.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()]).numpy()
    ours = cast(raw, source, target).astype(np.float64)
    theirs = values.to(types[target]).double().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(theirs)]))


def test_cast_keeps_dtype_of_scales_and_reports_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules of FP8, GPTQ, bitsandbytes and torchao keep their scales. Other modules are cast."""
    kept = {
        "fp8.weight_scale_inv": torch.rand(2, 2),
        "gptq.scales": torch.rand(2, 8),
        "nf4.weight.absmax": torch.rand(4),
        "torchao._weight_scale": torch.rand(8, 1),
    }
    beside = {
        "fp8.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        "gptq.qweight": torch.ones(1, 8, dtype=torch.int32),
        "nf4.weight": torch.ones(8, 1, dtype=torch.uint8),
        "nf4.weight.quant_state.bitsandbytes__nf4": torch.ones(8, dtype=torch.uint8),
        "torchao._weight_qdata": torch.ones(8, 8, dtype=torch.int8),
    }
    wide = torch.tensor([1e6, 1.0, float("nan"), -1e6, 1e-30, float("inf"), 0.0])
    cast = {
        "gptq.bias": torch.rand(8),
        "attn.table": wide,
        "moe.weight": torch.rand(4),
        "seq.bias": torch.rand(4),
    }
    # Integer buffers do not make their modules quantized.
    beside["moe.hash_table"] = torch.ones(4, 4, dtype=torch.uint8)
    beside["seq.mask"] = torch.ones(4, dtype=torch.int8)
    save_file({**kept, **beside, **cast, "attn.index": torch.arange(4)}, tmp_path / "model.safetensors")
    assert main([str(tmp_path / "model.safetensors"), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in {**kept, **beside}.items():
        assert found[name].dtype == value.dtype, name
    assert all(found[name].dtype == torch.float16 for name in cast)
    told = (
        "note: 2 values became infinite and 1 value became 0 in the cast to float16 (--dtype), for example in"
    )
    assert capsys.readouterr().err.count(f"{told} 'attn.table'") == 1
