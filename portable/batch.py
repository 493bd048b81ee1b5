"""Define the type of a batch and the names of its optional columns, and attach host copies.

A host copy is a copy in CPU memory of a column that is on the device. Its values can be read
without a host-device sync.
"""

from __future__ import annotations

from typing import Any

import torch

Batch = dict[str, torch.Tensor]
"""Dictionary of the keyword arguments of ``model.forward`` and the ``labels``: int64 tensors of shape
``[micro_batch, seq_len]``. A batch with images also contains the tensors of the images, which have other
shapes.

The labels are already shifted, so they align with the logits, and are -100 wherever there is no target. A
classifier's labels can also be float32. In this case, a missing label is NaN instead of -100.
"""
IGNORED_LABEL = -100
"""Label of positions that do not count in the loss."""
SOURCE_COLUMN = "source"
"""Name of the column that is added if the data is a mixture of sources. It contains the index of each row's
source, int64 ``[batch]``.
"""
PART_POSITIONS_COLUMN = "part_positions"
"""Name of a column that context parallelism adds. For each of this rank's tokens, it contains the position in
the token's document, int64 ``[batch, seq_len / num_parts]``.
"""
TEXT_TOKENS_COLUMN = "text_tokens"
"""Name of a column that context parallelism adds. For each of this rank's tokens, it contains the length of
the token's document in tokens, int64 ``[batch, seq_len / num_parts]``.
"""
BLANK_PREFIX = "blank_"
"""Prefix of the names of columns that contain a blank image.

A batch without images has these columns if other batches of the run have images, so that the image tower of
the model runs in every forward pass.
"""

_HOST_COPY = "host_copy"


def attach_host_copy(column: torch.Tensor, host_copy: torch.Tensor) -> None:
    """Attach a host copy to a column, so that :func:`read_host_copy` needs no device sync.

    The copy is an attribute of the tensor object ``column``. Tensors that are derived from
    ``column``, such as slices, do not have a host copy.

    Args:
        column: Column of a batch on the device.
        host_copy: The same column on the host.
    """
    setattr(column, _HOST_COPY, host_copy)


def read_host_copy(column: torch.Tensor) -> list[Any]:
    """Return the values of a column on the host. Syncs with the device if the column has no host copy."""
    values: list[Any] = getattr(column, _HOST_COPY, column).tolist()
    return values
