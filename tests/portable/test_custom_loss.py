"""Custom losses: exact on every engine, compared with a plain loop, and errors."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from portable import UserError
from portable.batch import IGNORED_LABEL, Batch
from portable.config import RunConfig
from portable.evaluation.metrics import evaluate
from portable.model.regularization import install_embedding_noise
from portable.model.training_loss import Outputs, TrainingLoss
from portable.run.batches import build_eval_loader
from tests.engines import ENGINES, Engines
from tests.gpu.test_parity import STEPS, plain_losses
from tests.parity import opened
from tests.portable.data_support import write_jsonl
from tests.promises import record
from tests.runs import TINY_MODEL, configured

HERE = __name__
PADDED: dict[str, Any] = {
    "data__packing": False,
    "train__global_batch_size": 12,
    "train__micro_batch_size": 2,
    "train__steps": STEPS,
}


def factor(labels: Tensor) -> Tensor:
    return torch.where(labels == IGNORED_LABEL, 0.0, 0.25 + (labels % 4).float())


class Focal:
    """Focal loss of tokens, each with a weight that follows from its label."""

    needs = ("log_probs",)

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = gamma

    def weight(self, batch: Batch) -> float:
        return float(factor(batch["labels"]).sum())

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        assert outputs.log_probs is not None
        share = factor(batch["labels"])
        losses = -outputs.log_probs * (1 - outputs.log_probs.exp()) ** self.gamma
        return (share * losses).sum(), share.sum(), {"plain": -(share * outputs.log_probs).sum()}


def plain_focal(logits: Tensor, batch: Batch) -> tuple[Tensor, float]:
    labels = batch["labels"]
    log_p = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (-factor(labels) * log_p * (1 - log_p.exp()) ** 2).sum(), float(factor(labels).sum())


def squared(outputs: Outputs, batch: Batch) -> Any:
    """Compute the squared distance of all logits to the one-hot label."""
    assert outputs.logits is not None
    labels = batch["labels"]
    wanted = functional.one_hot(labels.clamp(min=0), outputs.logits.shape[-1])
    losses = (outputs.logits.float() - wanted).square().mean(-1)
    return torch.where(labels == IGNORED_LABEL, 0.0, losses).sum(), (labels != IGNORED_LABEL).sum()


def plain_squared(logits: Tensor, batch: Batch) -> tuple[Tensor, float]:
    total, count = squared(Outputs(logits=logits), batch)
    return total, float(count)


def plain_variant(logits: Tensor, batch: Batch) -> tuple[Tensor, float]:
    labels = batch["labels"].flatten()
    logits = logits.flatten(0, 1)
    smooth = functional.cross_entropy(
        logits, labels, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=0.2
    )
    z = logits.logsumexp(-1).square()[labels != IGNORED_LABEL].sum()
    return smooth + 0.01 * z, int((labels != IGNORED_LABEL).sum())


def by_column(outputs: Outputs, batch: Batch) -> Any:
    """Weight records by a column. Another column has integers."""
    assert outputs.log_probs is not None and not batch["group"].is_floating_point()
    share = torch.where(
        batch["labels"] == IGNORED_LABEL, 0.0, batch["share"][:, None] + batch["group"][:, None]
    )
    return -(share * outputs.log_probs).sum(), share.sum()


by_column.needs = ("log_probs",)  # type: ignore[attr-defined]
by_column.weight = lambda batch: by_column(  # type: ignore[attr-defined]
    Outputs(log_probs=torch.zeros(batch["labels"].shape)), batch
)[1]


def plain_by_column(logits: Tensor, batch: Batch) -> tuple[Tensor, float]:
    log_p = logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    total, weight = by_column(Outputs(log_probs=log_p), batch)
    return total, float(weight)


LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "focal": ({"train__loss": f"{HERE}:Focal(gamma=2.0)"}, plain_focal),
    "squared": ({"train__loss": f"{HERE}:squared", "train__learning_rate": 1e-3}, plain_squared),
    "column": ({"train__loss": f"{HERE}:by_column", "data__columns": ["share", "group"]}, plain_by_column),
    "smooth": ({"train__label_smoothing": 0.2, "train__z_loss": 0.01}, plain_variant),
}
CHUNKS = {"memory__loss_chunk_tokens": 7}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("focal", "no_shard", 2, {}),
    ("focal", "full_shard", 3, {}),
    ("focal", "full_shard", 2, CHUNKS),
    ("focal", "zero2", 2, {}),
    ("focal", "zero3", 3, {}),
    ("focal", "xla", 2, {}),
    ("squared", "full_shard", 2, CHUNKS),
    ("column", "full_shard", 2, CHUNKS),
    ("smooth", "full_shard", 2, CHUNKS),
    ("smooth", "xla", 2, {}),
]


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the settings of a loss, and the losses of a plain loop with it."""
    settings, criterion = LOSSES[request.param]
    if "data__columns" in settings:
        rows = [json.loads(line) for line in corpus.read_text().splitlines()]
        rows = [{**row, "share": 0.5 + (i % 3) / 2, "group": i % 4} for i, row in enumerate(rows)]
        settings = {**settings, "data__source": str(write_jsonl(corpus.parent / "columns.jsonl", rows))}
    config = configured(tmp_path_factory.mktemp("truth"), corpus, **PADDED, **settings)
    return settings, plain_losses(config, criterion=criterion)


