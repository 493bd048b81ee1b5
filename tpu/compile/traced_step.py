"""Build the inputs for tracing or simulating a training step, for both TPU backends."""

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
    """Inputs of a training step."""

    config: RunConfig
    """Config of the run, resolved with the files on this machine."""
    model: PreTrainedModel
    """The transformers model with its adapter, on the meta device."""
    plan: BatchPlan
    """Batch sizes of this rank."""
    batch: Batch
    """Micro-batch on the CPU, with meaningless values."""


def build_step_inputs(config: RunConfig, backend: Backend, *, sequence_parts: int) -> StepInputs:
    """Build the inputs for a training step of a run.

    The batch also contains zeros for the tensors that a custom loss computes once before training.

    Args:
        config: Config of the run.
        backend: Backend of the run.
        sequence_parts: Number of parts that each sequence is split into. The batch contains one
            part.

    Raises:
        UserError: If the config is not supported, or if the loss cannot be traced.
    """
    config, model, _ = resolve_and_build_model(config)
    plan = compute_batch_plan_of_rank(config, backend)
    part_config = config.replaced({"context_parallel_size": sequence_parts})
    # Build the batch for a GPU, because a CPU attends to each document separately, and a TPU uses a mask
    # instead.
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
    """Build zeros as placeholders for the tensors that a loss computes once before training.

    Args:
        loss: Custom loss that defines a function ``once``, which is called on the meta device.
        batch: Micro-batch that determines the shapes.

    Returns:
        Tensors with the names, shapes and dtypes of the result of ``once``.

    Raises:
        UserError: If ``once`` does not run on the meta device.
    """
    shapes = {name: rows.to("meta") for name, rows in batch.items()}
    value = torch.zeros(shapes["labels"].shape, device="meta")

    def build_outputs(*_: Any, **__: Any) -> Outputs:
        return Outputs(**dict.fromkeys(STATISTICS, value))

    try:
        values = loss.once(build_outputs, shapes)  # type: ignore[misc]
    except Exception as error:  # custom code may read tensor values or require logits
        raise UserError(
            f"--compile: {loss.key}: the values that the loss computes before training are not available; "
            "remove --compile"
        ) from error
    return {name: torch.zeros(rows.shape, dtype=rows.dtype) for name, rows in values.items()}
