"""Where weights come from: a checkpoint, or initialisation. Both are read slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Index = tuple[slice, ...]


class ReadableTensor(Protocol):
    """A tensor that can be read in slices; ``converters.Tensor`` is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """The elements in ``index`` (unit steps), or all of them."""


class InMemoryTensor:
    """A CPU tensor behind the interface of a lazy one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        tensor = self._tensor if index is None else self._tensor[index]
        return to_numpy(tensor.detach())


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A numpy view of a CPU tensor; bfloat16 comes as ``ml_dtypes.bfloat16``."""
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """A torch tensor over a numpy array's memory where numpy allows; the inverse of :func:`to_numpy`."""
    array = np.require(array, requirements=["C", "W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
