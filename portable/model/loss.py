"""The loss of every task: a sum over the labels, plus the model's own auxiliary terms.

A step minimizes the mean loss over all labels of the global batch: cross-entropy, or the loss of a
classifier's ``problem_type``. The model's own ``forward(labels=...)`` may add terms, such as the
load-balancing loss of a mixture of experts or a z-loss. transformers defines these for one forward pass. Over
a global batch they are averaged over the sequences: each micro-batch is weighted by its share. The result
equals transformers' loss if the global batch is one micro-batch, and does not grow with the number of
micro-batches or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from portable.model.document_attention import DocumentAttention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from portable.backend import Batch
    from portable.model.chunked_loss import ChunkedHead

IGNORED = -100


@dataclass(frozen=True)
class Outputs:
    """What a model gives for a micro-batch of an evaluation, on the device.

    Attributes:
        predictions: the most likely class of each position, with the labels' shape; None if not asked for, or
            if the labels are numbers.
        logits: as the model returns them; None if not asked for and never held at once.
    """

    predictions: Tensor | None
    logits: Tensor | None


class Measure(Protocol):
    """Adds up what the metrics of a run need; see :class:`portable.evaluation.metrics.Measures`."""

    needs: Literal["logits", "predictions"] | None
    kind: str
    """What the passes are for, in messages."""

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """The sums of a micro-batch, by name."""


class Objective:
    """The training loss, as the contribution of one micro-batch.

    Args:
        model: a transformers model, not wrapped.
        global_batch_size: sequences in an optimizer step, over all ranks.
        head: computes losses in place of logits, if the model has such a head.
    """

    def __init__(self, model: nn.Module, global_batch_size: int, head: ChunkedHead | None = None) -> None:
        self._terms = ModelTerms(model)
        self.of_routers = self._terms.of_routers
        self._sequences = global_batch_size
        self._head = head
        self._attention = DocumentAttention(model)
        self._criterion = _CRITERIA.get(getattr(model.config, "problem_type", None), _cross_entropy)

    def __call__(self, model: nn.Module, batch: Batch, valid: Tensor) -> Tensor:
        """Run ``model``, which may be wrapped, on a micro-batch of the global batch.

        Args:
            valid: number of valid labels in the global batch, on the device.

        Returns:
            an fp32 scalar on the device. The loss of the step is its sum over all micro-batches and ranks.
        """
        labels = batch["labels"]
        loss, output = _passed(model, batch, self._head, self._attention, self._criterion, self._terms)
        loss = loss / valid.clamp(min=1)
        # With SPMD, where all ranks run one program, the batch holds the sequences of all ranks.
        return self._terms.added(loss, output, share=labels.shape[0] / self._sequences)

    def evaluated(self, model: nn.Module, batch: Batch, measure: Measure) -> dict[str, Tensor]:
        """The sums of ``measure`` and the summed ``loss`` of a micro-batch, without the model's own terms."""
        labels = batch["labels"]
        head = None if measure.needs == "logits" else self._head
        if head is not None and head.pays(labels):
            # The head makes the predictions beside the losses: no tensor has the logits of all tokens.
            with head.predicting(measure.needs is not None) as predicted:
                loss, _ = _passed(model, batch, head, self._attention, self._criterion)
            outputs = Outputs(predicted[0] if predicted else None, None)
        else:
            loss, output = _passed(model, batch, None, self._attention, self._criterion)
            classes = measure.needs is not None and not labels.is_floating_point()
            outputs = Outputs(output.logits.argmax(dim=-1) if classes else None, output.logits)
        return {"loss": loss, **measure(outputs, batch)}


