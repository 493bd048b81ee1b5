"""Other readers of ZeRO checkpoints. ``test_moves`` tests moves, and ``test_fp16`` resumed 16-bit runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from portable.converters.cli import main as convert
from portable.run.rank import run_rank
from tests.runs import configured

pytest.importorskip("deepspeed")

from pathlib import Path

from tests.ranks import RankPool

COMMON: dict[str, Any] = {
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "data__eval_fraction": 0,
    "log__sample_tokens": 0,
}


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    return run_rank("cpu", configured(folder, corpus, **{**COMMON, **settings}))


def own_tool(folder: Path) -> dict[str, Any]:
    """Return the state that DeepSpeed's script reads from a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_checkpoint_conversion_matches_deepspeed_tool(
    strategy: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings = {"strategy": strategy, "precision": "bf16", "train__stop_after": 2}
    assert ranks.run(2, leg, tmp_path / "run", corpus, settings) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    theirs = ranks.run(1, own_tool, checkpoint)
    assert convert([str(tmp_path / "run"), str(tmp_path / "out"), "--optimizer", "--quiet"]) == 0
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() <= theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    moments = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert float(moments["model.norm.weight.step"]) == 2
    assert all(np.any(moments[f"{name}.exp_avg_sq"]) for name in ours)
