"""DCP written without torch, read back by torch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from converters import open_checkpoint
from converters.cli import main
from converters.writers.torchzip_writer import pickle, saved
from tests.converters.compare import assert_model, assert_optimizer, bits, load


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else value


def test_torch_loads_what_fsdp_wrote_and_we_rewrote(written: Path, tmp_path: Path) -> None:
    reference = load(written / "fsdp3-ours.ref.pt")
    argv = [str(written / "fsdp3-ours"), str(tmp_path / "out"), "--to", "dcp", "--optimizer", "--verify"]
    assert main([*argv, "--max-shard-size", "500", "--quiet"]) == 0
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1
    assert "lm_head.weight" in reference["model"]  # tied: a live model asks for it
    groups = [{"lr": 0.0, "params": []} for _ in reference["groups"]]
    state: dict[str, Any] = {
        "model": blank(reference["model"]),
        "optim": {"state": blank(reference["optim"]), "param_groups": groups},
    }
    dcp_load(state, checkpoint_id=tmp_path / "out")
    for name, value in reference["model"].items():
        assert bits(state["model"][name]) == bits(value)
    for name, values in reference["optim"].items():
        assert all(bits(state["optim"]["state"][name][what]) == bits(value) for what, value in values.items())
    assert state["optim"]["param_groups"][0]["lr"] == 0.01
    assert state["optim"]["param_groups"][0]["params"] == reference["groups"][0]["params"]
    again = open_checkpoint(tmp_path / "out")
    assert_optimizer(again, reference)
    assert "lm_head.weight" in again.aliases
    assert_model(again, reference["model"])


def test_values(tmp_path: Path) -> None:
    value: dict[str, Any] = {"a": [1, -1, 255, 256, -(1 << 40), 1 << 62, 0.5, True, None], "é": ("x", {}, [])}
    path = tmp_path / "v.pt"
    (data,) = saved(value)
    assert isinstance(data, bytes)
    path.write_bytes(data)
    assert torch.load(path, weights_only=True) == value
    with pytest.raises(TypeError):
        pickle(object())
