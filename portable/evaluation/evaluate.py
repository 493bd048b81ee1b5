"""One evaluation: all batches of all ranks, then one read from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.evaluation.metrics import LABELS, NOTHING, WEIGHTS
from portable.model.training_loss import count_valid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from portable.backend import Backend, Batch, Engine
    from portable.evaluation.metrics import MetricSet


def evaluate(
    backend: Backend, engine: Engine, batches: Iterable[Batch], measures: MetricSet = NOTHING
) -> dict[str, Any]:
    """The values of all metrics over the batches of all ranks, ``loss`` (mean over valid labels) among them.

    All ranks call it, with equally many batches, and get the same values.
    """
    totals: dict[str, Tensor] = {}
    texts: dict[str, float] = {}
    valid, weight = 0, 0.0
    for batch in batches:
        valid += count_valid(batch["labels"])
        weight += engine.objective.weight(batch)
        placed = backend.place(batch)
        totals = engine.evaluate(placed, measures, totals)
        if measures.texts is not None:
            for name, value in measures.texts.sums(backend, engine, batch, placed).items():
                texts[name] = texts.get(name, 0.0) + value
    totals |= {
        name: torch.tensor(value, dtype=torch.float64, device=backend.device) for name, value in texts.items()
    }
    on_device = {LABELS: backend.total(valid), WEIGHTS: backend.total(weight)} | {
        name: backend.sum(total) for name, total in totals.items()
    }
    flat = torch.tensor(backend.read(list(on_device.values())), dtype=torch.float64)
    parts = flat.split([total.numel() for total in on_device.values()])
    return measures.values(
        {
            name: part.reshape(total.shape)
            for (name, total), part in zip(on_device.items(), parts, strict=True)
        }
    )
