"""Detect non-finite updates, which are skipped and counted on the device without a host sync.

An engine has a tensor of counters on its device, fp32 ``[5]``, which is exact for up to 16 million
updates per launch. The engine counts every update with device operations. The training loop reads
the counters when it logs and before it saves. A *streak* is a sequence of consecutive skipped
updates. When it reaches the limit, the engine skips all further updates, and the training loop ends
the run as soon as it reads the counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

MAX_STREAK = 10
"""Number of consecutive non-finite updates that end a run with ``train.on_non_finite: skip``. A single bad
sample cannot cause this many."""

INITIAL_COUNTERS = (0.0, 0.0, 0.0, -1.0, 0.0)
"""Initial values of the five counters. In order, these are the number of updates, the number of skipped
updates, the length of the current streak, the first update of the latest streak (counted from 0, or -1 if
there is none), and whether the loss (1) or only the gradients (0) of that update were not finite.
"""


@dataclass(frozen=True)
class UpdateHealth:
    """Counters of non-finite updates since the start of this launch, copied to the host.

    A streak is a sequence of consecutive skipped updates.

    Attributes:
        skipped_updates: Number of updates that were skipped because the loss or the gradient norm
            was not finite.
        first_bad_update: Zero-based index of the first update in the latest streak. None if there
            was no streak.
        bad_loss: Whether the loss of update ``first_bad_update`` was not finite. False if only its
            gradients were not finite, or if there was no streak.
        halted: 0 if the run can continue. If the run must end, because the current streak is too
            long, this is the limit that the streak has reached. See :func:`get_max_streak`.
    """

    skipped_updates: int
    first_bad_update: int | None
    bad_loss: bool = False
    halted: int = 0

    @classmethod
    def from_counters(cls, counters: Sequence[float], limit: int) -> UpdateHealth:
        """Create the object from counters that were copied to the host.

        Args:
            counters: The five counters. See :data:`INITIAL_COUNTERS`.
            limit: Number of consecutive skipped updates that ends the run, from
                :func:`get_max_streak`.
        """
        _, skipped, streak, start, loss = counters
        first = int(start) if start >= 0 else None
        return cls(int(skipped), first, bad_loss=loss > 0, halted=limit if streak >= limit else 0)


def get_max_streak(on_non_finite: str) -> int:
    """Return the number of consecutive non-finite updates that ends the run: 1 or :data:`MAX_STREAK`.

    Args:
        on_non_finite: Value of ``train.on_non_finite``, either ``stop`` or ``skip``.
    """
    return 1 if on_non_finite == "stop" else MAX_STREAK


def get_streak(counters: Tensor) -> Tensor:
    """Return the length of the current streak: the number of consecutive skipped updates.

    Args:
        counters: Counters on the device, fp32 ``[5]``. See :data:`INITIAL_COUNTERS`.

    Returns:
        A scalar on the device. 0 if the latest update was not skipped.
    """
    return counters[2]


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
    """Count an update, and decide whether to skip it.

    An update is skipped if it is not finite. Once ``max_streak`` consecutive updates have been
    skipped, all further updates are also skipped. Engines call this function before each update. It
    does not trigger a host-device sync.

    Args:
        counters: Counters before the update, fp32 ``[5]``.
        is_non_finite: Whether the update is not finite, a boolean scalar on the device. It must be
            equal on all ranks.
        loss: Loss of the step, a scalar on the device.
        max_streak: Result of :func:`get_max_streak`.

    Returns:
        New counters, and whether to skip the update.
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
    """Return the names of the tensors that contain NaN or infinity.

    The names are unique. They are grouped by device, and within a device in the order of
    ``tensors``. Triggers one host-device sync per device.

    Args:
        tensors: Names and local tensors. Integers, empty tensors and scalars, such as step
            counts, are ignored.
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
