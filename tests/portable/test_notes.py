"""What a run tells a person before its first step, a dry run tells as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("deepspeed")

from portable.cli import main
from tests.portable.test_adopt import WORDS, pretrained
from tests.portable.test_data_tokenizer import word_tokenizer
from tests.runs import flags, tiny

if TYPE_CHECKING:
    from pathlib import Path

TOLD = ("note:", "warning:", "hint:", "newly initialized", "in the checkpoint but not used")


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return sorted(line for line in capsys.readouterr().err.splitlines() if line.startswith(TOLD))


@pytest.mark.usefixtures("brief_runs")
def test_a_dry_run_prints_the_notes_of_the_run(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an Accelerate file, a DeepSpeed JSON, special tokens and tensors without a use."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = pretrained(tmp_path / "model", word_tokenizer("$A </s>", **WORDS), eos_token_id=3)
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "of.another": torch.ones(2)}, model / "model.safetensors", {"format": "pt"})
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 0}, "wall_clock_breakdown": true}')
    (tmp_path / "accelerate.yaml").write_text(
        "{distributed_type: DEEPSPEED, gpu_ids: '0,1', num_processes: 1,"
        f" deepspeed_config: {{deepspeed_config_file: {tmp_path / 'ds.json'}}}}}"
    )
    settings: dict[str, Any] = tiny(
        tmp_path / "run", corpus, model__name_or_path=str(model), train__steps=1, log__sample_tokens=0
    )
    del settings["model.config"]
    settings |= {"data.packing": False, "data.max_samples": 4, "data.eval_fraction": 0}
    command = ["--accelerate-config", str(tmp_path / "accelerate.yaml"), *flags(settings)]
    assert main([*command, "--show-data", "1"]) == 0  # so that the samples are counted
    capsys.readouterr()
    assert main([*command, "--dry-run"]) == 0
    before = told(capsys)
    assert not (tmp_path / "run").exists()
    assert main(command) == 0
    assert told(capsys) == before
    for words in ("gpu_ids", "wall_clock_breakdown", "special tokens", "of.another", "the data has 4"):
        assert any(words in line for line in before)
