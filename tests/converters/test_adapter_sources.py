"""Adapters converted from the checkpoints of every program: the result equals peft's own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from portable.converters import compute_fingerprint, open_checkpoint
from portable.converters.cli import main

ZERO = ("zero1", "zero2-bf16", "zero3", "zero3-tied", "zero2-frozen", "zero3-frozen")
FSDP = ("fsdp-sharded", "fsdp-sharded-alone", "fsdp-full", "fsdp-full-alone")
WHOLE = ("zero2-frozen", "zero3-frozen", "fsdp-sharded", "fsdp-full")


@pytest.mark.parametrize("name", [*ZERO, *FSDP, "live", "pickled"])
def test_converted_adapter_equals_peft_folder(
    name: str, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(adapters / name), str(tmp_path / "out"), "--verify"]) == 0
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    theirs = load_file(adapters / f"{name}.adapter" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype
        assert ours[key].tobytes() == value.tobytes(), key
    assert (tmp_path / "out" / "adapter_config.json").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    noted = "tensors of the base model are not converted; add --merge-into" in capsys.readouterr().err
    assert noted == (name in WHOLE)


@pytest.mark.parametrize("name", WHOLE)
def test_adapter_merges_into_base_of_same_checkpoint(name: str, adapters: Path, tmp_path: Path) -> None:
    source, out = str(adapters / name), tmp_path / "out"
    more = ["--config-from", str(adapters / "base"), "--quiet"]
    assert main([source, str(out), "--merge-into", source, *more]) == 0
    beside = tmp_path / "beside"
    assert main([f"{source}.adapter", str(beside), "--merge-into", str(adapters / "base"), *more]) == 0
    ours, theirs = load_file(out / "model.safetensors"), load_file(beside / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].tobytes() == value.tobytes() for key, value in theirs.items())


def test_adapter_settings_of_verl_are_used(tmp_path: Path) -> None:
    """verl stores r and lora_alpha in `lora_train_meta.json`, next to the rank files of the model."""
    torch.manual_seed(0)
    module = "model.layers.0.self_attn.q_proj"
    base = {"model.norm.weight": torch.randn(8), f"{module}.weight": torch.randn(8, 8)}
    factors = {"lora_A": torch.randn(4, 8), "lora_B": torch.randn(8, 4)}
    state = {
        "base_model.model.model.norm.weight": base["model.norm.weight"],
        f"base_model.model.{module}.base_layer.weight": base[f"{module}.weight"],
        **{f"base_model.model.{module}.{name}.default.weight": value for name, value in factors.items()},
    }
    actor = tmp_path / "global_step_10" / "actor"
    actor.mkdir(parents=True)
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    (actor / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 32, "task_type": "CAUSAL_LM"}')
    assert main([str(actor), str(tmp_path / "adapter"), "--quiet"]) == 0
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert written.keys() == {f"base_model.model.{module}.{name}.weight" for name in factors}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 4, ["q_proj"])
    save_file(base, tmp_path / "base.safetensors")
    argv = [str(tmp_path / "out"), "--merge-into", str(tmp_path / "base.safetensors"), "--quiet"]
    assert main([str(actor), *argv]) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")[f"{module}.weight"]
    wanted = base[f"{module}.weight"] + 32 / 4 * factors["lora_B"] @ factors["lora_A"]
    torch.testing.assert_close(torch.from_numpy(merged), wanted, rtol=1e-5, atol=1e-5)


def test_adapter_optimizer_state_has_names_of_adapter(adapters: Path, tmp_path: Path) -> None:
    assert main([str(adapters / "zero3"), str(tmp_path / "out"), "--optimizer", "--quiet"]) == 0
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    state = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert {key.removesuffix(".exp_avg") for key in state if key.endswith(".exp_avg")} == adapter.keys()
    reopened = open_checkpoint(tmp_path / "out").optimizer
    assert reopened is not None
    assert reopened.state.keys() == adapter.keys()


@pytest.mark.parametrize("name", ["zero2-bf16", "live"])
def test_adapter_merge_into_other_base_is_rejected(
    name: str, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fingerprint of the base is recorded in `trainer_state.json`, and in the header of an adapter."""
    source = tmp_path / "step"
    shutil.copytree(adapters / name, source)
    for recorded, code in ((compute_fingerprint(open_checkpoint(adapters / "base")), 0), ("0" * 32, 2)):
        state = {"step": 2, "metadata": {"adapter": {"base": recorded}}}
        (source / "trainer_state.json").write_text(json.dumps(state))
        out, folder = tmp_path / f"out{code}", tmp_path / f"folder{code}"
        into = ["--merge-into", str(adapters / "base"), "--quiet"]
        assert main([str(source), str(out), *into]) == code
        assert main([str(source), str(folder), "--quiet"]) == 0
        assert main([str(folder), str(tmp_path / f"again{code}"), *into]) == code
    assert capsys.readouterr().err.count("was trained on other weights") == 2
