"""Checkpoints written by functions of other projects, and our checkpoints read by other projects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from portable.converters import CheckpointError, open_checkpoint
from portable.converters.names.module_order import MODEL_TYPES, sort_in_module_order
from tests.converters import make_peers
from tests.converters.compare import (
    assert_model,
    assert_optimizer,
    assert_state,
    load,
)
from tests.ranks import RankPool
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def peers(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("peers")
    ranks.run(2, make_peers.alone, out, timeout=300)
    ranks.run(2, make_peers.accelerate, out, timeout=300)
    return out


@pytest.mark.parametrize("name", ["fsdp2-full", "alone"])
def test_accelerate_and_dcp_checkpoints_equal_live_run(peers: Path, name: str) -> None:
    reference = load(peers / f"{name}.ref.pt")
    checkpoint = open_checkpoint(peers / name)
    assert checkpoint.format == ("torch" if name == "fsdp2-full" else "dcp")
    assert_model(checkpoint, reference["model"])
    assert_optimizer(checkpoint, reference)


def test_dcp_with_metadata_per_rank_needs_all_files(peers: Path, tmp_path: Path) -> None:
    names = {path.name for path in (peers / "alone").iterdir()}
    assert {"__0.metadata", "__1.metadata"} <= names and ".metadata" not in names
    for lost in ("__0.metadata", "__1.metadata", "__1_0.distcp"):
        shutil.copytree(peers / "alone", tmp_path / lost)
        (tmp_path / lost / lost).unlink()
        with pytest.raises(CheckpointError):
            checkpoint = open_checkpoint(tmp_path / lost)
            [tensor.read() for tensor in checkpoint.tensors.values()]


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_sharded_checkpoint_equals_torch_merge(peers: Path, tmp_path: Path, version: int) -> None:
    step = peers / f"fsdp{version}-sharded"
    dcp_to_torch_save(step / "pytorch_model_fsdp_0", tmp_path / "model.pt")
    checkpoint = open_checkpoint(step)
    assert_model(checkpoint, load(tmp_path / "model.pt")["model"])
    dcp_to_torch_save(step / "optimizer_0", tmp_path / "optimizer.pt")
    assert_state(checkpoint, load(tmp_path / "optimizer.pt")["optimizer"]["state"])


HEADS = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_sort_in_module_order_matches_models(tmp_path: Path, kind: str) -> None:
    with torch.device("meta"):
        model = tiny_model(kind, HEADS.get(kind, "AutoModelForCausalLM"))
    names = [name for name, _ in model.named_parameters()]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert sort_in_module_order(sorted(names), tmp_path / "config.json") == names
    assert sort_in_module_order([*names, "new.weight"], tmp_path / "config.json") is None
