"""Evaluation of a model, and metrics that are computed from sums over the evaluation set.

A metric adds up sums over micro-batches, and computes its values from the totals at the end. The sums stay on
the device, so an evaluation reads from the device only once. The values do not depend on the number of ranks,
the size of a micro-batch, or the padding.
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
"""Sums over the evaluation set by name, on the host: float64, with the shapes of a micro-batch's sums."""
LABELS, LOSS, WEIGHTS = "labels", "loss", "weights"
"""Names of totals. Every metric gets the number of valid labels and the summed loss. ``weights`` is the
divisor of the loss, which may differ from the number of labels if ``train.loss`` is set.
"""


@runtime_checkable
class Metric(Protocol):
    """Interface of a custom metric, such as ``my_package.my_module:MyMetric`` in ``train.metrics``.

    A metric may also have these attributes:

    - ``needs``: ``"predictions"``, ``"logits"`` (the default), or None. Predictions are the most likely class
      of each position, and need no more memory than the loss. With logits, a language model keeps all logits
      of a micro-batch in memory.
    - ``higher_is_better``: Whether higher values are better. ``checkpoint.best_mode: auto`` reads it.
    - ``names``: Names of the values.
    """

    def sums(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sums of a micro-batch.

        This method runs on the device, and must not copy values to the host. Rows that only fill up a
        micro-batch, and positions without a target, have the label -100 (NaN if labels are floats) and must
        not count.

        Args:
            outputs: Outputs of the model that ``needs`` names.
            batch: Micro-batch on the device.

        Returns:
            Sums by name, integers or floats. Names and shapes must be equal for all micro-batches.
        """

    def values(self, totals: Totals) -> Mapping[str, float]:
        """Compute the values by name.

        Args:
            totals: Totals of the sums, and of ``labels`` and ``loss``. See :data:`Totals`.
        """


@dataclass(frozen=True)
class RatioMetric:
    """Metric that is defined by a function, and whose values are quotients of two sums.

    Attributes:
        function: Function that returns a sum and its divisor for each name, computed from a micro-batch.
    """

    function: Callable[[Outputs, Batch], Mapping[str, tuple[Tensor, Tensor]]]

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Call the function and return the sums and their divisors.

        Args:
            outputs: Outputs of the model.
            batch: Micro-batch on the device.

        Returns:
            ``sum of NAME`` and ``count of NAME`` for each name.

        Raises:
            TypeError: If the function does not return a mapping from names to pairs.
        """
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
        """Return the quotient for each name."""
        names = [key.removeprefix("sum of ") for key in totals if key.startswith("sum of ")]
        return {name: float(totals[f"sum of {name}"] / totals[f"count of {name}"]) for name in names}


class MetricSet:
    """All metrics of a run as one measure that an engine calls on each micro-batch.

    Args:
        metrics: Metrics by name.
        texts: Metrics of generated text. None if there are none.
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
        """Compute the sums of all metrics for a micro-batch.

        Args:
            outputs: Outputs of the model that ``needs`` names.
            batch: Micro-batch on the device.

        Returns:
            Sums with the keys ``metric/name``.
        """
        return {
            f"{name}/{key}": value
            for name, metric in self._metrics.items()
            for key, value in metric.sums(outputs, batch).items()
        }

    def compute_metric_values(self, totals: Totals) -> dict[str, Any]:
        """Compute the values of all metrics from the totals.

        Args:
            totals: Totals by name, on the host.

        Returns:
            Values by name, with the mean loss first.

        Raises:
            UserError: If two metrics have a value with the same name.
        """
        common = {LABELS: totals[LABELS], LOSS: totals[LOSS]}
        totals = {WEIGHTS: totals[LABELS], **totals}
        weight = float(totals[WEIGHTS]) or 1.0
        results: dict[str, Any] = {"loss": float(totals[LOSS]) / weight}
        for name, total in totals.items():  # values that the loss of train.loss logs
            if name.startswith(LOSS_SUM_PREFIX):
                results[name.removeprefix(LOSS_SUM_PREFIX)] = float(total) / weight
        for name, metric in self._metrics.items():
            metric_totals = {
                key.partition("/")[2]: total for key, total in totals.items() if key.startswith(f"{name}/")
            }
            values = metric.values(metric_totals | common)
            if duplicate := next((value for value in values if value in results), None):
                raise UserError(
                    f"train.metrics: {name}: another metric also has a value {duplicate!r}; rename one of "
                    "the two"
                )
            results |= values
        if self.texts is not None:
            results |= {name: float(totals[name] / totals["texts"]) for name in self.texts.names}
        return results

    def get_better_direction(self, value_name: str) -> Literal["min", "max"] | None:
        """Return the better direction of a value.

        Args:
            value_name: Name of a value.

        Returns:
            ``min`` or ``max``. None if the metric does not define it.
        """
        higher = {"loss": False} | dict.fromkeys(() if self.texts is None else self.texts.names, True)
        for name, metric in self._metrics.items():
            if (higher_is_better := getattr(metric, "higher_is_better", None)) is not None:
                higher |= dict.fromkeys((name, *getattr(metric, "names", ())), bool(higher_is_better))
        is_higher_better = higher.get(value_name, higher.get(value_name.partition(".")[0]))
        return None if is_higher_better is None else "max" if is_higher_better else "min"

    @property
    def value_names(self) -> list[str] | None:
        """Names of all values. None if a custom metric does not define its names."""
        names_by_metric = [getattr(metric, "names", None) for metric in self._metrics.values()]
        generated = () if self.texts is None else self.texts.names
        if None in names_by_metric:
            return None
        return ["loss", *(name for names in names_by_metric for name in names or ()), *generated]


LOSS_ONLY = MetricSet()
"""Measure without metrics: it computes only the loss."""


def load_user_metric(path: str) -> Metric:
    """Load a custom metric from an import path, ``package.module:name``.

    Args:
        path: Import path of a class with the methods of :class:`Metric`, or of a function for
            :class:`RatioMetric`.

    Returns:
        The metric. Its exceptions are reported as errors of ``train.metrics``.

    Raises:
        UserError: If the path does not lead to a metric, or if the value of the attribute ``needs`` is not
            supported.
    """
    key = f"train.metrics: {path}"
    target: Any = plugins.load_plugin("train.metrics", path)
    if not isinstance(target, Metric) and not callable(target):
        raise UserError(
            f"{key}: is neither a function nor a class with the methods sums and values; use one of the two"
        )
    metric = _UserMetric(key, target if isinstance(target, Metric) else RatioMetric(target))
    for name in ("needs", "higher_is_better", "names"):
        if hasattr(target, name):
            setattr(metric, name, getattr(target, name))
    needs: Any = getattr(metric, "needs", None)
    if needs not in (None, "logits", "predictions"):
        raise UserError(
            f"{key}: the attribute needs is {needs!r}; set the attribute to 'logits' or 'predictions'"
        )
    return metric


class _UserMetric:
    """Wrapper of a custom metric that reports its exceptions as errors of the setting."""

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
            json.dumps(values)  # raises if the log cannot store the values
            return values


def compute_exp_or_inf(exponent: float) -> float:
    """Return the exponential, or infinity if it overflows."""
    return math.exp(exponent) if exponent < 700 else math.inf


def divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide elementwise. The quotient is 0 if the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1e-300), 0.0)


def evaluate(
    backend: Backend, engine: Engine, batches: Iterable[Batch], metric_set: MetricSet = LOSS_ONLY
) -> dict[str, Any]:
    """Evaluate a model on the micro-batches of all ranks.

    All ranks have to call this function with the same number of micro-batches, and get the same values.

    Args:
        backend: Backend of the run.
        engine: Engine with the model.
        batches: Micro-batches of this rank, on the host.
        metric_set: Metrics to compute.

    Returns:
        Values of all metrics by name. ``loss`` is the mean over all valid labels, or over the weights of a
        custom loss.
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
