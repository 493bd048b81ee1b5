"""Which base model an adapter belongs to."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from converters import CheckpointError, open_checkpoint
from portable.errors import UserError
from portable.model.pretrained import snapshot

if TYPE_CHECKING:
    from converters import Tensor

_TENSORS, _ELEMENTS = 2048, 1 << 14
"""The most tensors that are looked into, and elements of each."""


def fingerprint_of(name_or_path: str) -> str:
    """A digest of a pretrained model's tensors: names, dtypes, shapes, and a few values of each.

    Reads kilobytes of each tensor, not the model. It does not depend on how the files are divided.

    Raises:
        UserError: if the model cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        tensors = open_checkpoint(snapshot(name_or_path)).tensors
        stride = -(-len(tensors) // _TENSORS) or 1
        for number, name in enumerate(sorted(tensors)):
            tensor = tensors[name]
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            if number % stride == 0:
                digest.update(tensor.read(_some(tensor)).tobytes())
    except CheckpointError as error:
        raise UserError(f"model.name_or_path: {error}") from error
    return digest.hexdigest()


def _some(tensor: Tensor) -> tuple[slice, ...]:
    """An index of a few elements in the middle of the tensor, in a row where it is long enough."""
    sizes = list(tensor.shape)
    index = [slice(size // 2, size // 2 + 1) if size else slice(0, 0) for size in sizes]
    if sizes:
        start = max(0, sizes[-1] // 2 - _ELEMENTS // 2)
        index[-1] = slice(start, min(start + _ELEMENTS, sizes[-1]))
    return tuple(index)
