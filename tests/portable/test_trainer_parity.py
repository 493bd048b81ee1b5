"""Comparison with transformers' Trainer: same model, data and arguments give the same losses at every step.

The arguments come from the table of the migration page and from its text about the Trainer's defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch import Tensor

from portable.batch import IGNORED_LABEL
from portable.checkpoint.store import open_checkpoints
from portable.checkpoint.trainer_state import TrainerState
from portable.config import RunConfig
from portable.data.samples.loader import EVAL_EPOCH
from portable.data.samples.order import EpochIndex, locate_sample
from portable.model.build import AUTO_CLASSES
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.parity import opened
from tests.runs import TINY_MODEL, configured, write_labelled
from tests.tiny_models import tiny_config
from tests.tpu.test_parity import MODELS

pytestmark = pytest.mark.usefixtures("brief_runs")
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
Rows = list[dict[str, "Tensor"]]


LLAMA: dict[str, Any] = {"model__config": {**TINY_MODEL, "num_hidden_layers": 1}}
MASKED: dict[str, Any] = {"model__task": "masked-lm", "data__packing": False}
LABELLED: dict[str, Any] = {**MODELS["bert"], "model__task": "sequence-classification"}
THREE = {**LABELLED["model__config"], "problem_type": "regression", "num_labels": 3}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "causal, packed": ({**LLAMA, "train__warmup_steps": 2}, 3),
    "causal, padded": ({**LLAMA, "data__packing": False, "train__schedule": "cosine"}, 2),
    "masked": (MODELS["bert"], 1),
    "masked, with mBART's decoder": ({"model__config": tiny_config("mbart"), **MASKED}, 1),
    "seq2seq": ({**MODELS["t5"], "train__weight_decay": 2.0}, 1),
    "classification": ({**LABELLED, "train__weight_decay": 0.01}, 1),
    "classification by numbers": ({**LABELLED, "model__config": THREE, "data__label_field": "numbers"}, 1),
    "classification of several kinds": ({**LABELLED, "data__label_field": "kinds"}, 1),
    "adafactor": (
        {**LLAMA, "train__optimizer": "adafactor", "train__adafactor_rule": "transformers"},
        1,
    ),
}
"""Settings of each case, and the number of micro-batches over which the Trainer accumulates gradients."""


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("labeled"), 48)


def page_settings() -> dict[str, Any]:
    """Read the settings of the page's file that mimics the Trainer, without its model, data and length."""
    _, _, text = PAGE.read_text("utf-8").partition("this config reproduces a Trainer script")
    document = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    train = {f"train__{key}": value for key, value in document["train"].items() if key != "epochs"}
    return {
        **train,
        "precision": document["precision"],
        "data__eval_fraction": document["data"]["eval_fraction"],
    }


def as_transformers_has_it(row: dict[str, Tensor], task: str) -> dict[str, Tensor]:
    """Convert a sample of shifted labels to unshifted labels, because transformers' models shift them."""
    if task == "masked-lm":
        row.pop("decoder_input_ids", None)  # a model that has a decoder makes its own from the labels
    if task != "causal-lm":
        return row
    last = row["labels"][-1:]
    longer = {
        "input_ids": torch.cat([row["input_ids"], last.clamp(min=0)]),
        "labels": torch.cat([torch.tensor([IGNORED_LABEL]), row["labels"]]),
    }
    if "attention_mask" in row:
        longer["attention_mask"] = torch.cat([row["attention_mask"], (last != IGNORED_LABEL).long()])
    return longer


class Ordered(transformers.Trainer):  # type: ignore[misc]
    """The Trainer, which takes the samples of an epoch in a given order and keeps the losses unrounded."""

    def __init__(self, *, orders: list[list[int]], **arguments: Any) -> None:
        self.step_losses: list[float] = []
        self._orders = orders
        super().__init__(**arguments)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return _Orders(self._orders)

    def training_step(self, *arguments: Any, **more: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **more)
        self.step_losses.append(float(loss))
        return loss


class _Orders(torch.utils.data.Sampler[int]):
    """Another order each time."""

    def __init__(self, orders: list[list[int]]) -> None:
        self._orders, self._next = orders, 0

    def __len__(self) -> int:
        return len(self._orders[0])

    def __iter__(self) -> Any:
        order = self._orders[self._next % len(self._orders)]
        self._next += 1
        return iter(order)


def arguments(
    config: RunConfig,
    folder: Path,
    accumulation: int,
    kind: Any = transformers.TrainingArguments,
    **more: Any,
) -> Any:
    """Build the Trainer's arguments from the run's settings by the table. ``kind`` may be TRL's class."""
    train = config.train
    assert train.micro_batch_size != "auto"
    assert train.micro_batch_size * accumulation == train.global_batch_size
    length: dict[str, Any] = {"max_steps": train.steps}
    if train.epochs is not None:
        length = {"num_train_epochs": train.epochs}
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm or 0.0,
        adam_epsilon=train.eps,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        lr_scheduler_type=train.schedule,
        warmup_steps=train.warmup_steps,
        optim={"adamw": "adamw_torch_fused"}.get(train.optimizer, train.optimizer),
        eval_strategy="steps" if train.eval_every else "no",
        eval_steps=train.eval_every,
        per_device_eval_batch_size=64,  # all at once: the Trainer averages the means of batches
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **length,
        **more,
    )