def seen(config: RunConfig) -> tuple[list[Any], dict[str, float], dict[str, float]]:
    """Return losses and norms of the steps, the numbers of the last step, and the result of an evaluation."""
    with opened(config) as trial:
        results = [trial.step() for _ in range(STEPS)]
        backend = trial.backend
        found = [tuple(backend.read_to_host([result.loss, result.grad_norm])) for result in results]
        assert trial.run.data.first_eval is not None
        batches = build_eval_loader(trial.run, trial.run.data.first_eval)
        evaluated = evaluate(backend, trial.engine, batches, trial.run.metrics)
        graphs: Any = getattr(trial.engine, "graphs", None)
        assert graphs is None or all(count == 1 for count in graphs.graph_counts.values()), (
            graphs.graph_counts
        )
        return found, trial.read_metrics(results[-1]), evaluated


@pytest.mark.parametrize(("kind", "name", "size", "own"), CASES, indirect=["kind"])
def test_custom_loss_equals_plain_loop(
    kind: Any, name: str, size: int, own: dict[str, Any], engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    settings, truth = kind
    config = configured(tmp_path, corpus, **{**PADDED, **settings, **ENGINES[name].settings, **own})
    found, numbers, evaluated = engines.run(name, size, seen, config)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in truth], rel=1e-5)
    record([loss for loss, _ in found], [loss for loss, _ in truth], 1e-5)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in truth], rel=1e-4)
    assert found[-1][0] < found[0][0] - 0.001
    if "train__loss" in settings:
        assert "perplexity" not in evaluated and evaluated["loss"] == pytest.approx(found[-1][0], rel=0.3)
    else:  # the loss of an evaluation stays the plain one
        assert numbers["cross_entropy"] < found[-1][0]
        assert evaluated["perplexity"] == pytest.approx(math.exp(evaluated["loss"]), rel=1e-5)


# -- errors ---------------------------------------------------------------------------------------


