"""The comparison of packings runs, and counts what it says it counts."""

from __future__ import annotations

import re

import pytest

from benchmarks import packing


@pytest.mark.exhaustive
def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--texts", "60", "--seq-len", "256", "--batch", "2", "--steps", "1", "--rounds", "1"]
    assert packing.main(small) == 0
    rows = dict(re.findall(r"^\| (\w.*?) \| (.*) \|$", capsys.readouterr().out, re.MULTILINE))
    assert set(rows) == {*packing.OURS, "Trainer, padded"}
    tokens = {name: int(row.split(" | ")[1].replace(",", "")) for name, row in rows.items()}
    assert tokens["portable-train, packing: true"] == 512
    assert 450 < tokens["portable-train, packing: documents"] <= 512
    assert tokens["portable-train, packing: false"] < 512