def trained_beside(config: RunConfig, folder: Path, accumulation: int, **more: Any) -> Ordered:
    """Train the same run with the Trainer and return it; ``more`` are additional training arguments."""
    task, batch = config.model.task, config.train.global_batch_size
    with opened(config) as trial:
        data, seed = trial.run.data, config.seed
        model = getattr(transformers, AUTO_CLASSES[task]).from_config(trial.run.model_config)
        model.load_state_dict(trial.engine.model.state_dict())
        count = len(data.train)
        places = [locate_sample(position, count, seed) for position in range(trial.run.steps * batch)]
        if config.train.epochs is None:  # one long epoch, because each epoch masks other tokens
            rows = [row_of(data.train, place, task) for place in places]
            orders = [list(range(len(rows)))]
        else:
            rows = [row_of(data.train, EpochIndex(0, index), task) for index in range(count)]
            orders = [[index for at, index in places if at == epoch] for epoch in range(places[-1][0] + 1)]
        held: Rows = []
        if data.first_eval is not None:
            held = [
                row_of(data.first_eval, EpochIndex(EVAL_EPOCH, index), task)
                for index in range(len(data.first_eval))
            ]
        trainer = Ordered(
            orders=orders,
            model=model,
            args=arguments(config, folder, accumulation),
            train_dataset=rows,
            eval_dataset=held or None,
            **more,
        )
    trainer.train()
    return trainer


def beside(config: RunConfig, folder: Path, accumulation: int) -> tuple[list[float], list[float]]:
    """Return the Trainer's loss of each step, and of each evaluation."""
    trainer = trained_beside(config, folder, accumulation)
    parts = trainer.step_losses
    losses = [sum(parts[i : i + accumulation]) for i in range(0, len(parts), accumulation)]
    return losses, [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]


def row_of(samples: Any, place: EpochIndex, task: str) -> dict[str, Tensor]:
    return as_transformers_has_it(
        {name: values[0] for name, values in samples.build_batch([place]).items()}, task
    )


def ours(config: RunConfig) -> tuple[list[float], list[float]]:
    assert run_rank("cpu", config) == 0
    rows = list(read_metrics(Path(config.output_dir)))
    losses, evaluations = ([row[name] for row in rows if name in row] for name in ("loss", "eval_loss"))
    return losses, evaluations


@pytest.mark.parametrize("name", CASES)
def test_losses_match_trainer(name: str, tmp_path: Path, corpus: Path, labelled: Path) -> None:
    case, accumulation = CASES[name]
    source = labelled if "classification" in name else corpus
    settings = {
        **page_settings(),
        "data__eval_fraction": 0.1,
        "train__steps": 6,
        "train__eval_every": 3,
        "train__learning_rate": 3e-3,
        "train__global_batch_size": 6,
        "train__micro_batch_size": 6 // accumulation,
        "checkpoint__export": False,
        **case,
    }
    config = configured(tmp_path / "ours", source, **settings)
    losses, evaluations = ours(config)
    theirs, their_evaluations = beside(config, tmp_path / "theirs", accumulation)
    assert losses == pytest.approx(theirs, rel=1e-5)
    assert evaluations == pytest.approx(their_evaluations, rel=1e-5)
    assert (len(losses), len(evaluations)) == (6, 2)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)  # equal losses then mean equal updates


def test_losses_of_page_file_match_trainer_defaults(tmp_path: Path, labelled: Path) -> None:
    """Three epochs of all records, with only the settings of the page."""
    settings = {**page_settings(), "train__steps": None, "train__epochs": 3, "train__micro_batch_size": 16}
    config = configured(tmp_path / "ours", labelled, **LABELLED, **settings, checkpoint__export=False)
    losses, _ = ours(config)
    theirs, _ = beside(config, tmp_path / "theirs", 1)
    assert losses == pytest.approx(theirs, rel=1e-5)
    assert len(losses) == 9


def test_early_stopping_and_best_value_match_trainer(tmp_path: Path, labelled: Path) -> None:
    """Accuracy, the last step before early stopping and the best value match."""
    settings = {
        **page_settings(),
        **CASES["classification"][0],
        "data__eval_fraction": 0.4,
        "train__steps": 20,
        "train__eval_every": 1,
        "train__learning_rate": 2.5e-2,
        "train__global_batch_size": 6,
        "train__micro_batch_size": 6,
        "train__early_stopping_patience": 2,
        "checkpoint__keep_best": 1,
        "checkpoint__export": False,
    }
    config = configured(tmp_path / "ours", labelled, **settings)
    assert run_rank("cpu", config) == 0
    rows = [row for row in read_metrics(tmp_path / "ours") if "eval_loss" in row]

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    stopping = transformers.EarlyStoppingCallback(2)
    trainer = trained_beside(
        config, tmp_path / "theirs", 1, compute_metrics=accuracy, callbacks=[stopping, _ByLoss()]
    )
    theirs = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [row["step"] for row in rows] == [row["step"] for row in theirs]
    assert 3 < rows[-1]["step"] < 20
    assert [row["eval_accuracy"] for row in rows] == [row["eval_accuracy"] for row in theirs]
    assert [row["eval_loss"] for row in rows] == pytest.approx([row["eval_loss"] for row in theirs], rel=1e-4)
    latest = open_checkpoints(tmp_path / "ours").find_latest()
    best = TrainerState.read(latest or tmp_path).eval_history.best
    first = min(theirs, key=lambda row: row["eval_loss"])["step"]
    assert [step for step, _ in best] == [first]
    assert best[0][1] == pytest.approx(trainer.state.best_metric, rel=1e-4)


class _ByLoss(transformers.TrainerCallback):  # type: ignore[misc]
    """The Trainer's best is by the loss."""

    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        args.metric_for_best_model, args.greater_is_better = "eval_loss", False
