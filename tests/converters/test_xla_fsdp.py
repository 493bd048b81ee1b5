"""PyTorch/XLA FSDP v1 shard files against the live shards they were written from, and its own tool."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from converters import Checkpoint, CheckpointError, open_checkpoint
from tests.converters.compare import assert_model, assert_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUNS = ("flat3", "flat4", "each4", "each1", "dim3", "trainer3", "bf16")
EXAMPLE = "ckpt_rank-{:08d}-of-00000003.pth"


def load(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(path, weights_only=False)
    return values


@pytest.mark.parametrize("run", RUNS)
def test_every_way_of_sharding_bit_for_bit(written_xla: Path, run: str) -> None:
    reference = load(written_xla / f"{run}.ref.pt")
    checkpoint = open_checkpoint(written_xla / run)
    assert checkpoint.format == "xla-fsdp"
    assert (
        checkpoint.metadata["world_size"] == len(list((written_xla / run).glob("*[!r].p*")))
        or run == "trainer3"
    )
    assert "embed_tokens.weight" in checkpoint.tensors and "lm_head.weight" not in checkpoint.tensors
    assert_model(checkpoint, reference["model"])
    assert_optimizer(checkpoint, reference)


@pytest.mark.parametrize("run", ["flat3", "flat4", "each4", "dim3"])
def test_same_as_torch_xla_consolidates(written_xla: Path, run: str) -> None:
    assert_model(open_checkpoint(written_xla / run), load(written_xla / f"{run}.ref.pt")["peer"])


def test_one_file_stands_for_its_ranks(written_xla: Path, tmp_path: Path) -> None:
    """Two steps in one folder, and a consolidated file beside them."""
    for step in (1, 2):
        for rank in range(3):
            name = EXAMPLE.format(rank)
            shutil.copy(written_xla / "flat3" / name, tmp_path / f"step{step}_{name}")
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "step1_consolidated.pth")
    with pytest.raises(CheckpointError, match="several checkpoints"):
        open_checkpoint(tmp_path)
    reference = load(written_xla / "flat3.ref.pt")
    assert_model(open_checkpoint(tmp_path / f"step2_{EXAMPLE.format(1)}"), reference["model"])
    assert_model(
        open_checkpoint(written_xla / "flat4" / "piece.b.pt"), load(written_xla / "flat4.ref.pt")["model"]
    )
    assert_model(
        open_checkpoint(written_xla / "each1" / "piece.a.pt"), load(written_xla / "each1.ref.pt")["model"]
    )


def test_trainer_folder(written_xla: Path, tmp_path: Path) -> None:
    """The Trainer puts the consolidated weights beside the shards; only the shards have the optimizer."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(written_xla / "trainer3", folder)
    torch.save({"arguments": 1}, folder / "training_args.bin")
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    reference = load(written_xla / "trainer3.ref.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert_model(checkpoint, reference["model"])
    assert_optimizer(checkpoint, reference)
    for rank in range(3):
        (folder / f"rank{rank}-of-3-optimizer.pt").unlink()
    assert open_checkpoint(folder).optimizer is None


@pytest.fixture
def step(written_xla: Path, tmp_path: Path) -> Path:
    shutil.copytree(written_xla / "each4", tmp_path / "step")
    return tmp_path / "step"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], ranks: tuple[int, ...] = (2,)) -> None:
    """Save some ranks' files again, as torch_xla would have had it done so."""
    for path in sorted(folder.iterdir()):
        values = load(path)
        if values["shard_metadata"]["rank"] in ranks:
            change(values)
            torch.save(values, path)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint: Checkpoint = open_checkpoint(folder)
        assert checkpoint.optimizer is not None
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


EVERY = (0, 1, 2, 3)
UP = "_fsdp_wrapped_module.layers.0._fsdp_shard_FSDP_SHARD_SEPARATOR__fsdp_wrapped_module" + "".join(
    f"_FSDP_SHARD_SEPARATOR_{part}" for part in ("_fpw_module", "up", "weight")
)
BUFFER = "_fsdp_wrapped_module.tracked"
HEAD, SUFFIX = UP.rsplit(".", 1)


