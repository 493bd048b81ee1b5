"""Batches, and the names of their additional columns."""

from __future__ import annotations

from typing import Any

import torch

Batch = dict[str, torch.Tensor]
"""Keyword arguments for ``model.forward`` plus the ``labels``: int64 tensors of shape ``[micro_batch,
seq_len]``.

The labels are already shifted, so they align with the logits, and are -100 wherever there is no target. A
classifier's labels can also be float32, with NaN instead of -100.
"""
IGNORED_LABEL = -100
"""Label of positions that do not count in the loss."""
SOURCE_COLUMN = "source"
"""Column in the batches of a mixture: index of each row's source, int64 ``[batch]``."""
PART_POSITIONS_COLUMN = "part_positions"
"""Column under context parallelism: positions of this rank's tokens, int64 ``[batch, seq_len / parts]``."""
TEXT_TOKENS_COLUMN = "text_tokens"
"""Column under context parallelism: length of the text that contains each token, of the same shape."""

_HOST_COPY = "host_copy"


def attach_host_copy(column: torch.Tensor, host_copy: torch.Tensor) -> None:
    """Keep the values of a column on the host, so that :func:`read_host_copy` does not sync with the device.

    Args:
        column: Column of a batch on the device.
        host_copy: The same column on the host.
    """
    setattr(column, _HOST_COPY, host_copy)


def read_host_copy(column: torch.Tensor) -> list[Any]:
    """Read the values of a column on the host. Syncs with the device if the column has no host copy."""
    values: list[Any] = getattr(column, _HOST_COPY, column).tolist()
    return values
