"""Sources of weights, such as a checkpoint or an initialization, from which slices are read lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from portable.converters import Tensor as StoredTensor
from portable.converters.tensors.dtypes import to_numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

Index = tuple[slice, ...]


class ReadableTensor(Protocol):
    """Interface of a tensor whose slices can be read; ``converters.Tensor`` implements it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the complete tensor."""

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Read the elements at ``index``. Its slices must have unit steps. None reads all elements."""


class ComputedTensor:
    """CPU tensor that is computed completely each time that a part of it is read.

    Args:
        shape: Shape of the tensor.
        compute: Function that returns the tensor.
        dtype: Dtype in the files, if ``compute`` only moves elements of files.
    """

    def __init__(
        self, shape: Sequence[int], compute: Callable[[], torch.Tensor], dtype: str | None = None
    ) -> None:
        self.shape, self._compute, self.dtype = tuple(shape), compute, dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> ComputedTensor:
        """Wrap a tensor that already has values."""
        return cls(tensor.shape, tensor.detach)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Compute the tensor and return the elements in ``index``. See :class:`ReadableTensor`."""
        tensor = self._compute()
        return to_numpy(tensor if index is None else tensor[index].contiguous())


class SlicedTensor:
    """CPU tensor whose slices are computed when they are read.

    Args:
        shape: Shape of the complete tensor.
        compute: Function that returns the elements in an index, which has unit steps and all dimensions.
        dtype: Dtype in the files, if ``compute`` only moves elements of files.
    """

    def __init__(
        self, shape: Sequence[int], compute: Callable[[Index], torch.Tensor], dtype: str | None = None
    ) -> None:
        self.shape, self._compute, self.dtype = tuple(shape), compute, dtype

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Compute the elements in ``index``. See :class:`ReadableTensor`.

        Returns zeros without computing anything if a slice is empty.
        """
        index = tuple(
            slice(*part.indices(size)[:2])
            for part, size in zip(index or [slice(None)] * len(self.shape), self.shape, strict=True)
        )
        if any(part.stop <= part.start for part in index):
            return to_numpy(torch.zeros([max(part.stop - part.start, 0) for part in index]))
        return to_numpy(self._compute(index).contiguous())


@torch.no_grad()
def copy_into_tensor(target: torch.Tensor, source: ReadableTensor, index: Index | None = None) -> None:
    """Copy a source of weights into a tensor.

    A tensor from a file with the dtype of ``target`` is read directly into ``target``, if it is on the CPU.

    Args:
        target: Tensor that is overwritten, on any device.
        source: Source with the shape of ``target``, after ``index``.
        index: Part of ``source`` to copy. All elements if None.
    """
    if isinstance(source, StoredTensor) and target.device.type == "cpu" and target.is_contiguous():
        buffer = to_numpy(target.detach())
        if buffer.dtype == to_numpy_dtype(source.dtype):
            source.read(index, out=buffer)
            return
    target.copy_(to_torch(source.read(index)))


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a NumPy array that shares memory with a CPU tensor. bfloat16 becomes ``ml_dtypes.bfloat16``."""
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """Convert a NumPy array to a tensor, without a copy if possible; the inverse of :func:`to_numpy`."""
    array = np.require(array, requirements=["C", "W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
