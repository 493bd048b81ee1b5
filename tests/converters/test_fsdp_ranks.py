"""FSDP-sharded state with one file per rank, compared with the live tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from portable.converters import CheckpointError, open_checkpoint
from portable.converters.formats.fsdp_ranks.flat import _find_wrapped_modules
from tests.converters.compare import assert_model, assert_optimizer, load

SAMPLES = Path(__file__).parent / "rank_samples"


@pytest.mark.parametrize("run", ["tensor-parallel-4", "meshes-4"])
@pytest.mark.parametrize("torch_version", ["2.9.1", "2.10.0", "2.15.0"])
def test_fsdp_rank_meshes_of_several_torch_versions_are_read(
    torch_version: str, run: str, tmp_path: Path
) -> None:
    shutil.unpack_archive(SAMPLES / f"torch-{torch_version}.tar.xz", tmp_path, filter="data")
    checkpoint, reference = open_checkpoint(tmp_path / run), load(tmp_path / f"{run}.ref.pt")
    assert_model(checkpoint, reference["model"])
    assert_optimizer(checkpoint, reference)


def test_fsdp_rank_files_open_by_folder_or_file(written_ranks: Path, tmp_path: Path) -> None:
    """The folder is `global_step_<n>/actor/`, with the model's config in `huggingface/`."""
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
    with pytest.raises(
        CheckpointError, match="several models; specify one of these folders: 'actor', 'critic'"
    ):
        open_checkpoint(actor.parent)


def test_fsdp_rank_local_state_dict_is_rejected(written_ranks: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"LOCAL_STATE_DICT.*save it with SHARDED_STATE_DICT"):
        open_checkpoint(written_ranks / "fsdp1-local-3")
    accelerate = tmp_path / "local" / "pytorch_model_fsdp_rank0.bin"
    accelerate.parent.mkdir()
    accelerate.touch()
    for path in (accelerate, accelerate.parent):
        with pytest.raises(CheckpointError, match=r"LOCAL_STATE_DICT.*save it with SHARDED_STATE_DICT"):
            open_checkpoint(path)


def test_find_wrapped_modules_uses_lengths_without_guessing() -> None:
    layers = [(f"layers.{i}.{name}", (size,)) for i in range(3) for name, size in (("up", 12), ("down", 8))]
    sizes = [("embed", (10,)), *layers, ("head", (10,))]
    found = _find_wrapped_modules(sizes, [[10] * 2, [10] * 2, [10] * 2, [10] * 2], 2)
    assert found == [["embed", "head"], *([f"layers.{i}.up", f"layers.{i}.down"] for i in range(3))]
    # One layer wrapped, but which: the embedding and the other two are the root's.
    assert _find_wrapped_modules(sizes, [[30] * 2, [10] * 2], 2) == 2
    assert _find_wrapped_modules(sizes, [[30] * 2, [9] * 2], 2) == 0
    assert _find_wrapped_modules(sizes, [[30, 29], [10] * 2], 2) == 0
