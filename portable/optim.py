"""Optimizers by their config names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from portable.config import TrainConfig


def parameter_groups(
    parameters: Mapping[str, nn.Parameter],
    weight_decay: float,
    ndim: Callable[[nn.Parameter], int] = torch.Tensor.dim,
) -> list[dict[str, Any]]:
    """Two groups: matrices decay, vectors (biases and the scales of norms) do not.

    Args:
        parameters: by name.
        weight_decay: of the matrices.
        ndim: tells the dimensions of a parameter where it does not show them itself.
    """
    trained = [p for p in parameters.values() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if ndim(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if ndim(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    settings: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    ndim: Callable[[nn.Parameter], int] = torch.Tensor.dim,
) -> torch.optim.Optimizer:
    """The optimizer that ``train.optimizer`` names, in its fused form.

    The fused kernels take the whole step in one launch, and leave everything as it is when a device-side flag
    (``found_inf``) says that the gradients are not finite.
    """
    groups = parameter_groups(parameters, settings.weight_decay, ndim)
    beta1, beta2 = settings.betas
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(beta1, beta2), eps=settings.eps, fused=True
        )
    assert settings.optimizer == "sgd", settings.optimizer
    return FusedSGD(groups, lr=settings.learning_rate, momentum=beta1)


class FusedSGD(torch.optim.Optimizer):
    """SGD with momentum, as ``torch.optim.SGD(fused=True)``, also on sharded parameters.

    torch's fused kernel has no rule for DTensors. The update is elementwise, so each rank's shard can be
    taken as a plain tensor.
    """

    found_inf: torch.Tensor | None = None
    """An fp32 scalar on the device; where it is 1, a step changes nothing."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            buffers: list[torch.Tensor] = []
            if group["momentum"]:
                for parameter in trained:
                    if not self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                buffers = [self.state[parameter]["momentum_buffer"] for parameter in trained]
            if trained:
                torch._fused_sgd_(
                    [_local(p) for p in trained],
                    [_local(p.grad) for p in trained],
                    [_local(buffer) for buffer in buffers],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                    grad_scale=None,
                    found_inf=self.found_inf,
                )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