class ModelTerms:
    """The terms that a model's own ``forward(labels=...)`` adds to its cross-entropy.

    The model gets its labels, and its cross-entropy is replaced by 0. The loss that it returns is then the
    sum of its other terms.

    Args:
        model: a transformers model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        config: Any = model.config
        forward = inspect.signature(model.forward).parameters
        names = inspect.unwrap(type(model).forward).__code__.co_names
        # Nearly all models with other terms call `self.loss_function`; a few compute cross-entropy inline.
        self._replaceable = "loss_function" in names
        self.of_routers = bool(getattr(config.get_text_config(), "output_router_logits", False))
        """Whether the model's config asks for the router loss."""
        self._nothing: Tensor | None = None
        self._more: dict[str, Any] = {}
        if self.of_routers and "output_router_logits" in forward:
            self._more = {"output_router_logits": True}  # some models ignore their config here
        self._given = (self._replaceable or bool(self._more)) and "labels" in forward

    @contextmanager
    def requested(self, labels: Tensor) -> Iterator[dict[str, Any]]:
        """Yield the extra inputs that make the model's ``loss`` the sum of its other terms."""
        if not self._given:
            yield {}
            return
        nothing = self._nothing = torch.zeros((), device=labels.device)
        if not self._replaceable:
            with _CrossEntropyIs(nothing):
                yield {"labels": labels, **self._more}
            return
        attributes = self._model.__dict__  # `loss_function` is a property over this attribute
        own = attributes.get("_loss_function")
        attributes["_loss_function"] = lambda *_, **__: nothing
        try:
            yield {"labels": labels, **self._more}
        finally:
            attributes.pop("_loss_function")
            if own is not None:
                attributes["_loss_function"] = own

    def added(self, loss: Tensor, output: Any, *, share: float) -> Tensor:
        """Add ``share`` of the model's terms in ``output`` to ``loss``."""
        own: Tensor | None = output.loss if self._given else None
        nothing, self._nothing = self._nothing, None
        # Most models add nothing, not even in place: skip the addition.
        if own is None or (own is nothing and own._version == 0):
            return loss
        return loss + own.float() * share


def token_loss(model: nn.Module, batch: Batch, head: ChunkedHead | None = None) -> Tensor:
    """Run ``model`` on a micro-batch and return the summed cross-entropy, without auxiliary terms.

    ``labels[b, t]`` is the target of ``logits[b, t]``; for classification, ``labels[b]`` of ``logits[b]``.
    Targets that are :data:`IGNORED` do not count. The result is a sum, not a mean: dividing by the valid
    tokens of the *global* batch keeps the loss exact under accumulation, padding and any world size.

    Args:
        head: avoids holding all logits at once.

    Returns:
        an fp32 scalar on the device.
    """
    return _passed(model, batch, head, DocumentAttention(model), _cross_entropy)[0]


def _passed(
    model: nn.Module,
    batch: Batch,
    head: ChunkedHead | None,
    attention: DocumentAttention,
    criterion: Criterion,
    terms: ModelTerms | None = None,
) -> tuple[Tensor, Any]:
    """Return the summed loss of a forward pass, and the model's output."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    labels = batch["labels"]
    in_parts = head is not None and head.pays(labels)
    with ExitStack() as stack:
        inputs = stack.enter_context(attention.within(inputs))
        if terms is not None:
            inputs |= stack.enter_context(terms.requested(labels))
        if head is not None and in_parts:
            stack.enter_context(head.giving_losses(labels))
        output: Any = model(**inputs)
    if in_parts:
        assert output.logits.shape == (*labels.shape, 1)
        return output.logits.sum(), output
    # A config may keep the problem_type of an earlier classification task.
    criterion = criterion if labels.is_floating_point() else _cross_entropy
    return criterion(output.logits, labels), output


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    values = logits.float().reshape(labels.shape)
    return functional.mse_loss(values, torch.where(labels.isnan(), values.detach(), labels), reduction="sum")


def _binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    counts = ~labels.isnan()
    return functional.binary_cross_entropy_with_logits(
        logits.float(), torch.where(counts, labels, 0), weight=counts.float(), reduction="sum"
    )


Criterion = Callable[["Tensor", "Tensor"], "Tensor"]
_CRITERIA: dict[str | None, Criterion] = {
    "regression": _squared_error,
    "multi_label_classification": _binary_cross_entropy,
}


_LOSSES = (functional.cross_entropy, functional.mse_loss, functional.binary_cross_entropy_with_logits)


class _CrossEntropyIs(TorchFunctionMode):
    """Replaces cross-entropy and other losses of labels by ``value`` within this context."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOSSES:
            return self._value
        return func(*args, **(kwargs or {}))


def no_totals(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros on the host for :func:`added`, with the shapes of ``sums``."""
    return {name: torch.zeros(value.shape, dtype=_wide(value)) for name, value in sums.items()}


def added(totals: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``totals`` plus ``sums``, by name, on the device: int64 for integers, float64 for floats."""
    wide = {name: value.detach().to(_wide(value)) for name, value in sums.items()}
    return {name: totals[name] + value if name in totals else value for name, value in wide.items()}


def _wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.is_floating_point() else torch.int64


def count_valid(labels: Tensor) -> int:
    """Count the valid labels, on the host. Numeric labels are valid unless they are NaN."""
    if labels.is_floating_point():
        return int(torch.count_nonzero(~labels.isnan()))
    return int(torch.count_nonzero(labels != IGNORED))
