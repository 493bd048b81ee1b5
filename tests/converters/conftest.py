"""Checkpoints that torch, DeepSpeed and torch_xla wrote, made once a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.converters.making import written_by
from tests.converters.samples import MAKERS, ORBAX


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DCP checkpoints from 1 to 4 ranks, with `<name>.ref.pt` beside each."""
    return written_by(MAKERS["written"], tmp_path_factory)


@pytest.fixture(scope="session")
def written_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints with one torch.save file a rank, with `<name>.ref.pt` beside each."""
    return written_by(MAKERS["written_ranks"], tmp_path_factory)


@pytest.fixture(scope="session")
def written_xla(torch_xla: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PyTorch/XLA checkpoints, with `<name>.ref.pt` beside each."""
    return written_by(MAKERS["written_xla"], tmp_path_factory)


@pytest.fixture(scope="session")
def deepspeed_written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSpeed checkpoints from 1 to 4 ranks, with `<name>.<step>.ref.pt` beside each."""
    pytest.importorskip("deepspeed")
    return written_by(MAKERS["deepspeed_written"], tmp_path_factory)


@pytest.fixture(scope="session")
def deepspeed_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSpeed checkpoints with stages, experts or tensor parallel ranks."""
    pytest.importorskip("deepspeed")
    return written_by(MAKERS["deepspeed_parallel"], tmp_path_factory)


@pytest.fixture(scope="session")
def written_universal(deepspeed_written: Path) -> Path:
    """Some of these runs made universal, with `<name>.2.ref.pt` beside each."""
    return deepspeed_written / "universal"


@pytest.fixture(scope="session")
def orbax_samples() -> Path:
    """A folder of Orbax's checkpoints, kept beside the tests."""
    return ORBAX


@pytest.fixture(scope="session")
def written_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Megatron-LM's and Megatron-Core's checkpoints, with `<name>.logits.pt` beside."""
    return written_by(MAKERS["written_megatron"], tmp_path_factory)