class Odd:
    """Custom loss that is correct, or wrong in the way that the argument names."""

    needs = "logits"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def weight(self, batch: Batch) -> float:
        rows = {"negative": -1.0, "of rows": float(len(batch["labels"]))}
        return rows.get(self.kind, float((batch["labels"] != IGNORED_LABEL).sum()))

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        assert outputs.logits is not None
        valid, squares = batch["labels"] != IGNORED_LABEL, outputs.logits.float().square()
        total, weight = squares.sum(), valid.sum()
        match self.kind:
            case "fails":
                raise KeyError("no such\ncolumn")
            case "mean":
                return squares[valid].mean(), weight
            case "shapes":
                torch.zeros(3) + torch.zeros(7)
            case "helper":
                functional.cross_entropy(torch.zeros(3, 2), torch.zeros(5).long())
            case "undone":
                changed = squares.exp()
                total = (changed * changed).sum()
                with torch.no_grad():
                    changed.zero_()
            case "detached":
                return total.detach(), weight
            case "in place":
                batch["labels"].fill_(0)
            case "names":
                return total, weight, {f"{float(total):.6g}": total}
        return total, weight


ODD = {
    "mean": r"returns \S+ for a micro-batch, but \S+ in total for its two halves; .*return a sum",
    "fails": r"raises an error \(KeyError: 'no such.*column'; test_custom_loss.py, line \d+\)",
    "shapes": r"raises an error \(RuntimeError: The size of tensor.*; test_custom_loss.py, line \d+\)",
    "helper": r"raises an error \(ValueError: Expected input batch_size.*; test_custom_loss.py, line \d+\)",
    "undone": r"backward pass raises an error \(RuntimeError: .*inplace.*; test_custom_loss.py, line \d+\)",
    "detached": "the sum has no gradient",
    "in place": r"changes batch\['labels'\] in place; change a copy",
    "of rows": "the weights that the loss returns are ",
    "negative": r"weight\(\) returns -1; return a finite number of at least 0",
}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *((f"Odd(kind={kind!r})", rf"Odd.*: .*{told}") for kind, told in ODD.items()),
        (
            "Odd(kind='names')",
            r"logs .* for one micro-batch and .* for another; return the same names",
        ),
        ("focl", r"has no focl; did you mean Focal"),
    ],
)
def test_custom_loss_with_errors_is_rejected(name: str, told: str, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told) as caught:
        config = configured(tmp_path, corpus, **PADDED, train__loss=f"{HERE}:{name}")
        with opened(config) as trial:
            result = trial.step()
            trial.read_metrics(result)
    assert str(caught.value).startswith("train.loss") and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "micro"), [("no_shard", 1), ("xla", 2)])
def test_custom_loss_that_is_mean_is_detected_without_halves(
    name: str, micro: int, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    """A micro-batch of one row has no halves, and on XLA their comparison would compile another graph."""
    given = {**PADDED, **ENGINES[name].settings, "train__micro_batch_size": micro}
    config = configured(tmp_path, corpus, **given, train__loss=f"{HERE}:Odd(kind='mean')")
    with pytest.raises(AssertionError, match=r": returns \S+ for a micro-batch, .* return a sum over rows"):
        engines.run(name, 2, seen, config)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"data__packing": True},
            r"data\.columns: \w+ has one number.*data\.packing: true joins several records",
        ),
        ({"train__loss": None}, r"data\.columns: \w+ is a column of numbers, which only a custom loss"),
        ({"train__z_loss": 0.1}, r"train\.z_loss: 0\.1 changes the cross-entropy"),
        ({"data__columns": "labels"}, "labels is reserved for model inputs; rename the column"),
        ({"data__columns": "part_positions"}, "part_positions is reserved for model inputs"),
        (
            {"data__columns": [], "data__eval": {"source": "a.jsonl", "columns": ["labels"]}},
            r"data\.eval\.columns: labels is reserved for model inputs; rename the column",
        ),
        ({"data__columns": "txet"}, r"data\.columns: .* no field 'txet' .*did you mean 'text'"),
        ({"data__columns": "text"}, r"data\.columns: .*: 'text' is of type str, not a number"),
    ],
)
def test_custom_loss_rejects_incompatible_settings(
    more: dict[str, Any], told: str, corpus: Path, tmp_path: Path
) -> None:
    settings = {**PADDED, "data__columns": "share", "train__loss": f"{HERE}:by_column", **more}
    with pytest.raises(UserError, match=told), opened(configured(tmp_path, corpus, **settings)):
        pass


