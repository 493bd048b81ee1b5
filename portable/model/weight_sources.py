"""Tensors whose slices are produced on demand, either read from a checkpoint or computed."""

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
    """Interface of a lazily read tensor. ``converters.Tensor`` implements it for tensors in files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the complete tensor."""

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Read a slice of the tensor.

        Args:
            index: One slice per dimension, with unit steps. None for all elements.

        Returns:
            An array in the dtype of the tensor, with bfloat16 as ``ml_dtypes.bfloat16``.
        """


class ComputedTensor:
    """Lazily read tensor that computes all of its values on every read, even if a slice is read.

    It implements :class:`ReadableTensor`.

    Args:
        shape: Shape of the tensor.
        compute: Function that returns the tensor, on the CPU.
        dtype: Dtype in the checkpoint file, such as ``BF16``, if ``compute`` only reads and
            rearranges the elements of stored tensors. None if ``compute`` calculates new values.
    """

    def __init__(
        self, shape: Sequence[int], compute: Callable[[], torch.Tensor], dtype: str | None = None
    ) -> None:
        self.shape, self._compute, self.dtype = tuple(shape), compute, dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> ComputedTensor:
        """Wrap a CPU tensor that already has values. Its memory is shared, not copied."""
        return cls(tensor.shape, tensor.detach)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Compute the complete tensor and return the elements in ``index``. See :class:`ReadableTensor`."""
        tensor = self._compute()
        return to_numpy(tensor if index is None else tensor[index].contiguous())


class SlicedTensor:
    """:class:`ReadableTensor` that computes slices on demand, without the rest of the tensor.

    Args:
        shape: Shape of the complete tensor.
        compute: Function that returns the elements at an index, on the CPU. The index has one slice
            per dimension, with a start and a stop.
        dtype: Dtype of the elements in their checkpoint file, such as ``BF16``, if ``compute`` only
            reads and rearranges stored elements. None if it computes new values.
    """

    def __init__(
        self, shape: Sequence[int], compute: Callable[[Index], torch.Tensor], dtype: str | None = None
    ) -> None:
        self.shape, self._compute, self.dtype = tuple(shape), compute, dtype

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Compute the elements that ``index`` selects. See :class:`ReadableTensor`.

        If ``index`` selects no elements, nothing is computed, and the result is an empty fp32
        array.
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
    """Copy the values of a lazily read tensor into a tensor, converting the dtype if necessary.

    If ``source`` is in a file and has the dtype of ``target``, and ``target`` is contiguous and
    on the CPU, the file is read directly into the memory of ``target``.

    Args:
        target: Tensor to overwrite, on any device. It has the shape of ``source[index]``.
        source: Source of the values.
        index: Slices of ``source`` to copy. None for all elements.
    """
    if isinstance(source, StoredTensor) and target.device.type == "cpu" and target.is_contiguous():
        buffer = to_numpy(target.detach())
        if buffer.dtype == to_numpy_dtype(source.dtype):
            source.read(index, out=buffer)
            return
    target.copy_(to_torch(source.read(index)))


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a NumPy array with the values of a CPU tensor. bfloat16 becomes ``ml_dtypes.bfloat16``.

    The array shares memory with the tensor, unless the tensor is bfloat16 and not contiguous.
    Such a tensor is copied.
    """
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """Convert a NumPy array to a tensor, without a copy if possible.

    This function is the inverse of :func:`to_numpy`. The tensor shares memory with the array,
    unless the array is read-only or not contiguous. Such an array is copied.
    """
    array = np.require(array, requirements=["C", "W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
