"""The terms that a model's own ``forward(labels=...)`` adds to its cross-entropy."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from portable.model.rotations import has_length_dependent_rotations
from portable.private import of_torch, of_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from portable.config.sections import ModelConfig

ROUTER_LOSS = "load_balancing_loss_func"
"""The function in a model's module that computes its router loss from the logits of every layer's gate."""


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
    def requested(
        self, labels: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the extra inputs that make the model's ``loss`` the sum of its other terms.

        Args:
            labels: The labels of the batch.
            inputs: The other columns of the batch. Padding of packed documents is not among the tokens of the
                router loss.
        """
        if not self._given:
            yield {}
            return
        with self._without_padding(inputs or {}):
            yield from self._requested(labels)

    @contextmanager
    def _without_padding(self, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Exclude the padding of packed documents from the router loss, because transformers includes it."""
        functions = of_transformers.module_of(self._model)
        compute_loss = functions.get(ROUTER_LOSS)
        if not self.of_routers or "document_lengths" not in inputs or compute_loss is None:
            yield
            return
        # Padding has position 0, and a document has at least two positions.
        is_later = inputs["position_ids"] > 0
        is_token = (is_later | functional.pad(is_later[:, 1:], (0, 1))).long()

        def compute_without_padding(*arguments: Any, **keywords: Any) -> Any:
            bound = signature.bind(*arguments, **keywords)
            bound.arguments["attention_mask"] = is_token
            return compute_loss(*bound.args, **bound.kwargs)

        signature = inspect.signature(compute_loss)
        if "attention_mask" not in signature.parameters:
            yield
            return
        functions[ROUTER_LOSS] = compute_without_padding
        try:
            yield
        finally:
            functions[ROUTER_LOSS] = compute_loss

    def _requested(self, labels: Tensor) -> Iterator[dict[str, Any]]:
        nothing = self._nothing = torch.zeros((), device=labels.device)
        if not self._replaceable:
            with _CrossEntropyIs(nothing):
                yield {"labels": labels, **self._more}
            return
        with of_transformers.loss_function(self._model, lambda *_, **__: nothing):
            yield {"labels": labels, **self._more}

    def added(self, loss: Tensor, output: Any, *, share: float) -> Tensor:
        """Add ``share`` of the model's terms in ``output`` to ``loss``."""
        own: Tensor | None = output.loss if self._given else None
        nothing, self._nothing = self._nothing, None
        # Most models add nothing, not even in place: skip the addition.
        if own is None or (own is nothing and of_torch.changes(own) == 0):
            return loss
        return loss + own.float() * share


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


_ROUTER_LOSS = "output_router_logits"


def adds_router_loss(config: PretrainedConfig, settings: ModelConfig) -> bool:
    """Return whether a pretrained mixture of experts gets its router loss by default, as in TRL."""
    text = config.get_text_config()
    asked = _ROUTER_LOSS in str(settings.config)  # also inside of text_config
    applies = settings.task == "causal-lm" and not settings.from_scratch and not asked
    return applies and hasattr(text, _ROUTER_LOSS) and bool(getattr(text, "router_aux_loss_coef", 0.0))


def counts_last_tokens(config: PretrainedConfig, settings: ModelConfig) -> bool:
    """Return whether the last token of a text matters to the other tokens although it only is a label.

    The router loss of a mixture of experts is a mean over all tokens of a text, and rotary embeddings may
    depend on the length of a text. Such a model gets the last token of each text, as in transformers.

    Args:
        config: The transformers config of the model.
        settings: The ``model`` section of the run.
    """
    routed = bool(getattr(config.get_text_config(), _ROUTER_LOSS, False)) or adds_router_loss(
        config, settings
    )
    return settings.task == "causal-lm" and (routed or has_length_dependent_rotations(config))
