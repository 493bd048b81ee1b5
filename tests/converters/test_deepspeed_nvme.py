"""ZeRO-3 groups that lie on NVMe: the swap files that a checkpoint copies beside its rank files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from converters import CheckpointError, open_checkpoint
from tests.converters.compare import assert_model, assert_optimizer, everything, load
from tests.converters.making import written_by

pytest.importorskip("deepspeed")

SWAPPED = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of DeepSpeed's own."""
    return written_by("make_nvme", tmp_path_factory)


@pytest.mark.ops("async_io")
def test_bit_for_bit_with_the_live_run(offloaded: Path) -> None:
    step = offloaded / "nvme-2" / "global_step2"
    swapped = {path.name for path in (step / "offloaded_tensors" / "rank01").iterdir()}
    assert swapped == {"0_11.tensor.swp", *(f"{what}-0_11.tensor.swp" for what in SWAPPED)}
    expected = load(offloaded / "nvme-2.2.ref.pt")
    checkpoint = open_checkpoint(offloaded / "nvme-2")
    assert_model(checkpoint, expected["model"])
    assert_optimizer(checkpoint, expected, 2)


def swap_out(step: Path, *, align: int = 1024) -> list[Path]:
    """Move every flat run of a checkpoint into the file that DeepSpeed would keep it in.

    `PartitionedOptimizerSwapper` calls it after the first and last parameter (`parameter_id`), numbered in
    the model's order, and fills it up to whole blocks (`swap_buffer`'s alignment).
    """
    files = []
    model = load(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    skip = {*model["buffer_names"], *model["shared_params"]}
    numbers = {name: i for i, name in enumerate(name for name in model["module"] if name not in skip)}
    for path in sorted(step.glob("*optim_states.pt")):
        rank = int(path.name.split("zero_pp_rank_")[1].split("_")[0])
        folder = step / "offloaded_tensors" / f"rank{rank:02d}"
        folder.mkdir(parents=True)
        content = load(path)
        state = content["optimizer_state_dict"]
        for group, shapes in enumerate(model["param_shapes"]):
            names = list(shapes)
            key = f"{numbers[names[0]]}_{numbers[names[-1]]}.tensor.swp"
            moments = state["optimizer_state_dict"]["state"][group]
            runs = {key: state["fp32_flat_groups"][group]}
            runs |= {f"{what}-{key}": moments[what] for what in SWAPPED}
            for name, run in runs.items():
                data = run.detach().numpy().tobytes()
                (folder / name).write_bytes(data + bytes(-len(data) % align))
                files.append(folder / name)
            state["fp32_flat_groups"][group] = torch.empty(0)
            moments |= {what: torch.empty(0) for what in SWAPPED}
        torch.save(content, path)
    return files


@pytest.mark.parametrize("name", ["zero3-fp32-2", "sub-groups-3"])
def test_laid_out_as_deepspeed_does(deepspeed_written: Path, tmp_path: Path, name: str) -> None:
    step = tmp_path / "global_step2"
    shutil.copytree(deepspeed_written / name / "global_step2", step)
    good = everything(open_checkpoint(step))
    files = swap_out(step)
    assert everything(open_checkpoint(step)) == good
    for path in files:
        data = path.read_bytes()
        for damage in (None, data[:-1024], data + bytes(1 << 20)):
            path.unlink(missing_ok=True)
            if damage is not None:
                path.write_bytes(damage)
            with pytest.raises(
                CheckpointError, match=rf"{path.name}.*({'NVMe' if damage is None else 'bytes'})"
            ):
                everything(open_checkpoint(step))
        path.write_bytes(data)
    assert everything(open_checkpoint(step)) == good
