"""Built-in metrics of each task. ``train.metrics`` selects them by name."""

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
    """Settings on which the metrics of a run depend.

    Attributes:
        task: Key of :data:`METRIC_BUILDERS`. For sequence classification, this is the problem type
            of the classifier, such as ``regression``. For other tasks, it is the value of
            ``model.task``.
        classes: Names of the classes, in the order of their ids.
        tokenizer: Tokenizer that decodes generated tokens.
        user_loss: Whether ``train.loss`` is set. The loss that it selects, such as ``dpo`` or a
            custom loss, replaces the default loss of the task.
    """

    task: str
    classes: tuple[str, ...] = ()
    tokenizer: Any = None
    user_loss: bool = False


class Perplexity:
    """Perplexity metric: the exponential of the mean loss per token."""

    needs = None
    higher_is_better = False
    names = ("perplexity",)

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return an empty dict, because the perplexity is computed from the total loss."""
        return {}

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the perplexity, or infinity if it overflows."""
        return {"perplexity": compute_exp_or_inf(float(totals[LOSS]) / max(float(totals[LABELS]), 1))}


class Accuracy:
    """Accuracy metric: the fraction of labels that are predicted correctly.

    There is one label per token in a language model, and one label per text in a classifier.
    """

    needs = "predictions"
    higher_is_better = True
    names = ("accuracy",)

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the number of correct predictions in a micro-batch, under the key ``right``."""
        labels = batch["labels"]
        assert outputs.predictions is not None
        return {"right": ((outputs.predictions == labels) & (labels != IGNORED_LABEL)).sum()}

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the fraction of correct predictions."""
        return {"accuracy": float(totals["right"]) / max(float(totals[LABELS]), 1)}


