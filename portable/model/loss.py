"""The loss of every task: summed over what has a label, and what a model adds.

A step minimises the mean cross-entropy over all labels of the global batch, or what a classifier of another
``problem_type`` has in its place, plus what a model's own ``forward(labels=...)`` adds to it: the auxiliary
loss that balances a mixture's experts, a z-loss. transformers defines what is added for one forward pass.
Over a global batch it is the mean over the sequences: each micro-batch's, weighted by its share of them. So
it is exactly transformers' where the global batch is one micro-batch, and does not grow with the number of
micro-batches or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from portable.backend import Batch
    from portable.model.chunked_loss import ChunkedHead

IGNORED = -100


class Objective:
    """What training minimises, as one micro-batch's share of it.

    Args:
        model: of transformers, not wrapped by anything.
        global_batch_size: sequences in an optimizer step, over all ranks.
        head: gives losses in place of logits, where it saves something.
    """

    def __init__(self, model: nn.Module, global_batch_size: int, head: ChunkedHead | None = None) -> None:
        self._terms = OwnTerms(model)
        self.of_routers = self._terms.of_routers
        self._sequences = global_batch_size
        self._head = head
        self._criterion = _CRITERIA.get(getattr(model.config, "problem_type", None), _cross_entropy)

    def __call__(self, model: nn.Module, batch: Batch, valid: Tensor) -> Tensor:
        """Run ``model``, which may be wrapped now, on a micro-batch of the global batch.

        Args:
            valid: labels that count in the global batch, on the device.

        Returns:
            an fp32 scalar on the device; the sum over all micro-batches of all ranks is what is minimised.
        """
        labels = batch["labels"]
        loss, output = _passed(model, batch, self._head, self._terms, self._criterion)
        loss = loss / valid.clamp(min=1)
        # Where ranks are one program, a batch is as long as that of all of them together.
        return self._terms.added(loss, output, share=labels.shape[0] / self._sequences)

    def evaluated(self, model: nn.Module, batch: Batch) -> Tensor:
        """The summed loss of a micro-batch, without what the model adds, which is for training."""
        return _passed(model, batch, self._head, None, self._criterion)[0]


class OwnTerms:
    """What a model's own ``forward(labels=...)`` adds to its cross-entropy.

    The model is given its labels, and a cross-entropy of 0 in place of its own. What is then left of its loss
    is what it adds, whatever that is made of.

    Args:
        model: of transformers, not wrapped by anything.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        config: Any = model.config
        forward = inspect.signature(model.forward).parameters
        names = inspect.unwrap(type(model).forward).__code__.co_names
        # Nearly all models that add something call this method of theirs; others have a cross-entropy inline.
        self._replaceable = "loss_function" in names
        self.of_routers = bool(getattr(config.get_text_config(), "output_router_logits", False))
        """Whether the model's config asks for a loss of its routers."""
        self._nothing: Tensor | None = None
        self._more: dict[str, Any] = {}
        if self.of_routers and "output_router_logits" in forward:
            self._more = {"output_router_logits": True}  # not every model looks into its config
        self._given = (self._replaceable or bool(self._more)) and "labels" in forward

    @contextmanager
    def asked_for(self, labels: Tensor) -> Iterator[dict[str, Any]]:
        """What else to call the model with, within this context, for its ``loss`` to be what it adds."""
        if not self._given:
            yield {}
            return
        nothing = self._nothing = torch.zeros((), device=labels.device)
        if not self._replaceable:
            with _CrossEntropyIs(nothing):
                yield {"labels": labels, **self._more}
            return
        attributes = self._model.__dict__  # the property stands in front of this one
        own = attributes.get("_loss_function")
        attributes["_loss_function"] = lambda *_, **__: nothing
        try:
            yield {"labels": labels, **self._more}
        finally:
            attributes.pop("_loss_function")
            if own is not None:
                attributes["_loss_function"] = own

    def added(self, loss: Tensor, output: Any, *, share: float) -> Tensor:
        """``loss`` with that ``share`` of what the model has added in the pass that returned ``output``."""
        own: Tensor | None = output.loss if self._given else None
        nothing, self._nothing = self._nothing, None
        # Most models add nothing, not even in place: that is not worth an operation.
        if own is None or (own is nothing and own._version == 0):
            return loss
        return loss + own.float() * share


def token_loss(model: nn.Module, batch: Batch, head: ChunkedHead | None = None) -> Tensor:
    """Run ``model`` on a micro-batch, without holding all of its logits where ``head`` saves them.

    The labels are aligned with the logits: ``labels[b, t]`` is what ``logits[b, t]`` should predict (for
    classification, ``labels[b]`` and ``logits[b]``), and :data:`IGNORED` where nothing is to be predicted.
    A sum, not a mean: dividing by the valid tokens of the *global* batch is what makes the loss exact under
    accumulation, padding and any world size.

    Returns:
        the summed loss, an fp32 scalar on the device. The cross-entropy alone: what a model adds is for
        training.
    """
    return _passed(model, batch, head, None, _cross_entropy)[0]


def _passed(
    model: nn.Module,
    batch: Batch,
    head: ChunkedHead | None,
    terms: OwnTerms | None,
    criterion: Criterion,
) -> tuple[Tensor, Any]:
    """The summed loss of a forward pass, and what the model returned."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    labels = batch["labels"]
    in_parts = head is not None and head.pays(labels)
    with ExitStack() as stack:
        if terms is not None:
            inputs |= stack.enter_context(terms.asked_for(labels))
        if head is not None and in_parts:
            stack.enter_context(head.giving_losses(labels))
        output: Any = model(**inputs)
    if in_parts:
        assert output.logits.shape == (*labels.shape, 1)
        return output.logits.sum(), output
    # A config may keep the problem_type of a classifier that it once described.
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
    """Within this context a cross-entropy, or another loss of labels, is ``value``, and costs nothing."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOSSES:
            return self._value
        return func(*args, **(kwargs or {}))


def count_valid(labels: Tensor) -> int:
    """How many labels count; ``labels`` are on the host. Of numbers, all that are not NaN do."""
    if labels.is_floating_point():
        return int(torch.count_nonzero(~labels.isnan()))
    return int(torch.count_nonzero(labels != IGNORED))
