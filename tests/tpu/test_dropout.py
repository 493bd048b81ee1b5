"""Dropout masks depend on the position: each device draws its part of one mask."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from portable.tpu.compile.hlo import HloModule
from tests.runs import TINY_MODEL, configured
from tests.tpu.test_trace import DEVICES, traced
from tests.xla import XlaPool


def keyed(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.randint(0, 1 << 31, (2,), generator=torch.Generator().manual_seed(seed)).int()
    return first, second


def z_scores(mask: torch.Tensor, p: float) -> list[float]:
    """Return the deviations of a mask's mean and of the correlations of neighbors, in standard deviations."""
    centered = mask.double() - p
    found = [float(centered.sum()) / math.sqrt(p * (1 - p) * mask.numel())]
    for dim, size in enumerate(mask.shape):
        for lag in (1, 2, 16):
            if lag < size:
                pairs = centered.narrow(dim, 0, size - lag) * centered.narrow(dim, lag, size - lag)
                found.append(float(pairs.sum()) / (p * (1 - p) * math.sqrt(pairs.numel())))
    return found


@pytest.mark.parametrize("p", [0.9, 0.5, 0.01])
def test_dropout_masks_are_random(p: float) -> None:
    from portable.tpu.xla.dropout import draw_dropout_mask

    shape = torch.Size((4, 8, 64, 128))
    first, second = keyed(0)
    keys = [(first, second), (first + 1, second), (first, second + 1), (first ^ (1 << 30), second)]
    masks = torch.stack([draw_dropout_mask(shape, key, p) for key in keys])
    assert max(map(abs, z_scores(masks, p))) < 4.5  # 16 figures: one in ten thousand times


def dropped() -> list[torch.Tensor]:
    from portable.config import load_config
    from portable.tpu.xla import runtime
    from portable.tpu.xla.dropout import use_positional_dropout
    from portable.tpu.xla.layout import MeshLayout
    from portable.tpu.xla.runtime import xr
    from portable.tpu.xla.torch_xla_internals import xla

    runtime.start_xla_runtime()
    use_positional_dropout()
    layout = MeshLayout(load_config(None, {"backend": "xla"}), int(xr.addressable_runtime_device_count()))
    xla.set_rng_seed(7, "xla:0")
    ones = torch.ones(8, 16, 33, device="xla:0")
    xla.mark_sharding(ones, layout.to_op_sharding(layout.get_batch_spec(3)))
    first, second = (torch.nn.functional.dropout(ones, 0.25) for _ in range(2))
    return [first.cpu(), second.cpu()]


def test_dropout_mask_does_not_depend_on_devices(xla: XlaPool) -> None:
    alone, shared = xla.run(1, dropped), xla.run(4, dropped)
    for ours, theirs in zip(alone, shared, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(alone[0], alone[1])
    assert set(alone[0].unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert abs(float((alone[0] == 0).float().mean()) - 0.25) < 0.04


def test_dropout_draws_only_own_part(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    """The compiler does not partition random bit generators, so only keys may come from one."""
    config = configured(
        tmp_path / "run",
        corpus,
        backend="xla",
        log__sample_tokens=0,
        data__eval_fraction=0,
        train__micro_batch_size=2,
        train__global_batch_size=8,
        model__config={**TINY_MODEL, "num_hidden_layers": 1, "attention_dropout": 0.1},
    )
    (name,) = xla.run(DEVICES, traced, config, tmp_path, environment={"XLA_HLO_DEBUG": "1"})
    module = HloModule((tmp_path / f"{name}.hlo.pb").read_bytes())
    drawing = [
        instruction
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "rng-bit-generator"
    ]
    assert drawing
    assert max(sum(array.num_elements for array in one.result_arrays) for one in drawing) <= 4
