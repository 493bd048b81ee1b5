"""Helpers that accumulate evaluation totals on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def build_zero_totals(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Build totals that are all zero, for the first call of :func:`compute_new_totals`.

    Args:
        sums: Sums of a micro-batch, which determine the names, shapes and dtypes of the totals.

    Returns:
        Totals on the host, int64 or float64, keyed by name.
    """
    return {
        name: torch.zeros(value.shape, dtype=_get_accumulation_dtype(value)) for name, value in sums.items()
    }


def compute_new_totals(totals: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new totals: the totals of the previous micro-batches plus the sums of a micro-batch.

    Args:
        totals: Totals of the previous micro-batches, on the device. Empty for the first
            micro-batch. Not modified.
        sums: Sums of the micro-batch, on the device.

    Returns:
        New totals, keyed by name: int64 for integer sums, float64 for floating-point sums.
    """
    wide = {name: value.detach().to(_get_accumulation_dtype(value)) for name, value in sums.items()}
    return {name: totals[name] + value if name in totals else value for name, value in wide.items()}


def _get_accumulation_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype for accumulating a value: float64 if it is floating-point, otherwise int64."""
    return torch.float64 if value.is_floating_point() else torch.int64
