"""What a step takes that is traced and not run, on either backend of a TPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portable.adapters.adapter import training_model
from portable.adapters.settings import resolved
from portable.batch_plan import batch_plan
from portable.model import build as models
from portable.planner.activations import fake_batch
from portable.planner.passes import Request

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.backend import Backend, Batch
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig


class TracedStep(NamedTuple):
    """What a step takes."""

    config: RunConfig
    model_config: PretrainedConfig
    model: PreTrainedModel
    """On the meta device, with its adapter."""
    plan: BatchPlan
    batch: Batch
    """A micro-batch, on the CPU; no value of it means anything."""


def traced_step(config: RunConfig, backend: Backend, *, parts: int) -> TracedStep:
    """What a step of ``config`` takes on ``backend``.

    Args:
        parts: of a sequence, one of which is in the batch.

    Raises:
        UserError: if a run would refuse the config.
    """
    model_config = models.model_config(config.model)
    models.check_length(model_config, config)
    config = resolved(config)
    model = training_model(model_config, config)
    plan = batch_plan(config, backend)
    shown = config.replaced({"context_parallel_size": parts})
    # Not as on a CPU, which attends to each document by itself: here a mask keeps them apart.
    request = Request.of(shown, micro_batch=plan.micro_batch_size, compute="cast", on_gpu=True)
    return TracedStep(config, model_config, model, plan, fake_batch(model, request))
