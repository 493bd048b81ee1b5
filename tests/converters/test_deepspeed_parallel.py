"""DeepSpeed checkpoints with pipeline stages, experts and tensor parallel ranks, against the live tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from converters import CheckpointError, open_checkpoint
from tests.converters.compare import assert_model, assert_optimizer, rewrite
from tests.converters.test_deepspeed import reference


def test_patterns_of_before_the_maps(deepspeed_parallel: Path, tmp_path: Path) -> None:
    """DeepSpeed 0.18 lists replicated and row parallel parameters; what it cuts otherwise is refused."""
    for name, told in (("autotp-zero1-4", None), ("autotp-zero2-4", "sub-parameters")):
        folder = tmp_path / name
        shutil.copytree(deepspeed_parallel / name / "global_step2", folder)
        for path in folder.glob("*model_states.pt"):
            rewrite(path, lambda content: content["universal_checkpoint_info"].pop("affine_map"))
        if told is None:
            assert_model(open_checkpoint(folder), reference(deepspeed_parallel, name)["model"])
        else:
            with pytest.raises(CheckpointError, match=f"'qkv_proj.weight': tensor parallel parts of {told}"):
                open_checkpoint(folder)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("param_shapes", "checkpoints of runs without ZeRO are not supported"),
        ("nothing", "the optimizer states of all ranks are missing$"),
    ],
)
def test_a_run_without_zero_lacks_nothing(
    deepspeed_parallel: Path, tmp_path: Path, lost: str, told: str
) -> None:
    shutil.copytree(deepspeed_parallel / "pipeline-fp32-4" / "global_step2", tmp_path / "step")
    for path in (tmp_path / "step").glob("*optim_states.pt"):
        path.unlink()
    for path in (tmp_path / "step").glob("mp_rank_*"):
        rewrite(path, lambda content: content.pop(lost, None))
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path / "step")


def test_an_expert_swapped_for_another_is_refused(deepspeed_parallel: Path, tmp_path: Path) -> None:
    """Also where both its names and its file's say that it is the other: by the values of its masters."""
    shutil.copytree(deepspeed_parallel / "experts-zero1-4" / "global_step2", tmp_path / "step")
    first, second = (
        tmp_path / "step" / f"layer_0_expert_{number}_mp_rank_00_model_states.pt" for number in (0, 2)
    )
    one, two = torch.load(first), torch.load(second)
    torch.save(dict(zip(one, two.values(), strict=True)), first)
    torch.save(dict(zip(two, one.values(), strict=True)), second)
    with pytest.raises(CheckpointError, match="differs from rank 0's optimizer states"):
        open_checkpoint(tmp_path / "step")


def test_mics_writes_the_files_of_one_group(deepspeed_written: Path, tmp_path: Path) -> None:
    """DeepSpeed up to 0.19.6 has MiCS: ZeRO-3 within groups of ranks, which all write the same files.

    `MiCS_Optimizer` makes the group its `dp_process_group`, which numbers the files, and its size the
    `partition_count`; only `dp_world_size` counts all ranks. It needs a backend that coalesces, which gloo
    does not, so these are the files of a ZeRO-3 run of one group, with what MiCS records beside.
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
    with pytest.raises(CheckpointError, match="world size of 5, the optimizer states 2"):
        open_checkpoint(step)
