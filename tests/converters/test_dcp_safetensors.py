"""DCP's sharded safetensors, written by torch's own writer, against the live tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from converters import CheckpointError, open_checkpoint
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


def test_a_missing_shard_is_not_zeros(written_dcp_safetensors: Path, tmp_path: Path) -> None:
    """torch's consolidation writes zeros for it without a word."""
    told = {1: "shard 00001, model 00001", 2: "shard 00002, model 00001", 3: "a shard is missing"}
    for number, why in told.items():
        folder = tmp_path / str(number)
        shutil.copytree(written_dcp_safetensors / "consolidated", folder)
        (folder / "sharded" / f"shard-{number:05d}-model-00001-of-00001.safetensors").unlink()
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(folder)
    folder = tmp_path / "two"
    shutil.copytree(written_dcp_safetensors / "two-files", folder)
    (folder / "shard-00002-model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard 00002, model 00001 is missing"):
        open_checkpoint(folder)
    shutil.copytree(written_dcp_safetensors / "consolidated", folder := tmp_path / "odd")
    one = folder / "sharded" / "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(one, one.with_name("shard-00001-model-00003-of-00001.safetensors"))
    with pytest.raises(CheckpointError, match="holds files with other numbers"):
        open_checkpoint(folder)
