"""What a step takes that is traced and not run, on either backend of a TPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.adapters.assemble import resolve_and_build_model
from portable.batch_plan import compute_batch_plan_of_rank
from portable.errors import UserError
from portable.model.training_loss import STATISTICS, Outputs, TrainingLoss, build_training_loss
from portable.planner.activations import build_fake_batch
from portable.planner.pass_cost import PassRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from portable.backend import Backend
    from portable.batch import Batch
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig


class StepInputs(NamedTuple):
    """What a step takes."""

    config: RunConfig
    model: PreTrainedModel
    """On the meta device, with its adapter."""
    plan: BatchPlan
    batch: Batch
    """A micro-batch, on the CPU; no value of it means anything."""


def build_step_inputs(config: RunConfig, backend: Backend, *, sequence_parts: int) -> StepInputs:
    """What a step of ``config`` takes on ``backend``.

    Args:
        sequence_parts: of a sequence, one of which is in the batch.

    Raises:
        UserError: if a run would refuse the config.
    """
    config, model, _ = resolve_and_build_model(config)
    plan = compute_batch_plan_of_rank(config, backend)
    part_config = config.replaced({"context_parallel_size": sequence_parts})
    # Not as on a CPU, which attends to each document by itself: here a mask keeps them apart.
    request = PassRequest.from_config(
        part_config, micro_batch=plan.micro_batch_size, compute="cast", on_gpu=True
    )
    batch = build_fake_batch(model, request)
    if config.data.sequences_per_sample > 1:
        batch = {
            name: rows.unflatten(0, (-1, config.data.sequences_per_sample)) for name, rows in batch.items()
        }
    loss = build_training_loss(config)
    if loss is not None and loss.once is not None:
        batch |= _build_precomputed_zeros(loss, batch)
    return StepInputs(config, model, plan, batch)


def _build_precomputed_zeros(loss: TrainingLoss, batch: Batch) -> Mapping[str, torch.Tensor]:
    """Zeros, shaped as what ``loss`` computes of each sample before a run."""
    shapes = {name: rows.to("meta") for name, rows in batch.items()}
    value = torch.zeros(shapes["labels"].shape, device="meta")

    def build_outputs(*_: Any, **__: Any) -> Outputs:
        return Outputs(**dict.fromkeys(STATISTICS, value))

    try:
        values = loss.once(build_outputs, shapes)  # type: ignore[misc]
    except Exception as error:  # code of the user, which may read values or need logits
        raise UserError(
            f"--compile: {loss.key}: the values that it computes before the training are unknown here; leave "
            "out --compile"
        ) from error
    return {name: torch.zeros(rows.shape, dtype=rows.dtype) for name, rows in values.items()}
