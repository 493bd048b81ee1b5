"""One file a rank of FSDP-sharded state, against the live tensors it was written from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from converters import CheckpointError, open_checkpoint
from converters.containers.pickle_reader import Instance
from converters.formats.fsdp_ranks.flat import _units
from converters.formats.fsdp_ranks.sharded import _cuts_of_layout
from tests.converters.compare import assert_model, assert_optimizer, load

SAMPLES = Path(__file__).parent / "rank_samples"


@pytest.mark.parametrize("run", ["tensor-parallel-4", "meshes-4"])
@pytest.mark.parametrize("torch_version", ["2.9.1", "2.10.0", "2.15.0"])
def test_meshes_of_older_and_newer_torch(torch_version: str, run: str, tmp_path: Path) -> None:
    shutil.unpack_archive(SAMPLES / f"torch-{torch_version}.tar.xz", tmp_path, filter="data")
    checkpoint, reference = open_checkpoint(tmp_path / run), load(tmp_path / f"{run}.ref.pt")
    assert_model(checkpoint, reference["model"])
    assert_optimizer(checkpoint, reference)


def record(**fields: Any) -> Instance:
    made = Instance("torch.distributed._mesh_layout._MeshLayout", ())
    made.state = fields
    return made


def test_layouts_of_a_mesh() -> None:
    """Of 8 ranks: the sizes and strides of each dimension."""
    found = _cuts_of_layout(record(shape=((2, 2), 2), stride=((4, 1), 2)), 8)
    assert found == [[(2, 4), (2, 1)], [(2, 2)]]
    axes = (record(shape=(2, 2), stride=(4, 1)), record(shape=(), stride=()), record(shape=(2,), stride=(2,)))
    assert _cuts_of_layout(record(axes=axes), 8) == [[(2, 4), (2, 1)], [], [(2, 2)]]
    assert _cuts_of_layout(record(shape=8, stride=1), 8) == [[(8, 1)]]
    for shape, stride in (
        *(((2, 2), (1, 1)), ((4, 2), (1, 2)), ((3,), (1,)), ((2,), (3,)), ((16,), (1,)), ((2,), (8,))),
        *(((0,), (1,)), ((2,), (0,)), ((2,), (-1,)), ((2.0,), (1,)), (("a",), (1,)), ((2, 2), (1,))),
        *(((((2,),),), (((1,),),)), (None, None), ((1 << 200,), (1,)), ((2,) * 100, (2,) * 100)),
    ):
        assert _cuts_of_layout(record(shape=shape, stride=stride), 8) is None, (shape, stride)
    broken: list[Any] = [(None,), ({},), (record(shape=(2,)),), (record(shape=2, stride=1),) * 2]
    for damaged in broken:
        assert _cuts_of_layout(record(axes=damaged), 8) is None, damaged
    for other in (None, 8, record(), record(axes=[])):
        assert _cuts_of_layout(other, 8) is None


def test_the_folders_of_a_run(written_ranks: Path, tmp_path: Path) -> None:
    """`global_step_<n>/actor/`, with the model's config in `huggingface/`."""
    actor = tmp_path / "run" / "global_step_7" / "actor"
    shutil.copytree(written_ranks / "fsdp2-2", actor)
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text('{"model_type": "odd"}')
    for path in (tmp_path / "run", actor.parent, actor, actor / "model_world_size_2_rank_1.pt"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.metadata["step"] == 7
        assert checkpoint.companions.keys() == {"config.json"}
        assert_model(checkpoint, load(written_ranks / "fsdp2-2.ref.pt")["model"])
    shutil.copytree(actor, actor.with_name("critic"))
    with pytest.raises(CheckpointError, match="several models; give one of 'actor', 'critic'"):
        open_checkpoint(actor.parent)


def test_what_is_refused_by_name(written_ranks: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"LOCAL_STATE_DICT.*save with SHARDED_STATE_DICT"):
        open_checkpoint(written_ranks / "fsdp1-local-3")
    accelerate = tmp_path / "local" / "pytorch_model_fsdp_rank0.bin"
    accelerate.parent.mkdir()
    accelerate.touch()
    for path in (accelerate, accelerate.parent):
        with pytest.raises(CheckpointError, match=r"LOCAL_STATE_DICT.*save with SHARDED_STATE_DICT"):
            open_checkpoint(path)


def test_wrapped_modules_follow_from_the_lengths_or_are_not_guessed() -> None:
    layers = [(f"layers.{i}.{name}", (size,)) for i in range(3) for name, size in (("up", 12), ("down", 8))]
    sizes = [("embed", (10,)), *layers, ("head", (10,))]
    found = _units(sizes, [[10] * 2, [10] * 2, [10] * 2, [10] * 2], 2)
    assert found == [["embed", "head"], *([f"layers.{i}.up", f"layers.{i}.down"] for i in range(3))]
    # One layer wrapped, but which: the embedding and the other two are the root's.
    assert _units(sizes, [[30] * 2, [10] * 2], 2) == 2
    assert _units(sizes, [[30] * 2, [9] * 2], 2) == 0
    assert _units(sizes, [[30, 29], [10] * 2], 2) == 0