class _ConfusionCounts:
    """Base class of the single-label classification metrics that are computed from a confusion matrix."""

    needs = "predictions"

    def __init__(self, setting: MetricSettings) -> None:
        self.classes = setting.classes

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Compute the confusion matrix of a micro-batch.

        Returns:
            ``counts``, int64 ``[classes, classes]``. The element ``[i, j]`` is the number of texts with
            label ``i`` for which the model predicts class ``j``.
        """
        count, labels, predictions = len(self.classes), batch["labels"], outputs.predictions
        assert predictions is not None
        valid = labels != IGNORED_LABEL
        cells = torch.where(valid, labels, 0) * count + predictions
        counts = torch.zeros(count * count, dtype=torch.int64, device=labels.device)
        counts = counts.scatter_add(0, cells.reshape(-1), valid.long().reshape(-1))
        return {"counts": counts.view(count, count)}


class Confusion(_ConfusionCounts):
    """Confusion-matrix metric, with a row for each label and a column for each predicted class.

    The matrix is omitted if there are more than 100 classes, because it would fill the log.
    """

    names = ()  # the matrix is not a number, so it cannot be compared

    def values(self, totals: Totals) -> dict[str, Any]:
        """Return the matrix under the key ``confusion``, together with the names of the classes.

        Returns an empty dictionary if there are more than :data:`MAX_LOGGED_CLASSES` classes.
        """
        if len(self.classes) > MAX_LOGGED_CLASSES:
            return {}
        counts = [[int(cell) for cell in row] for row in totals["counts"].tolist()]
        return {"confusion": {"classes": list(self.classes), "counts": counts}}


class F1(_ConfusionCounts):
    """F1 metric for single-label classification: the F1 of each class, and their mean.

    The mean, ``f1``, includes only the classes that occur in the labels or the predictions.
    """

    higher_is_better = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values: ``f1``, and ``f1.<class>`` for each class."""
        return ("f1", *(f"f1.{name}" for name in self.classes))

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the F1 of each class and their mean, keyed by ``names``."""
        counts = totals["counts"]
        return _compute_f1(counts.diagonal(), counts.sum(dim=0), counts.sum(dim=1), self.classes, "f1")


def _compute_f1(
    right: Tensor, predicted: Tensor, present: Tensor, classes: Sequence[str], macro_name: str
) -> dict[str, float]:
    """Compute the F1 score of each class, and the mean of the scores.

    A class that occurs neither in the labels nor in the predictions has the score 0, and the mean
    ignores this class. If no class occurs, the mean is 0.

    Args:
        right: Number of correct predictions of each class, ``[classes]``.
        predicted: Number of predictions of each class, ``[classes]``.
        present: Number of labels of each class, ``[classes]``.
        classes: Names of the classes.
        macro_name: Key of the mean in the result.

    Returns:
        The mean under ``macro_name``, and the F1 score of each class under ``f1.CLASS``.
    """
    f1_by_class = divide_or_zero(2 * right, predicted + present)
    is_present = (predicted + present) > 0
    mean = float(f1_by_class[is_present].mean()) if is_present.any() else 0.0
    return {
        macro_name: mean,
        **{f"f1.{name}": float(value) for name, value in zip(classes, f1_by_class, strict=True)},
    }


class SubsetAccuracy:
    """Accuracy metric for multi-label classification: the fraction of texts with all classes correct."""

    needs = "logits"
    higher_is_better = True
    names = ("accuracy",)

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Count the texts with labels, and the texts that are predicted correctly.

        Returns:
            ``rows``, the number of texts with at least one label that is not missing (NaN), and
            ``right``, the number of these texts for which the prediction is correct for every label
            that is not missing.
        """
        predictions, targets, valid = _compare_multilabel(outputs, batch)
        rows = valid.any(dim=-1)
        return {"right": (((predictions == targets) | ~valid).all(dim=-1) & rows).sum(), "rows": rows.sum()}

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the fraction of texts for which all predictions are correct."""
        return {"accuracy": float(totals["right"]) / max(float(totals["rows"]), 1)}


class MultilabelF1:
    """F1 metric for multi-label classification: micro F1, macro F1, and the F1 of each class.

    Each pair of a text and a class is a binary prediction. Micro F1 is computed over all pairs.
    Macro F1 is the mean over the F1 of each class. In this mean, a class that occurs neither in the
    labels nor in the predictions counts as 0, as in scikit-learn.
    """

    needs = "logits"
    higher_is_better = True

    def __init__(self, setting: MetricSettings) -> None:
        self.classes = setting.classes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values: ``f1_micro``, ``f1_macro``, and one name per class."""
        return ("f1_micro", "f1_macro", *(f"f1.{name}" for name in self.classes))

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Count the correct predictions, all predictions, and the labels of each class.

        Returns:
            ``right``, ``predicted`` and ``present``, each int64 ``[classes]``.
        """
        predictions, targets, valid = _compare_multilabel(outputs, batch)
        return {
            "right": (predictions & targets & valid).sum(dim=0),
            "predicted": (predictions & valid).sum(dim=0),
            "present": (targets & valid).sum(dim=0),
        }

    def values(self, totals: Totals) -> dict[str, float]:
        """Return micro F1, macro F1 and the F1 of each class, keyed by the names in :attr:`names`."""
        right, predicted, present = (totals[name] for name in ("right", "predicted", "present"))
        micro = float(divide_or_zero(2 * right.sum(), predicted.sum() + present.sum()))
        values = _compute_f1(right, predicted, present, self.classes, "f1_macro")
        # For the mean, the F1 of a class that never occurs is 0, as in scikit-learn.
        values["f1_macro"] = float(divide_or_zero(2 * right, predicted + present).mean())
        return {"f1_micro": micro} | values


class _MultilabelDecisions(NamedTuple):
    """Predictions and labels of a micro-batch. Each tensor is bool ``[texts, classes]``.

    Attributes:
        predictions: Whether the classifier predicts the class for the text.
        targets: Whether the text is labeled with the class.
        valid: Whether the text has a label for the class. If not, ignore ``predictions`` and
            ``targets``.
    """

    predictions: Tensor
    targets: Tensor
    valid: Tensor


def _compare_multilabel(outputs: Outputs, batch: Batch) -> _MultilabelDecisions:
    """Convert the logits and labels of a multi-label classifier to booleans.

    A class is predicted if its logit is positive, and is a target if its label is greater than 0.5.

    Args:
        outputs: Outputs with logits ``[texts, classes]``.
        batch: Batch whose labels are floats ``[texts, classes]``, with NaN for a missing label.

    Returns:
        The predictions, the targets, and a mask of the labels that are not missing.
    """
    assert outputs.logits is not None
    labels = batch["labels"]
    return _MultilabelDecisions(outputs.logits.float() > 0, labels > 0.5, ~labels.isnan())


class _RegressionErrorSums:
    """Base class of regression metrics that are computed from sums of errors and labels.

    Each sum is a tensor of shape ``[outputs]``, with one element for each regression output of the
    model.
    """

    needs = "logits"

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Sum the errors and the labels of a micro-batch, and count the labels.

        Errors are summed as absolute values and as squares. Labels are summed as values and as
        squares. Missing labels (NaN) are skipped.

        Each squared label is split into a high and a low part, which are summed separately in
        float64. A single sum would lose too much precision to compute the variance of the labels
        from it.
        """
        assert outputs.logits is not None
        labels = batch["labels"].double()
        labels = labels if labels.dim() > 1 else labels[:, None]
        valid = ~labels.isnan()
        labels = torch.where(valid, labels, 0.0)
        errors = torch.where(valid, outputs.logits.double().reshape(labels.shape) - labels, 0.0)
        squares = labels.square()
        # Split the square of a float32 value into two parts whose sums have no rounding errors.
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
    """Mean-squared-error metric. The mean is over all texts and over all numbers predicted per text."""

    higher_is_better = False
    names = ("mse",)

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the mean squared error."""
        return {"mse": float(divide_or_zero(totals["squared"].sum(), totals["count"].sum()))}


class MeanAbsoluteError(_RegressionErrorSums):
    """Mean-absolute-error metric. The mean is over all texts and over all numbers predicted per text."""

    higher_is_better = False
    names = ("mae",)

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the mean absolute error."""
        return {"mae": float(divide_or_zero(totals["absolute"].sum(), totals["count"].sum()))}


