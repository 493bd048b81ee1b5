"""Non-finite updates are masked and counted on the device, without a host sync.

An engine has an fp32 tensor of counters ``[5]`` on its device, which is exact up to 16 million updates per
launch, and counts every update with device operations. The loop reads the counters when it logs and before it
saves. A *streak* is a sequence of skipped updates. If it reaches the policy's limit, the engine makes no
further update and the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

MAX_STREAK = 10
"""Streak at which ``train.on_non_finite: skip`` ends the run: the cause is then not a single bad sample."""

INITIAL_COUNTERS = (0.0, 0.0, 0.0, -1.0, 0.0)
"""Updates; skipped updates; length of the current streak; first update of the latest streak (from 0), or -1;
whether its loss (1) or only its gradients (0) were not finite."""


@dataclass(frozen=True)
class UpdateHealth:
    """The counters since the start of this launch.

    Attributes:
        skipped_updates: updates skipped because the loss or gradient norm was not finite.
        first_bad_update: the first update of the latest streak, from 0; None without a streak.
        bad_loss: whether that update's loss was not finite, rather than only its gradients.
        halted: the length of the streak if it reached the limit, else 0.
    """

    skipped_updates: int
    first_bad_update: int | None
    bad_loss: bool = False
    halted: int = 0

    @classmethod
    def from_counters(cls, counters: Sequence[float], limit: int) -> UpdateHealth:
        """Convert counters that were copied to the host."""
        _, skipped, streak, start, loss = counters
        first = int(start) if start >= 0 else None
        return cls(int(skipped), first, bad_loss=loss > 0, halted=limit if streak >= limit else 0)


def get_max_streak(on_non_finite: str) -> int:
    """The streak at which ``train.on_non_finite`` ends the run."""
    return 1 if on_non_finite == "stop" else MAX_STREAK


class CountedUpdate(NamedTuple):
    """Result of :func:`count_update_and_decide_skip`.

    Attributes:
        counters: Counters after the update, fp32 ``[5]``.
        skip: Whether to skip the update, a boolean scalar on the device.
    """

    counters: Tensor
    skip: Tensor


def count_update_and_decide_skip(
    counters: Tensor, *, is_non_finite: Tensor, loss: Tensor, max_streak: int
) -> CountedUpdate:
    """Count an update.

    Args:
        counters: before the update.
        is_non_finite: whether the update is not finite, a boolean scalar on the device, equal on all ranks.
        loss: of the step.
        max_streak: from :func:`get_max_streak`.

    Returns:
        the new counters, and whether to skip the update, a boolean scalar.
    """
    updates, skipped, streak, start, loss_is_bad = counters.unbind()
    skip = is_non_finite | (streak >= max_streak)
    begins = skip & (streak == 0)
    start = torch.where(begins, updates, start)
    loss_is_bad = torch.where(begins, (~torch.isfinite(loss)).float(), loss_is_bad)
    streak = torch.where(skip, streak + 1, 0.0)
    return CountedUpdate(torch.stack([updates + 1, skipped + skip.float(), streak, start, loss_is_bad]), skip)


@torch.no_grad()
def find_nonfinite_names(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors with a value that is not finite, each once.

    Triggers one host-device sync for each device.

    Args:
        tensors: Names and local tensors. Integers and scalars, such as step counts, are ignored.
    """
    names: dict[torch.device, list[str]] = {}
    maxima: dict[torch.device, list[Tensor]] = {}
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.dim() and tensor.numel():
            names.setdefault(tensor.device, []).append(name)
            # The maximum norm propagates NaN and, unlike isfinite, needs no memory for a mask.
            maxima.setdefault(tensor.device, []).append(torch.linalg.vector_norm(tensor, torch.inf).float())
    nonfinite: dict[str, None] = {}
    for device, norms in maxima.items():
        finite = torch.isfinite(torch.stack(norms)).tolist()
        nonfinite |= {name: None for name, ok in zip(names[device], finite, strict=True) if not ok}
    return list(nonfinite)
