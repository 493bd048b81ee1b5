"""Batches of which each rank of a group takes a part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from portable.data.samples.base import Batch

PART_POSITIONS = "part_positions"
"""A column: the positions of the tokens of a part, int64 ``[batch, seq_len / parts]``."""


def part_of(whole: Batch, part: tuple[int, int]) -> Batch:
    """A part of the tokens of each sample of ``whole``: which, of how many of equal length.

    ``input_ids`` and ``labels`` are int64 ``[batch, seq_len / parts]``. Labels are already those of the next
    token, so no part needs another one's. What tells documents apart, ``position_ids``, stays whole.
    """
    which, parts = part
    if parts == 1:
        return whole
    ids = whole["input_ids"]
    positions = whole.get("position_ids", torch.arange(ids.shape[1]).expand(ids.shape))
    size = ids.shape[1] // parts
    cut = {"input_ids": ids, "labels": whole["labels"], PART_POSITIONS: positions}
    kept = {name: whole[name] for name in ("position_ids", "document_lengths") if name in whole}
    # Padding comes last, where causal attention does not see it: its mask is not needed.
    return kept | {name: values.narrow(1, which * size, size).contiguous() for name, values in cut.items()}
