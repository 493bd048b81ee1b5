"""Damaged DeepSpeed checkpoints: a refusal that names the file, or exactly the right bytes."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from converters import CheckpointError, open_checkpoint
from tests.converters.test_dcp_damage import everything, outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUNS = (
    ("zero1-bf16-3", "2"),
    ("zero2-fp32-3", "2"),
    ("zero3-bf16-3", "2"),
    ("fp32-accumulation-4", "2"),
    ("elastic-2", "2"),
    ("zero0-bf16-2", "2"),
)
FLIPS = 120


@pytest.fixture(params=RUNS, ids=lambda run: run[0])
def step(request: pytest.FixtureRequest, deepspeed_written: Path, tmp_path: Path) -> Path:
    name, number = request.param
    shutil.copytree(deepspeed_written / name / f"global_step{number}", tmp_path / "step")
    return tmp_path / "step"


@pytest.fixture
def copy(deepspeed_written: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(deepspeed_written / name / "global_step2", target)
        return target

    return make


def test_flips(step: Path) -> None:
    good = everything(open_checkpoint(step))
    rng = random.Random(0)
    refused = 0
    paths = sorted(step.iterdir())
    for _ in range(FLIPS):
        path = rng.choice(paths)
        data = path.read_bytes()
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        refused += outcome(step, good)
        path.write_bytes(data)
    assert refused > FLIPS // 5  # the rest are in zip padding, or in a tensor that nobody asks for


def test_truncated_deleted_swapped_and_foreign_files(step: Path) -> None:
    good = everything(open_checkpoint(step))
    rng = random.Random(0)
    paths = sorted(step.iterdir())
    for path in paths:
        data = path.read_bytes()
        for length in (0, rng.randrange(len(data)), len(data) - 1):
            path.write_bytes(data[:length])
            assert outcome(step, good)
        path.unlink()
        assert outcome(step, good)
        path.mkdir()
        assert outcome(step, good)
        path.rmdir()
        path.write_bytes(b"hello" * 1000)
        assert outcome(step, good)
        path.write_bytes(data)
    for left, right in pairwise(paths):
        first, second = left.read_bytes(), right.read_bytes()
        left.write_bytes(second)
        right.write_bytes(first)
        assert outcome(step, good)
        left.write_bytes(first)
        right.write_bytes(second)
        right.write_bytes(first)
        assert outcome(step, good)
        right.write_bytes(second)
    assert everything(open_checkpoint(step)) == good


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
        assert outcome(step, good), mixture
        for file, data in kept.items():
            (step / file).write_bytes(data)


def test_a_run_of_another_world_size_left_files(deepspeed_written: Path, copy: Callable[[str], Path]) -> None:
    step = copy("zero2-4")
    last = "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    (step / last).unlink()
    with pytest.raises(CheckpointError, match=r"rank 3 are missing \(1 of 4\)"):
        open_checkpoint(step)
    step = copy("zero2-bf16-2")
    shutil.copy(deepspeed_written / "zero2-4" / "global_step2" / last, step / last)
    with pytest.raises(CheckpointError, match="had 2 ranks"):
        open_checkpoint(step)
    shutil.copy(
        deepspeed_written / "zero2-fp32-3/global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt", step
    )
    with pytest.raises(CheckpointError, match="from two runs"):
        open_checkpoint(step)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["zero2-fp32-3", "zero3-fp32-2"])
def test_a_hostile_world_size_is_refused_at_once(copy: Callable[[str], Path], name: str) -> None:
    step = copy(name)
    for path in step.glob("*optim_states.pt"):
        rewrite(path, lambda content: content["optimizer_state_dict"].update(partition_count=1 << 60))
    with pytest.raises(CheckpointError, match=rf"rank {name[-1]} are missing \(\d+ of {1 << 60}\)"):
        open_checkpoint(step)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallel"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallel"),
        ("layer_00-model_00-model_states.pt", "pipeline parallel"),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "expert parallel"),
        ("expert_0_mp_rank_00_model_states.pt", "expert parallel"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert parallel"),
        ("zero_pp_rank_1_mp_rank_00_model_states.pt", "two runs"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "two runs|are both of rank"),
        ("zero_pp_rank_00_mp_rank_00_optim_states.pt", "are both of rank"),
    ],
)
def test_what_is_not_supported_is_named(copy: Callable[[str], Path], file: str, why: str) -> None:
    step = copy("zero2-fp32-3")
    (step / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(step)


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """What torch would have saved under this name had the run been another."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


