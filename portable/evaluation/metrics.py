"""Evaluate a model, and define metrics as sums over the evaluation set.

A metric computes sums for each micro-batch, for example the number of correct predictions. The sums
of all micro-batches and ranks are added up, and the metric computes its values from these totals.
Therefore, the values do not depend on the number of ranks, the micro-batch size, or the padding.
The sums stay on the device until the end, so an evaluation reads from the device only once.
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
"""Sums over the complete evaluation set, keyed by name: float64 tensors on the host.

Each total has the same shape as the sum of a single micro-batch.
"""
LABELS, LOSS, WEIGHTS = "labels", "loss", "weights"
"""Names of totals that are always computed: number of valid labels, summed loss, and divisor of the loss.

If ``train.loss`` is set, the divisor may differ from the number of labels. Every metric receives the first
two totals.
"""


@runtime_checkable
class Metric(Protocol):
    """Interface of a custom metric, such as ``my_package.my_module:MyMetric`` in ``train.metrics``.

    A metric must have the methods :meth:`sums` and :meth:`values`. It may also have these
    attributes:

    - ``needs``: Output of the model that :meth:`sums` reads: ``"predictions"`` or ``"logits"`` (the
      default). None if it reads neither. Predictions are the most likely class at each position,
      and need no more memory than the loss. With ``"logits"``, all logits of a micro-batch are in
      memory at the same time.
    - ``higher_is_better``: Whether higher values are better. ``checkpoint.best_mode: auto`` reads
      it.
    - ``names``: Names of the values that :meth:`values` returns.
    """

    def sums(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Compute the sums over a micro-batch that :meth:`values` needs for the metric.

        The caller adds these sums over all micro-batches and ranks. All computations must run on
        the device, and must not copy values to the host. Positions with the label -100 (NaN for
        float labels) must be ignored. They are padding rows and positions without a target.

        Args:
            outputs: Outputs of the model, which contain the output selected by ``needs``.
            batch: Micro-batch on the device.

        Returns:
            Sums of integers or floats, keyed by name. The names and shapes must be the same for all
            micro-batches.
        """

    def values(self, totals: Totals) -> Mapping[str, float]:
        """Compute the values of the metric at the end of an evaluation.

        Args:
            totals: Sums over all micro-batches of all ranks, keyed by the names from :meth:`sums`. There
                are two more keys: ``labels``, the number of valid labels, and ``loss``, the summed loss.

        Returns:
            Values, keyed by their names in ``metrics.jsonl`` without the prefix ``eval_``.
        """


