"""Base class of objects that replace the ``forward`` method of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)


class ForwardWrapper:
    """Base class of objects that replace ``model.forward`` and call the original method.

    A subclass defines ``__call__``, which calls the previous method as ``self.__wrapped__``. The
    method :meth:`install` replaces ``model.forward``. If several wrappers are installed, the last
    wrapper runs first.

    The model itself is not wrapped, because the hooks of FSDP2, DDP and DeepSpeed must see the
    inputs and outputs of the new ``forward``. The replacement is an object rather than a function,
    because :func:`copy.deepcopy` does not copy functions. In a copied model, a function would still
    call the original model, whereas the copied object calls the copied model.

    Args:
        model: A transformers model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self.__wrapped__: Any = model.forward  # the name that inspect.signature reads

    @property
    def original_forward(self) -> Any:
        """Forward method that the model had before any :class:`ForwardWrapper` replaced it."""
        method = self.__wrapped__
        while isinstance(method, ForwardWrapper):
            method = method.__wrapped__
        return method

    @classmethod
    def install(cls, model: Model) -> Model:
        """Replace ``model.forward`` with an instance of this class, unless this was done before.

        Args:
            model: A transformers model, before it is wrapped, for example by DDP. Modified in
                place.

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
