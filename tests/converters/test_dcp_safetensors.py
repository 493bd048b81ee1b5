"""DCP's sharded safetensors, written by torch's own writer, against the live tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from converters import open_checkpoint
from tests.converters.compare import assert_model, assert_same, load


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for name, value in load(folder / "ref.pt")["model"].items() if name != "lm_head.weight"
    }


@pytest.mark.parametrize("name", ["sharded", "two-files", "consolidated", "with-moments", "grid"])
def test_every_save_bit_for_bit(written_dcp_safetensors: Path, name: str) -> None:
    checkpoint = open_checkpoint(written_dcp_safetensors / name)
    assert checkpoint.format == "dcp-safetensors"
    expected = weights(written_dcp_safetensors)
    if name == "consolidated":
        expected = {name: value for name, value in expected.items() if value.is_floating_point()}
    if name == "grid":
        expected = load(written_dcp_safetensors / "grid.ref.pt")["model"]
    assert_model(checkpoint, expected)
    if name == "with-moments":
        assert checkpoint.optimizer is not None
        for parameter, values in load(written_dcp_safetensors / "ref.pt")["optim"].items():
            assert_same(checkpoint.optimizer.state[parameter]["exp_avg"], values["exp_avg"])  # type: ignore[arg-type]


def test_one_shard_stands_for_all(written_dcp_safetensors: Path) -> None:
    path = written_dcp_safetensors / "sharded" / "shard-00002-model-00001-of-00001.safetensors"
    assert_model(open_checkpoint(path), weights(written_dcp_safetensors))
