"""Rows for tokens that were added to a vocabulary, with the values that transformers gives them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from portable.model.weight_sources import Index, ReadableTensor

_ROWS = 1 << 14  # read at a time
_SPREAD = 1e-9  # of the covariance, as in transformers


class GrownTensor:
    """A table with further rows: drawn around the mean of its own, as ``resize_token_embeddings`` does.

    Args:
        source: the table, ``[tokens, size]``, or a bias, ``[tokens]``.
        rows: how many it has in the end.
        seed: of the draws.
    """

    def __init__(self, source: ReadableTensor, rows: int, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._old = source.shape[0]
        self.shape: tuple[int, ...] = (rows, *source.shape[1:])

    @property
    def dtype(self) -> Any:
        """That of the table."""
        return getattr(self._source, "dtype", None)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """See :class:`portable.model.weight_sources.ReadableTensor`."""
        first, *others = index or tuple(slice(0, size) for size in self.shape)
        start, stop, _ = first.indices(self.shape[0])
        parts = []
        if start < self._old:
            parts.append(self._source.read((slice(start, min(stop, self._old)), *others)))
        if stop > self._old:
            new_index = (slice(max(start - self._old, 0), stop - self._old), *others)
            new = self._new_rows[new_index]
            parts.append(new.astype(parts[0].dtype) if parts else new)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @cached_property
    def _new_rows(self) -> NDArray[np.float32]:
        count, total, square = self._old, None, None
        for start in range(0, count, _ROWS):
            rows = slice(start, min(start + _ROWS, count))
            part = self._source.read((rows, *(slice(0, size) for size in self.shape[1:]))).astype(np.float64)
            total = part.sum(axis=0) + (0 if total is None else total)
            if part.ndim == 2:
                square = part.T @ part + (0 if square is None else square)
        assert total is not None
        mean = torch.as_tensor(total / count, dtype=torch.float32)
        wanted = self.shape[0] - count
        if square is not None:
            centred = torch.as_tensor(square / count) - torch.outer(mean.double(), mean.double())
            factor, failed = torch.linalg.cholesky_ex(_SPREAD * centred)
            if not int(failed):
                draws = torch.Generator().manual_seed(self._seed)
                noise = torch.randn(wanted, len(mean), generator=draws, dtype=torch.float64)
                drawn: NDArray[np.float32] = (mean + noise @ factor.T).float().numpy()
                return drawn
        same: NDArray[np.float32] = mean.expand(wanted, *mean.shape).contiguous().numpy()
        return same
