"""What other projects' own functions write, and what those that read it make of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from converters import CheckpointError, open_checkpoint
from converters.cli import main
from converters.names.module_order import MODEL_TYPES, module_order
from tests.converters import make_peers
from tests.converters.compare import (
    assert_model,
    assert_optimizer,
    assert_state,
    bits,
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
def test_bit_for_bit_with_the_live_run(peers: Path, name: str) -> None:
    reference = load(peers / f"{name}.ref.pt")
    checkpoint = open_checkpoint(peers / name)
    assert checkpoint.format == ("torch" if name == "fsdp2-full" else "dcp")
    assert_model(checkpoint, reference["model"])
    assert_optimizer(checkpoint, reference)


def test_a_metadata_file_from_each_rank(peers: Path, tmp_path: Path) -> None:
    names = {path.name for path in (peers / "alone").iterdir()}
    assert {"__0.metadata", "__1.metadata"} <= names and ".metadata" not in names
    for lost in ("__0.metadata", "__1.metadata", "__1_0.distcp"):
        shutil.copytree(peers / "alone", tmp_path / lost)
        (tmp_path / lost / lost).unlink()
        with pytest.raises(CheckpointError):
            checkpoint = open_checkpoint(tmp_path / lost)
            [tensor.read() for tensor in checkpoint.tensors.values()]


@pytest.mark.parametrize("version", [1, 2])
def test_the_same_as_torch_and_accelerate_merge(peers: Path, tmp_path: Path, version: int) -> None:
    from accelerate.utils import merge_fsdp_weights

    step = peers / f"fsdp{version}-sharded"
    assert main([str(step), str(tmp_path / "ours"), "--quiet", "--optimizer", "--verify"]) == 0
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    dcp_to_torch_save(step / "pytorch_model_fsdp_0", tmp_path / "model.pt")
    theirs = load(tmp_path / "model.pt")["model"]
    checkpoint = open_checkpoint(step)
    assert_model(checkpoint, theirs)
    assert set(ours) == set(theirs) - set(checkpoint.aliases)
    assert all(bits(ours[name]) == bits(theirs[name]) for name in ours)
    dcp_to_torch_save(step / "optimizer_0", tmp_path / "optimizer.pt")
    state = load(tmp_path / "optimizer.pt")["optimizer"]
    assert_state(checkpoint, state["state"])
    merge_fsdp_weights(str(step / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(bits(merged[name]) == bits(value) for name, value in ours.items() if name in merged)
    assert set(merged) | set(checkpoint.aliases) >= set(ours)


HEADS = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_the_known_orders_are_those_of_the_models(tmp_path: Path, kind: str) -> None:
    with torch.device("meta"):
        model = tiny_model(kind, HEADS.get(kind, "AutoModelForCausalLM"))
    names = [name for name, _ in model.named_parameters()]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert module_order(sorted(names), tmp_path / "config.json") == names
    assert module_order([*names, "new.weight"], tmp_path / "config.json") is None
