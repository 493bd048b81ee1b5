"""The training loss of a mixture, with the loss of each source beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.data.samples.mixture import SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from portable.backend import Batch
    from portable.model.training_loss import LossValue, Outputs

_IGNORED = -100
LOSS, SHARE = "loss/", "share/"
"""Begin the names of a source's mean cross-entropy in a step, and of its share of the step's labels."""


class LossBySource:
    """A loss, and the cross-entropy and the labels of each source, from the column ``source`` of a batch.

    Args:
        names: of the sources.
        loss: of the user's, or a built-in variant; None for cross-entropy. If it does without ``log_probs``,
            the losses of the sources are not known.
    """

    def __init__(self, names: Sequence[str], loss: Callable[..., LossValue] | None) -> None:
        self._names = tuple(names)
        self._loss = loss
        self.needs: Any = ("log_probs",) if loss is None else getattr(loss, "needs", "logits")
        for optional in ("weight", "before"):
            if hasattr(loss, optional):
                setattr(self, optional, getattr(loss, optional))

    def __call__(self, outputs: Outputs, batch: Batch) -> LossValue:
        labels = batch["labels"]
        valid = labels != _IGNORED
        numbers: dict[str, Tensor] = {}
        if self._loss is None:
            assert outputs.log_probs is not None
            total, weight = -torch.where(valid, outputs.log_probs, 0.0).sum(), valid.sum()
        else:
            value = self._loss(outputs, batch)
            if not isinstance(value, tuple) or len(value) not in (2, 3):
                return value  # refused with its name
            total, weight = value[:2]  # type: ignore[assignment]
            numbers = dict(value[2]) if len(value) == 3 else {}
        rows = batch.get(SOURCE)
        rows = labels.new_zeros(labels.shape[0]) if rows is None else rows
        rows = rows.view(-1, *(1,) * (labels.dim() - 1))
        for number, name in enumerate(self._names):
            own = valid & (rows == number)
            numbers[SHARE + name] = own.sum()
            if outputs.log_probs is not None:
                numbers[LOSS + name] = -torch.where(own, outputs.log_probs.detach(), 0.0).sum()
        return total, weight, numbers

    def named(self, found: dict[str, float]) -> dict[str, float]:
        """The numbers of a step: a source's loss is the mean over its own labels, if there are any."""
        out = dict(found)
        for name in self._names:
            share, loss = out[SHARE + name], out.pop(LOSS + name, None)
            if share > 0 and loss is not None:
                out[LOSS + name] = loss / share
        return out
