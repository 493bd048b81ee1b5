"""An evaluation and its metrics, from sums over the whole evaluation set.

A metric adds up numbers over micro-batches, and turns the totals into its values at the end. The sums stay
on the device, so an evaluation reads from it once. They do not depend on ranks, micro-batch or padding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from portable import plugins
from portable.errors import UserError
from portable.model.loss import LOSS_SUM_PREFIX, count_valid_labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from portable.backend import Backend, Engine
    from portable.batch import Batch
    from portable.evaluation.generation import TextMetrics
    from portable.model.training_loss import Outputs

Totals = Mapping[str, "Tensor"]
"""Sums over the evaluation set, on the host: float64 with the shape that the sums of a micro-batch have."""
LABELS, LOSS, WEIGHTS = "labels", "loss", "weights"
"""Totals that every metric gets: the number of valid labels, and the summed loss. What the loss is divided by
may be another number than that of the labels with ``train.loss``."""


@runtime_checkable
class Metric(Protocol):
    """A metric, such as ``my_package.my_module:MyMetric`` in ``train.metrics``.

    May also have ``needs``, ``"predictions"`` or ``"logits"`` (the default), and ``higher_is_better``.
    Predictions (the most likely class of each position) need no more memory than the loss does; logits make
    a language model keep all of a micro-batch's.
    """

    def sums(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """The numbers of a micro-batch to add up: integers or floats, always of the same names and shapes.

        Runs on the device, and must not read from it. Rows that only fill up a micro-batch, and positions
        without a target, have the label -100 (NaN if labels are floats) and must not count.
        """

    def values(self, totals: Totals) -> Mapping[str, float]:
        """The values by name. ``totals`` also has ``labels`` and ``loss``, see :data:`Totals`."""


@dataclass(frozen=True)
class RatioMetric:
    """A metric made from a function: the values are quotients of two sums.

    Attributes:
        function: returns for each name a sum and what to divide it by, for a micro-batch.
    """

    function: Callable[[Outputs, Batch], Mapping[str, tuple[Tensor, Tensor]]]

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        pairs: Any = self.function(outputs, batch)
        is_valid = isinstance(pairs, Mapping) and all(
            isinstance(p, tuple) and len(p) == 2 for p in pairs.values()
        )
        if not is_valid:
            raise TypeError(
                f"returns {pairs!r:.60}; return a mapping from names to pairs of a sum and its count"
            )
        sums = {f"sum of {name}": pair[0] for name, pair in pairs.items()}
        return sums | {f"count of {name}": pair[1] for name, pair in pairs.items()}

    def values(self, totals: Totals) -> dict[str, float]:
        names = [key.removeprefix("sum of ") for key in totals if key.startswith("sum of ")]
        return {name: float(totals[f"sum of {name}"] / totals[f"count of {name}"]) for name in names}


class MetricSet:
    """All metrics of a run, as what an engine calls on each micro-batch.

    Args:
        metrics: by name.
        texts: metrics of generated texts, if any.
    """

    pass_name = "evaluation"

    def __init__(self, metrics: Mapping[str, Metric] | None = None, texts: TextMetrics | None = None) -> None:
        self._metrics = dict(metrics or {})
        self.texts = texts
        needs = {getattr(metric, "needs", "logits") for metric in self._metrics.values()}
        self.needs: Literal["logits", "predictions"] | None = (
            "logits" if "logits" in needs else "predictions" if "predictions" in needs else None
        )

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """The sums of a micro-batch, by metric and name."""
        return {
            f"{name}/{key}": value
            for name, metric in self._metrics.items()
            for key, value in metric.sums(outputs, batch).items()
        }

    def compute_metric_values(self, totals: Totals) -> dict[str, Any]:
        """The values of all metrics, the mean loss first."""
        common = {LABELS: totals[LABELS], LOSS: totals[LOSS]}
        totals = {WEIGHTS: totals[LABELS], **totals}
        weight = float(totals[WEIGHTS]) or 1.0
        results: dict[str, Any] = {"loss": float(totals[LOSS]) / weight}
        for name, total in totals.items():  # what train.loss logs
            if name.startswith(LOSS_SUM_PREFIX):
                results[name.removeprefix(LOSS_SUM_PREFIX)] = float(total) / weight
        for name, metric in self._metrics.items():
            metric_totals = {
                key.partition("/")[2]: total for key, total in totals.items() if key.startswith(f"{name}/")
            }
            values = metric.values(metric_totals | common)
            if duplicate := next((value for value in values if value in results), None):
                raise UserError(
                    f"train.metrics: {name}: another metric has a value {duplicate!r}, too; rename one of "
                    "the two"
                )
            results |= values
        if self.texts is not None:
            results |= {name: float(totals[name] / totals["texts"]) for name in self.texts.names}
        return results

    def get_better_direction(self, value_name: str) -> Literal["min", "max"] | None:
        """Which way the value of a metric is better; None if the metric does not tell."""
        higher = {"loss": False} | dict.fromkeys(() if self.texts is None else self.texts.names, True)
        for name, metric in self._metrics.items():
            if (higher_is_better := getattr(metric, "higher_is_better", None)) is not None:
                higher |= dict.fromkeys((name, *getattr(metric, "names", ())), bool(higher_is_better))
        is_higher_better = higher.get(value_name, higher.get(value_name.partition(".")[0]))
        return None if is_higher_better is None else "max" if is_higher_better else "min"

    @property
    def value_names(self) -> list[str] | None:
        """The names of all values; None if a metric of the user's does not tell."""
        names_by_metric = [getattr(metric, "names", None) for metric in self._metrics.values()]
        generated = () if self.texts is None else self.texts.names
        if None in names_by_metric:
            return None
        return ["loss", *(name for names in names_by_metric for name in names or ()), *generated]


