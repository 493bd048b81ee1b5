"""The terms that a model's own ``forward(labels=...)`` adds to its cross-entropy."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from portable.private import of_torch, of_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


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
