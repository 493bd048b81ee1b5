"""Reading and writing safetensors files, compared with the reference implementation."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from portable.converters import (
    Checkpoint,
    CheckpointError,
    OptimizerState,
    Tensor,
    open_checkpoint,
    write_safetensors,
)
from tests.converters.compare import assert_model, assert_same, bits

WEIGHTS = {
    "a.weight": torch.randn(5, 3),
    "a.mask": torch.tensor([True, False, True]),
    "b.weight": torch.randn(7, 2).bfloat16(),
    "b.steps": torch.tensor(1 << 50),
    "c.table": torch.randn(3, 3).half(),
    "d.empty": torch.zeros(0, 4),
    "e.bytes": torch.arange(7, dtype=torch.uint8),
    "f.f8": torch.randn(9).to(torch.float8_e5m2),
    "g.u16": torch.tensor([1, 65535], dtype=torch.uint16),
}


def model(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(WEIGHTS if weights is None else weights, folder / "model.safetensors")
    return folder


def header(document: Any, data: bytes = b"") -> bytes:
    text = json.dumps(document).encode() if not isinstance(document, bytes) else document
    return struct.pack("<Q", len(text)) + text + data


def test_safetensors_round_trips_folder_file_and_index(tmp_path: Path) -> None:
    source = model(tmp_path / "in")
    for path in (source, source / "model.safetensors"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "safetensors"
        assert_model(checkpoint, WEIGHTS)
    with pytest.raises(TypeError, match="verfy: unknown option"):
        write_safetensors(open_checkpoint(source), tmp_path / "out", verfy=True)  # type: ignore[call-arg]
    with pytest.raises(CheckpointError, match="names: unknown value 'lives'; use one of published, live, st"):
        write_safetensors(open_checkpoint(source), tmp_path / "out", names="lives")
    plan = write_safetensors(open_checkpoint(source), tmp_path / "out", max_shard_size=60, progress=False)
    names = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert names == sorted([*(file.name for file in plan.files), "model.safetensors.index.json"])
    assert names[0] == f"model-00001-of-{len(plan.files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in WEIGHTS.values())
    found = {}
    for file in plan.files:
        found.update(safetensors.torch.load_file(tmp_path / "out" / file.name))
        with safetensors.safe_open(tmp_path / "out" / file.name, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
    assert set(found) == set(index["weight_map"]) == set(WEIGHTS)
    assert all(bits(found[name]) == bits(value) for name, value in WEIGHTS.items())
    assert_model(open_checkpoint(tmp_path / "out"), WEIGHTS)
    assert_model(open_checkpoint(tmp_path / "out" / "model.safetensors.index.json"), WEIGHTS)


def test_safetensors_round_trips_optimizer(tmp_path: Path) -> None:
    stored = open_checkpoint(model(tmp_path / "in")).tensors
    weights = {name: stored[name] for name in ("a.weight", "b.weight")}
    state: dict[str, dict[str, Tensor | int | float | bool]] = {
        "a.weight": {"exp_avg": weights["a.weight"], "step": 7},
        "b.weight": {"row": weights["b.weight"], "step": 2.5, "flag": True},
    }
    groups = [{"params": ["a.weight", "b.weight"], "lr": 0.1, "betas": (0.9, 0.95), "fused": None}]
    source = Checkpoint(
        format="x", root=tmp_path / "in", tensors=weights, optimizer=OptimizerState(state, groups)
    )
    write_safetensors(source, tmp_path / "out", optimizer=True, dtype="float16", progress=False, verify=True)
    moments = safetensors.torch.load_file(tmp_path / "out" / "optimizer.safetensors")
    assert bits(moments["a.weight.exp_avg"]) == bits(WEIGHTS["a.weight"])
    assert moments["a.weight.step"].item() == 7
    assert moments["b.weight.step"].item() == 2.5
    back = open_checkpoint(tmp_path / "out").optimizer
    assert back is not None
    assert back.param_groups == [{**groups[0], "betas": [0.9, 0.95]}]
    assert set(back.state["b.weight"]) == {"row", "step", "flag"}
    assert_same(back.state["b.weight"]["row"], WEIGHTS["b.weight"])  # type: ignore[arg-type]


def test_safetensors_optimizer_state_of_another_shape_is_rejected(tmp_path: Path) -> None:
    source = model(tmp_path / "in", {"a.weight": torch.ones(5, 3)})
    (source / "optimizer.json").write_text(json.dumps({"param_groups": [{"params": ["a.weight"]}]}))
    path = source / "optimizer.safetensors"
    safetensors.torch.save_file({"a.weight.row": torch.ones(5), "a.weight.exp_avg": torch.ones(5)}, path)
    line = f"{path}: exp_avg of 'a.weight' has shape [5], but the parameter has shape [5, 3]; copy the"
    with pytest.raises(CheckpointError, match=re.escape(line)):
        _ = open_checkpoint(source).optimizer


def test_safetensors_dtype_casts_only_floats_with_dimensions(tmp_path: Path) -> None:
    weights = {**WEIGHTS, "g.scale": torch.tensor(0.1)}
    source = model(tmp_path / "in", weights)
    write_safetensors(
        open_checkpoint(source), tmp_path / "out", dtype="bfloat16", progress=False, verify=True
    )
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for name, value in weights.items():
        cast = value.is_floating_point() and value.ndim > 0 and value.dtype != torch.float8_e5m2
        assert bits(stored[name]) == bits(value.bfloat16() if cast else value)


DAMAGED = {
    "too short": b"\0\0\0",
    "huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "not json": header(b"{nope"),
    "a list": header([1]),
    "deep": header(b"[" * 100_000),
    "twice": header(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'),
    "unknown type": header({"a": {"dtype": "Q3", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "negative": header({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"x"),
    "float size": header({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"x"),
    "wrong length": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}, b"xxx"),
    "overflow": header({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 0]}}),
    "outside": header({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"x"),
    "backwards": header({"a": {"dtype": "U8", "shape": [0], "data_offsets": [1, 0]}}, b"x"),
    "gap": header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"xx"),
    "tail": header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"xx"),
    "overlap": header(
        {
            "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
            "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
        },
        b"xxx",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_safetensors_inconsistent_headers_are_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[name])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_safetensors_index_must_match_shards(tmp_path: Path) -> None:
    source = model(tmp_path / "in")
    out = tmp_path / "out"
    write_safetensors(open_checkpoint(source), out, max_shard_size=100, progress=False)
    index = out / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shards = sorted(set(good["weight_map"].values()))
    first, last = next(iter(good["weight_map"])), shards[-1]
    cases: list[tuple[Any, str]] = [
        ({"weight_map": {**good["weight_map"], first: "../in/model.safetensors"}}, "points outside"),
        ({"weight_map": {**good["weight_map"], first: "nope.safetensors"}}, "nope"),
        ({"weight_map": {**good["weight_map"], first: last}}, "does not"),
        ({"weight_map": {k: v for k, v in good["weight_map"].items() if k != first}}, "contains"),
        ({"weight_map": {**good["weight_map"], "more": last}}, "'more'"),
        ({"weight_map": 1}, "weight_map"),
        ([], "not an object"),
    ]
    for document, what in cases:
        index.write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match=what):
            open_checkpoint(out)
    index.unlink()
    with pytest.raises(CheckpointError, match="several"):
        open_checkpoint(out)
