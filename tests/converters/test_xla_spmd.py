"""PyTorch/XLA SPMD checkpoints: torch's DCP as torch_xla's planner fills it, against the live tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters import open_checkpoint


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
