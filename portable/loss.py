"""The loss of every task: cross-entropy summed over the positions that have a label."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor, nn

    from portable.backend import Batch
    from portable.chunked_loss import ChunkedHead

IGNORED = -100


def token_loss(model: nn.Module, batch: Batch, head: ChunkedHead | None = None) -> Tensor:
    """Run ``model`` on a micro-batch, without holding all of its logits where ``head`` saves them.

    The labels are aligned with the logits: ``labels[b, t]`` is what ``logits[b, t]`` should predict (for
    classification, ``labels[b]`` and ``logits[b]``), and :data:`IGNORED` where nothing is to be predicted.
    A sum, not a mean: dividing by the valid tokens of the *global* batch is what makes the loss exact under
    accumulation, padding and any world size.

    Returns:
        the summed loss, an fp32 scalar on the device.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    labels = batch["labels"]
    if head is not None and head.pays(labels):
        return head.token_loss(model, inputs, labels)
    logits = model(**inputs).logits
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def count_valid(labels: Tensor) -> int:
    """Positions that have a label; ``labels`` are on the host."""
    return int(torch.count_nonzero(labels != IGNORED))