OPTIM = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "file", "change", "why"),
    [
        ("zero2-fp32-3", OPTIM, lambda c: c.update(ds_version="0.0.1"), "ds_version"),
        ("zero2-fp32-3", OPTIM, lambda c: c["ds_config"].update(seed=1), "ds_config"),
        ("zero2-fp32-3", OPTIM, lambda c: c["optimizer_state_dict"].update(zero_stage=1), "zero_stage"),
        (
            "zero2-fp32-3",
            OPTIM,
            lambda c: c["optimizer_state_dict"].update(group_paddings=[4]),
            "differ in size",
        ),
        ("zero2-fp32-3", OPTIM, lambda c: mapping(c).popitem(), "param_slice_mappings"),
        ("zero2-fp32-3", OPTIM, lambda c: setattr(next(iter(mapping(c).values())), "start", 3), "mappings"),
        ("zero2-fp32-3", OPTIM, lambda c: state(c)["step"].add_(1), "step"),
        ("zero2-fp32-3", OPTIM, lambda c: state(c).update(exp_avg=torch.zeros(7)), "lengths"),
        ("zero2-fp32-3", OPTIM, lambda c: state(c).update(exp_avg=state(c)["exp_avg_sq"]), "share bytes"),
        (
            "zero2-fp32-3",
            OPTIM,
            lambda c: state(c).update(exp_avg=state(c)["exp_avg"].double()),
            "F32 and F64",
        ),
        ("zero2-fp32-3", OPTIM, lambda c: state(c).update(odd=[1]), "odd|optimizer state"),
        ("zero2-fp32-3", OPTIM, lambda c: state(c).pop("exp_avg"), "optimizer state"),
        ("zero2-fp32-3", OPTIM, lambda c: groups(c)[0].update(lr=1.0), "param_groups"),
        (
            "zero2-fp32-3",
            "mp_rank_00_model_states.pt",
            lambda c: c.update(dp_world_size=4),
            "world size of 4",
        ),
        ("zero2-fp32-3", "mp_rank_00_model_states.pt", lambda c: c.update(mp_world_size=2), "tensor"),
        (
            "zero2-fp32-3",
            "mp_rank_00_model_states.pt",
            lambda c: reverse(c["param_shapes"]),
            "not at the position|param_slice_mappings disagree",
        ),
        ("zero2-fp32-3", "mp_rank_00_model_states.pt", lambda c: c["module"].pop("counts"), "counts"),
        (
            "zero2-fp32-3",
            "mp_rank_00_model_states.pt",
            lambda c: c["module"]["big.bias"].add_(1),
            "big.bias|is not",
        ),
        ("zero2-fp32-3", "mp_rank_00_model_states.pt", lambda c: shape(c, "big.bias", (18,)), "319"),
        (
            "zero3-fp32-2",
            OPTIM,
            lambda c: c["optimizer_state_dict"].update(partition_count=3),
            "partition_count",
        ),
        ("zero3-fp32-2", OPTIM, lambda c: shorten(c["optimizer_state_dict"]["fp32_flat_groups"]), "elements"),
        (
            "zero3-fp32-2",
            OPTIM.replace("optim", "model"),
            lambda c: reverse(c["param_shapes"]),
            "param_shapes",
        ),
        ("zero3-fp32-2", OPTIM.replace("optim", "model"), lambda c: c.update(global_steps=9), "global_steps"),
        ("zero3-fp32-2", OPTIM.replace("optim", "model"), lambda c: fragments(c).popitem(), "frozen"),
    ],
)
def test_records_that_disagree(
    copy: Callable[[str], Path], name: str, file: str, change: Callable[[Any], None], why: str
) -> None:
    step = copy(name)
    everything(open_checkpoint(step))
    rewrite(step / file, change)
    with pytest.raises(CheckpointError, match=why) as caught:
        everything(open_checkpoint(step))
    assert str(step) in str(caught.value)


