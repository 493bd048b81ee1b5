"""DCP's sharded safetensors, written by torch's own writer, against the live tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters import open_checkpoint
from tests.converters.compare import assert_model, assert_same, load


@pytest.mark.parametrize("name", ["sharded", "two-files", "consolidated", "with-moments", "grid"])
def test_every_save_bit_for_bit(written: Path, name: str) -> None:
    """Each file stands for all."""
    folder, reference = written / "safetensors" / name, load(written / f"safetensors+{name}.ref.pt")
    for path in (folder, max(folder.rglob("shard-00002-*"))):
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "dcp-safetensors"
        assert_model(checkpoint, reference["model"])
    if name == "with-moments":
        assert checkpoint.optimizer is not None
        for parameter, values in reference["optim"].items():
            assert_same(checkpoint.optimizer.state[parameter]["exp_avg"], values["exp_avg"])  # type: ignore[arg-type]
