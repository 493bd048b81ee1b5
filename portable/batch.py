"""The batch type, the names of its additional columns, and host copies of columns."""

from __future__ import annotations

from typing import Any

import torch

Batch = dict[str, torch.Tensor]
"""Keyword arguments for ``model.forward`` plus the ``labels``: int64 tensors of shape ``[micro_batch,
seq_len]``. A batch with images also has the tensors of its images, of other shapes.

The labels are already shifted, so they align with the logits, and are -100 wherever there is no target. A
classifier's labels can also be float32. In this case, a missing label is NaN instead of -100.
"""
IGNORED_LABEL = -100
"""Label of positions that do not count in the loss."""
SOURCE_COLUMN = "source"
"""Name of the column that mixtures of data sources add: index of each row's source, int64 ``[batch]``."""
PART_POSITIONS_COLUMN = "part_positions"
"""Name of a column that context parallelism adds: position of each of this rank's tokens in its document,
int64 ``[batch, seq_len / num_parts]``.
"""
TEXT_TOKENS_COLUMN = "text_tokens"
"""Name of a column that context parallelism adds: number of tokens of the document that contains each of this
rank's tokens, int64 ``[batch, seq_len / num_parts]``.
"""
BLANK_PREFIX = "blank_"
"""Prefix of the columns of a blank image.

A batch without images has these columns if other batches of the run have images, so that the image tower of
the model runs in every forward pass.
"""

_HOST_COPY = "host_copy"


def attach_host_copy(column: torch.Tensor, host_copy: torch.Tensor) -> None:
    """Attach a host copy to a column, so that :func:`read_host_copy` does not sync with the device.

    Args:
        column: Column of a batch on the device.
        host_copy: The same column on the host.
    """
    setattr(column, _HOST_COPY, host_copy)


def read_host_copy(column: torch.Tensor) -> list[Any]:
    """Return the values of a column on the host. Syncs with the device if the column has no host copy."""
    values: list[Any] = getattr(column, _HOST_COPY, column).tolist()
    return values
