"""Compute a fingerprint of a model's weights that is independent of how they are split into files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.tensors.tensor import Tensor

# Maximum number of tensors whose values are read, and of elements that are read from each of them.
_MAX_SAMPLED_TENSORS, _MAX_SAMPLED_ELEMENTS = 2048, 1 << 14


def compute_fingerprint(checkpoint: Checkpoint) -> str:
    """Compute a digest of a model's weights by reading only a sample of the values.

    Args:
        checkpoint: Checkpoint of a model.

    Returns:
        The digest as a hexadecimal string. The digest covers the names, dtypes and shapes of all
        tensors. It also covers up to 16,384 values of each sampled tensor. At most 2048 tensors are
        sampled.

    Raises:
        CheckpointError: If a file is damaged.
    """
    digest = hashlib.blake2b(digest_size=16)
    tensors = checkpoint.tensors
    stride = -(-len(tensors) // _MAX_SAMPLED_TENSORS) or 1
    for number, name in enumerate(sorted(tensors)):
        tensor = tensors[name]
        # Names from a damaged file may contain lone surrogates.
        header = f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode("utf-8", "surrogatepass")
        digest.update(header)
        if number % stride == 0:
            digest.update(tensor.read(_build_sample_index(tensor)).tobytes())
    return digest.hexdigest()


def _build_sample_index(tensor: Tensor) -> tuple[slice, ...]:
    """Build the index that selects a sample from the middle of a tensor.

    The sample consists of up to `_MAX_SAMPLED_ELEMENTS` consecutive elements of the last dimension.
    It is empty if the tensor is empty.
    """
    sizes = list(tensor.shape)
    index = [slice(size // 2, size // 2 + 1) if size else slice(0, 0) for size in sizes]
    if sizes:
        start = max(0, sizes[-1] // 2 - _MAX_SAMPLED_ELEMENTS // 2)
        index[-1] = slice(start, min(start + _MAX_SAMPLED_ELEMENTS, sizes[-1]))
    return tuple(index)
