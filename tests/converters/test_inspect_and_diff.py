"""`portable-convert inspect` and `diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from portable.converters import open_checkpoint
from portable.converters.cli import main
from tests.converters.compare import error_of
from tests.converters.samples import folder_of, parameters


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    """Return (exit code, JSON document) of a command."""
    capsys.readouterr()
    code = main([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def saved(path: Path, **tensors: Any) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    "name", parameters(["dcp", "deepspeed-zero3-fp32-2", "universal-zero2-bf16-2", "xla-flat3"])
)
def test_inspect_and_diff_of_every_format(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder_of(name, request, tmp_path)
    code, document = run(capsys, "inspect", source, "--optimizer", "--stats")
    assert code == 0
    assert document["format"] == open_checkpoint(source).format
    assert main([str(source), str(tmp_path / "out"), "--optimizer", "--quiet"]) == 0
    code, found = run(capsys, "diff", source, tmp_path / "out", "--optimizer")
    assert code == 0
    assert found["same"]
    assert found["compared"] == len(document["tensors"])
    known = document["tensors"].values()
    assert sum(tensor["bytes"] for tensor in known) == document["bytes"]
    assert all(tensor["statistics"]["not_finite"] == 0 for tensor in known)


def test_inspect_prints_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.array([[0, -3, 1], [np.nan, np.inf, 2]], np.float32).astype(ml_dtypes.bfloat16)
    source = saved(tmp_path / "a", weight=values, none=np.zeros((0, 3)), count=np.array([1 << 40]))
    code, document = run(capsys, "inspect", source, "--stats")
    assert code == 0
    assert document["tensors"]["weight"]["statistics"] == {
        "count": 6,
        "least": -3.0,
        "largest": 2.0,
        "mean": 0.0,
        "rms": pytest.approx(np.sqrt(14 / 4)),
        "zeros": 1,
        "not_finite": 2,
    }
    assert document["tensors"]["none"]["statistics"]["least"] is None
    assert main(["inspect", str(source), "--stats"]) == 0
    assert "3 tensors, " in capsys.readouterr().out


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_inspect_and_diff_of_overflowing_sums_print_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.full(4, 1e308)
    left, right = saved(tmp_path / "a", weight=values), saved(tmp_path / "b", weight=values / 2)
    _, document = run(capsys, "inspect", left, "--stats")
    statistics = document["tensors"]["weight"]["statistics"]
    assert (statistics["least"], statistics["mean"], statistics["rms"]) == (1e308, None, None)
    _, document = run(capsys, "diff", left, right)
    assert document["values"]["weight"]["relative"] is None


def test_inspect_prints_tied_names_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = torch.ones(2, 2)
    torch.save({"a.weight": shared, "b\nproblem: none.weight": shared}, tmp_path / "m.pt")
    main(["inspect", str(tmp_path / "m.pt")])
    assert "  tied: b problem: none.weight is a.weight\n" in capsys.readouterr().out


def test_diff_tolerance_excludes_close_elements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = saved(tmp_path / "a", weight=np.array([3.0, 4, 0, 0], np.float32))
    right = saved(tmp_path / "b", weight=np.array([3.01, 4.01, 5, np.inf], np.float32))
    _, document = run(capsys, "diff", left, right, "--tolerance", 0.1)
    expected = {"elements": 2, "not_finite": 1, "largest": 5.0, "relative": 1.0}
    assert document["values"]["weight"] == expected


@pytest.mark.parametrize("tolerance", ["-1", "nan", "inf", "1e-6x"])
def test_diff_tolerance_is_a_finite_number(
    tolerance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "a", weight=np.zeros(1))
    line = error_of(capsys, "diff", path, path, "--tolerance", tolerance, code=2)
    assert f"argument --tolerance: '{tolerance}' is not a finite number of at least 0" in line


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        # The difference exceeds the range of float64.
        ([1.7e308, 1], [-1.7e308, 1], {"elements": 1, "not_finite": 0, "largest": np.finfo(float).max}),
        ([np.inf, 1], [-1.7e308, 1], {"elements": 1, "not_finite": 1, "largest": 0}),
        (
            np.array([(1 << 60) + 1, 5, -1]),
            np.array([1 << 60, 5, (1 << 64) - 1], np.uint64),
            {"elements": 2, "not_finite": 0, "largest": 2.0**64},
        ),
    ],
)
def test_diff_compares_extreme_elements(
    left: Any, right: Any, expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [saved(tmp_path / name, w=np.asarray(values)) for name, values in (("a", left), ("b", right))]
    _, document = run(capsys, "diff", *paths)
    difference = document["values"]["w"]
    assert {name: difference[name] for name in expected} == expected


def test_diff_reports_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((300, 400)).astype(np.float32)
    other, bad = weight.copy(), weight.copy()
    other[17, 5] += 0.5
    bad[0, 0] = np.nan
    big = np.array([(1 << 60) + 1])
    held = {"same": weight, "cast": np.ones(3, np.float32), "moved": weight, "bad": weight, "big": big}
    changed = {"cast": np.ones(3, np.float16), "moved": other, "bad": bad, "big": big - 1}
    left = saved(tmp_path / "a", **held, a=weight[:2])
    right = saved(tmp_path / "b", **held | changed, b=weight[:2])
    code, found = run(capsys, "diff", left, right)
    assert code == 1
    assert not found["same"]
    assert (found["only_in_a"], found["only_in_b"]) == (["a"], ["b"])
    assert found["dtypes"] == {"cast": ["F32", "F16"]}
    assert found["values"].keys() == {"moved", "bad", "big"}
    assert found["values"]["moved"]["elements"] == 1
    assert found["values"]["moved"]["largest"] == pytest.approx(0.5, rel=1e-5)
    assert found["values"]["bad"]["not_finite"] == 1
    assert found["values"]["big"]["elements"] == 1
    norm = float(np.sqrt(np.square(weight.astype(np.float64)).sum()))
    assert found["values"]["moved"]["relative"] == pytest.approx(0.5 / norm, rel=1e-5)
    assert found["values"]["big"]["largest"] == 1
    _, document = run(capsys, "diff", left, right, "--tolerance", 0.5)
    assert "big" in document["values"]
    _, found = run(capsys, "diff", left, right, "--tolerance", 1)
    assert found["values"].keys() == {"bad"}
    assert main(["diff", str(left), str(right)]) == 1
    out = capsys.readouterr().out
    assert "moved: 1 element differs by at most 0.5" in out
    assert out.endswith("2 of 5 tensors have the same values\n")
