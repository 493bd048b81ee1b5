"""Metrics as sums: equal to their formulas over the whole set, however it is cut into micro-batches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from portable.config import RunConfig
from portable.data.samples.classes import MULTI, REGRESSION, SINGLE
from portable.errors import UserError
from portable.evaluation.builtin import KNOWN, Setting, build_metrics
from portable.evaluation.generation import rouge_l
from portable.evaluation.metrics import evaluate
from portable.model.loss import added
from portable.model.training_loss import IGNORED, Outputs
from portable.reporting.metrics import Throughput
from portable.run.batches import eval_batches
from tests.engines import Engines
from tests.parity import opened
from tests.runs import configured, write_labelled

NAMES = ("a", "b", "c", "never")


def values_of(setting: Setting, logits: Tensor, labels: Tensor, size: int, more: tuple[str, ...] = ()) -> Any:
    """The values over micro-batches of ``size`` rows, the last filled up with rows that must not count."""
    measures = build_metrics((*KNOWN[setting.task], *more), setting)
    floats = labels.is_floating_point()
    ignored = math.nan if floats else IGNORED
    short = -len(labels) % size
    logits = torch.cat([logits, torch.full((short, *logits.shape[1:]), 1e4)])
    labels = torch.cat([labels, torch.full((short, *labels.shape[1:]), ignored, dtype=labels.dtype)])
    totals: dict[str, Tensor] = {}
    for rows, wanted in zip(logits.split(size), labels.split(size), strict=True):
        outputs = Outputs(None if floats else rows.argmax(dim=-1), rows)
        sums = measures(outputs, {"labels": wanted})
        totals = added(totals, {name: value.double() for name, value in sums.items()})
    valid = (~labels.isnan() if floats else labels != IGNORED).sum()
    totals = {"labels": valid, "loss": 2 * valid, **totals}
    return measures.values({name: total.double() for name, total in totals.items()})


@pytest.mark.parametrize("size", [1, 7, 40])
def test_one_class_per_text(size: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (40,))
    logits = torch.randn(40, 4) + 2 * functional.one_hot(labels, 4)
    logits[:, 3] = -100
    found = values_of(Setting(SINGLE, NAMES), logits, labels, size)
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
def test_several_classes_per_text(size: int) -> None:
    torch.manual_seed(1)
    labels = torch.randint(0, 2, (40, 3)).float()
    labels[5, 1] = math.nan
    logits = torch.randn(40, 3) + labels.nan_to_num()
    found = values_of(Setting(MULTI, NAMES[:3]), logits, labels, size)
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
def test_numbers(outputs: int, size: int) -> None:
    torch.manual_seed(2)
    labels = 1000 + torch.randn(40, outputs) * torch.tensor([1.0, 5.0][:outputs])
    logits = labels + torch.randn(40, outputs)
    found = values_of(Setting(REGRESSION), logits, labels if outputs > 1 else labels[:, 0], size)
    errors = (logits.double() - labels.double()).square()
    variance = (labels.double() - labels.double().mean(dim=0)).square()
    assert found["mse"] == pytest.approx(float(errors.mean()), rel=1e-9)
    assert found["mae"] == pytest.approx(float(errors.sqrt().mean()), rel=1e-9)
    assert found["r2"] == pytest.approx(float((1 - errors.sum(dim=0) / variance.sum(dim=0)).mean()), rel=1e-6)


def test_tokens() -> None:
    torch.manual_seed(3)
    logits, labels = torch.randn(10, 6, 16), torch.randint(0, 16, (10, 6))
    labels[:, 4:] = IGNORED
    found = [values_of(Setting("causal-lm"), logits, labels, size) for size in (1, 4, 10)]
    assert found[0] == found[1] == found[2]
    right = (logits.argmax(dim=-1) == labels)[:, :4].double().mean()
    assert found[0]["accuracy"] == pytest.approx(float(right))
    assert found[0]["perplexity"] == pytest.approx(math.e**2) and found[0]["loss"] == 2


# -- the user's own ----------------------------------------------------------------------------------------


def long_words(outputs: Outputs, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A function: the mean of the labels, and the share of them that are large."""
    labels = batch["labels"]
    valid = labels != IGNORED
    return {
        "mean_label": (torch.where(valid, labels, 0).sum(), valid.sum()),
        "large": (((labels > 1) & valid).sum(), valid.sum()),
    }


class Largest:
    """A class: a histogram, of which the value is the most frequent label."""

    needs = "predictions"
    higher_is_better = True
    names = ("mode",)

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


