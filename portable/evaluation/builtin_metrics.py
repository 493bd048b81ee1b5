"""The metrics that ``train.metrics`` knows by name, for each task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.batch import IGNORED_LABEL
from portable.data.samples.classes import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from portable.errors import UserError
from portable.evaluation.best_tracker import MAX_LOGGED_CLASSES
from portable.evaluation.metrics import (
    LABELS,
    LOSS,
    MetricSet,
    compute_exp_or_inf,
    divide_or_zero,
    load_user_metric,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from portable.batch import Batch
    from portable.evaluation.metrics import Metric, Totals
    from portable.model.training_loss import Outputs


@dataclass(frozen=True)
class MetricSettings:
    """What the metrics of a run depend on.

    Attributes:
        task: ``model.task``, with the problem type of a classifier.
        classes: names of the classes, by id.
        tokenizer: to generate texts.
    """

    task: str
    classes: tuple[str, ...] = ()
    tokenizer: Any = None
    user_loss: bool = False
    """Whether ``train.loss`` replaces the cross-entropy."""


class Perplexity:
    """The exponential of the mean loss."""

    needs = None
    higher_is_better = False
    names = ("perplexity",)

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        return {}

    def values(self, totals: Totals) -> dict[str, float]:
        return {"perplexity": compute_exp_or_inf(float(totals[LOSS]) / max(float(totals[LABELS]), 1))}


class Accuracy:
    """The share of labels that are predicted: of tokens, or of texts for a classifier."""

    needs = "predictions"
    higher_is_better = True
    names = ("accuracy",)

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        labels = batch["labels"]
        assert outputs.predictions is not None
        return {"right": ((outputs.predictions == labels) & (labels != IGNORED_LABEL)).sum()}

    def values(self, totals: Totals) -> dict[str, float]:
        return {"accuracy": float(totals["right"]) / max(float(totals[LABELS]), 1)}


class _ConfusionCounts:
    needs = "predictions"

    def __init__(self, setting: MetricSettings) -> None:
        self.classes = setting.classes

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """How often each label (row) got each prediction (column), int64 ``[classes, classes]``."""
        count, labels, predictions = len(self.classes), batch["labels"], outputs.predictions
        assert predictions is not None
        valid = labels != IGNORED_LABEL
        cells = torch.where(valid, labels, 0) * count + predictions
        counts = torch.zeros(count * count, dtype=torch.int64, device=labels.device)
        counts = counts.scatter_add(0, cells.reshape(-1), valid.long().reshape(-1))
        return {"counts": counts.view(count, count)}


class Confusion(_ConfusionCounts):
    """The confusion matrix: a row for each class of the data, a column for each prediction.

    It is left out above 100 classes, where it would fill the log.
    """

    names = ()  # it is no number to compare

    def values(self, totals: Totals) -> dict[str, Any]:
        if len(self.classes) > MAX_LOGGED_CLASSES:
            return {}
        counts = [[int(cell) for cell in row] for row in totals["counts"].tolist()]
        return {"confusion": {"classes": list(self.classes), "counts": counts}}


class F1(_ConfusionCounts):
    """F1 of each class, and ``f1``, their mean over the classes that occur in the data or the predictions."""

    higher_is_better = True

    @property
    def names(self) -> tuple[str, ...]:
        return ("f1", *(f"f1.{name}" for name in self.classes))

    def values(self, totals: Totals) -> dict[str, float]:
        counts = totals["counts"]
        return _compute_f1(counts.diagonal(), counts.sum(dim=0), counts.sum(dim=1), self.classes, "f1")


def _compute_f1(
    right: Tensor, predicted: Tensor, present: Tensor, classes: Sequence[str], macro_name: str
) -> dict[str, float]:
    f1_by_class = divide_or_zero(2 * right, predicted + present)
    is_present = (predicted + present) > 0
    mean = float(f1_by_class[is_present].mean()) if is_present.any() else 0.0
    return {
        macro_name: mean,
        **{f"f1.{name}": float(value) for name, value in zip(classes, f1_by_class, strict=True)},
    }


class SubsetAccuracy:
    """Several classes per text: the share of texts whose classes are all predicted, and no other."""

    needs = "logits"
    higher_is_better = True
    names = ("accuracy",)

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        predictions, targets, valid = _compare_multilabel(outputs, batch)
        rows = valid.any(dim=-1)
        return {"right": (((predictions == targets) | ~valid).all(dim=-1) & rows).sum(), "rows": rows.sum()}

    def values(self, totals: Totals) -> dict[str, float]:
        return {"accuracy": float(totals["right"]) / max(float(totals["rows"]), 1)}


class MultilabelF1:
    """Several classes per text: F1 over all decisions (micro), the mean over classes (macro), and each."""

    needs = "logits"
    higher_is_better = True

    def __init__(self, setting: MetricSettings) -> None:
        self.classes = setting.classes

    @property
    def names(self) -> tuple[str, ...]:
        return ("f1_micro", "f1_macro", *(f"f1.{name}" for name in self.classes))

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        predictions, targets, valid = _compare_multilabel(outputs, batch)
        return {
            "right": (predictions & targets & valid).sum(dim=0),
            "predicted": (predictions & valid).sum(dim=0),
            "present": (targets & valid).sum(dim=0),
        }

    def values(self, totals: Totals) -> dict[str, float]:
        right, predicted, present = (totals[name] for name in ("right", "predicted", "present"))
        micro = float(divide_or_zero(2 * right.sum(), predicted.sum() + present.sum()))
        values = _compute_f1(right, predicted, present, self.classes, "f1_macro")
        # As in scikit-learn, a class that never occurs counts as 0 here.
        values["f1_macro"] = float(divide_or_zero(2 * right, predicted + present).mean())
        return {"f1_micro": micro} | values


class _MultilabelDecisions(NamedTuple):
    """Decisions about each class of each text, bool ``[texts, classes]``.

    Attributes:
        predictions: Whether the classifier predicts the class.
        targets: Whether the text has the class.
        valid: Whether there is a label.
    """

    predictions: Tensor
    targets: Tensor
    valid: Tensor


def _compare_multilabel(outputs: Outputs, batch: Batch) -> _MultilabelDecisions:
    """What a classifier of several classes chooses, what is right, and where there is a label."""
    assert outputs.logits is not None
    labels = batch["labels"]
    return _MultilabelDecisions(outputs.logits.float() > 0, labels > 0.5, ~labels.isnan())


class _RegressionErrorSums:
    """Sums for regressions, each float64 ``[numbers]``."""

    needs = "logits"

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        assert outputs.logits is not None
        labels = batch["labels"].double()
        labels = labels if labels.dim() > 1 else labels[:, None]
        valid = ~labels.isnan()
        labels = torch.where(valid, labels, 0.0)
        errors = torch.where(valid, outputs.logits.double().reshape(labels.shape) - labels, 0.0)
        squares = labels.square()
        # The square of a float32 value in two parts, whose sums have no rounding errors.
        high = squares.float().double()
        high = torch.where(high.isfinite(), high, 0.0)
        return {
            "count": valid.sum(dim=0),
            "absolute": errors.abs().sum(dim=0),
            "squared": errors.square().sum(dim=0),
            "sum": labels.sum(dim=0),
            "high parts of squares": high.sum(dim=0),
            "low parts of squares": (squares - high).sum(dim=0),
        }


class MeanSquaredError(_RegressionErrorSums):
    """The mean squared error over all numbers."""

    higher_is_better = False
    names = ("mse",)

    def values(self, totals: Totals) -> dict[str, float]:
        return {"mse": float(divide_or_zero(totals["squared"].sum(), totals["count"].sum()))}


class MeanAbsoluteError(_RegressionErrorSums):
    """The mean absolute error over all numbers."""

    higher_is_better = False
    names = ("mae",)

    def values(self, totals: Totals) -> dict[str, float]:
        return {"mae": float(divide_or_zero(totals["absolute"].sum(), totals["count"].sum()))}


class R2(_RegressionErrorSums):
    """Coefficient of determination: the explained share of the labels' variance, averaged over the outputs.

    Degenerate cases have the values of scikit-learn: if the labels do not vary, 1.0 for exact predictions and
    0.0 for others; with fewer than two samples, NaN.
    """

    higher_is_better = True
    names = ("r2",)

    def values(self, totals: Totals) -> dict[str, float]:
        names = "squared", "count", "sum", "high parts of squares", "low parts of squares"
        columns = list(zip(*(totals[name].tolist() for name in names), strict=True))
        return {"r2": sum(_compute_r2(*column) for column in columns) / len(columns)}


def _compute_r2(squared: float, count: float, total: float, high: float, low: float) -> float:
    """Compute the coefficient of determination of one output.

    Args:
        squared: Sum of the squared errors.
        count: Number of labels.
        total: Sum of the labels.
        high: Sum of the high parts of the squared labels.
        low: Sum of the low parts of the squared labels.
    """
    if count < 2 or not all(map(math.isfinite, (squared, total, high, low))):
        return math.nan
    # Floats would lose the variance of labels that are large and vary little.
    variance = float(Fraction(high) + Fraction(low) - Fraction(total) ** 2 / int(count))
    if variance > 0:
        return 1 - squared / variance
    return 0.0 if squared > 0 else 1.0


_PERPLEXITY: Callable[[MetricSettings], Metric] = lambda _: Perplexity()  # noqa: E731
_LANGUAGE_MODEL_METRICS: dict[str, Callable[[MetricSettings], Metric]] = {
    "perplexity": _PERPLEXITY,
    "accuracy": lambda _: Accuracy(),
}
METRIC_BUILDERS: dict[str, dict[str, Callable[[MetricSettings], Metric]]] = {
    "causal-lm": _LANGUAGE_MODEL_METRICS,
    "masked-lm": _LANGUAGE_MODEL_METRICS,
    "seq2seq-lm": _LANGUAGE_MODEL_METRICS,
    SINGLE_LABEL: {"accuracy": lambda _: Accuracy(), "f1": F1, "confusion": Confusion},
    MULTI_LABEL: {"accuracy": lambda _: SubsetAccuracy(), "f1": MultilabelF1},
    REGRESSION: {
        "mse": lambda _: MeanSquaredError(),
        "mae": lambda _: MeanAbsoluteError(),
        "r2": lambda _: R2(),
    },
}
"""The metrics of each task by name; all of them are the default, which generates nothing."""


def build_metrics(names: Sequence[str] | None, settings: MetricSettings) -> MetricSet:
    """The metrics that ``train.metrics`` names.

    Raises:
        UserError: for a name that the task does not have, or a path without a metric.
    """
    builders = {
        name: make
        for name, make in METRIC_BUILDERS[settings.task].items()
        if not (settings.user_loss and make is _PERPLEXITY)
    }
    metrics, texts, text_metrics = {}, [], {}
    if settings.task == "seq2seq-lm":
        from portable.evaluation.generation import TEXT_METRICS, TextMetrics

        text_metrics = TEXT_METRICS
    # Predictions need all logits, which a loss of the user's may do without.
    default = () if settings.user_loss else builders
    for name in default if names is None else names:
        if name == "loss":  # every evaluation has it
            continue
        if ":" in name:
            metrics[name] = load_user_metric(name)
        elif name in builders:
            metrics[name] = builders[name](settings)
        elif name in text_metrics:
            texts.append(name)
        else:
            raise UserError(
                f"train.metrics: {name!r} is not a metric of {settings.task}; use one of "
                f"{', '.join((*builders, *text_metrics))}, or package.module:name for a custom metric"
            )
    return MetricSet(metrics, TextMetrics(texts, settings.tokenizer) if texts else None)
