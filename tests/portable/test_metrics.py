"""Metrics as sums: they equal the formulas over the full dataset, for any division into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from portable.batch import IGNORED_LABEL
from portable.config import RunConfig
from portable.data.samples.classes import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from portable.data.samples.order import EpochIndex
from portable.errors import UserError
from portable.evaluation.builtin_metrics import METRIC_BUILDERS, MetricSettings, build_metrics
from portable.evaluation.generation import compute_rouge_l
from portable.evaluation.metrics import evaluate
from portable.evaluation.totals import compute_new_totals
from portable.model.training_loss import Outputs
from portable.run.batches import build_eval_loader
from tests.engines import ENGINES, Engines
from tests.parity import Opened, opened
from tests.portable.data_support import write_jsonl
from tests.runs import configured, write_labelled

NAMES = ("a", "b", "c", "never")


def values_of(
    setting: MetricSettings, logits: Tensor, labels: Tensor, size: int, more: tuple[str, ...] = ()
) -> Any:
    """Return the values over micro-batches of ``size`` rows, the last one filled with ignored rows."""
    measures = build_metrics((*METRIC_BUILDERS[setting.task], *more), setting)
    floats = labels.is_floating_point()
    ignored = math.nan if floats else IGNORED_LABEL
    short = -len(labels) % size
    logits = torch.cat([logits, torch.full((short, *logits.shape[1:]), 1e4)])
    labels = torch.cat([labels, torch.full((short, *labels.shape[1:]), ignored, dtype=labels.dtype)])
    totals: dict[str, Tensor] = {}
    for rows, wanted in zip(logits.split(size), labels.split(size), strict=True):
        outputs = Outputs(None if floats else rows.argmax(dim=-1), rows)
        sums = measures(outputs, {"labels": wanted})
        totals = compute_new_totals(totals, {name: value.double() for name, value in sums.items()})
    valid = (~labels.isnan() if floats else labels != IGNORED_LABEL).sum()
    totals = {"labels": valid, "loss": 2 * valid, **totals}
    return measures.compute_metric_values({name: total.double() for name, total in totals.items()})


@pytest.mark.parametrize("size", [1, 7, 40])
def test_metrics_of_single_label_match_formulas(size: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (40,))
    logits = torch.randn(40, 4) + 2 * functional.one_hot(labels, 4)
    logits[:, 3] = -100
    found = values_of(MetricSettings(SINGLE_LABEL, NAMES), logits, labels, size)
    pairs = list(zip(labels.tolist(), logits.argmax(dim=-1).tolist(), strict=True))
    counts = [[pairs.count((row, column)) for column in range(4)] for row in range(4)]
    assert found["confusion"] == {"classes": list(NAMES), "counts": counts}
    assert found["accuracy"] == sum(a == b for a, b in pairs) / 40
    each = []
    for index in range(3):
        right = pairs.count((index, index))
        precision = right / sum(b == index for _, b in pairs)
        recall = right / sum(a == index for a, _ in pairs)
        each.append(2 * precision * recall / (precision + recall))
    assert [found[f"f1.{name}"] for name in NAMES] == pytest.approx([*each, 0.0])
    assert found["f1"] == pytest.approx(sum(each) / 3)  # the class that never occurs does not count


@pytest.mark.parametrize("size", [3, 40])
def test_metrics_of_multi_label_match_formulas(size: int) -> None:
    torch.manual_seed(1)
    labels = torch.randint(0, 2, (40, 3)).float()
    labels[5, 1] = math.nan
    logits = torch.randn(40, 3) + labels.nan_to_num()
    found = values_of(MetricSettings(MULTI_LABEL, NAMES[:3]), logits, labels, size)
    right, wrong, missed, rows = [0] * 3, [0] * 3, [0] * 3, 0
    for row, wanted in zip((logits > 0).tolist(), labels.tolist(), strict=True):
        rows += all(
            math.isnan(want) or chosen == (want == 1) for chosen, want in zip(row, wanted, strict=True)
        )
        for index, (chosen, want) in enumerate(zip(row, wanted, strict=True)):
            right[index] += chosen and want == 1
            wrong[index] += chosen and want == 0
            missed[index] += not chosen and want == 1
    assert found["accuracy"] == rows / 40

    def f1(r: int, w: int, m: int) -> float:
        return 2 * r / (2 * r + w + m)

    each = [f1(*one) for one in zip(right, wrong, missed, strict=True)]
    assert [found[f"f1.{name}"] for name in NAMES[:3]] == pytest.approx(each)
    assert found["f1_macro"] == pytest.approx(sum(each) / 3)
    assert found["f1_micro"] == pytest.approx(f1(sum(right), sum(wrong), sum(missed)))


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("outputs", [1, 2])
def test_metrics_of_regression_match_formulas(outputs: int, size: int) -> None:
    torch.manual_seed(2)
    labels = 1000 + torch.randn(40, outputs) * torch.tensor([1.0, 5.0][:outputs])
    logits = labels + torch.randn(40, outputs)
    found = values_of(MetricSettings(REGRESSION), logits, labels if outputs > 1 else labels[:, 0], size)
    errors = (logits.double() - labels.double()).square()
    variance = (labels.double() - labels.double().mean(dim=0)).square()
    assert found["mse"] == pytest.approx(float(errors.mean()), rel=1e-9)
    assert found["mae"] == pytest.approx(float(errors.sqrt().mean()), rel=1e-9)
    assert found["r2"] == pytest.approx(float((1 - errors.sum(dim=0) / variance.sum(dim=0)).mean()), rel=1e-6)


@pytest.mark.parametrize(
    ("labels", "predictions", "r2"),
    [
        ([[0.3, 0.7]] * 6, [[0.5, 0.2]] * 6, 0.0),
        ([[0.3, 0.7]] * 6, [[0.3, 0.7]] * 6, 1.0),
        ([[0.3, 0.0], [0.3, 1.0]], [[0.5, 0.0], [0.3, 1.0]], 0.5),  # one of two columns is constant
        ([[0.0, 0.0]] * 3, [[0.0, 1.0]] * 3, 0.5),
        ([[1e6, 3.0]] * 5000, [[1e6 + 1, 3.0]] * 5000, 0.5),
        ([[0.1, 0.7]], [[0.1, 0.7]], math.nan),
        ([[1e4, 0.0], [1e4 + 1, 2.0]], [[1e4, 0.0], [1e4 + 1, 2.0]], 1.0),
        ([[1e4, 0.0], [1e4 + 1, 2.0]], [[1e4 + 0.5, 1.0]] * 2, 0.0),
        ([[1e6], [1e6 + 1]] * 50, [[1e6 + 0.25], [1e6 + 0.75]] * 50, 0.75),  # large, and vary little
        ([[1e30], [2e30]], [[1e30], [2e30]], 1.0),
        ([[0.1]] * 999, [[0.2]] * 999, 0.0),
        ([[0.3]] * 3, [[math.nan]] * 3, math.nan),
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_r2_of_degenerate_labels_matches_sklearn(labels: Any, predictions: Any, r2: float, size: int) -> None:
    values = values_of(MetricSettings(REGRESSION), torch.tensor(predictions), torch.tensor(labels), size)
    assert values["r2"] == pytest.approx(r2, abs=1e-6, nan_ok=True)


DEGENERATE: dict[str, tuple[str, list[Any], list[Any]]] = {
    "constant, wrong": (REGRESSION, [[3.0]] * 5, [[1.0], [2.0], [3.0], [4.0], [5.0]]),
    "constant, right": (REGRESSION, [[3.0]] * 5, [[3.0]] * 5),
    "two outputs, one constant": (REGRESSION, [[3.0, 1.0], [3.0, 2.0]], [[3.0, 1.0], [3.5, 2.5]]),
    "two samples": (REGRESSION, [[1.0], [2.0]], [[5.0], [-5.0]]),
    "large values that vary little": (REGRESSION, [[1e6 + i / 8] for i in range(9)], [[1e6]] * 9),
    "far from the labels": (REGRESSION, [[0.5], [0.25], [0.125]], [[1e10], [-1e10], [0.0]]),
    "zeros": (REGRESSION, [[0.0]] * 3, [[0.0]] * 3),
    "one class, right": (SINGLE_LABEL, [1] * 4, [1] * 4),
    "one class, wrong": (SINGLE_LABEL, [1] * 4, [2] * 4),
    "one sample": (SINGLE_LABEL, [0], [3]),
    "a class that is only predicted": (SINGLE_LABEL, [0, 1, 0, 1], [0, 3, 0, 3]),
    "a class that is never predicted": (SINGLE_LABEL, [0, 1, 2, 2], [0, 0, 0, 0]),
    "no class at all": (MULTI_LABEL, [[0.0] * 3] * 3, [[-1.0] * 3] * 3),
    "no class, all predicted": (MULTI_LABEL, [[0.0] * 3] * 3, [[1.0] * 3] * 3),
    "all classes, none predicted": (MULTI_LABEL, [[1.0] * 3] * 3, [[-1.0] * 3] * 3),
    "one text of several classes": (MULTI_LABEL, [[1.0, 0.0, 1.0]], [[1.0, 1.0, -1.0]]),
    "a class without texts": (MULTI_LABEL, [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [[1.0, -1.0, -1.0]] * 2),
}


@pytest.mark.large("sklearn")
@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("size", [1, 4])
def test_metrics_of_degenerate_cases_match_sklearn(case: str, size: int) -> None:
    from sklearn import metrics

    problem, labels, predictions = DEGENERATE[case]
    truth: dict[str, Any]
    if problem == REGRESSION:
        names = "mean_squared_error", "mean_absolute_error", "r2_score"
        mse, mae, r2 = (getattr(metrics, name)(labels, predictions) for name in names)
        truth = {"mse": mse, "mae": mae, "r2": r2}
        values = values_of(MetricSettings(problem), torch.tensor(predictions), torch.tensor(labels), size)
    elif problem == SINGLE_LABEL:
        each = metrics.f1_score(labels, predictions, labels=range(4), average=None, zero_division=0)
        truth = {
            "accuracy": metrics.accuracy_score(labels, predictions),
            "f1": metrics.f1_score(labels, predictions, average="macro", zero_division=0),
            **{f"f1.{name}": value for name, value in zip(NAMES, each, strict=True)},
        }
        logits = functional.one_hot(torch.tensor(predictions), 4).float()
        values = values_of(MetricSettings(problem, NAMES), logits, torch.tensor(labels), size)
        counts = metrics.confusion_matrix(labels, predictions, labels=range(4)).tolist()
        assert values["confusion"]["counts"] == counts
    else:
        chosen = [[int(value > 0) for value in row] for row in predictions]
        each = metrics.f1_score(labels, chosen, average=None, zero_division=0)
        truth = {
            "accuracy": metrics.accuracy_score(labels, chosen),
            "f1_micro": metrics.f1_score(labels, chosen, average="micro", zero_division=0),
            "f1_macro": metrics.f1_score(labels, chosen, average="macro", zero_division=0),
            **{f"f1.{name}": value for name, value in zip(NAMES, each, strict=False)},
        }
        setting = MetricSettings(problem, NAMES[:3])
        values = values_of(setting, torch.tensor(predictions), torch.tensor(labels), size)
    assert {name: values[name] for name in truth} == pytest.approx(truth, rel=1e-6, abs=1e-12)


def test_f1_of_absent_classes_matches_sklearn() -> None:
    """The macro mean includes all classes for multilabel data, and otherwise only classes that occur."""
    labels, logits = torch.tensor([[1.0, 0, 0], [0, 1, 0]]), torch.tensor([[1.0, -1, -1], [-1, -1, -1]])
    values = values_of(MetricSettings(MULTI_LABEL, NAMES[:3]), logits, labels, 2)
    assert values["f1_macro"] == pytest.approx(1 / 3) and values["f1_micro"] == pytest.approx(2 / 3)
    values = values_of(
        MetricSettings(SINGLE_LABEL, NAMES), torch.eye(4)[[0, 1, 1]], torch.tensor([0, 1, 0]), 3
    )
    assert values["f1"] == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_metrics_of_tokens_match_formulas() -> None:
    torch.manual_seed(3)
    logits, labels = torch.randn(10, 6, 16), torch.randint(0, 16, (10, 6))
    labels[:, 4:] = IGNORED_LABEL
    right = (logits.argmax(dim=-1) == labels)[:, :4].double().mean()
    wanted = {"loss": 2, "perplexity": pytest.approx(math.e**2), "accuracy": pytest.approx(float(right))}
    for size in (1, 4, 10):
        assert values_of(MetricSettings("causal-lm"), logits, labels, size) == wanted


# -- custom metrics ----------------------------------------------------------------------------------------


def long_words(outputs: Outputs, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Metric function: the mean of the labels, and the share of large labels."""
    labels = batch["labels"]
    valid = labels != IGNORED_LABEL
    return {
        "mean_label": (torch.where(valid, labels, 0).sum(), valid.sum()),
        "large": (((labels > 1) & valid).sum(), valid.sum()),
    }


