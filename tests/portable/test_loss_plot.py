"""``loss.svg``: what is drawn, and that no log and no name of a folder breaks it."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from portable.reporting.loss_plot import plot_loss
from portable.reporting.svg import POINTS, ticks

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder: Path, rows: list[dict[str, Any]]) -> ET.Element:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = plot_loss(folder)
    assert path == folder / "loss.svg"
    return ET.parse(path).getroot()


def curves(root: ET.Element, colour: str) -> list[list[tuple[float, float]]]:
    lines = [line for line in root.iter(f"{SVG}polyline") if line.get("stroke") == colour]
    points = [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in lines
    ]
    return [[(x, y) for x, y in line] for line in points if len(line) > 2]


def test_both_losses_stand_on_one_scale(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": s, "loss": 8.0 - s / 10, "learning_rate": 1e-3} for s in range(1, 41)
    ]
    rows += [{"step": s, "eval_loss": 8.0 - s / 10} for s in (10, 20, 40)]
    root = drawn(tmp_path / "run", rows)
    (training,), (evaluation,) = curves(root, "#1f6feb"), curves(root, "#d1242f")
    assert len(training) == 40
    assert evaluation == [training[9], training[19], training[39]]
    assert [x for x, _ in training] == sorted(x for x, _ in training)
    assert [y for _, y in training] == sorted(y for _, y in training)  # y grows downwards, and the loss falls
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"run", "step", "training loss", "evaluation loss", "10", "40", "5", "7"} <= set(words)


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 9.0 if s == 7777 else 1.0} for s in range(20_000)]
    ((*line,),) = curves(drawn(tmp_path, rows), "#1f6feb")
    assert len(line) <= POINTS + 2
    assert len({y for _, y in line}) == 2  # the spike is there


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": 2.0, "learning_rate": 0.0}, {"step": 2, "loss": 2.0, "learning_rate": 5e-324}],
        [{"step": 5, "loss": 1e299}, {"step": 6, "loss": -1e299}, {"step": 7, "loss": math.nan}],
        [{"step": 0, "loss": 1e-310}, {"step": (1 << 53) - 2, "loss": 3e-310, "eval_loss": "much"}],
        [{"step": 1, "loss": 10**400}, {"step": 2, "loss": 0}],
    ],
)
def test_every_log_is_drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    root = drawn(tmp_path / "a & <b> \x01", rows)
    assert all(math.isfinite(float(dot.attrib["cy"])) for dot in root.iter(f"{SVG}circle"))
    assert any((text.text or "").startswith("a & <b>") for text in root.iter(f"{SVG}text"))


def test_nothing_is_drawn_before_the_first_loss(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 2.0}\n')
    assert plot_loss(tmp_path) is None


def test_ticks_are_round() -> None:
    assert ticks(0, 12000, 7) == [0, 2000, 4000, 6000, 8000, 10000, 12000]
    assert ticks(2.1, 2.9, 4) == [2.2, 2.4, 2.6, 2.8]
    assert ticks(-1e-4, 3.2e-4, 5) == [-1e-4, 0, 1e-4, 2e-4, 3e-4]