def test_metrics_by_import_path() -> None:
    torch.manual_seed(4)
    labels = torch.randint(0, 4, (40,))
    own = (f"{__name__}:long_words", f"{__name__}:Largest")
    found = [values_of(Setting(SINGLE, NAMES), torch.randn(40, 4), labels, size, own) for size in (1, 7, 40)]
    assert [one["mean_label"] for one in found] == [float(labels.double().mean())] * 3
    assert [one["large"] for one in found] == [float((labels > 1).double().mean())] * 3
    assert [one["mode"] for one in found] == [float(labels.bincount().argmax())] * 3
    measures = build_metrics(own, Setting("causal-lm"))
    assert measures.names is None and measures.mode("mode") == "max" and measures.mode("large") is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("f2", "'f2' is no metric of single_label_classification; it has "),
        (f"{__name__}:NO_METRIC", "is neither a function nor a class with the methods sums and values"),
        (f"{__name__}:failing", "failing: fails (ValueError: not so; test_metrics.py, line "),
        (f"{__name__}:loss_again", "loss_again: another metric has a value 'loss', too"),
    ],
)
def test_what_is_no_metric_is_refused(name: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        values_of(Setting(SINGLE, NAMES), torch.randn(4, 4), torch.arange(4), 2, (name,))
    assert str(caught.value).startswith("train.metrics: ") and told in str(caught.value)
    assert "\n" not in str(caught.value)


# -- on engines --------------------------------------------------------------------------------------------

BERT: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 384, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def evaluated(config: RunConfig) -> dict[str, Any]:
    """On a rank: two steps, then the metrics."""
    with opened(config) as trial:
        for _ in range(2):
            trial.step()
        run = trial.run
        assert run.data.eval is not None
        return evaluate(trial.backend, trial.engine, eval_batches(run, run.data.eval), run.metrics)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Texts of two classes, of which 13 are held out: no number of ranks divides them."""
    texts = write_labelled(tmp_path_factory.mktemp("texts"), 60)
    settings: dict[str, Any] = {
        "model__task": "sequence-classification", "model__config": BERT, "data__eval_fraction": 13 / 60,
        "train__micro_batch_size": 1, "train__learning_rate": 1e-2,
    }  # fmt: skip
    return texts, settings


@pytest.fixture(scope="module")
def on_one(classifier: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one rank computes on all held-out texts at once."""
    texts, settings = classifier
    given = settings | {"strategy": "no_shard", "train__micro_batch_size": 6}
    return evaluated(configured(tmp_path_factory.mktemp("one"), texts, **given))


def test_a_rank_computes_what_a_plain_loop_does(
    classifier: tuple[Path, dict[str, Any]], on_one: Any, tmp_path: Path
) -> None:
    texts, settings = classifier
    with opened(configured(tmp_path, texts, **settings, strategy="no_shard")) as trial:
        for _ in range(2):
            trial.step()
        held_out = trial.run.data.eval
        assert held_out is not None and len(held_out) == 13
        batch = held_out.batch([(0, index) for index in range(13)])
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = trial.engine.model.eval()(**batch).logits
    pairs = list(zip(labels.tolist(), logits.argmax(dim=-1).tolist(), strict=True))
    assert on_one["confusion"]["counts"] == [[pairs.count((a, b)) for b in (0, 1)] for a in (0, 1)]
    assert on_one["loss"] == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-6)
    assert on_one["confusion"]["classes"] == ["no", "yes"]


@pytest.mark.parametrize(("name", "size"), [("full_shard", 3), ("zero3", 2), ("xla", 2)])
def test_any_number_of_ranks_computes_the_same(
    name: str,
    size: int,
    classifier: tuple[Path, dict[str, Any]],
    on_one: Any,
    engines: Engines,
    tmp_path: Path,
) -> None:
    texts, settings = classifier
    chosen = {"backend": "xla"} if name == "xla" else {"strategy": name}
    found = engines.run(name, size, evaluated, configured(tmp_path, texts, **settings, **chosen))
    assert found["confusion"] == on_one["confusion"] and found["f1"] == on_one["f1"]
    assert found["loss"] == pytest.approx(on_one["loss"], rel=1e-5)


def test_predictions_without_all_logits(corpus: Path, tmp_path: Path) -> None:
    """The chunked head's predictions are those of all logits, which no tensor holds."""
    found, widths = [], []
    chunked: dict[str, Any] = {"memory__loss_chunk_tokens": 8, "precision": "bf16", "data__packing": False}
    chunked |= {"strategy": "no_shard", "train__learning_rate": 2e-2}
    with opened(configured(tmp_path, corpus, **chunked)) as trial:
        for _ in range(6):
            trial.step()
        run, head = trial.run, trial.engine.model.get_output_embeddings()
        head.register_forward_hook(lambda *call: widths.append(call[-1].shape[-1]))
        assert run.data.eval is not None
        for own in ((), (f"{__name__}:long_words",)):  # the second needs all logits
            measures = build_metrics(("accuracy", *own), Setting("causal-lm"))
            batches = eval_batches(run, run.data.eval)
            found.append(evaluate(trial.backend, trial.engine, batches, measures))
    # A token's loss and its prediction.
    assert set(widths) == {384, 2} and (widths[0], widths[-1]) == (2, 384)
    assert found[0]["accuracy"] == found[1]["accuracy"] > 0
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)


