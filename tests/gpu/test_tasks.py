"""Each task on two ranks, under full_shard and DDP: the losses of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_parity import assert_close, our_losses
from tests.ranks import RankPool
from tests.runs import configured, write_labelled
from tests.tpu.test_parity import MODELS

BATCH: dict[str, Any] = {"train__global_batch_size": 8, "train__micro_batch_size": 2}
BERT: dict[str, Any] = MODELS["bert"]
CLASSIFIER: dict[str, Any] = {**BERT, "model__task": "sequence-classification"}
TASKS: dict[str, dict[str, Any]] = {
    "masked-lm": BERT,
    "seq2seq-lm": MODELS["t5"],
    "sequence-classification": CLASSIFIER,
    "sequence-classification, a number": {**CLASSIFIER, "data__label_field": "number"},
    "sequence-classification, several classes": {**CLASSIFIER, "data__label_field": "kinds"},
}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("labeled"), 160)


@pytest.mark.parametrize("name", TASKS)
def test_two_ranks_train_as_one(
    name: str, tmp_path: Path, corpus: Path, labelled: Path, ranks: RankPool
) -> None:
    task, _, labels = name.partition(", ")
    source = labelled if task == "sequence-classification" else corpus
    strategies = ("no_shard", "no_shard" if labels == "a number" else "full_shard")  # DDP once
    one, two = (
        configured(tmp_path, source, **BATCH, **TASKS[name], strategy=strategy) for strategy in strategies
    )
    assert one.model.task == task
    truth = our_losses(one)
    falls = {"several classes": 0.0}.get(labels, 0.1 if source == labelled else 0.3)  # from ln 2
    assert_close(ranks.run(2, our_losses, two), truth, 1e-5, falls=falls)
