"""PyTorch/XLA SPMD checkpoints: torch's DCP as torch_xla's planner fills it, against the live tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from converters import CheckpointError, open_checkpoint
from tests.converters.compare import assert_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("run", "cut"),
    [
        ("spmd-primed", {(0, 0), (0, 7), (3, 0), (3, 7)}),
        ("spmd", {(0, 0), (0, 4), (0, 8), (0, 12)}),
    ],
)
def test_pieces_are_those_of_the_devices(written_xla: Path, run: str, cut: set[tuple[int, int]]) -> None:
    checkpoint = open_checkpoint(written_xla / run)
    assert checkpoint.aliases == {"lm_head.weight": "embed_tokens.weight"}
    assert {box.offsets for box in checkpoint.tensors["layers.0.down.weight"].boxes} == cut


def test_index_keys_in_doubt(tmp_path: Path) -> None:
    """One parameter of two alike was frozen and left out: which one, nothing tells."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp_save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "step")
    checkpoint = open_checkpoint(tmp_path / "step")
    assert_model(checkpoint, model.state_dict())
    with pytest.raises(CheckpointError, match="several ways"):
        _ = checkpoint.optimizer
