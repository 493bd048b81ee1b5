"""Creation of large tensors on the meta device while a model is built."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST = 1 << 22
"""Elements of the largest tensor that is created on the host. Buffers are smaller than this."""
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)


@contextmanager
def large_tensors_on_meta() -> Iterator[None]:
    """Within this context, create tensors of more than ``_LARGEST`` elements on the meta device.

    A constructor creates each parameter on the host before it is moved to the meta device, and the stacked
    experts of one layer can take up tens of gigabytes. Small tensors stay on the host, because buffers need
    values.
    """
    with _LargeOnMeta():
        yield


class _LargeOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None and _count_elements(args, kwargs) > _LARGEST:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _count_elements(args: Any, kwargs: dict[str, Any]) -> int:
    """Count the elements of the tensor that a factory function of torch would create."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], list | tuple) else args)
    return math.prod(size)
