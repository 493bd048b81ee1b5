"""Damaged DCP checkpoints: a refusal that names the file, or exactly the right bytes. Never anything else."""

from __future__ import annotations

import pickle
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from converters import Checkpoint, CheckpointError, Tensor, open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLIPS = 400


def everything(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that a conversion with --optimizer would write."""
    found: dict[str, Any] = {name: content(tensor) for name, tensor in checkpoint.tensors.items()}
    found["aliases"] = dict(checkpoint.aliases)
    assert checkpoint.optimizer is not None
    for name, state in checkpoint.optimizer.state.items():
        found[f"state {name}"] = {what: content(value) for what, value in state.items()}
    found["groups"] = checkpoint.optimizer.param_groups
    return found


def content(value: Any) -> Any:
    return (value.dtype, value.shape, value.read().tobytes()) if isinstance(value, Tensor) else value


@pytest.fixture
def step(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "fsdp3-ours", tmp_path / "step")
    return tmp_path / "step"


def outcome(step: Path, good: dict[str, Any]) -> bool:
    """Whether the checkpoint was refused; anything read must be right."""
    try:
        found = everything(open_checkpoint(step))
    except CheckpointError as error:
        assert str(step) in str(error)
        assert "\n" not in str(error)
        return True
    assert found == good
    return False


def flips(step: Path, names: list[str], count: int) -> int:
    good = everything(open_checkpoint(step))
    rng = random.Random(0)
    refused = 0
    for _ in range(count):
        path = step / rng.choice(names)
        data = path.read_bytes()
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        refused += outcome(step, good)
        path.write_bytes(data)
    return refused


def test_flips_in_the_metadata(step: Path) -> None:
    assert flips(step, [".metadata"], FLIPS) > FLIPS // 2


def test_flips_in_the_shards(step: Path) -> None:
    # More than half of a shard this small is zip padding, where a flip changes nothing.
    shards = [path.name for path in step.glob("*.distcp")]
    assert flips(step, shards, FLIPS) > FLIPS // 5


def test_truncated_deleted_and_foreign_files(step: Path, written: Path) -> None:
    good = everything(open_checkpoint(step))
    rng = random.Random(0)
    for path in sorted(step.iterdir()):
        data = path.read_bytes()
        for _ in range(8):
            path.write_bytes(data[: rng.randrange(len(data))])
            assert outcome(step, good)
        path.unlink()
        assert outcome(step, good)
        path.mkdir()
        assert outcome(step, good)
        path.rmdir()
        path.write_bytes(b"hello" * 1000)
        assert outcome(step, good)
        path.write_bytes(data + b"more")
        outcome(step, good)
        path.write_bytes(data)
    for other in ("__1_0.distcp", "__2_0.distcp"):
        first, second = (step / "__0_0.distcp").read_bytes(), (step / other).read_bytes()
        (step / "__0_0.distcp").write_bytes(second)
        (step / other).write_bytes(first)
        assert outcome(step, good)
        (step / "__0_0.distcp").write_bytes(first)
        (step / other).write_bytes(second)
    shutil.copy(written / "fsdp2-ours" / "__0_0.distcp", step / "__0_0.distcp")
    assert outcome(step, good)


def hostile(step: Path, change: Callable[[Any], None]) -> str:
    """What is said about metadata that torch would have pickled with a lie in it."""
    path = step / ".metadata"
    data = path.read_bytes()
    metadata = pickle.loads(data)  # noqa: S301 - what torch wrote a moment ago
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    try:
        with pytest.raises(CheckpointError) as caught:
            everything(open_checkpoint(step))
    finally:
        path.write_bytes(data)
    return str(caught.value)


def test_lies_in_the_metadata(step: Path) -> None:
    def item(metadata: Any, name: str, index: int = 0) -> Any:
        return [place for at, place in metadata.storage_data.items() if at.fqn == name][index]

    weight = "model.brain.weight"

    def set_item(**values: Any) -> Callable[[Any], None]:
        return lambda metadata: item(metadata, weight).__dict__.update(values)

    def describe(**values: Any) -> Callable[[Any], None]:
        return lambda metadata: metadata.state_dict_metadata[weight].__dict__.update(values)

    import torch

    def other_chunk(metadata: Any) -> None:
        item(metadata, weight).__dict__.update(item(metadata, "optim.state.brain.weight.exp_avg").__dict__)

    def drop_chunk(metadata: Any) -> None:
        metadata.state_dict_metadata[weight].chunks.pop()

    def double_chunk(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[weight].chunks
        chunks.append(chunks[0])

    def retype(metadata: Any) -> None:
        metadata.state_dict_metadata[weight].properties.dtype = torch.float16

    def rename(metadata: Any) -> None:
        metadata.planner_data[weight] = ("model", "brain.bias")

    def compress(metadata: Any) -> None:
        item(metadata, weight).transform_descriptors = ["stream.zstd"]

    assert "leaves" in hostile(step, set_item(relative_path="../step/__0_0.distcp"))
    assert "leaves" in hostile(step, set_item(relative_path="/etc/passwd"))
    assert "nope" in hostile(step, set_item(relative_path="nope"))
    assert "truncated" in hostile(step, set_item(length=1 << 62))
    assert "truncated" in hostile(step, set_item(offset=1 << 40))
    assert "is not a size" in hostile(step, set_item(offset=-1))
    assert "is not a size" in hostile(step, set_item(length=1.5))
    assert "missing" in hostile(step, describe(size=torch.Size((1 << 40, 13))))
    assert "impossible" in hostile(step, describe(size=torch.Size((1 << 60, 1 << 60))))
    assert "dimensions" in hostile(step, describe(size=torch.Size((65,))))
    assert "share bytes" in hostile(step, other_chunk)
    assert "missing" in hostile(step, drop_chunk)
    assert "overlap" in hostile(step, double_chunk)
    assert "F16" in hostile(step, retype)
    assert "does not match" in hostile(step, rename)
    assert "compressed" in hostile(step, compress)
    assert "different keys" in hostile(step, lambda metadata: metadata.planner_data.pop(weight))
    assert "no storage_data" in hostile(step, lambda metadata: metadata.__dict__.update(storage_data=[]))


def test_code_in_the_metadata_is_named_and_not_run(step: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "owned"), "w"))

    said = hostile(step, lambda metadata: metadata.__dict__.update(storage_meta=Evil()))
    assert "io.open" in said and ".metadata" in said
    assert not (tmp_path / "owned").exists()
