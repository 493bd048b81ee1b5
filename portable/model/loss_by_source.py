"""The cross-entropy and the labels of each source of a mixture, beside its training loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portable.data.samples.base import SOURCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from portable.backend import Batch
    from portable.model.training_loss import Outputs

_IGNORED = -100
LOSS, SHARE = "loss/", "share/"
"""Begin the names of a source's mean cross-entropy in a step, and of its share of the step's labels."""


class BySource:
    """Sums of each source, from the column ``source`` of a batch. Those of evaluations have none.

    Args:
        sources: their names.
        losses: whether there are log-probabilities; without them the losses of the sources are not known.
    """

    def __init__(self, sources: Sequence[str], *, losses: bool) -> None:
        self._sources = tuple(sources)
        self._losses = losses
        kinds = (SHARE, LOSS) if losses else (SHARE,)
        self.names = tuple(kind + source for source in self._sources for kind in kinds)

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """The number of labels and the summed cross-entropy of each source, by name."""
        if SOURCE not in batch:
            return {}
        labels = batch["labels"]
        rows = batch[SOURCE].view(-1, *(1,) * (labels.dim() - 1))
        numbers: dict[str, Tensor] = {}
        for number, source in enumerate(self._sources):
            own = (labels != _IGNORED) & (rows == number)
            numbers[SHARE + source] = own.sum()
            if self._losses:
                assert outputs.log_probs is not None
                numbers[LOSS + source] = -torch.where(own, outputs.log_probs.detach(), 0.0).sum()
        return numbers

    def named(self, found: dict[str, float]) -> dict[str, float]:
        """The numbers of a step: a source's loss is the mean over its own labels, if there are any."""
        out = {name: value for name, value in found.items() if name not in self.names}
        labels = sum(found[SHARE + source] for source in self._sources)
        for source in self._sources:
            own = found[SHARE + source]
            out[SHARE + source] = own / labels if labels else 0.0
            if self._losses and own > 0:
                out[LOSS + source] = found[LOSS + source] / own
        return out
