"""Small files that are made to cost minutes or gigabytes, by comparisons, lookups or repeated reads.

Each of these took more than half a minute, or never ended, before there was a limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from portable.converters import CheckpointError, open_checkpoint
from portable.converters.containers.pickle_reader import unpickle_without_code
from portable.converters.names.canonical import (
    StateDictPath,
    classify_state_dict_keys,
    infer_key_paths,
    split_state_key,
)
from portable.converters.names.index_keys import match_groups_to_parameters
from portable.converters.tensors.tiling import check_boxes_cover_once
from tests.converters.compare import rewrite

# Numbers with the same Python hash.
SAME_HASH = 2**61 - 1
MOST_SECONDS = 20.0  # of CPU time; without the bounds it is minutes, so a slow machine does not matter


@contextmanager
def quick() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < MOST_SECONDS


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write tensors without elements, which cost only their entries."""
    header = {name: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


# -- numbers whose hashes are equal --------------------------------------------------------------------------


def colliding(count: int) -> bytes:
    numbers = ((7 + i * SAME_HASH).to_bytes(11, "little") for i in range(count))
    return b"".join(b"\x8a\x0b" + number for number in numbers)


@pytest.mark.parametrize("shape", ["dict", "set", "instance"])
def test_unpickling_rejects_many_keys_with_one_hash(shape: str) -> None:
    numbers = colliding(60_000)
    pairs = b"".join(numbers[i : i + 13] + b"N" for i in range(0, len(numbers), 13))
    data = {"dict": b"}(" + pairs + b"u.", "set": b"\x8f(" + numbers + b"\x90.",
            "instance": b"cm\nC\n)\x81(" + pairs + b"u."}[shape]  # fmt: skip
    with quick(), pytest.raises(CheckpointError, match="as a dict key or set item, but only integers from"):
        unpickle_without_code(b"\x80\x04" + data, location="f", standins={"m.C": None})


def test_optimizer_params_with_one_hash_are_rejected(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    groups = [{"params": [7 + i * SAME_HASH for i in range(60_000)]}]
    torch.save({"state": {}, "param_groups": groups}, tmp_path / "optimizer.bin")
    with quick(), pytest.raises(CheckpointError, match="neither names nor indices"):
        _ = open_checkpoint(tmp_path).optimizer


# -- names ---------------------------------------------------------------------------------------------------


def test_many_possibly_tied_names_are_read_fast(tmp_path: Path) -> None:
    count = 8000
    shapes = {f"a{i}.lm_head.weight": [0, i] for i in range(count)}
    shapes |= {f"b{i}.embed_tokens.weight": [0, count + i] for i in range(count)}
    safetensors(tmp_path / "model.safetensors", shapes)
    with quick():
        assert len(open_checkpoint(tmp_path).tensors) == 2 * count
    safetensors(tmp_path / "model.safetensors", {name: [0] for name in shapes})
    with (
        quick(),
        pytest.raises(
            CheckpointError, match=r"/.*: damaged: more than 1,000 pairs of tensors have the names"
        ),
    ):
        _ = open_checkpoint(tmp_path).tensors


def test_tensor_name_length_is_limited(tmp_path: Path) -> None:
    with quick(), pytest.raises(CheckpointError, match="400,000 characters"):
        split_state_key("." * 400_000, {})
    path = ("optim", "state", "." * 400_000)
    paths: dict[str, StateDictPath] = {"lr": ("optim", "param_groups", 0, "lr"), "state": path}
    with quick(), pytest.raises(CheckpointError, match=r"f: the optimizer state name .*400,000 characters"):
        classify_state_dict_keys(paths, frozenset({"state"}), location="f")
    safetensors(tmp_path / "model.safetensors", {"." * 400_000: [0]})
    with pytest.raises(CheckpointError, match="400,000 characters"):
        open_checkpoint(tmp_path)


def test_number_of_optimizers_is_limited() -> None:
    keys = [f"c{i}.param_groups" for i in range(20_000)] + [f"w{i}.x" for i in range(20_000)]
    with quick(), pytest.raises(CheckpointError, match="f: damaged: the keys contain 20,000 optimizers"):
        infer_key_paths(keys, location="f")


def with_numbers(metadata: Any) -> None:
    """Convert digits in paths to list indices."""
    for key, path in metadata.planner_data.items():
        metadata.planner_data[key] = tuple(int(part) if part.isdigit() else part for part in path)


def nested(depth: int) -> dict[str, Any]:
    return {"param_groups": nested(depth - 1) if depth else 0.1}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (
            {"optim": {"param_groups": {10**12: {"lr": 0.1}}}},
            "parameter group 0 of the optimizer is missing",
        ),
        (nested(300), "the path of"),
        ({"optimizer": {"a" * 5000: 0.1}}, r"is too long \(5,010 characters"),
    ],
)
def test_state_dict_paths_are_limited(state: dict[str, Any], why: str, tmp_path: Path) -> None:
    dcp_save({"model": {"w": torch.ones(2)}, **state}, checkpoint_id=tmp_path, no_dist=True)
    rewrite(tmp_path / ".metadata", with_numbers)
    with quick(), pytest.raises(CheckpointError, match=why):
        optimizer = open_checkpoint(tmp_path).optimizer
        assert optimizer is not None and optimizer.param_groups


# -- one file by many names ----------------------------------------------------------------------------------


def test_index_that_lists_one_file_twice_is_rejected(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", {f"t{i}": [0] for i in range(5000)})
    (tmp_path / "linked.safetensors").hardlink_to(tmp_path / "model.safetensors")
    (tmp_path / "link.safetensors").symlink_to("model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    many = {f"t{i}": "./" * i + "model.safetensors" for i in range(900)}
    pair = {"t0": "model.safetensors"}
    maps = (many, {**pair, "t1": "linked.safetensors"}, {**pair, "t1": "link.safetensors"})
    for weight_map in maps:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with quick(), pytest.raises(CheckpointError, match="lists one file twice"):
            open_checkpoint(tmp_path)


# -- puzzles -------------------------------------------------------------------------------------------------


def test_check_boxes_cover_once_is_fast_for_many_neighbors() -> None:
    """Each row has two pieces, split at different columns. All are neighbors in either sort order."""
    n = 6000
    pieces = [piece for i in range(n) for piece in (((i, 0), (1, i + 1)), ((i, i + 1), (1, n - i)))]
    with quick():
        check_boxes_cover_once("t", (n, n + 1), pieces)
    pieces[7], pieces[8] = ((3, 3), (1, n - 3)), ((4, 0), (1, 6))
    with quick(), pytest.raises(CheckpointError, match="overlap"):
        check_boxes_cover_once("t", (n, n + 1), pieces)
    cuts = [((0,) * 40, (2,) * 40)] * 2
    with quick(), pytest.raises(CheckpointError):
        check_boxes_cover_once("t", (4,) * 40, cuts)


def test_match_groups_to_parameters_is_fast_for_ambiguous_groups() -> None:
    candidates = [(f"a{i}", (1,)) for i in range(1500)]
    with quick():
        assert match_groups_to_parameters(candidates, [[None] * 500, [None] * 500]) == 2
        assert match_groups_to_parameters(candidates, [[None]] * 1500) == 2
        assert match_groups_to_parameters(
            [(f"a{i}", (i,)) for i in range(300)], [[(i,)] for i in range(300)]
        ) == {f"a{i}": (i, 0) for i in range(300)}
