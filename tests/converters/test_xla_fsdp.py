"""PyTorch/XLA FSDP v1 shard files and SPMD checkpoints, compared with the live shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from portable.converters import CheckpointError, open_checkpoint
from tests.converters.compare import assert_model, assert_optimizer, load

EXAMPLE = "ckpt_rank-{:08d}-of-00000003.pth"


def test_xla_fsdp_checkpoint_opens_by_any_rank_file(written_xla: Path, tmp_path: Path) -> None:
    """The folder has two steps and a consolidated file."""
    for step in (1, 2):
        for rank in range(3):
            name = EXAMPLE.format(rank)
            shutil.copy(written_xla / "flat3" / name, tmp_path / f"step{step}_{name}")
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "step1_consolidated.pth")
    with pytest.raises(CheckpointError, match="several checkpoints"):
        open_checkpoint(tmp_path)
    reference = load(written_xla / "flat3.ref.pt")
    assert_model(open_checkpoint(tmp_path / f"step2_{EXAMPLE.format(1)}"), reference["model"])
    assert_model(
        open_checkpoint(written_xla / "flat4" / "piece.b.pt"), load(written_xla / "flat4.ref.pt")["model"]
    )
    assert_model(
        open_checkpoint(written_xla / "each1" / "piece.a.pt"), load(written_xla / "each1.ref.pt")["model"]
    )


def test_xla_fsdp_trainer_folder_is_read(written_xla: Path, tmp_path: Path) -> None:
    """The Trainer writes consolidated weights next to the shards. Only the shards have the optimizer."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(written_xla / "trainer3", folder)
    torch.save({"arguments": 1}, folder / "training_args.bin")
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    reference = load(written_xla / "trainer3.ref.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert_model(checkpoint, reference["model"])
    assert_optimizer(checkpoint, reference)
    for rank in range(3):
        (folder / f"rank{rank}-of-3-optimizer.pt").unlink()
    assert open_checkpoint(folder).optimizer is None
