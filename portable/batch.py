"""Batches, and the names of their additional columns."""

from __future__ import annotations

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