LOSS_ONLY = MetricSet()
"""The loss alone."""


def load_user_metric(path: str) -> Metric:
    """The metric of an import path, ``package.module:name``.

    Raises:
        UserError: if there is none.
    """
    key = f"train.metrics: {path}"
    target: Any = plugins.load_plugin("train.metrics", path)
    if not isinstance(target, Metric) and not callable(target):
        raise UserError(
            f"{key}: is neither a function nor a class with the methods sums and values; give one of the two"
        )
    metric = _UserMetric(key, target if isinstance(target, Metric) else RatioMetric(target))
    for name in ("needs", "higher_is_better", "names"):
        if hasattr(target, name):
            setattr(metric, name, getattr(target, name))
    needs: Any = getattr(metric, "needs", None)
    if needs not in (None, "logits", "predictions"):
        raise UserError(
            f"{key}: its attribute needs is {needs!r}; set the attribute to 'logits' or 'predictions'"
        )
    return metric


class _UserMetric:
    """A metric of the user's, whose errors are told as theirs."""

    def __init__(self, key: str, metric: Metric) -> None:
        self._key = key
        self._metric = metric

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        device = batch["labels"].device
        with plugins.convert_user_errors(self._key):
            sums = self._metric.sums(outputs, batch)
            return {name: torch.as_tensor(total, device=device) for name, total in sums.items()}

    def values(self, totals: Totals) -> dict[str, Any]:
        with plugins.convert_user_errors(self._key):
            items = self._metric.values(totals).items()
            values = {name: value.item() if hasattr(value, "item") else value for name, value in items}
            json.dumps(values)  # as the log has to
            return values


def compute_exp_or_inf(exponent: float) -> float:
    """``exp``, or infinity where it overflows."""
    return math.exp(exponent) if exponent < 700 else math.inf


def divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1e-300), 0.0)


def evaluate(
    backend: Backend, engine: Engine, batches: Iterable[Batch], metric_set: MetricSet = LOSS_ONLY
) -> dict[str, Any]:
    """The values of all metrics over the batches of all ranks, ``loss`` (mean over valid labels) among them.

    All ranks call it, with equally many batches, and get the same values.
    """
    totals: dict[str, Tensor] = {}
    texts: dict[str, float] = {}
    num_labels, weight = 0, 0.0
    for batch in batches:
        num_labels += count_valid_labels(batch["labels"])
        weight += engine.objective.compute_weight(batch)
        device_batch = backend.copy_to_device(batch)
        totals = engine.evaluate_batch(device_batch, metric_set, totals)
        if metric_set.texts is not None:
            for name, value in metric_set.texts.compute_sums(backend, engine, batch, device_batch).items():
                texts[name] = texts.get(name, 0.0) + value
    totals |= {
        name: torch.tensor(value, dtype=torch.float64, device=backend.device) for name, value in texts.items()
    }
    on_device = {LABELS: backend.sum_host_numbers(num_labels), WEIGHTS: backend.sum_host_numbers(weight)} | {
        name: backend.sum_tensor_over_ranks(total) for name, total in totals.items()
    }
    flat = torch.tensor(backend.read_to_host(list(on_device.values())), dtype=torch.float64)
    parts = flat.split([total.numel() for total in on_device.values()])
    return metric_set.compute_metric_values(
        {
            name: flat_total.reshape(total.shape)
            for (name, total), flat_total in zip(on_device.items(), parts, strict=True)
        }
    )
