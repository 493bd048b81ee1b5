"""Initialize the embedding rows for ``data.added_tokens`` from the same distribution as transformers."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from portable.model.weight_sources import Index, ReadableTensor

_ROWS_PER_READ = 1 << 14  # number of rows per read
_COVARIANCE_SCALE = 1e-9  # factor by which transformers scales the covariance


class TableWithAddedRows:
    """Embedding table or output bias with added rows, drawn as in ``resize_token_embeddings``.

    The table is read lazily. The added rows are drawn from a normal distribution with the mean of
    the existing rows and 1e-9 times their covariance. If the covariance is not positive definite,
    or if the table is a bias, every added row is equal to the mean.

    Args:
        source: Existing table, ``[tokens, size]``, or bias, ``[tokens]``.
        num_rows: Number of rows, including the added rows.
        seed: Random seed.
    """

    def __init__(self, source: ReadableTensor, num_rows: int, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._num_source_rows = source.shape[0]
        self.shape: tuple[int, ...] = (num_rows, *source.shape[1:])

    @property
    def dtype(self) -> Any:
        """Dtype of the rows from the checkpoint, as written in the file, such as ``BF16``.

        None if the source tensor has no ``dtype`` attribute, or if this attribute is None.
        """
        return getattr(self._source, "dtype", None)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Read a slice of the table, which may contain existing and added rows.

        Args:
            index: One slice per dimension, with unit steps. None for the complete table.

        Returns:
            The elements, in the dtype of the existing rows, or in fp32 if all requested rows are added rows.
        """
        rows, *others = index or tuple(slice(0, size) for size in self.shape)
        start, stop, _ = rows.indices(self.shape[0])
        chunks = []
        if start < self._num_source_rows:
            chunks.append(self._source.read((slice(start, min(stop, self._num_source_rows)), *others)))
        if stop > self._num_source_rows:
            new_index = (slice(max(start - self._num_source_rows, 0), stop - self._num_source_rows), *others)
            added_rows = self._added_rows[new_index]
            chunks.append(added_rows.astype(chunks[0].dtype) if chunks else added_rows)
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    @cached_property
    def _added_rows(self) -> NDArray[np.float32]:
        """Values of the rows that are added to the existing table, fp32 ``[added rows, size]``.

        The first access reads the complete existing table to compute its statistics. The result is
        cached.
        """
        num_source_rows, total, square_sum = self._num_source_rows, None, None
        for start in range(0, num_source_rows, _ROWS_PER_READ):
            rows = slice(start, min(start + _ROWS_PER_READ, num_source_rows))
            chunk = self._source.read((rows, *(slice(0, size) for size in self.shape[1:]))).astype(np.float64)
            total = chunk.sum(axis=0) + (0 if total is None else total)
            if chunk.ndim == 2:
                square_sum = chunk.T @ chunk + (0 if square_sum is None else square_sum)
        assert total is not None
        mean = torch.as_tensor(total / num_source_rows, dtype=torch.float32)
        num_added = self.shape[0] - num_source_rows
        if square_sum is not None:
            covariance = torch.as_tensor(square_sum / num_source_rows) - torch.outer(
                mean.double(), mean.double()
            )
            factor, status = torch.linalg.cholesky_ex(_COVARIANCE_SCALE * covariance)
            if not int(status):
                draws = torch.Generator().manual_seed(self._seed)
                noise = torch.randn(num_added, len(mean), generator=draws, dtype=torch.float64)
                sampled_rows: NDArray[np.float32] = (mean + noise @ factor.T).float().numpy()
                return sampled_rows
        mean_rows: NDArray[np.float32] = mean.expand(num_added, *mean.shape).contiguous().numpy()
        return mean_rows
