"""Runs that begin at a checkpoint written by another program (`make_external.py`).

The loaded state equals the memory of the writing run, bit for bit, and the run continues like the Trainer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

from portable.checkpoint.external import open_external_checkpoint
from portable.checkpoint.resume_external import _ResumeMatcher, adopt_external_checkpoint
from portable.cli import main
from portable.converters import CheckpointError, OptimizerState, open_checkpoint
from portable.converters.storage.store_errors import AccessDeniedError, RetriesExhaustedError
from portable.data.samples.loader import TrainLoader
from portable.errors import DamagedError, RunError, UserError
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from tests.converters.compare import assert_same
from tests.converters.making import once
from tests.engines import Engines
from tests.parity import opened
from tests.portable.make_external import BETAS, DECAY, RATE, STEPS, llama, trainer_arguments
from tests.portable.test_command_line import refusal
from tests.portable.test_trainer_parity import Ordered
from tests.promises import record
from tests.runs import configured, flags, tiny
from tests.zygote import Zygote

pytestmark = pytest.mark.usefixtures("brief_runs")
ROWS = yaml.safe_load(Path(__file__).with_name("external_checkpoints_rows.yaml").read_text("utf-8"))
GOES_ON = 3  # steps
BATCH = 4
TOLERANCE = 1e-5

AS_BEFORE: dict[str, Any] = {
    "train__betas": list(BETAS),
    "train__weight_decay": DECAY,
    "train__learning_rate": RATE,
}
# Settings with which the run continues like the other program.
XLA_SETTINGS: dict[str, Any] = {**AS_BEFORE, "train__weight_decay": 0.01}
SOURCES = [
    "trainer",
    "trainer-fsdp",
    "trainer-zero2",
    "trainer-zero3",
    "accelerate",
    "accelerate-fsdp",
    "deepspeed",
    "torchtitan",
    "torchtitan-llama3",
    "torch",
    "xla-fsdp",
]
ENGINES: dict[str, tuple[dict[str, Any], int]] = {
    "no_shard": ({"strategy": "no_shard"}, 1),
    "full_shard": ({"strategy": "full_shard"}, 2),
    "zero2": ({"strategy": "zero2"}, 2),
    "xla": ({"backend": "xla"}, 2),
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """Return a folder of other programs' checkpoints, with a file `<name>.ref.pt` for each."""
    pytest.importorskip("deepspeed")

    def fill(out: Path) -> None:
        command = ["python", "-m", "tests.portable.make_external", str(out)]
        making = [zygote.start(*command, DS_ACCELERATOR="cpu", USE_TORCH_XLA="0")]
        if find_spec("torch_xla") is not None:
            making.append(zygote.start(*command, "xla", PJRT_DEVICE="CPU", USE_TORCH_XLA="1"))
        for process in making:
            _, errors = process.communicate()
            assert process.returncode == 0, errors[-4000:]

    return once("make_external", tmp_path_factory, fill)


