"""Batches, and the names of their columns."""

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
"""Column of a mixture's batch with the number of each row's source, int64 ``[batch]``."""
PART_POSITIONS_COLUMN = "part_positions"
"""Column with the positions of the tokens of a part of samples, int64 ``[batch, seq_len / parts]``."""
TEXT_TOKENS_COLUMN = "text_tokens"
"""Column with the length of the text of each token of a part of samples, with the same shape."""