# -- generated texts ---------------------------------------------------------------------------------------

T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 384, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1,
    "num_heads": 2, "dropout_rate": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "target", "score"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("The cat, sat!", "the cat sat on it", 2 * 1 * 0.6 / 1.6),
        ("police kill the gunman", "police killed the gunman", 0.75),  # Lin's example
        ("é à", "à é x", 0.4),
    ],
)
def test_rouge_l(text: str, target: str, score: float) -> None:
    assert rouge_l(text, target) == pytest.approx(score)


def translated(config: RunConfig) -> dict[str, Any]:
    """On a rank: train until the model says something of its own, and evaluate what it generates."""
    with opened(config) as trial:
        for _ in range(trial.run.steps):
            trial.step()
        run = trial.run
        assert run.data.eval is not None
        found = evaluate(trial.backend, trial.engine, eval_batches(run, run.data.eval), run.metrics)
        if config.strategy != "no_shard":
            compiled: Any = getattr(trial.engine, "graphs", None)
            return found | ({} if compiled is None else {"graphs": compiled.distinct})
        # What transformers generates, without our loop.
        batch = run.data.eval.batch([(0, index) for index in range(len(run.data.eval))])
        tokenizer, labels = run.data.tokenizer, batch["labels"]
        tokens = trial.engine.model.eval().generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False,
            num_beams=1, max_new_tokens=labels.shape[1],
            decoder_start_token_id=int(batch["decoder_input_ids"][0, 0]),
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        texts = tokenizer.batch_decode(tokens[:, 1:], skip_special_tokens=True)
        targets = [tokenizer.decode(row[row != IGNORED], skip_special_tokens=True) for row in labels]
        scores = [rouge_l(a, b) for a, b in zip(texts, targets, strict=True)]
        exact = [a.strip() == b.strip() for a, b in zip(texts, targets, strict=True)]
        return found | {
            "truth": (sum(exact) / len(exact), sum(scores) / len(scores)),
            "texts": len(set(texts)),
        }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Short texts and a word of each."""
    words = ["red", "green", "blue", "one", "two"]
    rows = [{"text": f"{words[i % 5]} {words[i % 3]}", "target": words[i % 5]} for i in range(60)]
    texts = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model__task": "seq2seq-lm", "model__config": T5, "data__target_seq_len": 6, "data__seq_len": 12,
        "data__eval_fraction": 0.2, "train__micro_batch_size": 3, "train__steps": 20,
        "train__learning_rate": 2e-2, "train__schedule": "constant",
        "train__metrics": ["exact_match", "rouge_l", "accuracy"],
    }  # fmt: skip
    return texts, settings


@pytest.fixture(scope="module")
def generated_alone(pairs: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts, settings = pairs
    folder = tmp_path_factory.mktemp("alone")
    return translated(configured(folder, texts, **settings, strategy="no_shard"))


def test_generated_texts_are_those_of_transformers(generated_alone: Any) -> None:
    alone = generated_alone
    assert (alone["exact_match"], alone["rouge_l"]) == pytest.approx(alone["truth"])
    assert alone["rouge_l"] > 0 and alone["texts"] > 1  # it has learned to say different things


@pytest.mark.parametrize("name", ["full_shard", "xla"])
def test_generated_texts_on_engines(
    name: str, pairs: tuple[Path, dict[str, Any]], generated_alone: Any, engines: Engines, tmp_path: Path
) -> None:
    texts, settings = pairs
    chosen = {"backend": "xla"} if name == "xla" else {"strategy": name}
    found = engines.run(name, 2, translated, configured(tmp_path, texts, **settings, **chosen))
    assert found["exact_match"] == generated_alone["exact_match"]
    assert found["rouge_l"] == pytest.approx(generated_alone["rouge_l"], rel=1e-12)
    assert all(count == 1 for count in found.get("graphs", {}).values())


def test_the_rates_of_the_bar_and_of_the_summary_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("portable.reporting.metrics.time.perf_counter", lambda: now)
    throughput = Throughput()
    now = 50.0  # the first step compiles
    throughput.add(8)
    assert throughput.window() == pytest.approx(8 / 50) == throughput.launch and throughput.first_step == 50
    now = 60.0
    throughput.pause(10.0)  # it is saved
    for _ in range(4):
        now += 2.0
        throughput.add(8)
    assert throughput.window() == pytest.approx(4.0) == throughput.launch
    now += 7.0
    throughput.pause(7.0)
    now += 2.0
    throughput.add(8)
    assert throughput.window() == pytest.approx(4.0) == throughput.launch
    now += 600.0  # the export
    assert throughput.launch == pytest.approx(4.0) and throughput.paused == 17
