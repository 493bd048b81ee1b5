"""Define `OutputTensor`, a tensor that a conversion writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.converters.tensors.dtypes import get_itemsize

if TYPE_CHECKING:
    from portable.converters.tensors.tensor import Tensor


@dataclass(frozen=True)
class OutputTensor:
    """Tensor to write, with its name and dtype in the output.

    Attributes:
        name: Name of the tensor. Must be unique in the output.
        dtype: Safetensors dtype of the written tensor, such as `"F32"`.
        tensor: Source tensor. If its dtype differs from `dtype`, the tensor is cast during writing.
    """

    name: str
    dtype: str
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        """Size of the written tensor in bytes, after the cast."""
        return self.tensor.numel * get_itemsize(self.dtype)