def test_mixture_rejects_number_columns_without_custom_loss(corpus: Path, tmp_path: Path) -> None:
    sources = [{"name": "web", "source": str(corpus), "weight": 1, "columns": ["share"]}]
    message = r"data\.sources\.web\.columns: share is a column of numbers, which only a custom loss"
    with pytest.raises(UserError, match=message):
        configured(tmp_path, corpus, **PADDED, data__source=None, data__sources=sources)


class PairedScores:
    """Loss of pairs that only reads the scores that a custom head adds to the model output."""

    whole = True
    sequences = 2
    needs = ()

    def __call__(self, outputs: Outputs, batch: Any) -> tuple[Tensor, int]:
        assert outputs.model is not None
        scores = outputs.model["scores"].unflatten(0, batch["labels"].shape[:2])
        return -functional.logsigmoid(scores[:, 0] - scores[:, 1]).sum(), len(batch["labels"])


def test_custom_loss_may_only_read_model_output() -> None:
    """The entries of the model output have one row per sequence, and the logits have no gradient."""
    scores = torch.randn(8, requires_grad=True)
    batch = {"labels": torch.zeros(4, 2, 3, dtype=torch.long)}
    loss = TrainingLoss("train.loss: scores", PairedScores())
    total = loss(Outputs(logits=torch.randn(4, 2, 3, 5), model={"scores": scores}), batch)[0]
    pairs = scores.detach().view(4, 2)
    assert float(total) == pytest.approx(float(-functional.logsigmoid(pairs[:, 0] - pairs[:, 1]).sum()))


def test_embedding_noise_depends_on_step_seed(corpus: Path, tmp_path: Path) -> None:
    """The noise is drawn from the seed of the step, independent of earlier random numbers."""

    def loss(alpha: float, seed: int = 0) -> float:
        given = {"train__micro_batch_size": 6, "train__neftune_noise_alpha": alpha}
        with opened(configured(tmp_path, corpus, **given, strategy="no_shard")) as trial:
            torch.manual_seed(seed)
            return float(trial.step().loss)

    assert loss(5.0) == loss(5.0, seed=1)
    assert abs(loss(5.0) - loss(0.0)) > 1e-3


@pytest.mark.parametrize(("packing", "seq_len"), [(False, 64), ("documents", 128)])
def test_embedding_noise_matches_transformers_per_document(
    packing: Any, seq_len: int, corpus: Path, tmp_path: Path
) -> None:
    """For any padding or packing, the noise equals the noise of transformers for only the document."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.neftune import activate_neftune

    model_config = {**TINY_MODEL, "max_position_embeddings": 128}
    config = configured(
        tmp_path, corpus, data__packing=packing, data__seq_len=seq_len, model__config=model_config
    )
    with opened(config) as trial:
        batch = {name: value[:1] for name, value in next(trial.batches).items()}
        model = AutoModelForCausalLM.from_config(trial.run.model_config)
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "document_lengths")}
    count = int((batch["labels"][0] != IGNORED_LABEL).sum())
    if packing:
        count = int(batch["document_lengths"][0, 0])
    whole = torch.cat([batch["input_ids"][:, :count], batch["labels"][:, count - 1 : count]], dim=1)
    seen: list[Tensor] = []

    def noise(model: Any, **given: Tensor) -> Tensor:
        embeddings = model.get_input_embeddings()
        watch = embeddings.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
        torch.manual_seed(0)
        model.train()(**given)
        watch.remove()
        with torch.no_grad():
            found: Tensor = seen[-1][:, :count] - embeddings.weight[given["input_ids"]][:, :count]
            return found

    theirs = copy.deepcopy(model)
    activate_neftune(theirs, 5.0)
    install_embedding_noise(model, 5.0, extra_tokens=1)
    torch.testing.assert_close(noise(model, **inputs), noise(theirs, input_ids=whole))