def begun(path: Path, corpus: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of a run that begins at ``path``."""
    common: dict[str, Any] = {
        "checkpoint__resume": str(path),
        "train__steps": 9,
        "train__warmup_steps": 0,
        "train__global_batch_size": BATCH,
        "train__micro_batch_size": 1,
        "data__eval_fraction": 0,
        "log__sample_tokens": 0,
        "checkpoint__export": False,
    }
    return tiny(folder, corpus, **common, **settings)


def begin(folder: Path, corpus: Path, path: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """On one rank, begin at ``path`` and save the loaded state into ``folder``.

    Returns the step and the sample.
    """
    keys = {key.replace(".", "__"): value for key, value in begun(path, corpus, folder, **settings).items()}
    config = configured(folder, corpus, **keys)
    backend = create_backend(config.backend)
    resolved = resolve_run(config, backend.name)
    backend.start()
    try:
        restored = restore_run(prepare_run(resolved, backend), path)
        folder.mkdir(exist_ok=True)
        restored.engine.save_shards(folder, background=False).wait()
        return restored.progress.step, restored.progress.samples
    finally:
        backend.stop()


def batches_after(samples: int, corpus: Path, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the batches of a run after ``samples``."""
    with opened(configured(folder, corpus, train__global_batch_size=BATCH, data__eval_fraction=0)) as trial:
        data = trial.run.data.train
        loader = TrainLoader(data, seed=0, position=samples, global_batch_size=BATCH, micro_batch_size=BATCH)
        batches = iter(loader)
        taken = [dict(next(batches)) for _ in range(GOES_ON)]
        batches.close()
        return taken


def cases() -> Iterator[Any]:
    """Yield every source on one engine, and one source on every engine."""
    for source in SOURCES:
        for engine in ENGINES:
            needed = engine == "no_shard" or source == "trainer-zero2"
            marks = [] if needed else [pytest.mark.exhaustive]
            if "xla" in (engine, source.partition("-")[0]):
                marks.append(pytest.mark.xla)
            yield pytest.param(source, engine, marks=marks, id=f"{source}-{engine}")


@pytest.mark.parametrize(("source", "engine"), list(cases()))
def test_external_checkpoint_loads_state_of_writing_run(
    source: str, engine: str, foreign: Path, corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    held: dict[str, Any] = torch.load(foreign / f"{source}.ref.pt", weights_only=False)
    settings, done = (XLA_SETTINGS, 1) if source == "xla-fsdp" else (AS_BEFORE, STEPS)
    choice, size = ENGINES[engine]
    loaded = tmp_path / "loaded"
    step, samples = engines.run(engine, size, begin, loaded, corpus, foreign / source, settings | choice)
    assert step == done
    # DeepSpeed counts its samples: two sequences on each of two ranks, as many as a step has here.
    assert samples == done * BATCH
    taken = open_checkpoint(loaded)
    assert taken.optimizer is not None
    for key, tensor in taken.tensors.items():
        assert_same(tensor, held["model"][key])
    assert set(taken.optimizer.state) == set(held["optim"])
    for key, values in taken.optimizer.state.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert_same(values[moment], held["optim"][key][moment])  # type: ignore[arg-type]
        assert float(getattr(values["step"], "read", lambda v=values["step"]: v)()) == done


def test_external_checkpoint_continues_like_trainer(trainer: Path, corpus: Path, tmp_path: Path) -> None:
    """Compare with `resume_from_checkpoint` of transformers on the samples of this run."""
    taken = [
        {**{name: tensor[at] for name, tensor in batch.items()}, "shift_labels": batch["labels"][at]}
        for batch in batches_after(STEPS * BATCH, corpus, tmp_path / "data")
        for at in range(BATCH)
    ]
    arguments = trainer_arguments(tmp_path / "peer", remove_unused_columns=False)
    arguments.max_steps = STEPS + GOES_ON
    arguments.per_device_train_batch_size = BATCH
    # the same number of samples as before the checkpoint comes first
    samples = taken[: STEPS * BATCH] + taken
    order = list(range(len(samples)))
    peer: Any = Ordered(orders=[order], model=llama(), args=arguments, train_dataset=samples)
    peer.model_accepts_loss_kwargs = False  # or it divides by the labels that it would have shifted itself
    peer.train(resume_from_checkpoint=str(trainer / f"checkpoint-{STEPS}"))
    theirs = {row["step"]: row["loss"] for row in peer.state.log_history if "loss" in row}
    more: dict[str, Any] = {"train__schedule": "constant", "train__stop_after": STEPS + GOES_ON}
    assert main(command(trainer, corpus, tmp_path / "run", **more)) == 0
    ours = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "run")}
    assert sorted(ours) == [4, 5, 6]
    assert {step: theirs[step] for step in ours} == pytest.approx(ours, rel=TOLERANCE)
    record([*ours.values()], [theirs[step] for step in ours], TOLERANCE)


# --- the command line


def command(path: Path, corpus: Path, folder: Path, **settings: Any) -> list[str]:
    return flags(begun(path, corpus, folder, **{**AS_BEFORE, **settings}))


@pytest.fixture
def trainer(foreign: Path, tmp_path: Path) -> Path:
    """Return a copy of the Trainer's output folder."""
    return Path(shutil.copytree(foreign / "trainer", tmp_path / "trainer"))


