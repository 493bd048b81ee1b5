"""Compute the loss of a micro-batch, for every task and engine.

:func:`forward_loss` runs the model on a micro-batch and returns the summed loss: the
cross-entropy, the loss of a classifier's ``problem_type``, or the loss in ``train.loss``. A
step minimizes the mean over all labels of the global batch. Therefore,
:func:`scale_loss_by_global_weight` divides the sum by the number of valid labels in the
global batch, not in the micro-batch. If a custom loss defines weights, the divisor is the
sum of the weights in the global batch instead.

transformers defines auxiliary losses, such as the load-balancing loss of a mixture of
experts, only for a single forward pass (:mod:`portable.model.auxiliary_losses`). The
auxiliary loss of a global batch is the mean over its micro-batches, each weighted by its
share of the sequences. This mean equals transformers' loss if the global batch is one
micro-batch, and does not grow with the number of micro-batches or ranks.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict
from weakref import WeakSet

import torch
from torch.nn import functional

from portable import plugins
from portable.batch import BLANK_PREFIX, IGNORED_LABEL, PART_POSITIONS_COLUMN, TEXT_TOKENS_COLUMN
from portable.errors import UserError
from portable.model.auxiliary_losses import AuxiliaryLosses
from portable.model.document_attention import install_document_forward
from portable.model.document_states import install_document_states
from portable.model.dynamic_rope import install_text_length_forward
from portable.model.forward import ForwardWrapper
from portable.model.image_forward import has_image_forward, install_image_forward
from portable.model.parameters import has_peft_adapter
from portable.model.training_loss import LOGITS, STATISTICS, LossSums, Outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from portable.batch import Batch
    from portable.model.chunked_loss import ChunkedHead
    from portable.model.forward import Model
    from portable.model.training_loss import TrainingLoss

MetricNeeds = Literal["logits", "predictions"] | None


class MicroBatchMeasure(Protocol):
    """Interface of functions that compute the metric sums of a micro-batch in an evaluation.

    :class:`portable.evaluation.metrics.MetricSet` implements it.

    Attributes:
        needs: Model output that the function reads: ``"logits"``, ``"predictions"``, or None for
            neither.
    """

    needs: MetricNeeds
    pass_name: str
    """Name of the pass over the data, used in messages."""

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Compute the sums from which the metrics of an evaluation are calculated.

        Args:
            outputs: Outputs of the model. Only the output named by the attribute ``needs``,
                ``"logits"`` or ``"predictions"``, is certain to be present.
            batch: Micro-batch on the device.

        Returns:
            Scalar tensors, keyed by name. The caller adds them up over all micro-batches and ranks.
        """


