"""The optimizer under ZeRO: torch's fused ones, or DeepSpeed's for the CPU where its JSON asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError, one_line, require
from portable.optim.build import build_optimizer, decaying, parameter_groups
from portable.terminal import native_stdout_closed

if TYPE_CHECKING:
    from torch import nn

    from gpu.zero.config.document import Document
    from portable.config import RunConfig

_KEY = "zero_force_ds_cpu_optimizer"


def check(config: RunConfig, document: Document | None) -> None:
    """Build DeepSpeed's CPU optimizer where it will be wanted: minutes, the first time on a machine.

    Raises:
        UserError: if it cannot be built, or DeepSpeed has none of this kind.
    """
    if document is None:
        return
    tested = document.get("zero_allow_untested_optimizer") is not False or config.train.optimizer == "adamw"
    require(
        tested,
        f"{document.name}: zero_allow_untested_optimizer false, and DeepSpeed has not tested "
        f"{config.train.optimizer} with ZeRO; use adamw, or set it to true",
    )
    if not _forced(config, document):
        return
    require(
        config.train.optimizer == "adamw",
        f"{document.name}: {_KEY} true, and DeepSpeed's optimizer for the CPU is AdamW, not "
        f"{config.train.optimizer}; set it to false",
    )
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        with native_stdout_closed():
            CPUAdamBuilder().load()
    except Exception as error:
        raise UserError(
            f"{document.name}: {_KEY} true, and DeepSpeed's cpu_adam cannot be built here "
            f"({one_line(error)}); install a C++ compiler and ninja, or set it to false"
        ) from error


def build(config: RunConfig, document: Document | None, model: nn.Module) -> Any:
    """The optimizer of ``model``, whose parameters may be cut up already."""
    parameters = dict(model.named_parameters())
    if not _forced(config, document):
        return build_optimizer(config.train, parameters, decaying(model))
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    train = config.train
    groups = parameter_groups(parameters, train.weight_decay, decaying(model))
    return DeepSpeedCPUAdam(groups, lr=train.learning_rate, betas=train.betas, eps=train.eps)


def catch_up(optimizer: Any, steps: int) -> None:
    """Bring an optimizer that was just filled to where it stood after ``steps`` updates.

    DeepSpeed's for the CPU keeps powers of its betas outside the state, and multiplies them on from step to
    step; computed anew for a later step they are rounded otherwise. So the steps are gone through with
    nothing in them, at a few microseconds each.
    """
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    group, nothing = optimizer.param_groups[0], [torch.zeros(1) for _ in range(4)]
    betas, eps, correct = group["betas"], group["eps"], group["bias_correction"]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *betas, eps, 0.0, correct, *nothing)


def _forced(config: RunConfig, document: Document | None) -> bool:
    return document is not None and document.get(_KEY) is True and config.memory.offload_optimizer != "none"
