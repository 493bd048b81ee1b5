"""Functions with which engines add up the sums of an evaluation's micro-batches on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def build_zero_totals(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Build totals that are 0, as initial totals for :func:`compute_new_totals`.

    Args:
        sums: Sums of a micro-batch, which determine the names, the shapes, and whether a total is an integer.

    Returns:
        Totals on the host, int64 or float64, keyed by name.
    """
    return {
        name: torch.zeros(value.shape, dtype=_get_accumulation_dtype(value)) for name, value in sums.items()
    }


def compute_new_totals(totals: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the totals after the sums of a micro-batch have been added. The arguments are not changed.

    Args:
        totals: Totals of the previous micro-batches, on the device. Empty for the first micro-batch.
        sums: Sums of a micro-batch, on the device.

    Returns:
        New totals, keyed by name: int64 for sums of integers, float64 for sums of floats.
    """
    wide = {name: value.detach().to(_get_accumulation_dtype(value)) for name, value in sums.items()}
    return {name: totals[name] + value if name in totals else value for name, value in wide.items()}


def _get_accumulation_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype of a total: float64 for floating-point sums, otherwise int64."""
    return torch.float64 if value.is_floating_point() else torch.int64