class PrecomputePass(MicroBatchMeasure):
    """Marker for the precompute pass, which calls a custom loss's ``once`` method for all samples.

    Pass this marker to :meth:`TrainingObjective.measure_micro_batch` instead of evaluation metrics.
    The method then calls ``once`` for the micro-batch, and returns the columns that ``once``
    computes. A column is a tensor with one row per sample.
    """

    needs = None
    pass_name = "pass over all samples"

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Raise NotImplementedError, because this class is only a marker and is never called."""
        raise NotImplementedError


def count_valid_labels(labels: Tensor) -> int:
    """Count the valid labels, and return the count as a Python int.

    An integer label is valid unless it is -100. A float label is valid unless it is NaN. If the
    labels are on an accelerator, the host waits for the count.
    """
    valid = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED_LABEL
    return int(torch.count_nonzero(valid))


# -- results -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossOutput:
    """Result of :func:`forward_loss`.

    Attributes:
        loss_sum: Loss summed over the labels of the micro-batch, an fp32 scalar.
        num_sequences: Number of samples in the micro-batch. With SPMD on XLA, a micro-batch
            contains the samples of all devices.
        weight: Weight returned by a :class:`TrainingLoss`. None for the task loss, whose weight
            is the number of valid labels.
        auxiliary_loss: Sum of the model's auxiliary losses, an fp32 scalar. None if there are
            none, and in evaluations.
        metrics: Sums to log. They are divided by the same global weight as the loss.
        predictions: Most likely class of each position. None in training, for float labels, or if
            no metric needs the logits or the predictions.
        logits: Logits of all positions. None in training, or if they are computed in chunks. Also
            None if a custom loss reads only per-token statistics and no metric needs the model's
            outputs.
    """

    loss_sum: Tensor
    num_sequences: int
    weight: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    predictions: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class StepSums:
    """Loss and logged values of a micro-batch, as one tensor that can be summed over micro-batches and ranks.

    Attributes:
        values: The loss, followed by the logged values, fp32 ``[1 + metrics]`` on the device.
        names: Names of the logged values.
    """

    values: Tensor
    names: tuple[str, ...]


def sum_micro_batches(sums: Sequence[StepSums]) -> StepSums:
    """Add up the contributions of the micro-batches of a step.

    Args:
        sums: Contributions of the micro-batches, at least one.

    Returns:
        The sum of the values, with the same names.

    Raises:
        UserError: If a custom loss logs different names for different micro-batches.
    """
    names = sums[0].names
    for micro_batch_sums in sums:
        if micro_batch_sums.names != names:
            raise UserError(
                f"train.loss: logs {', '.join(names) or 'nothing'} for one micro-batch and "
                f"{', '.join(micro_batch_sums.names) or 'nothing'} for another; return the same names for "
                "every micro-batch"
            )
    return StepSums(torch.stack([micro_batch.values for micro_batch in sums]).sum(dim=0), names)


RETURNED_WEIGHT = "returned weight"
"""Name of the entry in :class:`StepSums` for the weight that a custom loss returns, divided by the
global weight."""


class StepContribution(NamedTuple):
    """Contribution of a micro-batch to the mean loss of the global batch.

    Attributes:
        loss: The contribution, an fp32 scalar with a gradient.
        sums: The contribution without a gradient, together with the logged values.
    """

    loss: Tensor
    sums: StepSums


def scale_loss_by_global_weight(
    output: LossOutput, global_weight: Tensor, global_batch_size: int
) -> StepContribution:
    """Divide a micro-batch's loss by the weight of the global batch, and add auxiliary losses.

    The auxiliary losses are multiplied by the micro-batch's share of the sequences in the global
    batch. The logged sums are divided by the weight of the global batch, like the loss. If a custom
    loss returned a weight, the weight is one of these sums (:data:`RETURNED_WEIGHT`).

    Args:
        output: Result of the micro-batch.
        global_weight: Weight of the global batch, a scalar on the device. It is the number of valid
            labels, or the sum of a custom loss's weights. A weight of 0 is replaced by 1.
        global_batch_size: Number of sequences in an optimizer step, over all ranks.

    Returns:
        Contribution of the micro-batch to the mean loss: a scalar for the backward pass, and
        detached values for logging. The contributions of all micro-batches and ranks add up to the
        loss and the logged values of the step.
    """
    divisor = torch.where(global_weight > 0, global_weight, 1).float()
    loss = output.loss_sum / divisor
    if output.auxiliary_loss is not None:
        loss = loss + output.auxiliary_loss * (output.num_sequences / global_batch_size)
    values = loss.detach()[None]
    metrics = dict(output.metrics)
    if output.weight is not None:
        # The values of a step add up to 1 if the loss returns the declared weights, also if these are 0.
        share_without_labels = output.num_sequences / global_batch_size
        metrics[RETURNED_WEIGHT] = output.weight + torch.where(global_weight > 0, 0, share_without_labels)
    if metrics:
        values = torch.cat([values, torch.stack(list(metrics.values())) / divisor])
    return StepContribution(loss, StepSums(values, tuple(metrics)))


# -- the forward method of a model in training -------------------------------------------------------------


@dataclass(frozen=True)
class LossRequest:
    """Argument of :class:`LossForward` that selects the outputs from which a loss is computed.

    Attributes:
        labels: Labels that align with the logits, int64 ``[sequences, tokens]`` for a language
            model.
        statistics: Names of the per-token statistics to compute with ``head``, such as
            ``log_probs``. See :meth:`ChunkedHead.forward_with_statistics`. If empty, the logits are
            computed instead.
        head: The model's chunked head. None if ``statistics`` is empty.
        with_auxiliary_losses: Whether to compute the model's auxiliary losses.
    """

    labels: Tensor
    statistics: tuple[str, ...] = ()
    head: ChunkedHead | None = None
    with_auxiliary_losses: bool = False


class RequestedOutput(TypedDict):
    """Result of a forward pass with a :class:`LossRequest`.

    At run time, it is a plain dict, because FSDP2, DDP and DeepSpeed must find its tensors.
    """

    model_output: Any
    """Output of the transformers model. Its logits are None if ``statistics`` is not empty."""
    statistics: dict[str, Tensor]
    """Requested statistics by name, fp32 ``[batch, tokens]``."""
    auxiliary_loss: Tensor | None
    """Sum of the auxiliary losses, an fp32 scalar. None if it was not requested or there are none."""


class LossForward(ForwardWrapper):
    """Forward method that returns a :class:`RequestedOutput` if it receives a :class:`LossRequest`.

    Training and evaluation always pass a request. Without a request, as in ``model.generate``, the
    original forward method of the transformers model runs. All other methods with which this
    project has wrapped the model's own forward method are then skipped. They would interpret
    ``position_ids`` as boundaries of packed documents, but generation passes positions that
    continue after the cached tokens. Replaced forward methods of submodules are not skipped.

    Args:
        model: A transformers model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._auxiliary_losses = AuxiliaryLosses(model)

    def __call__(self, *arguments: Any, request: LossRequest | None = None, **inputs: Any) -> Any:
        """Run the forward pass.

        Args:
            arguments: Positional arguments of the model. Ignored if there is a request.
            request: Parts of the loss to compute.
            inputs: Keyword arguments of the model.

        Returns:
            A :class:`RequestedOutput`. Without a request, the output of the transformers model.
        """
        if request is None:
            return self.original_forward(*arguments, **inputs)
        statistics: dict[str, Tensor] = {}

        def forward(**inputs: Any) -> Any:
            if request.head is None:
                return self.__wrapped__(**inputs)
            output, measured = request.head.forward_with_statistics(
                self.__wrapped__, inputs, request.labels, request.statistics
            )
            statistics.update(measured)
            return output

        auxiliary_loss = None
        if request.with_auxiliary_losses:
            output, auxiliary_loss = self._auxiliary_losses.run_forward(forward, inputs, request.labels)
        else:
            output = forward(**inputs)
        return RequestedOutput(model_output=output, statistics=statistics, auxiliary_loss=auxiliary_loss)