def mapping(content: Any) -> Any:
    return content["optimizer_state_dict"]["param_slice_mappings"][0]


def state(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]


def groups(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]


def fragments(content: Any) -> Any:
    return content["frozen_param_fragments"]


def reverse(shapes: Any) -> None:
    for index, group in enumerate(shapes):
        shapes[index] = dict(reversed(group.items()))


def shape(content: Any, name: str, size: tuple[int, ...]) -> None:
    content["param_shapes"][0][name] = torch.Size(size)


def shorten(flats: Any) -> None:
    flats[0] = flats[0].detach()[:-1].clone()


def test_stage_3_steps_must_be_the_engines(copy: Callable[[str], Path]) -> None:
    step = copy("zero3-fp32-2")
    for path in step.glob("*model_states.pt"):
        rewrite(path, lambda content: content.update(global_steps=9))
    with pytest.raises(CheckpointError, match="is at step 9, the optimizer states are at step 2"):
        open_checkpoint(step)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"mics_shard_size": 4}, "MiCS"), ({"zero_quantized_nontrainable_weights": True}, "quantized")],
)
def test_other_layouts_are_named(copy: Callable[[str], Path], options: dict[str, Any], why: str) -> None:
    step = copy("zero3-fp32-2")
    for path in step.iterdir():
        rewrite(path, lambda content: content["ds_config"]["zero_optimization"].update(options))
    with pytest.raises(CheckpointError, match=f"{why}.* not supported"):
        open_checkpoint(step)


def test_swapped_out_masters_are_missed(copy: Callable[[str], Path]) -> None:
    """With NVMe offload the pickled masters are empty."""
    step = copy("zero3-fp32-2")
    for path in step.glob("*optim_states.pt"):
        rewrite(path, lambda content: empty(content["optimizer_state_dict"]["fp32_flat_groups"]))
    with pytest.raises(CheckpointError, match="NVMe"):
        open_checkpoint(step)


def empty(flats: Any) -> None:
    flats[0] = torch.empty(0)


class Unknown:
    """A class that only the client knows."""


def test_client_state(copy: Callable[[str], Path]) -> None:
    step = copy("zero2-fp32-3")
    good = everything(open_checkpoint(step))
    path = step / "mp_rank_00_model_states.pt"
    rewrite(
        path, lambda content: content.update(epoch=3, history=[0.5], extra={"rng": torch.get_rng_state()})
    )
    assert everything(open_checkpoint(step)) == good
    rewrite(path, lambda content: content.update(client=Unknown()))
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states.pt.*test_deepspeed_damage\.Unknown"):
        open_checkpoint(step)


def test_nothing_is_run(copy: Callable[[str], Path], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    step = copy("zero2-fp32-3")
    path = step / OPTIM
    content = torch.load(path, weights_only=False)
    content["evil"] = Evil()
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        open_checkpoint(step)
    assert not (tmp_path / "owned").exists()


def test_files_saved_into_a_stream_have_no_name(copy: Callable[[str], Path]) -> None:
    """Then the mappings alone tell two ranks apart."""
    step = copy("zero2-fp32-3")
    good = everything(open_checkpoint(step))
    paths = sorted(step.iterdir())
    for path in paths:
        stream = io.BytesIO()
        torch.save(torch.load(path, weights_only=False), stream)
        path.write_bytes(stream.getvalue())
    assert not outcome(step, good)
    first, second = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(second)
    paths[2].write_bytes(first)
    assert outcome(step, good)


def test_no_framework_is_imported(deepspeed_written: Path) -> None:
    code = (
        "import sys; from converters import open_checkpoint\n"
        f"c = open_checkpoint({str(deepspeed_written / 'zero3-4')!r})\n"
        "c.tensors['big.weight'].read(), c.optimizer\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