def test_external_checkpoint_starts_run_that_resumes(
    trainer: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(command(trainer, corpus, folder, train__stop_after=5)) == 0
    said = capsys.readouterr().err
    assert f"resuming at step 3 from {trainer}" in said and "written by the Hugging Face Trainer" in said
    assert "the checkpoint's rate of 0.002 is not used" in said
    rows = [row["step"] for row in read_metrics(folder)]
    assert rows == [4, 5]
    ours = folder / "checkpoints" / "step-000005"
    assert json.loads((ours / "trainer_state.json").read_text())["samples"] == 5 * BATCH
    # The same command, the path given or gone, and the run by itself.
    assert main(command(trainer, corpus, folder, train__stop_after=6)) == 0
    shutil.rmtree(trainer)
    assert main(command(trainer, corpus, folder, train__stop_after=7)) == 0
    assert main(flags(begun(Path("auto"), corpus, folder, **AS_BEFORE))) == 0
    assert [row["step"] for row in read_metrics(folder)] == [4, 5, 6, 7, 8, 9]
    assert f"resuming at step 5 from {ours}" in capsys.readouterr().err


def test_external_checkpoint_position_and_settings_may_be_set(
    trainer: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"checkpoint__resume_step": 0, "checkpoint__resume_samples": 7, "train__stop_after": 1}
    assert main(command(trainer, corpus, tmp_path / "run", train__weight_decay=0.3, **told)) == 0
    said = capsys.readouterr().err
    assert (
        "resuming at step 0" in said and "train.weight_decay: 0.1 in the checkpoint, 0.3 in this run" in said
    )
    state = json.loads((tmp_path / "run/checkpoints/step-000001/trainer_state.json").read_text())
    assert (state["step"], state["samples"]) == (1, 7 + BATCH)
    stored = open_checkpoint(tmp_path / "run").optimizer
    assert stored is not None
    steps = {float(values["step"].read()) for values in stored.state.values()}  # type: ignore[union-attr]
    assert steps == {4.0}  # of the moments, which the schedule's step does not change


def test_resume_info_describes_external_checkpoint(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, expected in ROWS["resume_info"].items():
        assert main(["--resume-info", str(foreign / name)]) == 0
        said = capsys.readouterr().out
        for word in expected:
            assert word in said


def test_external_optimizer_state_is_numbered_by_model_order(
    trainer: Path, corpus: Path, tmp_path: Path, foreign: Path
) -> None:
    """Safetensors files are sorted by name.

    For a new architecture, only the model defines the parameter order.
    """
    path = trainer / f"checkpoint-{STEPS}" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "new"}))
    names = [name for name, _ in llama().named_parameters()]
    opened = open_external_checkpoint(trainer, names)
    assert opened is not None and opened.optimizer is not None
    held = torch.load(foreign / "trainer.ref.pt", weights_only=False)["optim"]
    for name, values in opened.optimizer.state.items():
        assert_same(values["exp_avg"], held[name]["exp_avg"])  # type: ignore[arg-type]
    assert main(command(trainer, corpus, tmp_path / "run", train__stop_after=4)) == 0


def lose_state(step: Path) -> None:
    (step / "optimizer.pt").unlink()


def flip(step: Path) -> None:
    path = step / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def set_back(step: Path) -> None:
    path = step / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": 2}))


