"""DeepSpeed checkpoints that DeepSpeed wrote, against the live tensors of the run."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from converters import CheckpointError, open_checkpoint
from tests.converters.compare import assert_model, assert_optimizer, everything, refused

deepspeed: Any = pytest.importorskip("deepspeed")

# zero_to_fp32 has no stage 0, does not know BF16_Optimizer's files, and leaves ZeRO-1's frozen weights out.
THEIRS = (
    *("zero2-1", "zero2-bf16-2", "zero2-fp32-3", "zero2-4", "zero3-1", "zero3-fp32-2", "zero3-bf16-3"),
    *("zero3-4", "hpz-4", "elastic-2", "offload-zero2-2", "offload-zero3-2", "sub-groups-3"),
    *("round-robin-3", "aligned-3", "round-robin-aligned-3"),
)


def reference(written: Path, name: str, step: int = 2) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(written / f"{name}.{step}.ref.pt", weights_only=False)
    return values


@pytest.mark.parametrize("name", THEIRS)
def test_as_zero_to_fp32(deepspeed_written: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(deepspeed_written / name), "global_step2")
    checkpoint = open_checkpoint(deepspeed_written / name, "2")
    assert set(checkpoint.tensors) | set(checkpoint.aliases) == set(theirs)
    for key, value in theirs.items():
        ours = checkpoint.tensors[checkpoint.aliases.get(key, key)].read().astype("float64")
        assert ours.tobytes() == value.detach().double().numpy().tobytes(), (
            key
        )  # it casts buffers and frozen weights


def test_paths(deepspeed_written: Path, tmp_path: Path) -> None:
    root = deepspeed_written / "zero3-bf16-3"
    file = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for path, tag, step in (
        (root, None, 3),  # `latest`
        (root, "2", 2),
        (root, "global_step2", 2),
        (root / "global_step2", None, 2),
        (root / "global_step3" / file, None, 3),
    ):
        assert open_checkpoint(path, tag).metadata["step"] == step
    with pytest.raises(CheckpointError, match="the tag '9'"):
        open_checkpoint(root, "9")
    # Any tag may name a folder.
    shutil.copytree(root / "global_step2", tmp_path / "best")
    (tmp_path / "latest").write_text("best\n")
    assert open_checkpoint(tmp_path).metadata["tag"] == "best"
    assert open_checkpoint(tmp_path, "best").metadata["step"] == 2
    (tmp_path / "latest").unlink()
    assert open_checkpoint(tmp_path).metadata["tag"] == "best"
    for wrong in ("nothing", "../best", "/"):
        (tmp_path / "latest").write_text(wrong)
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            open_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CheckpointError, match="names 'global_step7', which holds no DeepSpeed files"):
        open_checkpoint(tmp_path)


def retype(data: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(new) if data.dtype == old else data
    if isinstance(data, dict):
        return type(data)((key, retype(value, old, new)) for key, value in data.items())
    return data


def test_fp16_files(deepspeed_written: Path, tmp_path: Path) -> None:
    """DeepSpeed refuses fp16 on CPU: a bf16 run's files, rewritten as an fp16 run names and types them."""
    for name in ("zero2-bf16-2", "zero3-bf16-3"):
        source, target = deepspeed_written / name / "global_step2", tmp_path / name
        target.mkdir()
        for path in source.iterdir():
            content = torch.load(path, weights_only=False)
            content["ds_config"] = {**content["ds_config"], "fp16": {"enabled": True}}
            optimizer = content.get("optimizer_state_dict")
            if isinstance(optimizer, dict) and name.startswith("zero2"):
                # the weights beside must be the masters, rounded: make masters that both types hold exactly
                groups = optimizer["single_partition_of_fp32_groups"]
                optimizer["single_partition_of_fp32_groups"] = [
                    group.bfloat16().half().float() for group in groups
                ]
            content["module"] = retype(content.get("module"), torch.bfloat16, torch.float16)
            content["frozen_param_fragments"] = retype(
                content.get("frozen_param_fragments"), torch.bfloat16, torch.float16
            )
            torch.save(content, target / path.name.removeprefix("bf16_"))
        checkpoint = open_checkpoint(target)
        assert checkpoint.tensors["fixed.weight"].dtype == "F16"
        assert checkpoint.tensors["big.weight"].dtype == "F32"
        expected = reference(deepspeed_written, name)["model"]
        ours = torch.from_numpy(checkpoint.tensors["big.weight"].read())
        assert torch.allclose(ours, expected["big.weight"], rtol=2**-8, atol=1e-6)


def test_accelerate(deepspeed_written: Path, tmp_path: Path) -> None:
    expected = reference(deepspeed_written, "accelerate", 1)
    folder = deepspeed_written / "accelerate"
    for path in (folder, folder / "pytorch_model"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.metadata["tag"] == "pytorch_model"
        assert_model(checkpoint, expected["model"])
        assert_optimizer(checkpoint, expected, 1)
    shutil.copytree(folder, tmp_path / "two")
    shutil.copytree(folder / "pytorch_model", tmp_path / "two" / "pytorch_model_1")
    with pytest.raises(CheckpointError, match="several models"):
        open_checkpoint(tmp_path / "two")


# -- files that do not belong together -----------------------------------------------------------------------


@pytest.fixture
def copy(deepspeed_written: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(deepspeed_written / name / "global_step2", target)
        return target

    return make


@pytest.mark.parametrize("name", ["zero2-fp32-3", "zero3-bf16-3"])
def test_files_of_another_step(deepspeed_written: Path, copy: Callable[[str], Path], name: str) -> None:
    step, later = copy(name), deepspeed_written / name / "global_step3"
    good = everything(open_checkpoint(step))
    names = sorted(path.name for path in step.iterdir())
    mixtures = [[file] for file in names]
    mixtures += [[file for file in names if kind in file] for kind in ("optim_states", "model_states")]
    for mixture in mixtures:
        kept = {file: (step / file).read_bytes() for file in mixture}
        for file in mixture:
            shutil.copy(later / file, step / file)
        try:
            assert everything(open_checkpoint(step)) == good, mixture
        except CheckpointError as error:
            assert str(step) in str(error)
        for file, data in kept.items():
            (step / file).write_bytes(data)


def test_files_saved_into_a_stream_have_no_name(copy: Callable[[str], Path]) -> None:
    """Then the mappings alone tell two ranks apart."""
    step = copy("zero2-fp32-3")
    good = everything(open_checkpoint(step))
    paths = sorted(step.iterdir())
    for path in paths:
        stream = io.BytesIO()
        torch.save(torch.load(path, weights_only=False), stream)
        path.write_bytes(stream.getvalue())
    assert everything(open_checkpoint(step)) == good
    first, second = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(second)
    paths[2].write_bytes(first)
    assert "param_slice_mappings" in refused(step)
