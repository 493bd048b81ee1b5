"""Samples of which each rank of a group takes a part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from portable.data.samples.base import Extended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.samples.base import Arrays, Samples

WHOLE_POSITIONS = "whole_positions"
"""A column: ``position_ids`` of whole samples, int64 ``[batch, seq_len]``, if they tell documents apart."""


class SharedSamples(Extended):
    """The ``part``-th of ``parts`` equal runs of tokens of each sample of ``plain``.

    ``input_ids``, ``labels`` and ``position_ids`` are int64 ``[batch, seq_len / parts]``. Labels are already
    those of the next token, so no part needs another one's. What tells documents apart stays whole.
    """

    def __init__(self, plain: Samples, part: int, parts: int) -> None:
        super().__init__(plain)
        self.valid_tokens = None  # a part may have more labels than another
        self._part, self._parts = part, parts

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        whole = self.plain.arrays(places)
        ids, positions = whole["input_ids"], whole.get("position_ids")
        kept = {}
        if positions is None:
            positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        else:
            kept = {WHOLE_POSITIONS: positions, "document_lengths": whole["document_lengths"]}
        size = ids.shape[1] // self._parts
        own = slice(self._part * size, (self._part + 1) * size)
        cut = {"input_ids": ids, "labels": whole["labels"], "position_ids": positions}
        return {name: np.ascontiguousarray(array[:, own]) for name, array in cut.items()} | kept


def shared(samples: Samples, part: int, parts: int) -> Samples:
    """``samples``, or the part of each that this rank takes."""
    return samples if parts == 1 else SharedSamples(samples, part, parts)
