"""Losses that replace the task loss: custom losses (``train.loss``), and variants of cross-entropy.

This module also validates the results of custom losses.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from portable import plugins
from portable.batch import IGNORED_LABEL
from portable.config.sources import list_training_source_names
from portable.errors import UserError, is_memory_error, to_one_line
from portable.model.loss_by_source import LossBySource
from portable.private import torch_internals

if TYPE_CHECKING:
    from torch import Tensor

    from portable.batch import Batch
    from portable.config import RunConfig

_MAX_CHECKED_LOGITS = 2**26
Statistic = Literal["log_probs", "log_z", "mean_logits"]
STATISTICS: tuple[Statistic, ...] = ("log_probs", "log_z", "mean_logits")
LOGITS = "logits"


@dataclass(frozen=True)
class Outputs:
    """Outputs of a model for a micro-batch, on the device.

    Attributes:
        predictions: Most likely class at each position, with the shape of the labels. Passed only
            to metrics, not to a custom loss. None for float labels, or if no metric needs outputs.
        logits: Logits as returned by the model. They are available if a custom loss or a metric
            needs them, or if the task loss is not computed in chunks. Otherwise None.
        log_probs: Log-probability of each label, fp32 with the shape of the labels, and 0 for
            positions without a label. None if the loss does not need them, or if the task loss
            uses the logits instead.
        log_z: Log-sum-exp of the logits of each position, fp32. None if not needed by the loss.
        mean_logits: Mean of the logits of each position, fp32. None if not needed by the loss.
        model: Complete output of the model, including the outputs of additional heads. If a sample
            consists of several sequences, the first dimension of these tensors is
            ``batch * sequences``. None for metrics.
    """

    predictions: Tensor | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    log_z: Tensor | None = None
    mean_logits: Tensor | None = None
    model: Any = None


LossValue = tuple["Tensor", "Tensor | float"] | tuple["Tensor", "Tensor | float", Mapping[str, "Tensor"]]


class Loss(Protocol):
    """Interface of a custom loss (``train.loss``): a function, or an object with ``__call__``.

    The loss is called as ``loss(outputs, batch)``. It returns the summed loss of the micro-batch,
    the weight by which the sum is divided, and optionally further values to log. The weight is, for
    example, the number of labels.

    ``train.loss`` contains the import path of the function or class, as in
    ``my_package.my_module:focal`` or, with arguments, ``my_package.my_module:Focal(gamma=2.0)``. A
    loss may also have these attributes and methods:

    - ``needs``: ``"logits"`` (the default), or a tuple with any of ``log_probs``, ``log_z`` and
      ``mean_logits``. These statistics are computed one chunk of tokens at a time if
      ``memory.loss_chunk_tokens`` applies. With logits, a language model keeps all logits of a
      micro-batch in memory.
    - ``weight(batch)``: The weight that the loss returns for a micro-batch, computed in advance. It
      is a number that is computed on the host from CPU tensors. The default is the number of
      labels. In each step, the sum of these weights must equal the sum of the returned weights.
    - ``before(forward, batch)``: Called before each forward pass, without gradients or dropout. It
      returns tensors, keyed by name, which are added to the batch that is passed to the loss. To
      compute them, it can call ``forward``, which returns :class:`Outputs`. ``forward()`` runs the
      trained model on the batch. ``forward(adapter=False)`` runs the trained model without its
      adapter. ``forward(other)`` runs another model, whose parameters are cast to the precision of
      the trained model.
    - ``once(forward, batch)``: Like ``before``, but called only once for every sample, with the
      weights at the start of the run. The returned tensors ``[batch, ...]`` are cached with the
      data, and are part of every batch.
    - ``sequences``: Minimum number of sequences per sample, such as 2 for pairs. The default is 1.
    - ``whole``: Whether the last token of a sample is also an input. By default, it is only a
      label.
    - ``dropout``: Whether to train with dropout. The setting ``train.dropout`` takes precedence.
    - ``reference``: Folder or Hub name of a model whose weights ``before`` uses, or ``"adapter"``.
      A run cannot resume with another reference.
    """

    def __call__(self, outputs: Outputs, batch: Batch) -> LossValue:
        """Compute the loss of a micro-batch, summed over its rows.

        This method runs on the device, under autocast if the precision is 16 bits, and must not
        copy values to the host. Gradients flow only through ``outputs``.

        Args:
            outputs: Model outputs that are listed in ``needs``.
            batch: Columns of the batch, including the columns of ``data.columns``. ``labels`` are
                aligned with the logits. A label of -100 (NaN for float labels) must be ignored.

        Returns:
            The loss, the weight by which it is divided, and optionally a mapping from names to
            further values to log. The loss, the weight and the further values are scalar tensors
            and sums over the rows. If a batch is split into two parts, the values of the parts must
            add up to the values of the batch.
        """


class LossSums(NamedTuple):
    """Loss of a micro-batch, summed over its labels or rows.

    Attributes:
        loss_sum: The summed loss, an fp32 scalar.
        weight: Denominator of the mean loss, an fp32 scalar. None if the denominator is the number
            of valid labels.
        metrics: Sums to log, keyed by name. They have the same denominator.
    """

    loss_sum: Tensor
    weight: Tensor | None
    metrics: dict[str, Tensor]


class TrainingLoss:
    """Wrapper that validates the results of a custom loss or :class:`CrossEntropy`.

    The loss replaces the task loss. On the first training micro-batch, this class checks the
    returned values and the backward pass. It also checks that the loss is a sum over the rows of
    the batch, and not a mean. In evaluations before this micro-batch, only the returned values are
    checked.

    The attributes ``before``, ``once``, ``whole`` and ``dropout`` are copied from the loss. If the
    loss does not have them, ``before`` and ``once`` are None, ``whole`` is False, and ``dropout``
    is True. ``needs`` is a set. ``reference`` is None if the loss has no reference, or if its
    reference is ``"adapter"``.

    Args:
        key: Name of the loss, used in error messages.
        loss: The function or object that computes the loss.
        in_evaluation: Whether ``eval_loss`` is the mean of this loss. Otherwise, it is the
            cross-entropy.
        sources: Names of the data sources of a mixture. Each step logs the share of the labels that
            belongs to each source. If the loss needs ``log_probs``, the mean cross-entropy of each
            source is also logged.

    Raises:
        UserError: If the loss cannot be called, or if its attribute ``needs`` is invalid.
    """

    def __init__(
        self, key: str, loss: Any, *, in_evaluation: bool = True, sources: Sequence[str] = ()
    ) -> None:
        self.key = key
        self.in_evaluation = in_evaluation
        self._loss = loss
        needs: Any = getattr(loss, "needs", LOGITS)
        names: Any = needs if isinstance(needs, tuple | list | set | frozenset) else (needs,)
        self.needs: frozenset[str] = frozenset(names)
        if not callable(loss):
            raise UserError(
                f"{key}: has the type {type(loss).__name__}, which is not callable; use a function with the "
                "arguments outputs and batch, or a class whose __call__ method has these arguments"
            )
        if self.needs - {LOGITS, *STATISTICS}:
            names = ", ".join(STATISTICS)
            raise UserError(
                f"{key}: the needs attribute has the unsupported value {needs!r}; set needs to 'logits', or "
                f"to one or more of {names}"
            )
        self._weight: Callable[[Batch], float] | None = getattr(loss, "weight", None)
        self.before: Callable[..., Mapping[str, Tensor]] | None = getattr(loss, "before", None)
        self.once: Callable[..., Mapping[str, Tensor]] | None = getattr(loss, "once", None)
        reference = getattr(loss, "reference", None)
        self.reference = reference if isinstance(reference, str) and reference != "adapter" else None
        self.whole: bool = getattr(loss, "whole", False)
        self.dropout: bool = getattr(loss, "dropout", True)
        self._is_checked = False
        self._by_source = LossBySource(sources, with_losses="log_probs" in self.needs)

    def compute_weight(self, batch: Batch) -> float | None:
        """Compute the weight of a micro-batch on the host.

        Args:
            batch: Micro-batch on the host.

        Returns:
            The weight. None if the loss has no ``weight`` method, in which case the caller uses the
            number of labels.

        Raises:
            UserError: If the loss's ``weight`` method fails, or if it does not return a finite
                number of at least 0.
        """
        if self._weight is None:
            return None
        with plugins.convert_user_errors(self.key):
            weight = float(self._weight(batch))
        if not (math.isfinite(weight) and weight >= 0):
            raise UserError(f"{self.key}: weight() returns {weight:g}; return a finite number of at least 0")
        return weight

    def __call__(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Compute the loss of a micro-batch.

        In the first training micro-batch, the loss is also checked. In evaluations before this
        micro-batch, only the result of the loss is checked.

        Args:
            outputs: Model outputs that the loss needs.
            batch: Columns of the micro-batch, on the device.

        Returns:
            The summed loss, the weight by which it is divided, and the sums to log, as fp32
            scalars. The sums to log include the sums for each data source. Only the summed loss
            has a gradient.

        Raises:
            UserError: If the loss fails, or if its result is invalid.
        """
        with plugins.convert_user_errors(self.key):
            value: Any = (self._loss if self._is_checked else self._call_and_check)(outputs, batch)
            total, weight, *metrics = value
            sums = {
                **(metrics[0] if metrics else {}),
                **self._by_source.compute_sums(outputs.log_probs, batch),
            }
            device = batch["labels"].device
            scalars = {name: _to_scalar(value, device) for name, value in sums.items()}
            return LossSums(total.float(), _to_scalar(weight, device), scalars)

    def _call_and_check(self, outputs: Outputs, batch: Batch) -> Any:
        """Call the loss, check its result, and return the result unchanged.

        If gradients are enabled, this method also checks that the backward pass works and that the
        loss is a sum over rows. These checks sync the host with the device, so they run only once.

        Raises:
            UserError: If a check fails, or if the loss changes the batch in place.
        """
        from portable.model.sharded_parameter_guard import ShardReadGuard

        versions_before = [
            (name, tensor, torch_internals.get_tensor_version(tensor)) for name, tensor in batch.items()
        ]
        # Views would be part of a graph that XLA compiles, and a meta tensor has no values to check.
        is_backward_checked = torch.is_grad_enabled() and batch["labels"].device.type not in ("meta", "xla")
        if is_backward_checked:
            outputs = _map_tensors(outputs, lambda tensor: tensor.view_as(tensor))
        with ShardReadGuard(self.key, in_loss=True):
            value = self._loss(outputs, batch)
        changed = next(
            (
                name
                for name, tensor, version in versions_before
                if torch_internals.get_tensor_version(tensor) != version
            ),
            None,
        )
        problem = _find_result_problem(value, batch["labels"].device)
        if changed is not None:
            problem = f"changes batch[{changed!r}] in place; change a copy instead"
        if problem is not None:
            raise UserError(f"{self.key}: {problem}")
        if torch.is_grad_enabled():
            if is_backward_checked:
                self._check_backward(outputs, batch, value[0])
            self._check_sum_over_rows(outputs, batch, value[0])
            self._is_checked = True
        return value

    def compute_logged_values(self, means: dict[str, float]) -> dict[str, float]:
        """Compute the values to log from the sums of a step.

        The sums of each data source become a mean loss and a share of the labels. See
        :meth:`LossBySource.compute_logged_values`. Other values do not change.

        Args:
            means: Sums of a step, keyed by name. Each sum is already divided by the weight of the
                global batch. For a value that does not belong to a data source, this quotient is
                the mean to log.
        """
        return self._by_source.compute_logged_values(means)

    def explain_unequal_weights(self, weight_ratio: float) -> str:
        """Build the error message for a loss whose returned weights differ from its declared weights.

        Args:
            weight_ratio: Sum of the weights that the loss returned, divided by the sum of its declared
                weights. The declared weights are the results of its ``weight`` method or, without this
                method, the numbers of labels.
        """
        declared = (
            "the number of labels that are not -100"
            if self._weight is None
            else "the weights that its method weight() returns"
        )
        remedy = (
            "define a method weight(batch) that computes the weight only from the batch"
            if self._weight is None
            else "correct the method weight()"
        )
        return (
            f"{self.key}: the weights that the loss returns are {weight_ratio:.6g} times {declared}; {remedy}"
        )

    def _check_backward(self, outputs: Outputs, batch: Batch, total: Tensor) -> None:
        """Raise UserError if the backward pass of the loss fails, for example after an in-place change.

        The gradients are computed with respect to ``outputs``, not parameters. Out-of-memory errors are
        raised unchanged.

        Args:
            outputs: Views of the outputs of the model, with which the loss was called. They must not be
                the tensors that the model returned, because DeepSpeed and FSDP2 add hooks to these
                tensors, which begin the backward pass of the engine.
            batch: Columns of the micro-batch.
            total: The summed loss.
        """
        model_output = outputs.model.values() if isinstance(outputs.model, dict) else ()
        values = [*vars(outputs).values(), *model_output]
        sources = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        if not sources:
            return
        try:
            torch.autograd.grad(total, sources, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if is_memory_error(error):
                raise
            reason = f"{type(error).__name__}: {to_one_line(error)}{self._find_failing_line(outputs, batch)}"
            raise UserError(
                f"{self.key}: the backward pass raises an error ({reason}); correct the loss"
            ) from error

    def _find_failing_line(self, outputs: Outputs, batch: Batch) -> str:
        """Run the loss in anomaly mode to find the operation whose backward pass fails.

        Returns:
            Text such as ``"; my_loss.py, line 12"`` to append to a message. Empty if the operation is not
            in the loss's source file.
        """
        copied = {
            name: value.detach().requires_grad_(value.requires_grad)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in vars(outputs).items()
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with suppress(Exception), torch.autograd.set_detect_anomaly(True):
                self._loss(type(outputs)(**copied), batch)[0].backward()
        file = getattr(inspect.getmodule(inspect.unwrap(self._loss)), "__file__", None) or getattr(
            inspect.getmodule(type(self._loss)), "__file__", None
        )
        lines = re.findall(r'File "([^"]+)", line (\d+)', "".join(str(each.message) for each in caught))
        line = next((number for path, number in reversed(lines) if path == file), None)
        return "" if line is None else f"; {Path(str(file)).name}, line {line}"

    def _check_sum_over_rows(self, outputs: Outputs, batch: Batch, total: Tensor) -> None:
        """Raise UserError if the loss of a micro-batch is not the sum of the losses of its two halves.

        A difference of up to 1 % is accepted. The check is skipped on meta devices. On XLA, and for
        a micro-batch with one row, :meth:`check_loss_is_sum_over_rows` checks this instead.
        """
        rows = batch["labels"].shape[0]
        if rows < 2 or total.device.type in ("meta", "xla"):
            return
        with torch.no_grad():
            halves = [
                self._loss(
                    _select_rows(outputs, half, batch["labels"].shape),
                    {name: tensor[half] for name, tensor in batch.items()},
                )[0]
                for half in (slice(0, rows // 2), slice(rows // 2, rows))
            ]
        self._check_totals_match(float(total.detach()), float(sum(halves)))

    def check_loss_is_sum_over_rows(self, batch: Batch, num_classes: int) -> None:
        """Check on the host, with random outputs, that the loss is a sum over rows.

        Such a loss doubles if every row of the batch is repeated. The usual check of this property
        uses the outputs of the model. This method replaces the usual check in two cases, and is
        called once, with the first micro-batch:

        * The model is on an XLA device. The usual check would compile another graph.
        * The micro-batch has only one row.

        The check is skipped if the loss has a ``before`` method, if labels are floats, if random
        logits would have more than 2**26 elements, or if the loss fails on random outputs.

        Args:
            batch: Micro-batch on the host.
            num_classes: Number of classes, or the vocabulary size of a language model.

        Raises:
            UserError: If the loss does not double when every row of the batch is repeated.
        """
        labels = batch["labels"]
        many = LOGITS in self.needs and labels.numel() * num_classes > _MAX_CHECKED_LOGITS
        if self.before is not None or labels.is_floating_point() or many:
            return
        draws = torch.Generator().manual_seed(0)
        valid = labels != IGNORED_LABEL
        statistics: dict[str, Tensor] = {
            name: -torch.rand(labels.shape, generator=draws) * valid for name in STATISTICS
        }
        if LOGITS in self.needs:
            statistics[LOGITS] = torch.randn((*labels.shape, num_classes), generator=draws)
        outputs = Outputs(**{name: value for name, value in statistics.items() if name in self.needs})
        try:
            with torch.no_grad():
                once, twice = (
                    float(self._loss(_repeat_outputs(outputs, times), _repeat_batch(batch, times))[0])
                    for times in (1, 2)
                )
        except Exception:  # the loss may need real outputs, with which the first step checks it
            return
        self._check_totals_match(twice, 2 * once)

    def _check_totals_match(self, total: float, sum_of_parts: float) -> None:
        """Raise UserError if a micro-batch's loss differs by over 1 % from the sum over its halves."""
        if abs(total - sum_of_parts) > 1e-2 * max(abs(total), abs(sum_of_parts), 1e-6):
            raise UserError(
                f"{self.key}: returns {total:.6g} for a micro-batch, but {sum_of_parts:.6g} in total for "
                "its two halves; return a sum over rows, not a mean"
            )


def _find_result_problem(value: Any, device: torch.device) -> str | None:
    """Describe the error in the result of a loss function.

    A valid result is a tuple of the summed loss, the weight and, optionally, a dictionary of sums
    to log. The weight and the sums to log are numbers or scalar tensors. The summed loss is a
    scalar tensor on ``device``. If gradients are enabled, the summed loss requires a gradient.

    Args:
        value: Result of the loss function.
        device: Device of the batch.

    Returns:
        The problem and its remedy, to append to the name of the setting in an error message.
        None if the result is valid.
    """
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        type_description = "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        return (
            f"returns {type_description}; return the sum and the weight, for example: return "
            "losses.sum(), counted.sum()"
        )
    total, weight, metrics = value if len(value) == 3 else (*value, {})
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        return (
            f"the third value is {metrics!r:.60}, not a dictionary of names and sums; return a dictionary "
            "such as "
            '{"correct": correct.sum()}'
        )
    for name, number in {"the sum": total, "the weight": weight, **metrics}.items():
        if (shape := tuple(getattr(number, "shape", ()))) != ():
            return (
                f"{name} has shape {list(shape)}, but must be one number per micro-batch; add up its "
                "elements with .sum()"
            )
        if not isinstance(number, torch.Tensor | float | int):
            return f"{name} has the type {type(number).__name__}; return a number or a scalar tensor"
    if not isinstance(total, torch.Tensor):
        return f"the sum has the type {type(total).__name__}; return a tensor that is computed from outputs"
    if total.device != device:
        return f"the sum is on {total.device}, but the batch is on {device}; return the sum on {device}"
    if torch.is_grad_enabled() and not total.requires_grad:
        return (
            "the sum has no gradient; compute the sum from outputs, without detach(), no_grad() or integers"
        )
    return None


def _repeat_outputs(outputs: Outputs, times: int) -> Outputs:
    """Repeat the outputs ``times`` times along the batch dimension, like ``torch.Tensor.repeat``.

    For example, two repetitions of the rows ``a, b`` give ``a, b, a, b``.
    """
    tensors = {name: value for name, value in vars(outputs).items() if value is not None}
    return Outputs(**{name: torch.cat([value] * times) for name, value in tensors.items()})


def _repeat_batch(batch: Batch, times: int) -> Batch:
    """Repeat the rows of a batch ``times`` times."""
    return {name: torch.cat([value] * times) for name, value in batch.items()}


def _to_scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Convert a number or scalar tensor to an fp32 scalar on ``device`` without a gradient."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).float()
    return torch.full((), value, device=device).float()


def _select_rows(outputs: Outputs, row_slice: slice, label_shape: Sequence[int]) -> Outputs:
    """Select rows of a micro-batch's outputs, to compute the loss of these rows only.

    Args:
        outputs: Outputs of a micro-batch. They are not modified. Tensors whose first dimension is
            not the number of rows are not sliced. If a row has several sequences, the first
            dimension of the model output is ``rows * sequences``, and all sequences of the
            selected rows are selected.
        row_slice: Rows to select.
        label_shape: Shape of the labels: ``[rows, ...]``, or ``[rows, sequences, tokens]``.
    """
    num_rows, num_sequences = label_shape[0], label_shape[1] if len(label_shape) == 3 else 1

    def select_tensor_rows(tensor: Tensor) -> Tensor:
        if num_sequences > 1 and tensor.shape[:1] == (num_rows * num_sequences,):
            sequences: Tensor = tensor.unflatten(0, (num_rows, num_sequences))[row_slice]
            return sequences.flatten(0, 1)
        return tensor[row_slice] if tensor.shape[:1] == (num_rows,) else tensor

    return _map_tensors(outputs, select_tensor_rows)


def _map_tensors(outputs: Outputs, function: Callable[[Tensor], Tensor]) -> Outputs:
    """Return a copy of outputs in which each tensor is replaced with the result of a function.

    Values of other types, such as tuples of tensors in the complete output of the model, are kept.
    """

    def map_value(value: Any) -> Any:
        return function(value) if isinstance(value, torch.Tensor) else value

    model_output = outputs.model
    if isinstance(model_output, dict):  # a ModelOutput, to which a custom model may have added entries
        model_output = copy.copy(model_output)
        for name, value in outputs.model.items():
            model_output[name] = map_value(value)
    tensors = {name: map_value(value) for name, value in vars(outputs).items() if name != "model"}
    return Outputs(**tensors, model=model_output)


class CrossEntropy:
    """Cross-entropy with optional label smoothing (``train.label_smoothing``) and z-loss (``train.z_loss``).

    Args:
        label_smoothing: Fraction of each target that is distributed evenly over all classes.
        z_loss: Weight of the squared log-sum-exp of the logits, which prevents the logits from
            drifting.
    """

    def __init__(self, label_smoothing: float, z_loss: float) -> None:
        self._smoothing = label_smoothing
        self._z_loss = z_loss
        self.needs: tuple[Statistic, ...] = STATISTICS if label_smoothing else ("log_probs", "log_z")
        if not (label_smoothing or z_loss):
            self.needs = ("log_probs",)

    def __call__(self, outputs: Outputs, batch: Batch) -> LossValue:
        """Compute the loss, summed over the labels of a micro-batch.

        Returns:
            The summed loss and the number of labels. With label smoothing or a z-loss, there is a
            third value: a dictionary that contains the plain summed cross-entropy as
            ``cross_entropy``, to be logged.
        """
        valid = batch["labels"] != IGNORED_LABEL
        assert outputs.log_probs is not None
        plain = losses = -outputs.log_probs
        if self._smoothing:
            assert outputs.log_z is not None and outputs.mean_logits is not None
            even = outputs.log_z - outputs.mean_logits
            losses = (1 - self._smoothing) * plain + self._smoothing * even
        if self._z_loss:
            assert outputs.log_z is not None
            losses = losses + self._z_loss * outputs.log_z.square()
        total = torch.where(valid, losses, 0.0).sum()
        if losses is plain:
            return total, valid.sum()
        return total, valid.sum(), {"cross_entropy": torch.where(valid, plain.detach(), 0.0).sum()}


BUILT_IN_LOSSES = {name: f"portable.losses:{kind}" for name, kind in (
    ("dpo", "DPO"), ("ipo", "IPO"), ("simpo", "SimPO"), ("orpo", "ORPO")
)}  # fmt: skip
"""Import paths of the losses that ``train.loss`` selects by name."""


def build_training_loss(config: RunConfig) -> TrainingLoss | None:
    """Build the loss of a run, unless the run uses the plain task loss.

    The result is the custom loss ``train.loss``, or a cross-entropy with label smoothing, a
    z-loss or losses per source. A classifier has no losses per source.

    Args:
        config: The config of the run.

    Returns:
        The loss. None if the run uses the plain task loss.

    Raises:
        UserError: If ``train.loss`` does not refer to a loss, if the loss needs pairs and
            ``data.format`` does not provide them, or if it needs complete sequences and
            ``data.packing`` is set. If ``data.format`` is ``auto``, the last two conditions are
            not checked. If it is ``samples``, the need for pairs is not checked.
    """
    train, key, loss = config.train, "train.label_smoothing", None
    # Losses of sources are not available for classifiers, because their labels need not be classes.
    sources = (
        () if config.model.task == "sequence-classification" else list_training_source_names(config.data)
    )
    if train.loss is not None:
        key = f"train.loss: {train.loss}"
        loss = plugins.load_plugin("train.loss", train.loss, BUILT_IN_LOSSES, "the loss of the task")
    elif train.label_smoothing or train.z_loss or sources:
        loss = CrossEntropy(train.label_smoothing, train.z_loss)
    if loss is None:
        return None
    data_format = config.data.format
    if getattr(loss, "sequences", 1) > config.data.sequences_per_sample and data_format not in (
        "auto",
        "samples",
    ):
        raise UserError(
            f"{key}: needs preference pairs, but data.format is {data_format}; set data.format to "
            'preference, and write records like {"prompt": ..., "chosen": ..., "rejected": ...}, or map the '
            "fields with data.columns, such as {chosen: NAME, rejected: NAME}"
        )
    if getattr(loss, "whole", False) and config.data.packing and data_format != "auto":
        raise UserError(f"{key}: needs complete sequences; set data.packing to false")
    return TrainingLoss(key, loss, in_evaluation=train.loss is not None, sources=sources)