class R2(_RegressionErrorSums):
    """Coefficient of determination (R2): the fraction of the label variance that the model explains.

    If a model predicts several numbers per text, their coefficients are averaged. Degenerate cases
    follow scikit-learn. If all labels are equal, the coefficient is 1.0 for exact predictions and 0.0
    otherwise. If there are fewer than two labels, it is NaN.
    """

    higher_is_better = True
    names = ("r2",)

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the coefficient of determination (R2), averaged over the model's regression outputs."""
        names = "squared", "count", "sum", "high parts of squares", "low parts of squares"
        columns = list(zip(*(totals[name].tolist() for name in names), strict=True))
        return {"r2": sum(_compute_r2(*column) for column in columns) / len(columns)}


def _compute_r2(squared: float, count: float, total: float, high: float, low: float) -> float:
    """Compute the coefficient of determination (R2) for one regression output of the model.

    Args:
        squared: Sum of the squared errors.
        count: Number of labels.
        total: Sum of the labels.
        high: Sum of the high parts of the squared labels.
        low: Sum of the low parts of the squared labels. ``high + low`` is the sum of the squared
            labels.

    Returns:
        The coefficient. NaN if there are fewer than two labels, or if a sum is not finite. If all
        labels are equal, the result is 1 for exact predictions and 0 otherwise.
    """
    if count < 2 or not all(map(math.isfinite, (squared, total, high, low))):
        return math.nan
    # Fractions are exact. Floats would lose the variance of labels that are large but vary little.
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
"""Functions that build metrics, keyed by task and then by the name of the metric.

By default, a run computes all metrics of its task in this table. Metrics of generated text are not part of
the table, because generation takes much longer than a forward pass.
"""


def build_metrics(names: Sequence[str] | None, settings: MetricSettings) -> MetricSet:
    """Build the metrics that ``train.metrics`` selects.

    Args:
        names: Names and import paths of metrics. The name ``loss`` is ignored, because every
            evaluation computes the loss. If ``names`` is None, all metrics of the task in
            :data:`METRIC_BUILDERS` are built, but no metrics of generated text. If ``names`` is
            None and ``train.loss`` is set, no metrics are built.
        settings: Settings that the metrics depend on.

    Returns:
        The metrics.

    Raises:
        UserError: If a name is not a metric of the task, if the name is ``perplexity`` and
            ``train.loss`` is set, or if an import path does not refer to a metric.
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
    # With a custom loss, no metrics are built by default, because predictions require all logits, which the
    # loss may not need.
    default = () if settings.user_loss else builders
    for name in default if names is None else names:
        if name == "loss":  # every evaluation computes it
            continue
        if ":" in name:
            metrics[name] = load_user_metric(name)
        elif name in builders:
            metrics[name] = builders[name](settings)
        elif name in text_metrics:
            texts.append(name)
        else:
            raise UserError(
                f"train.metrics: {name!r} is not a metric for {settings.task}"
                f"{' with train.loss set' if settings.user_loss else ''}; use one of "
                f"{', '.join((*builders, *text_metrics))}, or package.module:name for a custom metric"
            )
    return MetricSet(metrics, TextMetrics(texts, settings.tokenizer) if texts else None)