@pytest.mark.parametrize("row", ROWS["refused"], ids=lambda row: row["it"])
def test_external_checkpoint_with_errors_is_rejected(
    row: dict[str, Any],
    trainer: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "damage" in row:
        globals()[row["damage"]](trainer / f"checkpoint-{STEPS}")
    common = begun(trainer, corpus, tmp_path / "run", **AS_BEFORE)
    line = refusal(capsys, flags(common | row.get("settings", {})))
    for word in row["words"]:
        assert word in line
    assert not (tmp_path / "run").exists()


def test_external_checkpoint_rejects_differing_default_settings(
    trainer: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = begun(trainer, corpus, tmp_path / "run")
    del given["train.learning_rate"]
    line = refusal(capsys, flags(given))
    assert "was trained with train.betas: [0.8, 0.95], train.learning_rate: 0.002, but the defaults" in line


def saved(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Path:
    """Save a model and its optimizer after a step."""
    tokens = torch.arange(16)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
    return folder / "last.pt"


def test_external_checkpoint_without_step_needs_resume_step(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGD of torch counts no steps. Its weights and its momentum are stored in 16 bits."""
    model = llama().bfloat16()
    path = saved(tmp_path, model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    chosen = {
        "train__optimizer": "sgd",
        "train__betas": [0.9, 0.95],
        "train__weight_decay": 0.0,
        "train__stop_after": 5,
    }
    line = refusal(capsys, command(path, corpus, tmp_path / "run", **chosen))
    assert "has no step count; set checkpoint.resume_step" in line
    assert not (tmp_path / "run").exists()
    asked = {"checkpoint__resume_step": 4}
    assert main(command(path, corpus, tmp_path / "run", **chosen, **asked)) == 0
    said = capsys.readouterr().err
    assert "stores 20 of 20 weights only in BF16" in said and "resuming at step 4" in said


@pytest.mark.parametrize(
    ("error", "expected_type"),
    [
        (RetriesExhaustedError("s3://b/run: the store is away; run the command again"), RunError),
        (AccessDeniedError("s3://b/run: access denied; use other credentials"), UserError),
        (CheckpointError("/run/a.pt: is damaged; copy the file again"), DamagedError),
    ],
    ids=["outage", "denied", "damage"],
)
def test_adopting_external_checkpoint_keeps_kind_of_error(
    error: CheckpointError, expected_type: type[Exception], tmp_path: Path, corpus: Path
) -> None:
    """Only an error of the checkpoint means that the checkpoint is damaged."""
    external = Mock(**{"rename_to_model_names.side_effect": error})
    with pytest.raises(expected_type) as raised:
        adopt_external_checkpoint(external, configured(tmp_path, corpus), llama(), lambda _: RATE)
    assert type(raised.value) is expected_type
    assert str(raised.value) == f"checkpoint.resume: {error}"


@pytest.mark.parametrize(
    ("optimizer", "key", "values", "setting"),
    [
        ("sgd", "momentum", (0.9, 0.8), "train.betas"),
        ("muon", "momentum", (0.95, 0.8), "train.muon_momentum"),
        ("muon", "betas", ((0.9, 0.95), (0.8, 0.95)), "train.betas"),
        ("adamw", "betas", ((0.9, 0.95), (0.8, 0.95)), "train.betas"),
    ],
)
def test_settings_that_differ_between_stored_groups_are_noted(
    optimizer: str, key: str, values: tuple[Any, Any], setting: str, tmp_path: Path, corpus: Path
) -> None:
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    config = configured(tmp_path, corpus, train__optimizer=optimizer)
    groups = [{"params": names[:3], key: values[0]}, {"params": names[3:], key: values[1]}]
    matcher = _ResumeMatcher(Mock(scheduler_state={}), OptimizerState({}, groups), config, model)
    matcher.check_optimizer_settings()
    assert matcher.notes == [
        f"{setting}: different values in the parameter groups of the checkpoint, one value in this run"
    ]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_external_checkpoint_executes_no_pickle(
    trainer: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown class is ignored in the scheduler and rejected in the optimizer. Neither is executed."""
    step = trainer / f"checkpoint-{STEPS}"
    torch.save({"base_lrs": Trap(tmp_path / "sprung")}, step / "scheduler.pt")
    assert main(["--resume-info", str(trainer)]) == 0
    assert main([*command(trainer, corpus, tmp_path / "run"), "--dry-run"]) == 0
    torch.save(Trap(tmp_path / "sprung"), step / "optimizer.pt")
    capsys.readouterr()
    assert "allow-list" in refusal(capsys, command(trainer, corpus, tmp_path / "run"))
    assert not (tmp_path / "sprung").exists()


def test_external_optimizer_with_other_rule_is_rejected(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = llama()
    for optimizer, word in (
        (torch.optim.AdamW(model.parameters(), amsgrad=True, weight_decay=0.0), "amsgrad: True"),
        (torch.optim.Adam(model.parameters(), weight_decay=0.1), "decoupled_weight_decay: False"),
    ):
        path = saved(tmp_path, model, optimizer)
        assert word in refusal(capsys, command(path, corpus, tmp_path / "run"))
