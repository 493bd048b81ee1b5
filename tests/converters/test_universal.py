"""DeepSpeed universal checkpoints against the live run they came from, and against the run's own files."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from converters import CheckpointError, Tensor, open_checkpoint
from tests.converters.compare import assert_model, assert_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUNS = ("zero1-fp32-3", "zero2-bf16-3", "zero3-fp32-3", "zero3-bf16-3")
TAG = "global_step2_universal"


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def bytes_of(value: Any) -> Any:
    return value.read().tobytes() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("run", RUNS)
def test_every_stage_bit_for_bit(written_universal: Path, run: str) -> None:
    reference = load(written_universal / f"{run}.2.ref.pt")
    checkpoint = open_checkpoint(written_universal / run / TAG)
    assert checkpoint.format == "deepspeed-universal"
    assert checkpoint.metadata["step"] == 2
    assert checkpoint.metadata["zero_stage"] == int(run[4])
    assert checkpoint.aliases == {"lm_head.weight": "embed_tokens.weight"}
    assert_model(checkpoint, reference["model"])
    ours, whole = checkpoint.optimizer, open_checkpoint(written_universal / run)
    assert whole.format == "deepspeed"  # `latest` goes before `latest_universal`
    theirs = whole.optimizer
    assert ours is not None and theirs is not None
    assert ours.param_groups == theirs.param_groups
    assert set(ours.state) == set(theirs.state) == set(reference["optim"])
    for name, values in ours.state.items():
        assert {key: bytes_of(value) for key, value in values.items()} == {
            key: bytes_of(value) for key, value in theirs.state[name].items()
        }
        for key, value in reference["optim"][name].items():
            moment = values[key]
            assert isinstance(moment, Tensor)
            assert_same(moment, value)


def test_every_way_to_name_it(written_universal: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(written_universal / "zero3-bf16-3", run)
    assert open_checkpoint(run, tag=TAG).format == "deepspeed-universal"
    shutil.rmtree(run / "global_step2")
    (run / "latest").unlink()
    weights = load(written_universal / "zero3-bf16-3.2.ref.pt")["model"]
    assert_model(open_checkpoint(run), weights)
    assert_model(open_checkpoint(run / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"), weights)
    with pytest.raises(CheckpointError, match="nope"):
        open_checkpoint(run, tag="nope")
    (run / "latest_universal").write_text("elsewhere")
    with pytest.raises(CheckpointError, match="'elsewhere'"):
        open_checkpoint(run)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_checkpoint(folder)
        assert checkpoint.optimizer is not None
        for name, tensor in checkpoint.tensors.items():
            assert name and tensor.read() is not None
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def step(written_universal: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    shutil.copytree(written_universal / request.param / TAG, tmp_path / TAG)
    return tmp_path / TAG


def change(path: Path, how: Callable[[Any], Any]) -> None:
    value = load(path)
    made = how(value)
    torch.save(value if made is None else made, path)


def swap(left: Path, right: Path) -> None:
    one, other = left.read_bytes(), right.read_bytes()
    left.write_bytes(other)
    right.write_bytes(one)


@pytest.mark.parametrize("step", ["zero2-bf16-3", "zero3-bf16-3"], indirect=True)
def test_files_that_do_not_belong(step: Path, written_universal: Path) -> None:
    zero = step / "zero"
    (zero / "big.bias" / "exp_avg.pt").rename(step / "away")
    assert "exp_avg.pt: missing" in refused(step)
    (step / "away").rename(zero / "big.bias" / "exp_avg.pt")
    (zero / "big.bias" / "fp32.pt").rename(step / "away")
    assert "fp32.pt: missing" in refused(step)
    (step / "away").rename(zero / "big.bias" / "fp32.pt")
    swap(zero / "big.bias" / "fp32.pt", zero / "big.bias" / "exp_avg.pt")
    assert "was saved as" in refused(step)
    swap(zero / "big.bias" / "fp32.pt", zero / "big.bias" / "exp_avg.pt")
    (zero / "other").mkdir()
    assert "belongs to no parameter" in refused(step)
    (zero / "other").rmdir()
    change(
        zero / "big.bias" / "fp32.pt",
        lambda v: {**v, "param": v["param"] + 1} if isinstance(v, dict) else v + 1,
    )
    assert "values differ from" in refused(step)
    other = (
        "zero1-fp32-3" if "mp_rank_00_model_states.pt" in {p.name for p in step.iterdir()} else "zero3-fp32-3"
    )
    shutil.copy(written_universal / other / TAG / "zero" / "big.bias" / "fp32.pt", zero / "big.bias")
    assert "values differ from" in refused(step)


@pytest.mark.parametrize("step", ["zero3-bf16-3"], indirect=True)
def test_ranks_of_stage_3(step: Path) -> None:
    path = step / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    path.rename(step / "away")
    assert "rank 1 are missing" in refused(step)
    shutil.copy(step / "zero_pp_rank_2_mp_rank_00_model_states.pt", path)
    assert "the file of another rank" in refused(step)
    (step / "away").rename(path)
    moment = step / "zero" / "big.weight" / "exp_avg_sq.pt"
    change(moment, lambda value: value * 2)
    assert "values differ from zero/optimizer_state.pt" in refused(step)


@pytest.mark.parametrize("step", ["zero2-bf16-3"], indirect=True)
def test_what_does_not_add_up(step: Path) -> None:
    weight, common = step / "zero" / "big.weight", step / "zero" / "optimizer_state.pt"
    good = {path: path.read_bytes() for path in (*weight.iterdir(), common)}

    def said(path: Path, how: Callable[[Any], Any]) -> str:
        change(path, how)
        message = refused(step)
        path.write_bytes(good[path])
        return message

    assert "big.weight" in said(weight / "step.pt", lambda value: value + 5)
    assert "is [221]" in said(
        weight / "exp_avg.pt", lambda value: value.update(param=value["param"].flatten())
    )
    assert "not a tensor" in said(weight / "exp_avg.pt", lambda value: value.update(param=[1.0]))
    assert "tensor parallel" in said(weight / "fp32.pt", lambda value: value.update(param_n_sub_params=2))
    assert "stage 2" in said(weight / "exp_avg.pt", lambda value: value["param"].flatten().clone())
    assert "stage" in said(common, lambda value: value.update(zero_stage=7))
    assert "partition_count" in said(common, lambda value: value.update(partition_count=[3, 4]))
    assert "partition_count" in said(common, lambda value: value.update(partition_count=[1 << 60]))
    assert "param_groups" in said(common, lambda value: value.update(param_groups=None))
    assert "groups" in said(common, lambda value: value["param_groups"][0].update(params=[9]))
    assert open_checkpoint(step).optimizer is not None
