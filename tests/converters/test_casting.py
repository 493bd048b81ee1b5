"""Casts round once, to nearest with ties to even, whatever numpy and ml_dtypes do on the way."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from converters import Tensor
from converters.cli import main
from converters.storage.bytes import Memory
from converters.tensors.casting import Losses, cast_blocks
from converters.tensors.dtypes import numpy_dtype


def cast(values: np.ndarray[Any, Any], source: str, target: str) -> np.ndarray[Any, Any]:
    tensor = Tensor.contiguous("t", source, values.shape, Memory(values.tobytes()))
    losses = Losses()
    made = np.concatenate(
        [block.copy() for block in cast_blocks(tensor, target, set(), nbytes=4096, losses=losses)]
    )
    with np.errstate(all="ignore"):
        before, after = (
            np.frombuffer(values.tobytes(), numpy_dtype(source)).astype(np.float64),
            made.astype(np.float64),
        )
    assert losses.infinite == np.count_nonzero(np.isinf(after) & ~np.isinf(before))
    assert losses.zero == np.count_nonzero((after == 0) & (before != 0))
    return made


def hard_cases() -> np.ndarray[Any, Any]:
    """Ties of bfloat16, and their neighbors in float64; subnormals, limits, infinities, NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, 4000).astype(np.uint32) << 16
    ties = (bits | 0x8000).view(np.float32).astype(np.float64)
    around = [ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), ties * (1 + 2.0**-40)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1e-45, 3.4e38, 3.3961e38, 1e39, -1e300]
    return np.concatenate([*around, rng.standard_normal(2000), np.array(special)])


def nearest_bfloat16(value: float) -> float:
    """By exact arithmetic."""
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
def test_float64_to_bfloat16_rounds_once() -> None:
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
def test_as_torch_casts(source: str, target: str) -> None:
    """Every 16-bit value; for fp32 random bits of every exponent, ties, NaN with any payload."""
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


def test_scales_of_quantized_weights_keep_their_dtype_and_losses_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules of FP8, GPTQ and bitsandbytes; another module with numbers in it is cast."""
    kept = {
        "fp8.weight_scale_inv": torch.rand(2, 2),
        "gptq.scales": torch.rand(2, 8),
        "nf4.weight.absmax": torch.rand(4),
    }
    beside = {
        "fp8.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        "gptq.qweight": torch.ones(1, 8, dtype=torch.int32),
        "nf4.weight": torch.ones(8, 1, dtype=torch.uint8),
        "nf4.weight.quant_state.bitsandbytes__nf4": torch.ones(8, dtype=torch.uint8),
    }
    wide = torch.tensor([1e6, 1.0, float("nan"), -1e6, 1e-30, float("inf"), 0.0])
    cast = {"gptq.bias": torch.rand(8), "attn.table": wide}
    save_file({**kept, **beside, **cast, "attn.index": torch.arange(4)}, tmp_path / "model.safetensors")
    assert main([str(tmp_path / "model.safetensors"), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in {**kept, **beside}.items():
        assert found[name].dtype == value.dtype, name
    assert all(found[name].dtype == torch.float16 for name in cast)
    told = "note: 2 values became infinite and 1 values became 0 in --dtype float16, some of them in"
    assert capsys.readouterr().err.count(f"{told} 'attn.table'") == 1
