"""Base class of objects that replace the ``forward`` method of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)


class ForwardWrapper:
    """Base class of objects that replace ``model.forward`` and call the original method.

    A replacement is better than a wrapper around the model, because the hooks of FSDP2, DDP and
    DeepSpeed then receive the inputs and outputs of the replacement. It is an object instead of a
    function, so that :func:`copy.deepcopy` copies it: the replacement in a copied model calls the
    copied model.

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
        """Replace ``model.forward`` by an instance of this class, unless an earlier call has done so.

        Args:
            model: A transformers model, not wrapped. Modified in place.

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
