"""Adapters from the checkpoints of every program: what comes out is what peft saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from converters import fingerprint, open_checkpoint
from converters.cli import main

ZERO = ("zero1", "zero2-bf16", "zero3", "zero2-frozen", "zero3-frozen")
FSDP = ("fsdp-sharded", "fsdp-sharded-alone", "fsdp-full", "fsdp-full-alone")
WHOLE = ("zero2-frozen", "zero3-frozen", "fsdp-sharded", "fsdp-full")


@pytest.mark.parametrize("name", [*ZERO, *FSDP, "live", "pickled"])
def test_is_the_folder_that_peft_saves(
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
    noted = "tensors of the base model left out; --merge-into" in capsys.readouterr().err
    assert noted == (name in WHOLE)


@pytest.mark.parametrize("name", WHOLE)
def test_merges_into_the_base_that_lies_in_the_same_checkpoint(
    name: str, adapters: Path, tmp_path: Path
) -> None:
    source, out = str(adapters / name), tmp_path / "out"
    more = ["--config-from", str(adapters / "base"), "--quiet"]
    assert main([source, str(out), "--merge-into", source, *more]) == 0
    beside = tmp_path / "beside"
    assert main([f"{source}.adapter", str(beside), "--merge-into", str(adapters / "base"), *more]) == 0
    ours, theirs = load_file(out / "model.safetensors"), load_file(beside / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].tobytes() == value.tobytes() for key, value in theirs.items())


def test_the_optimizer_comes_along_under_the_names_of_the_adapter(adapters: Path, tmp_path: Path) -> None:
    assert main([str(adapters / "zero3"), str(tmp_path / "out"), "--optimizer", "--quiet"]) == 0
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    state = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert {key.removesuffix(".exp_avg") for key in state if key.endswith(".exp_avg")} == adapter.keys()
    reopened = open_checkpoint(tmp_path / "out").optimizer
    assert reopened is not None
    assert reopened.state.keys() == adapter.keys()


@pytest.mark.parametrize("name", ["zero2-bf16", "live"])
def test_another_base_than_the_recorded_one_is_refused(
    name: str, adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our checkpoints record it in `trainer_state.json`, an adapter made from one in its header."""
    source = tmp_path / "step"
    shutil.copytree(adapters / name, source)
    for recorded, code in ((fingerprint(open_checkpoint(adapters / "base")), 0), ("0" * 32, 2)):
        state = {"step": 2, "metadata": {"adapter": {"base": recorded}}}
        (source / "trainer_state.json").write_text(json.dumps(state))
        out, folder = tmp_path / f"out{code}", tmp_path / f"folder{code}"
        into = ["--merge-into", str(adapters / "base"), "--quiet"]
        assert main([str(source), str(out), *into]) == code
        assert main([str(source), str(folder), "--quiet"]) == 0
        assert main([str(folder), str(tmp_path / f"again{code}"), *into]) == code
    assert capsys.readouterr().err.count("was trained on other weights") == 2
