"""Log the mean cross-entropy of each source of a data mixture in every step.

The share of each source in the labels of the step is also logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portable.batch import IGNORED_LABEL, SOURCE_COLUMN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from portable.batch import Batch

LOSS_PREFIX, SHARE_PREFIX = "loss/", "share/"
"""Prefixes of two logged values of a source: its mean cross-entropy, and its share of a step's labels."""


class LossBySource:
    """Computation of the mean cross-entropy and the share of labels per source of a data mixture.

    The object does not store sums. The caller adds them up over the micro-batches of a step.
    The column ``source`` of a batch contains the index of each sample's source. Evaluation
    batches do not have this column, so nothing is logged for them.

    Args:
        sources: Names of the sources.
        with_losses: Whether the log-probabilities of the labels are available. If not, only the
            number of labels is computed for each source.
    """

    def __init__(self, sources: Sequence[str], *, with_losses: bool) -> None:
        self._sources = tuple(sources)
        self._with_losses = with_losses

    def compute_sums(self, log_probs: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        """Compute the number of labels and the summed cross-entropy of each source.

        Args:
            log_probs: Log-probabilities of the labels, with the shape of the labels. None if this
                object was created with ``with_losses=False``.
            batch: Micro-batch on the device.

        Returns:
            Two scalar tensors per source: the number of labels under the key ``share/NAME``, and
            the summed cross-entropy under the key ``loss/NAME``, where ``NAME`` is the name of the
            source. With ``with_losses=False``, only the numbers of labels are returned. In
            evaluations, the result is empty.
        """
        if SOURCE_COLUMN not in batch:
            return {}
        labels = batch["labels"]
        rows = batch[SOURCE_COLUMN].view(-1, *(1,) * (labels.dim() - 1))
        sums: dict[str, Tensor] = {}
        for number, source in enumerate(self._sources):
            is_of_source = (labels != IGNORED_LABEL) & (rows == number)
            sums[SHARE_PREFIX + source] = is_of_source.sum()
            if self._with_losses:
                assert log_probs is not None
                sums[LOSS_PREFIX + source] = -torch.where(is_of_source, log_probs.detach(), 0.0).sum()
        return sums

    def compute_logged_values(self, sums: dict[str, float]) -> dict[str, float]:
        """Replace each source's sums over a step by its mean loss and its share of the labels.

        Args:
            sums: Values to log, keyed by name. They include the results of :meth:`compute_sums`,
                summed over a step. The sums of all sources may be divided by a common factor,
                because only ratios of the sums are used.

        Returns:
            Values to log, keyed by name. Values that do not belong to a source are returned
            unchanged. For a source without labels in the step, the share is 0 and no loss is
            returned.
        """
        metrics = dict(sums)
        counts = {source: metrics.pop(SHARE_PREFIX + source) for source in self._sources}
        losses = {source: metrics.pop(LOSS_PREFIX + source, 0.0) for source in self._sources}
        total = sum(counts.values())
        for source, count in counts.items():
            metrics[SHARE_PREFIX + source] = count / total if total else 0.0
            if self._with_losses and count > 0:
                metrics[LOSS_PREFIX + source] = losses[source] / count
        return metrics
