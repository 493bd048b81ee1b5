"""Replacements of the ``forward`` method of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)


class ForwardWrapper:
    """Base class of objects that replace ``model.forward`` and call the method that they replace.

    The replacement is inside of the model, so the hooks of FSDP2, DDP and DeepSpeed receive its inputs and
    outputs. It is an object and not a function, because :func:`copy.deepcopy` then gives the copy of a model
    a replacement that calls the copy.

    Args:
        model: A transformers model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self.__wrapped__: Any = model.forward  # the name that inspect.signature reads

    @property
    def original_forward(self) -> Any:
        """Forward method of the model before the first replacement."""
        method = self.__wrapped__
        while isinstance(method, ForwardWrapper):
            method = method.__wrapped__
        return method

    @classmethod
    def install(cls, model: Model) -> Model:
        """Replace ``model.forward``, unless an earlier call has replaced it.

        Args:
            model: A transformers model, not wrapped. It is changed in place.

        Returns:
            The same model.
        """
        current_forward: Any = vars(model).get("forward")
        while isinstance(current_forward, ForwardWrapper):
            if isinstance(current_forward, cls):
                return model
            current_forward = current_forward.__wrapped__
        changed: Any = model
        changed.forward = cls(model)
        return model
