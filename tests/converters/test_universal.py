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


def test_a_moment_in_the_form_of_another_stage(written_universal: Path, tmp_path: Path) -> None:
    step = Path(shutil.copytree(written_universal / "zero2-bf16-2" / TAG, tmp_path / TAG))
    path = step / "zero" / "big.weight" / "exp_avg.pt"
    torch.save(load(path)["param"].flatten().clone(), path)
    assert "stage 2" in refused(step)
