"""Auxiliary losses, such as a router loss, which a model's ``forward(labels=...)`` adds to its loss."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from portable.model.dynamic_rope import has_length_dependent_rope
from portable.private import torch_internals, transformers_internals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from portable.config.sections import ModelConfig

ROUTER_LOSS_FUNCTION = "load_balancing_loss_func"
"""Name of the function in a model's module that computes the router loss from the gate logits of all
layers."""


class OutputWithAuxiliaryLoss(NamedTuple):
    """Result of :meth:`AuxiliaryLosses.run_forward`.

    Attributes:
        output: Output of the model.
        auxiliary_loss: Sum of the auxiliary losses, an fp32 scalar. None if the model has none.
    """

    output: Any
    auxiliary_loss: Tensor | None


class AuxiliaryLosses:
    """Auxiliary losses that a model's ``forward(labels=...)`` adds to its cross-entropy.

    :meth:`run_forward` passes labels to the model, and replaces the cross-entropy of the model by
    0. The loss that the model returns is then the sum of its auxiliary losses.

    Args:
        model: A transformers model, not wrapped. If its ``forward`` takes labels and calls
            ``loss_function``, this object permanently replaces the attribute ``loss_function`` of
            the model. The replacement returns 0 during :meth:`run_forward`, and otherwise calls the
            original function. If a model with a router loss computes its loss inline,
            :class:`_LabelLossReplacement` is used instead.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = cast("Any", model)
        config: Any = model.config
        forward = inspect.signature(model.forward).parameters
        names = inspect.unwrap(type(model).forward).__code__.co_names
        # Nearly all models with auxiliary losses call `self.loss_function`. A few compute the loss inline.
        self._calls_loss_function = "loss_function" in names
        self._has_router_loss = has_router_loss(config)
        self._router_arguments: dict[str, Any] = {}
        if self._has_router_loss and "output_router_logits" in forward:
            self._router_arguments = {"output_router_logits": True}  # some models ignore their config here
        self._may_have_losses = (
            self._calls_loss_function or bool(self._router_arguments)
        ) and "labels" in forward
        self._replacement_loss: Tensor | None = None
        if self._may_have_losses and self._calls_loss_function:
            self._original_loss_function = self._model.loss_function
            self._model.loss_function = self._compute_cross_entropy

    def run_forward(
        self, forward: Callable[..., Any], inputs: Mapping[str, Tensor], labels: Tensor
    ) -> OutputWithAuxiliaryLoss:
        """Run a forward pass and compute the auxiliary losses.

        Args:
            forward: The model, or its forward method.
            inputs: Arguments of ``forward``.
            labels: Labels of the batch. Models add their auxiliary losses to the cross-entropy only
                if they receive labels. The values of the labels have no effect, because the
                cross-entropy is replaced by 0.

        Returns:
            The model's output, and the sum of the auxiliary losses as an fp32 scalar. The sum is
            None if there are no auxiliary losses.
        """
        if not self._may_have_losses:
            return OutputWithAuxiliaryLoss(forward(**inputs), None)
        zero = torch.zeros((), device=labels.device)
        self._replacement_loss = zero
        replacement = nullcontext() if self._calls_loss_function else _LabelLossReplacement(zero)
        try:
            with replacement, self._exclude_padding_from_router_loss(inputs):
                output = forward(**inputs, labels=labels, **self._router_arguments)
        finally:
            self._replacement_loss = None
        loss: Tensor | None = output.loss
        # Return None if the model has not added a loss to the 0, because adding 0 would take time in each
        # step.
        if loss is None or (loss is zero and torch_internals.get_tensor_version(loss) == 0):
            return OutputWithAuxiliaryLoss(output, None)
        return OutputWithAuxiliaryLoss(output, loss.float())

    def _compute_cross_entropy(self, *arguments: Any, **keywords: Any) -> Any:
        """Return 0 during :meth:`run_forward`, otherwise the result of the original loss function.

        This method replaces the model's ``loss_function``.
        """
        return (
            self._original_loss_function(*arguments, **keywords)
            if self._replacement_loss is None
            else self._replacement_loss
        )

    def _exclude_padding_from_router_loss(self, inputs: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which the router loss ignores the padding of packed documents.

        Packed samples have no attention mask, so transformers would include their padding in the
        loss. In the context, the function :data:`ROUTER_LOSS_FUNCTION` in the model's module is
        replaced by a wrapper. The wrapper passes an attention mask computed from ``position_ids``.

        The context does nothing if ``inputs`` has no ``document_lengths``, or if the model has no
        router loss function that accepts an attention mask.
        """
        if not self._has_router_loss or "document_lengths" not in inputs:
            return nullcontext()
        functions = transformers_internals.get_module_namespace(self._model)
        if ROUTER_LOSS_FUNCTION not in functions:
            return nullcontext()
        compute_loss = functions[ROUTER_LOSS_FUNCTION]
        signature = inspect.signature(compute_loss)
        if "attention_mask" not in signature.parameters:
            return nullcontext()
        # Padding tokens have position 0. The first token of a document also has position 0, but the next
        # token has position 1.
        is_later = inputs["position_ids"] > 0
        is_token = (is_later | functional.pad(is_later[:, 1:], (0, 1))).long()

        def compute_without_padding(*arguments: Any, **keywords: Any) -> Any:
            bound = signature.bind(*arguments, **keywords)
            bound.arguments["attention_mask"] = is_token
            return compute_loss(*bound.args, **bound.kwargs)

        return transformers_internals.replace_mapping_entry(
            functions, ROUTER_LOSS_FUNCTION, compute_without_padding
        )


_LABEL_LOSSES = (functional.cross_entropy, functional.mse_loss, functional.binary_cross_entropy_with_logits)


class _LabelLossReplacement(TorchFunctionMode):
    """Torch function mode in which the functions in :data:`_LABEL_LOSSES` return a constant.

    The mode is used for models that compute their cross-entropy inline instead of calling
    ``loss_function``.

    Args:
        value: Constant that replaces the losses.
    """

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LABEL_LOSSES:
            return self._value
        return func(*args, **(kwargs or {}))


_ROUTER_LOGITS_KEY = "output_router_logits"


def has_router_loss(config: PretrainedConfig) -> bool:
    """Return whether the config of a model enables its router loss (``output_router_logits``)."""
    return bool(getattr(config.get_text_config(), _ROUTER_LOGITS_KEY, False))


def enables_router_loss_by_default(config: PretrainedConfig, settings: ModelConfig) -> bool:
    """Return whether the router loss is enabled by default, even if the pretrained config disables it.

    As in TRL, this default applies to a pretrained causal mixture of experts whose
    ``router_aux_loss_coef`` is not 0. If the user sets ``output_router_logits``, the result is
    False, because the user's value applies.

    Args:
        config: Transformers config of the model.
        settings: The ``model`` section of the run.
    """
    text = config.get_text_config()
    is_set_by_user = _ROUTER_LOGITS_KEY in str(settings.config)  # also inside of text_config
    applies = settings.task == "causal-lm" and not settings.from_scratch and not is_set_by_user
    return applies and hasattr(text, _ROUTER_LOGITS_KEY) and bool(getattr(text, "router_aux_loss_coef", 0.0))


def needs_last_token_as_input(config: PretrainedConfig, settings: ModelConfig) -> bool:
    """Return whether the last token of a document must be a model input instead of only a label.

    Usually, the last token is only a label, because no token follows it. However, the router loss of a
    mixture of experts is a mean over all tokens of a document, and rotary embeddings may depend on the
    document length. Such models receive all tokens, so that their loss is the same as in transformers.

    Args:
        config: Transformers config of the model.
        settings: The ``model`` section of the run.
    """
    has_router = has_router_loss(config) or enables_router_loss_by_default(config, settings)
    return settings.task == "causal-lm" and (has_router or has_length_dependent_rope(config))
