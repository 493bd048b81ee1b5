"""DeepSpeed checkpoints with pipeline stages, experts and tensor parallel ranks, against the live tensors."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from converters import CheckpointError, open_checkpoint
from converters.cli import main
from tests.converters.compare import assert_model
from tests.converters.test_deepspeed import assert_moments, reference
from tests.converters.test_deepspeed_damage import rewrite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# name -> (ZeRO stage, parameter groups)
RUNS = {
    "pipeline-fp32-4": (1, 1),
    "pipeline-bf16-4": (1, 1),
    "experts-zero1-4": (1, 2),
    "experts-zero2-4": (2, 2),
    "autotp-zero1-4": (1, 1),
    "autotp-zero2-4": (2, 1),
    "autotp-zero3-4": (3, 1),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_bit_for_bit(deepspeed_parallel: Path, name: str) -> None:
    stage, groups = RUNS[name]
    expected = reference(deepspeed_parallel, name)
    checkpoint = open_checkpoint(deepspeed_parallel / name)
    assert_model(checkpoint, expected["model"])
    assert_moments(checkpoint, expected, 2)
    told = checkpoint.metadata
    assert (told["step"], told["world_size"], told["zero_stage"]) == (2, 4, stage)
    assert checkpoint.counters["global_steps"] == 2
    assert checkpoint.optimizer is not None
    listed = checkpoint.optimizer.param_groups
    assert len(listed) == groups
    assert sorted(name for group in listed for name in group["params"]) == sorted(expected["optim"])
    for ours, theirs in zip(listed, expected["groups"], strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {
            k: list(v) if isinstance(v, tuple) else v for k, v in theirs.items()
        }


def test_converted(deepspeed_parallel: Path, tmp_path: Path) -> None:
    source = deepspeed_parallel / "autotp-zero1-4"
    argv = [str(source), str(tmp_path / "out"), "--optimizer", "--verify", "--quiet"]
    assert main(argv) == 0
    expected = reference(deepspeed_parallel, "autotp-zero1-4")["model"]
    assert_model(
        open_checkpoint(tmp_path / "out"), {k: v for k, v in expected.items() if k != "lm_head.weight"}
    )


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


def info(content: Any) -> Any:
    return content["universal_checkpoint_info"]


def parameter(content: Any, name: str) -> Any:
    return info(content)["affine_map"]["params"][f"^{name}$"]


def piece(content: Any, name: str, rank: int) -> Any:
    return parameter(content, name)["ranks"][rank]["pieces"][0]


MP0, MP1 = ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")
ODD = r"odd_proj\.weight"


@pytest.mark.parametrize(
    ("name", "file", "change", "told"),
    [
        # Tensor parallel ranks.
        ("autotp-zero2-4", MP1, None, "tensor parallel rank 1 are missing, of 2"),
        ("autotp-zero2-4", MP0, lambda c: c.pop("universal_checkpoint_info"), "do not say how"),
        ("autotp-zero2-4", MP0, lambda c: info(c)["affine_map"].update(version=2), "another version"),
        ("autotp-zero2-4", MP0, lambda c: info(c)["affine_map"]["params"].popitem(), "no affine map"),
        ("autotp-zero2-4", MP0, lambda c: piece(c, ODD, 0).update(scale=0.5), "damaged, or not supported"),
        ("autotp-zero2-4", MP0, lambda c: piece(c, ODD, 0).update(shape=[9, 6]), "damaged, or not supported"),
        ("autotp-zero2-4", MP0, lambda c: piece(c, ODD, 1)["source"].__setitem__(0, 6), "odd_proj"),
        ("autotp-zero2-4", MP0, lambda c: parameter(c, ODD).update(logical_shape=[54]), "says otherwise"),
        (
            "autotp-zero2-4",
            MP0,
            lambda c: parameter(c, ODD).update(ranks=[1, 2]),
            "damaged, or not supported",
        ),
        ("autotp-zero2-4", MP1, lambda c: c["module"]["scale"].add_(1), "scale.*copies of it differ"),
        ("autotp-zero2-4", MP1, lambda c: c.update(global_steps=9), "global_steps differs"),
        ("autotp-zero2-4", MP1, lambda c: c.update(mp_world_size=3), "parallel degrees are 2 and 1 of 3"),
        # Pipeline stages.
        ("pipeline-fp32-4", "layer_01-model_states.pt", None, "1.up.weight' is missing"),
        ("pipeline-fp32-4", "layer_01-model_states.pt", lambda c: c["up.bias"].add_(1), "1.up.bias' differs"),
        (
            "pipeline-fp32-4",
            "layer_00-model_states.pt",
            lambda c: c["weight"].add_(1),
            "words.weight' differs",
        ),
        ("pipeline-fp32-4", MP1, None, "pipeline parallel rank 1 are missing, of 2"),
        ("pipeline-fp32-4", MP0, lambda c: c.update(module={}), "pipeline parallel, unlike"),
        ("pipeline-fp32-4", MP0, lambda c: c.pop("param_shapes"), "in bf16 without ZeRO are not supported"),
        # Experts.
        ("experts-zero1-4", "layer_0_expert_3_mp_rank_00_model_states.pt", None, r"experts\.3.*is missing"),
        (
            "experts-zero1-4",
            "layer_1_expert_2_mp_rank_00_model_states.pt",
            lambda c: [value.add_(1) for value in c.values()],
            r"layers\.1.*experts\.2.*differs from rank 3's",
        ),
        (
            "experts-zero2-4",
            MP0,
            lambda c: c["ds_config"].pop("use_data_before_expert_parallelism"),
            "ds_config",
        ),
    ],
)
def test_damage_is_named(
    deepspeed_parallel: Path,
    tmp_path: Path,
    name: str,
    file: str,
    change: Callable[[Any], Any] | None,
    told: str,
) -> None:
    shutil.copytree(deepspeed_parallel / name / "global_step2", tmp_path / "step")
    path = tmp_path / "step" / file
    if change is None:
        path.unlink()
    else:
        rewrite(path, change)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path / "step")


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
    assert_moments(checkpoint, expected, 2)
    for path in step.glob("*model_states.pt"):
        rewrite(path, lambda content: content.update(dp_world_size=5))
    with pytest.raises(CheckpointError, match="world size of 5, the optimizer states 2"):
        open_checkpoint(step)
