"""DeepSpeed universal checkpoints against the live run they came from, and against the run's own files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from converters import CheckpointError, open_checkpoint
from tests.converters.compare import assert_model, everything, load, refused

TAG = "global_step2_universal"


def test_every_way_to_name_it(written_universal: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(written_universal / "zero3-bf16-3", run)
    whole = open_checkpoint(run)
    assert whole.format == "deepspeed"  # `latest` goes before `latest_universal`
    assert open_checkpoint(run, tag=TAG).format == "deepspeed-universal"
    assert everything(open_checkpoint(run, tag=TAG)) == everything(whole)
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


@pytest.fixture
def step(written_universal: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    shutil.copytree(written_universal / request.param / TAG, tmp_path / TAG)
    return tmp_path / TAG


def swap(left: Path, right: Path) -> None:
    one, other = left.read_bytes(), right.read_bytes()
    left.write_bytes(other)
    right.write_bytes(one)


@pytest.mark.parametrize("step", ["zero2-bf16-3", "zero3-bf16-3"], indirect=True)
def test_files_that_do_not_belong(step: Path, written_universal: Path) -> None:
    zero = step / "zero"
    swap(zero / "big.bias" / "fp32.pt", zero / "big.bias" / "exp_avg.pt")
    assert "was saved as" in refused(step)
    swap(zero / "big.bias" / "fp32.pt", zero / "big.bias" / "exp_avg.pt")
    (zero / "other").mkdir()
    assert "belongs to no parameter" in refused(step)
    (zero / "other").rmdir()
    below = (step / "mp_rank_00_model_states.pt").exists()
    other = "zero1-fp32-3" if below else "zero3-fp32-3"
    shutil.copy(written_universal / other / TAG / "zero" / "big.bias" / "fp32.pt", zero / "big.bias")
    assert "values differ from" in refused(step)


@pytest.mark.parametrize("step", ["zero3-bf16-3"], indirect=True)
def test_ranks_of_stage_3(step: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (1, 2)]
    shutil.copy(step / names[1], step / names[0])
    assert "the file of another rank" in refused(step)


@pytest.mark.parametrize("step", ["zero2-bf16-3"], indirect=True)
def test_a_moment_in_the_form_of_another_stage(step: Path) -> None:
    path = step / "zero" / "big.weight" / "exp_avg.pt"
    torch.save(load(path)["param"].flatten().clone(), path)
    assert "stage 2" in refused(step)