def info(values: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = values["shard_metadata"]["shard_info"][HEAD][SUFFIX]
    return table


def test_ranks_that_do_not_belong_together(step: Path, written_xla: Path) -> None:
    names = sorted(path.name for path in step.iterdir())
    (step / names[1]).rename(step.parent / "away")
    assert "rank 1 of 4 is missing" in refused(step)
    shutil.copy(step / names[2], step / names[1])
    assert "unlike its name" in refused(step)
    shutil.copy(written_xla / "flat3" / EXAMPLE.format(1), step / names[1])
    assert "unlike its name" in refused(step)
    shutil.move(step.parent / "away", step / names[1])

    rewrite(step, lambda values: values["shard_metadata"].update(world_size=5))
    assert "is rank 2 of 5" in refused(step)
    rewrite(step, lambda values: values["shard_metadata"].update(world_size=4))
    for values in (load(step / names[2])["optimizer"]["state"][0],):
        assert values["step"] == 1
    rewrite(step, lambda values: values["optimizer"]["state"][0]["step"].fill_(2.0))
    assert "another run or step" in refused(step)
    assert open_checkpoint(step).tensors
    rewrite(step, lambda values: values["optimizer"]["state"][0]["step"].fill_(1.0))
    rewrite(step, lambda values: values["optimizer"]["param_groups"][0].update(lr=0.5))
    assert "another run or step" in refused(step)


def test_free_names_twice(written_xla: Path, tmp_path: Path) -> None:
    shutil.copytree(written_xla / "flat4", tmp_path / "step")
    shutil.copy(tmp_path / "step" / "piece.b.pt", tmp_path / "step" / "copy.pt")
    assert "as is" in refused(tmp_path / "step")
    (tmp_path / "step" / "copy.pt").unlink()
    (tmp_path / "step" / "piece.c.pt").unlink()
    assert "rank 1 of 4 is missing" in refused(tmp_path / "step")


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        (lambda v: v["model"].pop(UP), (2,), "other parameters"),
        (lambda v: v["model"].pop(UP), EVERY, "describes other parameters"),
        (lambda v: v["model"].update({UP: v["model"][UP].half()}), (2,), "F16"),
        (lambda v: v["model"].update({UP: v["model"][UP][:64]}), (2,), "on rank 0"),
        (lambda v: v["model"].update({UP: v["model"][UP][:16].clone()}), EVERY, "does not fit"),
        (lambda v: v["model"].update({UP: v["model"][UP][::2]}), EVERY, "does not fit|contiguous"),
        (lambda v: v["model"].update({UP: 3}), EVERY, "not a tensor"),
        (lambda v: info(v).update(_orig_size=[13, 7]), (1,), "differently"),
        (lambda v: info(v).update(_orig_size=[1300, 6]), EVERY, "does not fit"),
        (lambda v: info(v).update(_orig_size=[1 << 62, 1 << 62]), EVERY, "does not fit"),
        (lambda v: info(v).update(_orig_size=[-13, 6]), EVERY, "not a list of sizes"),
        (lambda v: info(v).update(_orig_name="other"), EVERY, "is called"),
        (lambda v: v["shard_metadata"]["shard_info"].pop(HEAD), EVERY, "does not describe"),
        (lambda v: v["shard_metadata"].update(rank="2"), (2,), "no rank and world size"),
        (lambda v: v["shard_metadata"].update(world_size=1 << 60), EVERY, "unlike its name"),
        (lambda v: v.pop("shard_metadata"), (2,), "no shard_metadata"),
        (lambda v: v.pop("model"), (2,), "rank 2 of 4 is missing"),
        (lambda v: v.pop("optimizer"), (2,), "rank 2 of 4 is missing"),
        (lambda v: v["optimizer"]["state"].pop(0), (2,), "another run or step"),
        (lambda v: v["optimizer"]["state"][0].pop("exp_avg"), (2,), "not a tensor"),
        (lambda v: v["optimizer"]["state"][0].update(exp_avg=torch.ones(3)), EVERY, "fit the shards|not cut"),
        (lambda v: v["optimizer"]["param_groups"][0]["params"].pop(), EVERY, "do not match"),
        (lambda v: v["optimizer"].update(state={"a": {}}), EVERY, "keyed by index"),
        (lambda v: v["model"].update({BUFFER: torch.ones(3)}), (2,), "differs from rank 0"),
    ],
)  # fmt: skip
def test_what_does_not_add_up(step: Path, change: Any, ranks: tuple[int, ...], said: str) -> None:
    rewrite(step, change, ranks)
    with pytest.raises(CheckpointError, match=said):
        checkpoint = open_checkpoint(step)
        assert checkpoint.optimizer is not None
        for tensor in checkpoint.tensors.values():
            tensor.read()


def test_code_is_named_and_not_run(step: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "owned"), "w"))

    values = load(step / "ckpt_rank-00000002-of-00000004.pth")
    values["extra"] = Evil()
    torch.save(values, step / "ckpt_rank-00000002-of-00000004.pth")
    said = refused(step)
    assert "io.open" in said and "rank-00000002" in said
    assert not (tmp_path / "owned").exists()


def test_optimizer_by_index_only_beyond_doubt(step: Path) -> None:
    """Frozen parameters left out, several groups: accepted where the shapes leave one way, else refused."""
    reference = load(step.parent / "step" / "ckpt_rank-00000000-of-00000004.pth")
    count = len(reference["optimizer"]["param_groups"][0]["params"])

    def split(values: dict[str, Any]) -> None:
        group = values["optimizer"]["param_groups"][0]
        values["optimizer"]["param_groups"] = [
            {**group, "params": list(range(0, count, 2))},
            {**group, "params": list(range(1, count, 2)), "weight_decay": 0.0},
        ]

    rewrite(step, split, EVERY)
    assert "several ways" in refused(step)
    assert open_checkpoint(step).tensors  # the model is read all the same

    keys = [key.replace("_fsdp_wrapped_module.", "_fsdp_wrapped_module._fpw_module.", 1) for key in
            reference["model"] if "_fsdp_shard" in key]  # fmt: skip

    def name(values: dict[str, Any]) -> None:
        split(values)
        for group in values["optimizer"]["param_groups"]:
            group["param_names"] = [keys[index] for index in group["params"]]

    rewrite(step, name, EVERY)
    optimizer = open_checkpoint(step).optimizer
    assert optimizer is not None
    assert [len(group["params"]) for group in optimizer.param_groups] == [(count + 1) // 2, count // 2]
    assert "param_names" not in optimizer.param_groups[0]
