"""The files in ``examples``: they run, and compute the documented losses."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from portable import load_config
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.parity import opened
from tests.portable.data_support import write_jsonl
from tests.portable.test_preferences import pairs
from tests.runs import TINY_MODEL, configured, tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_files_are_valid(path: Path) -> None:
    config = load_config(path)
    assert config.train.loss is not None and (EXAMPLES / f"{path.stem}.py").is_file()


@pytest.mark.parametrize("rows", [-8, 8])
def test_distillation_aligns_padded_vocabularies(rows: int) -> None:
    """A teacher with more or fewer unused rows than the student."""
    loss = importlib.import_module("distillation").Distillation(teacher="")
    student, teacher = torch.randn(2, 3, 40), torch.randn(2, 3, 40 + rows)
    batch = {"labels": torch.randint(0, 30, (2, 3)), "teacher_logits": teacher}
    total, weight, numbers = loss(SimpleNamespace(logits=student), batch)
    shared = min(40, 40 + rows)
    ours, theirs = ((logits[..., :shared] / 2).log_softmax(-1) for logits in (student, teacher))
    wanted = 4 * functional.kl_div(ours, theirs, reduction="sum", log_target=True)
    assert weight == 6 and float(numbers["divergence"]) == pytest.approx(float(wanted), rel=1e-5)
    assert float(total) == pytest.approx(float(wanted + numbers["cross_entropy"]) / 2, rel=1e-5)


def test_distillation_example_reduces_divergence(tmp_path: Path, corpus: Path, brief_runs: None) -> None:
    teacher = configured(tmp_path / "teacher", corpus, train__learning_rate=1e-2)
    run_rank("cpu", teacher)
    final = tmp_path / "teacher" / "final"
    more = {
        "data__tokenizer": str(final),
        "train__loss": f"distillation:Distillation(teacher='{final}')",
        "train__micro_batch_size": 2,
        "model__config": {**TINY_MODEL, "num_hidden_layers": 1},
    }
    path = EXAMPLES / "distillation.yaml"
    config = load_config(path, tiny(tmp_path / "student", corpus, **more))
    with opened(config) as trial:
        rows = [next(iter(trial.batches)) for _ in range(3)]
        trial.batches.close()
        theirs = AutoModelForCausalLM.from_pretrained(final)
        total = count = 0.0
        with torch.no_grad():
            for row in rows:
                student = trial.engine.model(row["input_ids"]).logits / 2
                wanted = (theirs(row["input_ids"]).logits / 2).log_softmax(-1)
                kl = functional.kl_div(student.log_softmax(-1), wanted, reduction="sum", log_target=True) * 4
                ce = functional.cross_entropy(
                    (2 * student).flatten(0, 1), row["labels"].flatten(), reduction="sum"
                )
                total, count = total + float(0.5 * kl + 0.5 * ce), count + row["labels"].numel()
    run_rank("cpu", config)
    logged = [row for row in read_metrics(tmp_path / "student") if "loss" in row]
    assert logged[0]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert logged[-1]["divergence"] < logged[0]["divergence"]


REWARD: dict[str, Any] = {
    "data__seq_len": 48,
    "data__chat_template": "chatml",
    "data__packing": False,
    "data__eval_fraction": 0.1,
    "model__name_or_path": None,
    "model__config": TINY_MODEL,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 2,
    "train__learning_rate": 1e-2,
}


def test_reward_model_example_scores_chosen_higher(tmp_path: Path, brief_runs: None) -> None:
    """Chosen answers begin with another word. The exported model scores like the trained one."""
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs(60))
    path = EXAMPLES / "reward_model.yaml"
    run_rank("cpu", load_config(path, tiny(tmp_path / "one", data, **REWARD)))
    assert read_metrics(tmp_path / "one")[-1]["eval_accuracy"] > 0.9
    tokens = AutoTokenizer.from_pretrained(tmp_path / "one" / "final")
    with opened(load_config(path, tiny(tmp_path / "new", data, **REWARD))) as trial:
        first = AutoModelForSequenceClassification.from_config(trial.run.model.config).eval()
        first.load_state_dict(trial.engine.model.state_dict())
        ours = float(trial.step().loss)
        train = trial.run.data.train
        places = [train.locate_sample(at, 0)[1] for at in range(4)]
        numbers = [int(train.list_document_numbers(index)[0]) // 2 for index in places]

    def score(model: Any, number: int, key: str) -> torch.Tensor:
        row = pairs(60)[number]
        text = tokens.apply_chat_template([*row["prompt"], *row[key]], tokenize=False)
        with torch.no_grad():
            found = model(**tokens(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0]
        return torch.as_tensor(found)

    margins = [score(first, number, "chosen") - score(first, number, "rejected") for number in numbers]
    assert ours == pytest.approx(float(-functional.logsigmoid(torch.stack(margins)).mean()), rel=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "one" / "final")
    assert model.config.num_labels == 1
    assert score(model, 8, "chosen") > score(model, 8, "rejected")