def install_loss_forward(model: Model) -> Model:
    """Make the model's forward method accept a :class:`LossRequest`.

    Call this function after all other functions that replace the forward method. The method that is
    installed last runs first, so it receives all columns of a batch. The loss needs some of these
    columns to compute the auxiliary losses.

    Args:
        model: A transformers model, not wrapped by another module such as DDP.

    Returns:
        The same model.
    """
    return LossForward.install(model)


# -- the loss ----------------------------------------------------------------------------------------------


class TaskLoss:
    """Summed loss of the task: cross-entropy, or a regression or multi-label loss for float labels.

    It is used if the run does not define a :class:`TrainingLoss`. It is also used in
    evaluations if the :class:`TrainingLoss` is used only in training.

    Args:
        problem_type: ``problem_type`` of the model config, or None. It selects the loss for
            float labels.
    """

    needs: frozenset[str] = frozenset({"log_probs"})
    before = None

    def __init__(self, problem_type: str | None = None) -> None:
        self._criterion = _CRITERION_BY_PROBLEM_TYPE.get(problem_type, _compute_cross_entropy)

    def __call__(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Compute the summed loss of a micro-batch.

        Args:
            outputs: Outputs of the model, with either ``log_probs`` or ``logits``.
            batch: Micro-batch on the device.

        Returns:
            The summed loss. ``weight`` is None, so the sum is divided by the number of valid
            labels. ``metrics`` is empty.
        """
        if outputs.log_probs is not None:
            return LossSums(-outputs.log_probs.sum(), None, {})
        labels = batch["labels"]
        # Ignore problem_type for integer labels, because the config may keep the value of a previous
        # classification task.
        criterion = self._criterion if labels.is_floating_point() else _compute_cross_entropy
        assert outputs.logits is not None
        return LossSums(criterion(outputs.logits, labels), None, {})


def forward_loss(
    model: nn.Module,
    batch: Batch,
    objective: TrainingObjective,
    *,
    with_token_metrics: bool = False,
    evaluation: MicroBatchMeasure | None = None,
) -> LossOutput:
    """Run a model on a micro-batch and compute its loss.

    If a custom loss has a method ``before``, this method first computes additional columns for the
    loss. ``batch`` is not modified.

    Args:
        model: The model of ``objective``, or a wrapper around it.
        batch: Micro-batch on the device.
        objective: The objective of the run.
        with_token_metrics: Whether to also compute the token accuracy and, if all logits are
            available, the entropy. Ignored in an evaluation. Also ignored on XLA, where training
            always computes the token accuracy and never the entropy.
        evaluation: Metrics to compute in an evaluation. None in training. An evaluation does not
            compute auxiliary losses or token metrics.

    Returns:
        The summed loss, its weight, the auxiliary losses, the sums to log, and the predictions. In
        an evaluation, also the logits (see :class:`LossOutput`).

    Raises:
        UserError: If a custom loss fails, or if its result is invalid.
    """
    training = evaluation is None
    metric_needs = None if evaluation is None else evaluation.needs
    loss = objective.get_loss(training=training)
    is_custom = loss is not objective.task_loss
    batch = objective.add_reference_columns(loss, batch)
    labels = batch["labels"]
    needs, statistics = loss.needs, list[str]()
    if metric_needs == "logits" or (metric_needs is not None and is_custom):
        needs |= {LOGITS}
    elif metric_needs is not None:
        statistics.append("predictions")
    wants_token_metrics = labels.dim() > 1 and not labels.is_floating_point()
    # Always compute token metrics on XLA, because steps with and without them would be two graphs.
    wants_token_metrics = (
        wants_token_metrics and training and (with_token_metrics or labels.device.type == "xla")
    )
    if wants_token_metrics:
        statistics.append("hits")
    outputs, auxiliary_loss, hits = run_model_for_loss(
        model,
        objective.select_model_inputs(batch),
        labels,
        needs,
        statistics,
        head=objective.head,
        with_auxiliary_losses=training,
        logits_suffice=not is_custom,
    )
    loss_sum, weight, metrics = loss(outputs, batch)
    logits = outputs.model.logits
    # Skip sequence classifiers, whose logits have two dimensions.
    if wants_token_metrics and (hits is not None or logits.dim() > 2):
        metrics = compute_token_metric_sums(logits, hits, labels) | metrics
    predictions = outputs.predictions
    if metric_needs is not None and predictions is None and not labels.is_floating_point():
        assert outputs.logits is not None
        predictions = outputs.logits.argmax(dim=-1)
    return LossOutput(
        loss_sum,
        labels.shape[0],
        weight,
        auxiliary_loss,
        metrics,
        predictions,
        None if training else outputs.logits,
    )


class LossInputs(NamedTuple):
    """Result of :func:`run_model_for_loss`.

    Attributes:
        outputs: Outputs that are passed to the loss.
        auxiliary_loss: Sum of the model's auxiliary losses, an fp32 scalar. None if there are none.
        hits: 1 for each token whose label has the highest logit, otherwise 0, fp32
            ``[sequences, tokens]``. None if the caller did not request ``hits``. Also None if all
            logits were computed, because the caller can then compute the hits from the logits.
    """

    outputs: Outputs
    auxiliary_loss: Tensor | None
    hits: Tensor | None


def run_model_for_loss(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    needs: Collection[str],
    statistics: Sequence[str] = (),
    *,
    head: ChunkedHead | None = None,
    with_auxiliary_losses: bool = False,
    logits_suffice: bool = False,
) -> LossInputs:
    """Run a model on a micro-batch and return the inputs of its loss.

    The model's chunked head computes statistics without keeping all logits. It is used if the
    micro-batch has more than one chunk of tokens and ``needs`` contains statistics but not
    ``logits``. The outputs then contain the statistics in ``needs`` and ``statistics``, except
    ``hits``, which are returned separately. They do not contain the logits. Without the chunked
    head, the outputs contain the logits if ``needs`` contains ``logits`` or ``logits_suffice`` is
    True. They contain the statistics in ``needs`` unless ``logits_suffice`` is True.

    If a sample consists of several sequences, such as a pair, ``input_ids`` have the shape
    ``[batch, sequences, tokens]``. The model receives them as ``[batch * sequences, tokens]``, and
    the returned outputs have the original dimensions.

    Args:
        model: A model that :func:`install_loss_forward` has changed, or a wrapper around it.
        inputs: Arguments of the model, on the device.
        labels: Labels of the micro-batch.
        needs: Outputs that the loss reads: ``logits``, or names of per-token statistics, such as
            ``log_probs``.
        statistics: Names of additional statistics, such as ``hits``. They are computed only by the
            chunked head. Without it, the caller can compute them from the logits.
        head: The model's chunked head. None if the model does not have one.
        with_auxiliary_losses: Whether to compute the model's auxiliary losses.
        logits_suffice: Whether the loss can use logits instead of the statistics in ``needs``.

    Returns:
        The outputs for the loss, the auxiliary loss, and the hits. The hits mark the tokens whose
        label has the highest logit. They are None unless the chunked head is used and
        ``statistics`` contains ``hits``.
    """
    shape = inputs["input_ids"].shape
    is_split = len(shape) == 3
    if is_split:
        inputs = {name: tensor.flatten(0, 1) for name, tensor in inputs.items()}
        labels = labels.flatten(0, 1) if labels.dim() > 1 else labels
    needed = tuple(name for name in STATISTICS if name in needs)
    chunked = head is not None and needed and LOGITS not in needs and head.needs_chunking(labels)
    request = (
        LossRequest(labels, (*needed, *statistics), head, with_auxiliary_losses)
        if chunked
        else LossRequest(labels, with_auxiliary_losses=with_auxiliary_losses)
    )
    result: RequestedOutput = model(**inputs, request=request)
    output, values = result["model_output"], dict(result["statistics"])
    hits = values.pop("hits", None)
    if not chunked:
        if logits_suffice or LOGITS in needs:
            values[LOGITS] = output.logits
        if not logits_suffice:
            values |= _compute_token_statistics(output.logits, labels, needed)
    elif not logits_suffice and "log_probs" in values:
        values["log_probs"] = values["log_probs"].contiguous()  # a custom loss adds them up in any order
    if "predictions" in values:
        values["predictions"] = values["predictions"].long()
    if is_split:
        values = {name: value.unflatten(0, shape[:2]) for name, value in values.items()}
    return LossInputs(Outputs(**values, model=output), result["auxiliary_loss"], hits)


class TrainingObjective:
    """Training objective of a run: its losses in training and evaluation, and their weights.

    The objective also calls the reference models and teachers that a custom loss uses.

    Args:
        model: A transformers model, before it is wrapped, for example by DDP. Its forward method is
            replaced. See :func:`install_loss_forward`.
        global_batch_size: Number of sequences in an optimizer step, over all ranks.
        head: Output head of the model that computes the logits in chunks, so that they need less
            memory. None if the model always computes its logits as one tensor.
        custom_loss: Loss that replaces the task loss. This is either the loss of ``train.loss`` or
            a built-in cross-entropy. The cross-entropy is used for label smoothing, for a z-loss,
            and to log a separate loss for each source of a data mixture. None to use the task loss.
        compute_dtype: Dtype to which reference models and teachers are cast if the engine does not
            use autocast. None for the dtype of the trained model's token embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        global_batch_size: int,
        head: ChunkedHead | None = None,
        custom_loss: TrainingLoss | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self._model: Any = install_loss_forward(model)
        self.global_batch_size = global_batch_size
        self.head = head
        self.task_loss = TaskLoss(getattr(self._model.config, "problem_type", None))
        self._custom_loss = custom_loss
        self._is_checked = False
        self._compute_dtype = compute_dtype
        self._prepared_models: WeakSet[nn.Module] = WeakSet()
        """Reference models and teachers that :meth:`_prepare_reference` has already changed."""
        # Only a custom loss adds columns that the model does not accept.
        self._input_names = None if custom_loss is None else _list_input_names(model)

    def compute_weight(self, batch: Batch) -> float:
        """Compute the weight of a micro-batch on the host.

        The weight is the number of valid labels, unless a custom loss defines a different weight.

        A custom loss must be a sum over rows. The first step normally checks this with the outputs
        of the model. This is not possible if the batch has a single row, or if the model is on an
        XLA device. In these cases, the first call of this method checks the loss with random
        outputs.

        Args:
            batch: Micro-batch on the host.

        Raises:
            UserError: If the check fails, or if the ``weight`` function of a custom loss fails.
        """
        loss, labels = self._custom_loss, batch["labels"]
        if loss is None:
            return count_valid_labels(labels)
        if not self._is_checked and (self._reads_cause_compilation or len(labels) < 2):
            config = self._model.config
            is_class = labels.dim() == 1
            loss.check_loss_is_sum_over_rows(
                batch, config.num_labels if is_class else config.get_text_config().vocab_size
            )
            self._is_checked = True
        weight = loss.compute_weight(batch)
        return count_valid_labels(labels) if weight is None else weight

    @property
    def _reads_cause_compilation(self) -> bool:
        """Whether the model is on an XLA device, where reading values would compile another graph."""
        return any(parameter.device.type == "xla" for parameter in self._model.parameters())

    def compute_logged_values(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Convert the sums of a step to the values to log in addition to the loss.

        Args:
            sums: Values of :class:`StepSums`, keyed by name, added up over the micro-batches and
                ranks of a step.

        Returns:
            Values to log, keyed by name, such as ``mean_token_accuracy``.

        Raises:
            UserError: If the sum of the weights that a custom loss returned differs by more than
                0.01 % from the sum of the weights that it declared. The declared weights are the
                results of its ``weight`` method or, without this method, the numbers of labels.
        """
        values = dict(sums)
        share = values.pop(RETURNED_WEIGHT, 1.0)
        if self._custom_loss is not None and not abs(share - 1) <= 1e-4:  # also if it is NaN
            raise UserError(self._custom_loss.explain_unequal_weights(share))
        token_metrics = {
            name: values.pop(name)
            for name in (*_METRIC_COUNT_NAMES, *_METRIC_COUNT_NAMES.values())
            if name in values
        }
        values = values if self._custom_loss is None else self._custom_loss.compute_logged_values(values)
        counts = {
            name: token_metrics.get(count_name) or 1.0
            for name, count_name in _METRIC_COUNT_NAMES.items()
            if name in token_metrics
        }
        return values | {name: token_metrics[name] / count for name, count in counts.items()}

    def measure_micro_batch(
        self, model: nn.Module, batch: Batch, measure: MicroBatchMeasure
    ) -> dict[str, Tensor]:
        """Compute the evaluation sums or the precomputed columns of a micro-batch.

        The caller must disable gradients and switch the model to eval mode.

        Args:
            model: The model of the objective, or a wrapper around it. Not used for a
                :class:`PrecomputePass`.
            batch: Micro-batch on the device.
            measure: Metrics of the evaluation, or a :class:`PrecomputePass`.

        Returns:
            The summed ``loss``, the sums of a custom loss and the sums of the metrics, keyed by
            name. The names of a custom loss's sums get the prefix :data:`LOSS_SUM_PREFIX`. For
            a :class:`PrecomputePass`, the columns that the custom loss computes in its ``once``
            method.
        """
        if isinstance(measure, PrecomputePass):
            assert self._custom_loss is not None and self._custom_loss.once is not None
            return self._call_without_gradients(self._custom_loss.once, batch)
        output = forward_loss(model, batch, self, evaluation=measure)
        metrics = {f"{LOSS_SUM_PREFIX}{name}": value for name, value in output.metrics.items()}
        outputs = Outputs(output.predictions, output.logits)
        return {"loss": output.loss_sum, **metrics, **measure(outputs, batch)}

    def get_loss(self, *, training: bool) -> TrainingLoss | TaskLoss:
        """Return the loss that is used in training or, if ``training`` is False, in evaluation."""
        loss = self._custom_loss
        return self.task_loss if loss is None or not (training or loss.in_evaluation) else loss

    def select_model_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the columns of a batch that are passed to the model.

        Without a custom loss, these are all columns except the labels. With a custom loss, columns
        that the model does not accept are also left out, because only the loss reads them.
        Columns whose names begin with :data:`BLANK_PREFIX` are always passed.
        """
        names = batch if self._input_names is None else self._input_names
        return {
            name: tensor
            for name, tensor in batch.items()
            if name != "labels" and (name in names or name.startswith(BLANK_PREFIX))
        }

    def add_reference_columns(self, loss: TrainingLoss | TaskLoss, batch: Batch) -> Batch:
        """Add the columns that the ``before`` method of a custom loss computes.

        For example, the method may compute the log-probabilities of a reference model.

        Args:
            loss: Result of :meth:`get_loss`.
            batch: Micro-batch on the device.

        Returns:
            A new batch, or ``batch`` itself if the loss has no ``before`` method.
        """
        return batch if loss.before is None else {**batch, **self._call_without_gradients(loss.before, batch)}

    def _call_without_gradients(
        self, function: Callable[..., Mapping[str, Tensor]], batch: Batch
    ) -> dict[str, Tensor]:
        """Call a method of the custom loss without gradients, with the model in eval mode.

        The method is ``before`` or ``once``. It runs models on the batch to compute additional
        columns for the loss.

        Args:
            function: The method, called as ``function(forward, batch)``. Its argument ``forward``
                is a function. ``forward(other)`` runs the model ``other`` on the batch, and
                ``forward()`` runs the trained model. ``forward(adapter=False)`` runs the trained
                model without its adapter.
            batch: Micro-batch on the device.

        Returns:
            The columns that ``function`` returns, keyed by name.

        Raises:
            UserError: If ``function`` fails.
        """
        loss = self._custom_loss
        assert loss is not None

        def forward(other: nn.Module | None = None, *, adapter: bool = True) -> Outputs:
            model = self._model if other is None else self._prepare_reference(other)
            head = self.head if other is None else None
            inputs = self.select_model_inputs(batch)
            with nullcontext() if adapter else disable_adapter(self._model):
                return run_model_for_loss(model, inputs, batch["labels"], loss.needs, head=head).outputs

        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), plugins.convert_user_errors(loss.key):
                return dict(function(forward, batch))
        finally:
            self._model.train(training)

    def _prepare_reference(self, reference: nn.Module) -> nn.Module:
        """Prepare a reference model or teacher for the forward passes of a run.

        The first call for a model wraps its forward method like the forward method of the trained
        model, and casts its parameters. Further calls for the same model do nothing.

        The parameters are loaded in the dtype of their files, but the reference must compute in the
        same precision as the trained model. Under autocast, the new dtype is the dtype of the
        trained parameters. Otherwise, it is the compute dtype of the engine.

        Args:
            reference: The reference model or teacher. Modified in place.

        Returns:
            The same model.
        """
        if reference in self._prepared_models:
            return reference
        embedding = self._model.get_input_embeddings().weight
        dtype = embedding.dtype
        if not torch.is_autocast_enabled(embedding.device.type):
            dtype = self._compute_dtype or dtype
        for parameter in reference.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        self._prepared_models.add(reference)
        if has_image_forward(self._model):
            install_image_forward(reference)
        return _install_forwards(reference)


def _install_forwards(model: Model) -> Model:
    """Replace forward methods in a model so that it accepts the columns of a batch.

    The new methods keep packed documents separate, pass the length of each text to rotary
    embeddings, and compute the statistics that a loss requests. The model is modified in place and
    returned.
    """
    model = install_document_states(install_document_forward(model))
    return install_loss_forward(install_text_length_forward(model))


def compute_summed_cross_entropy(model: nn.Module, batch: Batch, head: ChunkedHead | None = None) -> Tensor:
    """Run a model on a micro-batch and return the summed cross-entropy, without auxiliary losses.

    Args:
        model: A transformers model. This function wraps its forward method in the same way as a
            training run does. The wrappers remain after the call.
        batch: Micro-batch on the device. ``labels[b, t]`` is the target of ``logits[b, t]``. For
            classification, ``labels[b]`` is the target of ``logits[b]``.
        head: The model's chunked head, to avoid computing all logits at once.

    Returns:
        An fp32 scalar on the device.
    """
    _install_forwards(model)
    loss, labels = TaskLoss(), batch["labels"]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    result = run_model_for_loss(model, inputs, labels, loss.needs, head=head, logits_suffice=True)
    return loss(result.outputs, batch).loss_sum


_METRIC_COUNT_NAMES = {"mean_token_accuracy": "first labels", "entropy": "all labels"}
"""Names, as in TRL, of the means that are logged in addition to the loss. Each is mapped to the name
of the count by which its sum is divided."""
_MAX_ENTROPY_LOGITS = 1 << 24


@torch.no_grad()
def compute_token_metric_sums(
    logits: Tensor | None, hits: Tensor | None, labels: Tensor
) -> dict[str, Tensor]:
    """Compute the number of hits, the summed entropy, and the label counts of a micro-batch.

    The mean token accuracy and the mean entropy are computed from these sums later. A hit is a
    label that has the highest logit. As in TRL, hits are counted only in the first sequence of each
    sample, which is the chosen answer of a pair. The entropy, in nats, is computed only from
    logits, and not on XLA.

    Args:
        logits: Logits of all tokens, ``[sequences, tokens, vocabulary]``. None if the chunked head
            has computed ``hits`` instead.
        hits: 1 for each token whose label has the highest logit, otherwise 0, fp32 ``[sequences,
            tokens]``. None to compute the hits from the logits.
        labels: Labels, ``[batch, tokens]`` or ``[batch, sequences, tokens]``.

    Returns:
        Sums and counts, fp32 scalars, keyed by name. ``mean_token_accuracy`` is the number of hits,
        to be divided by ``first labels``. ``entropy`` is the summed entropy, to be divided by ``all
        labels``. ``entropy`` and ``all labels`` are missing if the entropy is not computed.
    """
    valid = labels != IGNORED_LABEL
    targets = labels.flatten(0, -2)
    on_xla = labels.device.type == "xla"
    if hits is not None:
        is_hit = hits
    elif on_xla:
        assert logits is not None
        # Do not use argmax, because it needs memory for two more copies of the logits. Do not use gather
        # either: it needs one more copy if tokens are sharded.
        classes = torch.arange(logits.shape[-1], device=labels.device)
        target_logits = torch.where(classes == targets.unsqueeze(-1), logits, -torch.inf)
        is_hit = (target_logits.amax(dim=-1) >= logits.amax(dim=-1)) & valid.flatten(0, -2)
    else:
        assert logits is not None
        is_hit = logits.argmax(dim=-1) == targets
    first_sequences = slice(None, None, labels.shape[1] if labels.dim() == 3 else 1)
    counted = valid.flatten(0, -2)[first_sequences].sum().float()
    sums = {"first labels": counted, "mean_token_accuracy": is_hit[first_sequences].sum().float()}
    # On XLA, the entropy would need further copies of the logits, as argmax does.
    if logits is None or on_xla:
        return sums
    rows, row_is_valid = logits.flatten(0, -2), valid.flatten()
    step = max(1, _MAX_ENTROPY_LOGITS // rows.shape[-1])
    entropy = torch.zeros((), device=rows.device)
    for row_chunk, counts in zip(rows.split(step), row_is_valid.split(step), strict=True):
        log_p = row_chunk.float().log_softmax(dim=-1)
        entropy += torch.where(counts, -(log_p.exp() * log_p).sum(dim=-1), 0.0).sum()
    return sums | {"all labels": valid.sum().float(), "entropy": entropy}


def _compute_token_statistics(logits: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Compute per-token statistics from complete logits, without splitting them into chunks.

    Args:
        logits: Logits, ``[..., classes]``.
        labels: Labels, int64, with the shape of the logits without the last dimension.
        names: Any of ``log_probs``, ``log_z`` and ``mean_logits``. See
            :meth:`ChunkedHead.forward_with_statistics`.

    Returns:
        Statistics, fp32 with the shape of the labels, keyed by name. Empty if ``names`` is empty.
    """
    if not names:
        return {}
    logits = logits.float()
    values: dict[str, Tensor] = {}
    if "log_probs" in names:
        losses = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        )
        values["log_probs"] = -losses.view(labels.shape)
    if "log_z" in names:
        values["log_z"] = logits.logsumexp(dim=-1)
    if "mean_logits" in names:
        values["mean_logits"] = logits.mean(dim=-1)
    return values


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Disable the adapter of a model within this context.

    Unlike peft's ``disable_adapter``, this function does not change which parameters require a
    gradient. Contexts for the same model must not be nested.

    Args:
        model: The model.

    Raises:
        UserError: If the model has no adapter.
    """
    if not has_peft_adapter(model):
        raise UserError(
            "the model has no adapter to disable; set adapter.type, or choose another reference "
            "model for the loss"
        )
    # Imported here, because the module imports peft.
    from portable.private.peft_internals import disable_adapters

    with disable_adapters(model):
        yield


_MODEL_COLUMNS = (
    "input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "position_ids", "document_lengths",
    PART_POSITIONS_COLUMN, TEXT_TOKENS_COLUMN,
)  # fmt: skip
"""Columns that are always passed to the model, because its forward method may accept them as ``**kwargs``, or
a :class:`ForwardWrapper` may read them.
"""


def _list_input_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the batch columns that are passed to a model.

    These are the parameters of its ``forward`` method, and the columns in :data:`_MODEL_COLUMNS`.
    """
    return frozenset((*inspect.signature(model.forward).parameters, *_MODEL_COLUMNS))


def _compute_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the summed cross-entropy of logits ``[..., classes]`` in fp32. Labels of -100 do not count."""
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )


def _compute_squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the summed squared error in fp32. NaN labels do not count."""
    values = logits.float().reshape(labels.shape)
    return functional.mse_loss(values, torch.where(labels.isnan(), values.detach(), labels), reduction="sum")


def _compute_binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the summed binary cross-entropy of multi-label classification. NaN labels do not count."""
    counts = ~labels.isnan()
    return functional.binary_cross_entropy_with_logits(
        logits.float(), torch.where(counts, labels, 0), weight=counts.float(), reduction="sum"
    )


_CRITERION_BY_PROBLEM_TYPE: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
    "regression": _compute_squared_error,
    "multi_label_classification": _compute_binary_cross_entropy,
}

LOSS_SUM_PREFIX = "loss/"
"""Prefix that is added, in an evaluation, to the names of the sums that a custom loss returns."""
