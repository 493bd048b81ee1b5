"""Samples of which each rank of a group takes a part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from portable.data.samples.base import Extended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.samples.base import Arrays, Samples

PART_POSITIONS = "part_positions"
"""A column: the positions of the tokens of a part, int64 ``[batch, seq_len / parts]``."""


class SharedSamples(Extended):
    """The ``part``-th of ``parts`` equal runs of tokens of each sample of ``plain``.

    ``input_ids`` and ``labels`` are int64 ``[batch, seq_len / parts]``. Labels are already those of the next
    token, so no part needs another one's. What tells documents apart, ``position_ids``, stays whole.
    """

    def __init__(self, plain: Samples, part: int, parts: int) -> None:
        super().__init__(plain)
        self.valid_tokens = None  # a part may have more labels than another
        self._part, self._parts = part, parts

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        whole = self.plain.arrays(places)
        ids = whole["input_ids"]
        positions = whole.get("position_ids", np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
        size = ids.shape[1] // self._parts
        own = slice(self._part * size, (self._part + 1) * size)
        cut = {"input_ids": ids, "labels": whole["labels"], PART_POSITIONS: positions}
        kept = {name: whole[name] for name in ("position_ids", "document_lengths") if name in whole}
        # Padding comes last, where causal attention does not see it: its mask is not needed.
        return kept | {name: np.ascontiguousarray(array[:, own]) for name, array in cut.items()}


def shared(samples: Samples, part: int, parts: int) -> Samples:
    """``samples``, or the part of each that this rank takes."""
    return samples if parts == 1 else SharedSamples(samples, part, parts)
