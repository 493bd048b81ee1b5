"""The page about formats: its code runs, and it knows every format there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from converters import open_checkpoint
from converters.formats import formats
from converters.options import WRITERS
from tests.converters.samples import all_samples

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")


def test_the_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    (tmp_path / "ckpt").mkdir()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(saved, tmp_path / "ckpt" / "last.pt")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/formats.md", "exec"), {})
    assert "torch 1\nlayer.weight F32 (3, 5)\n" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").tensors["layer.weight"].dtype == "BF16"


def test_every_format_has_its_row_and_its_sample() -> None:
    names = {known.name for known in formats()}
    rows = [row for row in re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE) if row != "--to"]
    assert set(rows) == names | set(WRITERS)
    assert all(rows.count(name) == 2 + (name in WRITERS) for name in names)
    assert names - {sample.format for sample in all_samples()} == set()
