"""Checkpoints written by DeepSpeed itself, compared with the live tensors of the run."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from portable.converters import CheckpointError, open_checkpoint
from portable.converters.cli import main
from portable.converters.formats.deepspeed.expert_files import ExpertFiles
from tests.converters.compare import assert_model, assert_optimizer, everything, load, refused, rewrite

deepspeed: Any = pytest.importorskip("deepspeed")


def reference(written: Path, name: str, step: int = 2) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(written / f"{name}.{step}.ref.pt", weights_only=False)
    return values


def test_deepspeed_checkpoint_opens_by_folder_tag_or_file(
    deepspeed_written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    file_of_tag, out = root / "global_step3" / file, tmp_path / "out"
    for source, tag in ((root, "global_step3"), (root / "global_step3", None), (file_of_tag, None)):
        assert main([str(source), str(out), "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tag"] == tag
    # Any tag may name a folder.
    shutil.copytree(root / "global_step2", tmp_path / "best")
    (tmp_path / "latest").write_text("best\n")
    assert open_checkpoint(tmp_path).metadata["tag"] == "best"
    assert open_checkpoint(tmp_path, "best").metadata["step"] == 2
    (tmp_path / "latest").unlink()
    assert open_checkpoint(tmp_path).metadata["tag"] == "best"
    for wrong in ("../best", "global_step7"):
        (tmp_path / "latest").write_text(wrong)
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            open_checkpoint(tmp_path)


def test_deepspeed_fp16_files_are_read(deepspeed_written: Path, tmp_path: Path) -> None:
    """DeepSpeed rejects fp16 on CPU, so the files of a bf16 run get the names and types of fp16."""
    in_fp16 = partial(tree_map_only, torch.Tensor, lambda v: v.half() if v.dtype == torch.bfloat16 else v)
    for name in ("zero2-bf16-2", "zero3-bf16-3"):
        source, target = deepspeed_written / name / "global_step2", tmp_path / name
        target.mkdir()
        for path in source.iterdir():
            content = torch.load(path, weights_only=False)
            content["ds_config"] = {**content["ds_config"], "fp16": {"enabled": True}}
            optimizer = content.get("optimizer_state_dict")
            if isinstance(optimizer, dict) and name.startswith("zero2"):
                # the weights must be the rounded masters: make masters that both types represent exactly
                groups = optimizer["single_partition_of_fp32_groups"]
                optimizer["single_partition_of_fp32_groups"] = [
                    group.bfloat16().half().float() for group in groups
                ]
            content |= {key: in_fp16(content.get(key)) for key in ("module", "frozen_param_fragments")}
            torch.save(content, target / path.name.removeprefix("bf16_"))
        checkpoint = open_checkpoint(target)
        assert checkpoint.tensors["fixed.weight"].dtype == "F16"
        assert checkpoint.tensors["big.weight"].dtype == "F32"
        expected = reference(deepspeed_written, name)["model"]
        ours = torch.from_numpy(checkpoint.tensors["big.weight"].read())
        assert torch.allclose(ours, expected["big.weight"], rtol=2**-8, atol=1e-6)


# -- files that do not belong together -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zero2-fp32-3", "zero3-bf16-3"])
def test_deepspeed_files_of_another_step_are_rejected(
    deepspeed_written: Path, tmp_path: Path, name: str
) -> None:
    run = deepspeed_written / name
    step, later = shutil.copytree(run / "global_step2", tmp_path / name), run / "global_step3"
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


# -- pipeline stages, experts and tensor parallel ranks ------------------------------------------------------


def test_deepspeed_tensor_parallel_patterns_of_old_versions_are_read(
    deepspeed_parallel: Path, tmp_path: Path
) -> None:
    """DeepSpeed 0.18 lists replicated and row-parallel parameters. Other kinds of shards are rejected."""
    for name, told in (("autotp-zero1-4", None), ("autotp-zero2-4", "sub-parameters")):
        folder = tmp_path / name
        shutil.copytree(deepspeed_parallel / name / "global_step2", folder)
        for path in folder.glob("*model_states.pt"):
            rewrite(path, lambda content: content["universal_checkpoint_info"].pop("affine_map"))
        if told is None:
            assert_model(open_checkpoint(folder), reference(deepspeed_parallel, name)["model"])
        else:
            with pytest.raises(CheckpointError, match=f"'qkv_proj.weight': tensor-parallel shards of {told}"):
                open_checkpoint(folder)


def test_expert_numbers_do_not_depend_on_split_of_groups() -> None:
    """DeepSpeed splits groups of more than 179 million elements, so a group may lack the last expert."""
    files = object.__new__(ExpertFiles)
    prefix = "layers.0.deepspeed_moe.experts.deepspeed_experts."
    groups = [[f"{prefix}0.w"], [f"{prefix}1.w"]]
    names = [files.map_to_complete_names(group, 1, groups[0] + groups[1]) for group in groups]
    assert names == [{f"{prefix}0.w": f"{prefix}2.w"}, {f"{prefix}1.w": f"{prefix}3.w"}]


def test_deepspeed_swapped_expert_is_rejected(deepspeed_parallel: Path, tmp_path: Path) -> None:
    """The masters show the swap, even if the file name and the tensor names match the other expert."""
    shutil.copytree(deepspeed_parallel / "experts-zero1-4" / "global_step2", tmp_path / "step")
    first, second = (
        tmp_path / "step" / f"layer_0_expert_{number}_mp_rank_00_model_states.pt" for number in (0, 2)
    )
    one, two = torch.load(first), torch.load(second)
    torch.save(dict(zip(one, two.values(), strict=True)), first)
    torch.save(dict(zip(two, one.values(), strict=True)), second)
    with pytest.raises(CheckpointError, match=r"differs from its fp32 .* of rank 0,"):
        open_checkpoint(tmp_path / "step")


def test_deepspeed_mics_checkpoint_is_read_as_one_group(deepspeed_written: Path, tmp_path: Path) -> None:
    """DeepSpeed up to 0.19.6 has MiCS: ZeRO-3 within groups of ranks, which all write the same files.

    `MiCS_Optimizer` makes the group its `dp_process_group`, which numbers the files, and its size the
    `partition_count`. Only `dp_world_size` counts all ranks. MiCS needs a backend that coalesces, which gloo
    does not, so these are the files of a ZeRO-3 run of one group, with the fields that MiCS adds.
    """
    step = tmp_path / "step"
    shutil.copytree(deepspeed_written / "zero3-fp32-2" / "global_step2", step)
    for path in step.glob("*.pt"):
        rewrite(path, lambda content: content["ds_config"]["zero_optimization"].update(mics_shard_size=2))
    for path in step.glob("*model_states.pt"):
        rewrite(path, lambda content: content.update(dp_world_size=6))
    checkpoint, expected = open_checkpoint(step), reference(deepspeed_written, "zero3-fp32-2")
    assert_model(checkpoint, expected["model"])
    assert_optimizer(checkpoint, expected, 2)
    for path in step.glob("*model_states.pt"):
        rewrite(path, lambda content: content.update(dp_world_size=5))
    with pytest.raises(CheckpointError, match="data-parallel ranks is 5 here, but 2 in the optimizer states"):
        open_checkpoint(step)


# -- ZeRO-3 groups on NVMe: swap files in addition to the rank files
# -------------------------------------------------


@pytest.mark.ops("async_io")
def test_deepspeed_nvme_checkpoint_equals_live_run(deepspeed_nvme: Path, tmp_path: Path) -> None:
    step = deepspeed_nvme / "nvme-2" / "global_step2"
    swapped = {path.name for path in (step / "offloaded_tensors" / "rank01").iterdir()}
    assert swapped == {"0_11.tensor.swp", "exp_avg-0_11.tensor.swp", "exp_avg_sq-0_11.tensor.swp"}
    expected = load(deepspeed_nvme / "nvme-2.2.ref.pt")
    checkpoint = open_checkpoint(deepspeed_nvme / "nvme-2")
    assert_model(checkpoint, expected["model"])
    assert_optimizer(checkpoint, expected, 2)
    shutil.copytree(step, tmp_path / "step")
    (lost,) = (tmp_path / "step" / "offloaded_tensors" / "rank01").glob("exp_avg-*")
    data = lost.read_bytes()
    for damage, told in ((None, "NVMe"), (data[:-1024], "bytes"), (data + bytes(1 << 20), "bytes")):
        lost.unlink(missing_ok=True)
        if damage is not None:
            lost.write_bytes(damage)
        assert lost.name in (said := refused(tmp_path / "step")) and told in said


# -- universal checkpoints -----------------------------------------------------------------------------------


TAG = "global_step2_universal"


def test_deepspeed_universal_checkpoint_opens_by_folder_tag_or_file(
    written_universal: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(written_universal / "sub-groups-3", run)
    shutil.copytree(written_universal.parent / "sub-groups-3", run, dirs_exist_ok=True)
    whole = open_checkpoint(run)
    assert whole.format == "deepspeed"  # `latest` goes before `latest_universal`
    assert open_checkpoint(run, tag=TAG).format == "deepspeed-universal"
    assert everything(open_checkpoint(run, tag=TAG)) == everything(whole)
    shutil.rmtree(run / "global_step2")
    (run / "latest").unlink()
    weights = load(written_universal / "sub-groups-3.2.ref.pt")["model"]
    assert_model(open_checkpoint(run), weights)
    assert_model(open_checkpoint(run / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"), weights)
    with pytest.raises(CheckpointError, match="nope"):
        open_checkpoint(run, tag="nope")
    (run / "latest_universal").write_text("elsewhere")
    with pytest.raises(CheckpointError, match="'elsewhere'"):
        open_checkpoint(run)


def test_deepspeed_universal_moment_of_other_stage_is_rejected(
    written_universal: Path, tmp_path: Path
) -> None:
    step = Path(shutil.copytree(written_universal / "zero2-bf16-2" / TAG, tmp_path / TAG))
    path = step / "zero" / "big.weight" / "exp_avg.pt"
    torch.save(load(path)["param"].flatten().clone(), path)
    assert "stage 2" in refused(step)
