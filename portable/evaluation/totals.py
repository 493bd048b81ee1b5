"""Totals of an evaluation. An engine adds them up on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def build_zero_totals(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros on the host for :func:`compute_new_totals`, with the shapes of ``sums``."""
    return {
        name: torch.zeros(value.shape, dtype=_get_accumulation_dtype(value)) for name, value in sums.items()
    }


def compute_new_totals(totals: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the sums of a micro-batch to the totals, without changing either.

    Args:
        totals: Totals of the previous micro-batches, on the device. Empty before the first.
        sums: Sums of a micro-batch, on the device.

    Returns:
        New totals by name: int64 for sums of integers, float64 for sums of floats.
    """
    wide = {name: value.detach().to(_get_accumulation_dtype(value)) for name, value in sums.items()}
    return {name: totals[name] + value if name in totals else value for name, value in wide.items()}


def _get_accumulation_dtype(value: Tensor) -> torch.dtype:
    return torch.float64 if value.is_floating_point() else torch.int64
