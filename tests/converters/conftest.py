"""Checkpoints written by torch, DeepSpeed and torch_xla, once per test session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.converters.making import written_by
from tests.converters.samples import MAKERS, ORBAX


def made(fixture: str) -> Any:
    """Return a fixture with a folder of checkpoints, each with a file `<name>.ref.pt` of expected values."""

    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        if fixture in OF_DEEPSPEED:
            pytest.importorskip("deepspeed")
        if fixture == "written_items":
            pytest.importorskip("torch_checkpointing")
        return written_by(MAKERS[fixture], tmp_path_factory)

    return pytest.fixture(folder, scope="session", name=fixture)


OF_DEEPSPEED = {
    "deepspeed_written",
    "deepspeed_parallel",
    "deepspeed_nvme",
    "universal_loads",
    "adapters",
    "damaged",
    "every_damaged",
}
written, written_ranks = made("written"), made("written_ranks")
deepspeed_written, deepspeed_parallel = made("deepspeed_written"), made("deepspeed_parallel")
deepspeed_nvme, universal_loads = made("deepspeed_nvme"), made("universal_loads")
adapters, written_megatron = made("adapters"), made("written_megatron")
written_items = made("written_items")
damaged, every_damaged = made("damaged"), made("every_damaged")


@pytest.fixture(scope="session")
def written_xla(torch_xla: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of PyTorch/XLA checkpoints, each with a file `<name>.ref.pt`."""
    return written_by(MAKERS["written_xla"], tmp_path_factory)


@pytest.fixture(scope="session")
def written_universal(deepspeed_written: Path) -> Path:
    """Return universal checkpoints of some of these runs, each with a file `<name>.2.ref.pt`."""
    return deepspeed_written / "universal"


@pytest.fixture(scope="session")
def orbax_samples() -> Path:
    """Return a folder of Orbax checkpoints, which is part of the repository."""
    return ORBAX