@dataclass(frozen=True)
class RatioMetric:
    """Metric that divides a sum by a count, both computed by a custom function.

    The function is called for each micro-batch. At the end of an evaluation, the total sum is
    divided by the total count. If the total count is 0, the result is NaN or infinite.

    Attributes:
        function: Function that takes the outputs of the model and a micro-batch, and returns pairs
            ``(sum, count)``, keyed by name. Each name becomes a value of the metric.
    """

    function: Callable[[Outputs, Batch], Mapping[str, tuple[Tensor, Tensor]]]

    def sums(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Call the custom function on a micro-batch, and return sums and counts as separate entries.

        Args:
            outputs: Outputs of the model.
            batch: Micro-batch on the device.

        Returns:
            Entries ``sum of NAME`` and ``count of NAME`` for each name that the function returns.

        Raises:
            TypeError: If the function does not return a mapping from names to pairs ``(sum,
                count)``.
        """
        pairs: Any = self.function(outputs, batch)
        is_valid = isinstance(pairs, Mapping) and all(
            isinstance(p, tuple) and len(p) == 2 for p in pairs.values()
        )
        if not is_valid:
            raise TypeError(
                f"returns {pairs!r:.60}; return a dict that maps each name to a tuple (sum, count)"
            )
        sums = {f"sum of {name}": pair[0] for name, pair in pairs.items()}
        return sums | {f"count of {name}": pair[1] for name, pair in pairs.items()}

    def values(self, totals: Totals) -> dict[str, float]:
        """Return the values of the metric, keyed by name: each total sum divided by its total count."""
        names = [key.removeprefix("sum of ") for key in totals if key.startswith("sum of ")]
        return {name: float(totals[f"sum of {name}"] / totals[f"count of {name}"]) for name in names}


class MetricSet:
    """Set of all metrics of a run. An engine calls it on each micro-batch of an evaluation.

    Implements :class:`portable.model.loss.MicroBatchMeasure`.

    Args:
        metrics: Metrics, keyed by name.
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
        """Compute the sums of all metrics for a micro-batch, except for metrics of generated text.

        Args:
            outputs: Outputs of the model. They must contain the logits or predictions, depending on
                the attribute ``needs``.
            batch: Micro-batch on the device.

        Returns:
            Sums, keyed by ``METRIC/NAME``, where ``NAME`` is the key that the metric uses for the
            sum.
        """
        return {
            f"{name}/{key}": value
            for name, metric in self._metrics.items()
            for key, value in metric.sums(outputs, batch).items()
        }

    def compute_metric_values(self, totals: Totals) -> dict[str, Any]:
        """Compute the values of all metrics from the totals.

        Args:
            totals: Totals on the host, keyed by name. They must contain ``labels``, ``loss`` and
                the keys that :meth:`__call__` returns. They may also contain the sums that a custom
                loss logs, and the sums for metrics of generated text. The optional total
                ``weights`` is the divisor of the mean loss. Its default is ``labels``.

        Returns:
            Values, keyed by their names in ``metrics.jsonl`` without the prefix ``eval_``. The mean
            loss is first.

        Raises:
            UserError: If two metrics have a value with the same name.
        """
        common = {LABELS: totals[LABELS], LOSS: totals[LOSS]}
        totals = {WEIGHTS: totals[LABELS], **totals}
        weight = float(totals[WEIGHTS]) or 1.0
        results: dict[str, Any] = {"loss": float(totals[LOSS]) / weight}
        for name, total in totals.items():  # values that a custom loss logs
            if name.startswith(LOSS_SUM_PREFIX):
                results[name.removeprefix(LOSS_SUM_PREFIX)] = float(total) / weight
        for name, metric in self._metrics.items():
            prefix = f"{name}/"
            metric_totals = {
                key.removeprefix(prefix): total for key, total in totals.items() if key.startswith(prefix)
            }
            values = metric.values(metric_totals | common)
            if duplicate := next((value for value in values if value in results), None):
                raise UserError(
                    f"train.metrics: {name}: another metric or the loss already reports a value named "
                    f"{duplicate!r}; rename one of the two values"
                )
            results |= values
        if self.texts is not None:
            results |= {name: float(totals[name] / totals["texts"]) for name in self.texts.names}
        return results

    def get_better_direction(self, value_name: str) -> Literal["min", "max"] | None:
        """Return whether a value of an evaluation should be minimized or maximized.

        If no metric lists the name of the value, the part of the name before the first dot
        determines the direction. For example, ``f1`` determines the direction of ``f1.CLASS``.

        Args:
            value_name: Name of the value, such as ``f1`` or ``f1.CLASS``.

        Returns:
            ``min`` if lower values are better, or ``max`` if higher values are better. None if no
            metric defines a direction for the name.
        """
        higher = {"loss": False} | dict.fromkeys(() if self.texts is None else self.texts.names, True)
        for name, metric in self._metrics.items():
            if (higher_is_better := getattr(metric, "higher_is_better", None)) is not None:
                higher |= dict.fromkeys((name, *getattr(metric, "names", ())), bool(higher_is_better))
        is_higher_better = higher.get(value_name, higher.get(value_name.partition(".")[0]))
        return None if is_higher_better is None else "max" if is_higher_better else "min"

    @property
    def value_names(self) -> list[str] | None:
        """Names of the values that can be compared: ``loss``, then the metric values.

        An evaluation may compute further values, which are not listed: a confusion matrix, and the
        values that a custom loss logs.

        None if a custom metric does not define ``names``, because its values are then not known in
        advance.
        """
        names_by_metric = [getattr(metric, "names", None) for metric in self._metrics.values()]
        generated = () if self.texts is None else self.texts.names
        if None in names_by_metric:
            return None
        return ["loss", *(name for names in names_by_metric for name in names or ()), *generated]


LOSS_ONLY = MetricSet()
"""Empty set of metrics, for an evaluation that computes only the loss."""


def load_user_metric(path: str) -> Metric:
    """Load a custom metric from an import path, ``package.module:name``.

    Args:
        path: Import path of a class or an instance with the methods of :class:`Metric`, or of a
            function. Arguments may follow, as in ``package.module:name(k=5)``. A class is
            instantiated. A function is wrapped in :class:`RatioMetric`, which describes its
            arguments and result. A function can also have the optional attributes of
            :class:`Metric`.

    Returns:
        Wrapper of the metric. If the custom code raises an exception, the wrapper raises a
        UserError about ``train.metrics``. Out-of-memory errors and RunErrors are raised unchanged.

    Raises:
        UserError: If the path does not refer to a metric, if the arguments are not accepted, or if
            the ``needs`` attribute has an unsupported value.
    """
    key = f"train.metrics: {path}"
    target: Any = plugins.load_plugin("train.metrics", path)
    if not isinstance(target, Metric) and not callable(target):
        raise UserError(
            f"{key}: is neither a function nor an object with the methods sums and values; use a function, "
            "or a class with these two methods"
        )
    metric = _UserMetric(key, target if isinstance(target, Metric) else RatioMetric(target))
    for name in ("needs", "higher_is_better", "names"):
        if hasattr(target, name):
            setattr(metric, name, getattr(target, name))
    needs: Any = getattr(metric, "needs", None)
    if needs not in (None, "logits", "predictions"):
        raise UserError(
            f"{key}: the needs attribute has the unsupported value {needs!r}; set needs to 'logits' or "
            "'predictions'"
        )
    return metric


class _UserMetric:
    """Wrapper that converts the exceptions of a custom metric to UserErrors.

    Out-of-memory errors and RunErrors are not converted. The wrapper also converts the metric's
    sums to tensors on the device of the batch. If a value of the metric is a scalar tensor, the
    value is converted to a number. If a value cannot be stored as JSON, the wrapper raises a
    UserError.

    Args:
        key: Setting and import path that error messages begin with.
        metric: Custom metric.
    """

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
            json.dumps(values)  # raises an error if the log cannot store the values
            return values


def compute_exp_or_inf(exponent: float) -> float:
    """Return e to the power of ``exponent``, or infinity if the result could overflow.

    The result is infinity if ``exponent`` is at least 700 or NaN.
    """
    return math.exp(exponent) if exponent < 700 else math.inf


def divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide elementwise. Elements whose denominator is 0 become 0.

    Denominators must not be negative.
    """
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1e-300), 0.0)


def evaluate(
    backend: Backend, engine: Engine, batches: Iterable[Batch], metric_set: MetricSet = LOSS_ONLY
) -> dict[str, Any]:
    """Evaluate a model on the micro-batches of all ranks.

    Must be called on all ranks with the same number of micro-batches. The result is the same on all
    ranks.

    Args:
        backend: Backend of the run.
        engine: Engine with the model.
        batches: Micro-batches of this rank, on the host.
        metric_set: Metrics to compute.

    Returns:
        Values of all metrics, keyed by name. ``loss`` is the summed loss divided by the number of valid
        labels, or by the sum of the weights of a custom loss.
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
