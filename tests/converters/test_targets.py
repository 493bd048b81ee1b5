"""Converted checkpoints in their target programs: they load with the optimizer and continue as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from portable.converters import Checkpoint, CheckpointError, OptimizerState, open_checkpoint, write_checkpoint
from portable.converters.cli import main
from tests.converters.compare import assert_same, assert_state, bits, load
from tests.converters.make_ranks import Stack
from tests.converters.test_dcp import blank
from tests.converters.test_safetensors import WEIGHTS, model

# -- torch ---------------------------------------------------------------------------------------------------


def test_torch_loads_converted_state_dict_with_ties(written_ranks: Path, tmp_path: Path) -> None:
    reference = load(written_ranks / "fsdp2-3.ref.pt")
    argv = [str(written_ranks / "fsdp2-3"), str(tmp_path / "out"), "--to", "torch", "--optimizer", "--verify"]
    assert main([*argv, "--quiet"]) == 0
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert state.keys() == reference["model"].keys()
    assert all(bits(state[name]) == bits(value) for name, value in reference["model"].items())
    assert state["lm_head.weight"].data_ptr() == state["embed_tokens.weight"].data_ptr()
    mapped = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True, mmap=True)
    assert all(value.data_ptr() % 64 == 0 for value in mapped.values())


def test_converted_state_dict_has_every_dtype(tmp_path: Path) -> None:
    write_checkpoint(open_checkpoint(model(tmp_path / "in")), tmp_path / "out", "torch", verify=True)
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert {name: bits(value) for name, value in state.items()} == {k: bits(v) for k, v in WEIGHTS.items()}
    assert all(state[name].shape == value.shape for name, value in WEIGHTS.items())


def test_torch_optimizer_continues_from_conversion(universal_loads: Path, tmp_path: Path) -> None:
    """FSDP2's two groups continue in one process. The next step equals the step of the uninterrupted run."""
    write_checkpoint(open_checkpoint(universal_loads / "source"), tmp_path / "out", "torch", optimizer=True)
    run = Stack()
    run.load_state_dict(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True))
    named = dict(run.named_parameters())
    saved = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    groups = [
        {"params": [(name, named[name]) for name in group["param_names"]]} for group in saved["param_groups"]
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    optimizer.load_state_dict(saved)
    run(torch.arange(2, 6)).backward()
    optimizer.step()
    for name, value in load(universal_loads / "next.pt").items():
        torch.testing.assert_close(named[name].detach(), value, rtol=1e-6, atol=1e-8)


# -- DCP's safetensors ---------------------------------------------------------------------------------------


def test_torch_loads_converted_dcp_safetensors(written_ranks: Path, tmp_path: Path) -> None:
    reference = load(written_ranks / "fsdp2-3.ref.pt")
    source, out = open_checkpoint(written_ranks / "fsdp2-3"), tmp_path / "out"
    write_checkpoint(source, out, "dcp-safetensors", optimizer=True, max_shard_size=300, verify=True)
    weights = reference["model"]
    assert "lm_head.weight" in weights  # tied: a live model needs it
    state = blank(weights)
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(out)))
    assert {name: bits(value) for name, value in state.items()} == {k: bits(v) for k, v in weights.items()}
    assert open_checkpoint(out).aliases == {"lm_head.weight": "embed_tokens.weight"}


# -- DeepSpeed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_converted_universal_checkpoint(universal_loads: Path, stage: int) -> None:
    """Three ranks load the masters, moments and groups of two FSDP2 ranks, and their next steps agree."""
    source = open_checkpoint(universal_loads / "source")
    held = load(universal_loads / f"zero{stage}.pt")
    optimizer = assert_state(
        source, {name: {"step": torch.tensor(2.0), **held["optim"][name]} for name in held["optim"]}
    )
    assert len(held["optim"]) == 10
    for name in held["optim"]:
        assert_same(source.tensors[name], held["model"][name])
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    loaded = [{**group, "betas": list(group["betas"])} for group in held["groups"]]
    # Stage 3 uses the first group's hyperparameters for all groups, which is a limit of DeepSpeed.
    assert loaded == (groups if stage < 3 else [groups[0], groups[0]])
    after = load(universal_loads / f"zero{stage}.next.pt")
    for name, value in load(universal_loads / "next.pt").items():
        if stage < 3 or value.ndim > 1:
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("state", "listed", "why"),
    [
        ({"mu_product": "scalar"}, "ab", "mu_product of 'a' has a different shape"),  # NAdam
        ({"mu_product": 0.9}, "ab", "mu_product of 'a' has a different shape"),
        ({"step": "scalar"}, "ab", "is 2 for 'b', but 3 for other parameters"),
        ({"step": float("nan")}, "ab", "the step of 'a' is not a finite number"),
        ({"step": "vector"}, "ab", "the step of 'a' is not a finite number"),
        ({}, "a", "must contain each parameter exactly once"),
    ],
)
def test_state_that_deepspeed_universal_cannot_hold_is_rejected(
    state: dict[str, Any], listed: str, why: str, tmp_path: Path
) -> None:
    weights = {
        "a": torch.ones(2, 2),
        "b": torch.ones(2, 2),
        "scalar": torch.tensor(3.0),
        "vector": torch.ones(1),
    }
    source = open_checkpoint(model(tmp_path / "in", weights))
    states: dict[str, Any] = {name: {"step": 2, "exp_avg": source.tensors[name]} for name in "ab"}
    states["a"] |= {key: source.tensors.get(value, value) for key, value in state.items()}
    optimizer = OptimizerState(states, [{"params": list(listed), "lr": 0.1}])
    checkpoint = Checkpoint(format="x", root=tmp_path / "in", tensors=source.tensors, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=why):
        write_checkpoint(checkpoint, tmp_path / "out", "deepspeed-universal", optimizer=True)
