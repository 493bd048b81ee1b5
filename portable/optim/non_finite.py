"""Updates that must not be made, counted on the device: a loss or gradient that is not finite runs away with
no one, and nobody waits for the device to know.

An engine keeps an *account*, fp32 ``[5]`` on its device (so that whole numbers are exact up to 16 million
updates a leg), and enters every update into it with operations alone. The loop reads it when it logs and
before it saves. The updates left out one after another are a *streak*; one that is as long as the policy
lets it get ends the run, and no update is made after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MOST_IN_A_ROW = 10
"""Updates that ``train.on_non_finite: skip`` leaves out one after another before it ends the run: by then it
is not one sample any more."""

NEW_ACCOUNT = (0.0, 0.0, 0.0, -1.0, 0.0)
"""Updates; of these left out; the length of the streak that they end in; the update (from 0) that the latest
streak began with, or -1; whether it began with the loss (1) or only the gradients (0)."""


@dataclass(frozen=True)
class Health:
    """What the device counted since the start of the leg.

    Attributes:
        skipped_updates: left out because loss or gradient norm was not finite.
        first_bad_update: with which the latest streak of these began, counted from 0; None without any.
        bad_loss: whether that one's loss was not finite, and not only its gradients.
        halted: the length of the streak, where it is all that the policy allows and nothing is updated any
            more; else 0.
    """

    skipped_updates: int
    first_bad_update: int | None
    bad_loss: bool = False
    halted: int = 0

    @classmethod
    def of(cls, account: Sequence[float], limit: int) -> Health:
        """What an account says that has been brought to the host."""
        _, skipped, streak, start, loss = account
        first = int(start) if start >= 0 else None
        return cls(int(skipped), first, bad_loss=loss > 0, halted=limit if streak >= limit else 0)


def allowed_in_a_row(on_non_finite: str) -> int:
    """How many updates ``train.on_non_finite`` lets be left out one after another; with that many it ends."""
    return 1 if on_non_finite == "stop" else MOST_IN_A_ROW


def entered(account: Tensor, *, bad: Tensor, loss: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Enter an update into ``account``.

    Args:
        account: as it was before.
        bad: whether the update must not be made, a boolean scalar on the device, the same on all ranks.
        loss: of its step.
        limit: from :func:`allowed_in_a_row`.

    Returns:
        the new account, and whether the update is left out, a boolean scalar.
    """
    updates, skipped, streak, start, kind = account.unbind()
    left_out = bad | (streak >= limit)
    begins = left_out & (streak == 0)
    start = torch.where(begins, updates, start)
    kind = torch.where(begins, (~torch.isfinite(loss)).float(), kind)
    streak = torch.where(left_out, streak + 1, 0.0)
    return torch.stack([updates + 1, skipped + left_out.float(), streak, start, kind]), left_out