class Largest:
    """Metric class: a histogram. Its value is the most frequent label."""

    needs = "predictions"
    higher_is_better = True
    names = ("mode",)

    def __init__(self, folder: str = "labels") -> None:
        self.folder = folder

    def sums(self, outputs: Outputs, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert outputs.predictions is not None
        return {"counts": (batch["labels"].reshape(-1, 1) == torch.arange(4)).sum(dim=0)}

    def values(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return {"mode": float(totals["counts"].argmax())}


NO_METRIC = 3


def failing(outputs: Outputs, batch: Mapping[str, Tensor]) -> Any:
    raise ValueError("not\nso")


def loss_again(outputs: Outputs, batch: Mapping[str, Tensor]) -> Any:
    return {"loss": (1.0, 2)}


def test_custom_metrics_are_loaded_by_import_path() -> None:
    torch.manual_seed(4)
    labels = torch.randint(0, 4, (40,))
    own = (f"{__name__}:long_words", f"{__name__}:Largest(folder='a/b')")
    found = [
        values_of(MetricSettings(SINGLE_LABEL, NAMES), torch.randn(40, 4), labels, size, own)
        for size in (1, 7, 40)
    ]
    assert [one["mean_label"] for one in found] == [float(labels.double().mean())] * 3
    assert [one["large"] for one in found] == [float((labels > 1).double().mean())] * 3
    assert [one["mode"] for one in found] == [float(labels.bincount().argmax())] * 3
    measures = build_metrics(own, MetricSettings("causal-lm"))
    assert (
        measures.value_names is None
        and measures.get_better_direction("mode") == "max"
        and measures.get_better_direction("large") is None
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("f2", "'f2' is not a metric for single_label_classification; use one of "),
        (f"{__name__}:NO_METRIC", "is neither a function nor an object with the methods sums and values"),
        (f"{__name__}:failing", "failing: raises an error (ValueError: not so; test_metrics.py, line "),
        (
            f"{__name__}:loss_again",
            "loss_again: another metric or the loss already reports a value named 'loss'",
        ),
    ],
)
def test_build_metrics_rejects_unknown_names(name: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        values_of(MetricSettings(SINGLE_LABEL, NAMES), torch.randn(4, 4), torch.arange(4), 2, (name,))
    assert str(caught.value).startswith("train.metrics: ") and told in str(caught.value)
    assert "\n" not in str(caught.value)


# -- on engines --------------------------------------------------------------------------------------------

BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 384, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 384, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1,
    "num_heads": 2, "dropout_rate": 0.0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    # 13 texts are held out: no number of ranks divides them.
    "classes": {
        "model__task": "sequence-classification", "model__config": BERT, "data__eval_fraction": 13 / 60,
        "train__micro_batch_size": 1, "train__steps": 2, "train__learning_rate": 1e-2,
    },
    # Long enough that the model does not only repeat the prompt.
    "generated": {
        "model__task": "seq2seq-lm", "model__config": T5, "data__target_seq_len": 6, "data__seq_len": 12,
        "data__eval_fraction": 0.2, "train__micro_batch_size": 3, "train__steps": 20,
        "train__learning_rate": 2e-2, "train__schedule": "constant",
        "train__metrics": ["exact_match", "rouge_l", "accuracy"],
    },
}  # fmt: skip


@contextmanager
def trained(config: RunConfig) -> Iterator[tuple[Opened, dict[str, Any]]]:
    """Yield the run after its steps, and its metrics."""
    with opened(config) as trial:
        for _ in range(trial.run.steps):
            trial.step()
        run = trial.run
        assert run.data.first_eval is not None
        yield (
            trial,
            evaluate(trial.backend, trial.engine, build_eval_loader(run, run.data.first_eval), run.metrics),
        )


def evaluated(config: RunConfig) -> dict[str, Any]:
    """Train and evaluate on one rank."""
    with trained(config) as (trial, found):
        graphs: Any = getattr(trial.engine, "graphs", None)
        if graphs is not None and config.model.task == "seq2seq-lm":
            assert set(graphs.graph_counts.values()) == {1}
        return found


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write texts of two classes, and short texts with one word each."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["red", "green", "blue", "one", "two"]
    rows = [{"text": f"{words[i % 5]} {words[i % 3]}", "target": words[i % 5]} for i in range(60)]
    return {"classes": write_labelled(folder, 60), "generated": write_jsonl(folder / "pairs.jsonl", rows)}


@pytest.fixture(scope="module")
def alone(texts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the metrics of one rank, and the same from a plain forward pass or ``generate``."""
    found: dict[Any, Any] = {}
    for kind, settings in KINDS.items():
        config = configured(tmp_path_factory.mktemp("one"), texts[kind], **settings, strategy="no_shard")
        with trained(config) as (trial, found[kind]):
            held_out = trial.run.data.first_eval
            assert held_out is not None
            batch = held_out.build_batch([EpochIndex(0, index) for index in range(len(held_out))])
            by_hand = classes_by_hand if kind == "classes" else texts_by_hand
            with torch.no_grad():
                found[kind, "by hand"] = by_hand(trial.engine.model.eval(), batch, trial.run.data.tokenizer)
    return found


def classes_by_hand(model: Any, batch: dict[str, Tensor], _: Any) -> dict[str, Any]:
    labels = batch.pop("labels")
    logits = model(**batch).logits
    pairs = list(zip(labels.tolist(), logits.argmax(dim=-1).tolist(), strict=True))
    counts = [[pairs.count((a, b)) for b in (0, 1)] for a in (0, 1)]
    loss = float(functional.cross_entropy(logits, labels))
    return {"confusion": {"classes": ["no", "yes"], "counts": counts}, "loss": pytest.approx(loss, rel=1e-6)}


def texts_by_hand(model: Any, batch: dict[str, Tensor], tokenizer: Any) -> dict[str, Any]:
    labels = batch["labels"]
    tokens = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False,
        num_beams=1, max_new_tokens=labels.shape[1],
        decoder_start_token_id=int(batch["decoder_input_ids"][0, 0]),
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    said = tokenizer.batch_decode(tokens[:, 1:], skip_special_tokens=True)
    targets = [tokenizer.decode(row[row != IGNORED_LABEL], skip_special_tokens=True) for row in labels]
    scores = [compute_rouge_l(a, b) for a, b in zip(said, targets, strict=True)]
    exact = [a.strip() == b.strip() for a, b in zip(said, targets, strict=True)]
    assert sum(scores) > 0 and len(set(said)) > 1  # it has learned different answers
    means = {"exact_match": sum(exact) / len(exact), "rouge_l": sum(scores) / len(scores)}
    return {name: pytest.approx(value) for name, value in means.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_one_rank_match_manual_computation(kind: str, alone: dict[Any, Any]) -> None:
    by_hand = alone[kind, "by hand"]
    assert {name: alone[kind][name] for name in by_hand} == by_hand


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("classes", "no_shard", 1),  # all texts at once
        ("classes", "full_shard", 3),
        ("classes", "zero3", 2),
        ("classes", "xla", 2),
        ("generated", "full_shard", 2),
        ("generated", "xla", 2),
    ],
)
def test_metrics_match_on_any_number_of_ranks(
    kind: str, name: str, size: int, texts: dict[str, Path], alone: Any, engines: Engines, tmp_path: Path
) -> None:
    own = {"train__micro_batch_size": 6} if size == 1 else {}
    config = configured(tmp_path, texts[kind], **{**KINDS[kind], **ENGINES[name].settings, **own})
    found = engines.run(name, size, evaluated, config)
    for value in ("confusion", "f1", "exact_match"):
        assert found.get(value) == alone[kind].get(value)
    assert found.get("rouge_l", 0) == pytest.approx(alone[kind].get("rouge_l", 0), rel=1e-12)
    # After many steps they differ by more than rounding.
    assert found["loss"] == pytest.approx(alone[kind]["loss"], rel=1e-5 if kind == "classes" else 1e-4)


def test_predictions_of_chunked_head_match_all_logits(corpus: Path, tmp_path: Path) -> None:
    """The chunked head has the same predictions, but no tensor has all logits."""
    found, widths = [], []
    chunked: dict[str, Any] = {"memory__loss_chunk_tokens": 8, "precision": "bf16", "data__packing": False}
    chunked |= {"strategy": "no_shard", "train__learning_rate": 2e-2}
    with opened(configured(tmp_path, corpus, **chunked)) as trial:
        for _ in range(6):
            trial.step()
        run, head = trial.run, trial.engine.model.get_output_embeddings()
        head.register_forward_hook(lambda *call: widths.append(call[-1].shape[-1]))
        assert run.data.first_eval is not None
        for own in ((), (f"{__name__}:long_words",)):  # the second needs all logits
            measures = build_metrics(("accuracy", *own), MetricSettings("causal-lm"))
            batches = build_eval_loader(run, run.data.first_eval)
            found.append(evaluate(trial.backend, trial.engine, batches, measures))
    # A token's loss and its prediction.
    assert set(widths) == {384, 2} and (widths[0], widths[-1]) == (2, 384)
    assert found[0]["accuracy"] == found[1]["accuracy"] > 0
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("text", "target", "score"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("The cat, sat!", "the cat sat on it", 2 * 1 * 0.6 / 1.6),
        ("police kill the gunman", "police killed the gunman", 0.75),  # Lin's example
        ("é à", "à é x", 0.4),
    ],
)
def test_compute_rouge_l(text: str, target: str, score: float) -> None:
    assert compute_rouge_l(text, target) == pytest.approx(score)
