"""Optimizers by their config names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from portable.optim.adafactor import RULES, Adafactor
from portable.optim.adamw_8bit import AdamW8bit
from portable.optim.sharded import local

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from portable.config import TrainConfig


class Optimizer(Protocol):
    """The interface that an engine needs, beyond that of torch's optimizers."""

    param_groups: list[dict[str, Any]]
    state: Any
    found_inf: Tensor | None
    """An fp32 scalar on the parameters' device. If it is 1, the step is a no-op."""

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of ``parameter`` before the first step, sharded."""

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decaying(model: nn.Module) -> set[str]:
    """The names of the parameters with weight decay: all except norms and biases.

    As in the Trainer's ``get_decay_parameter_names``, the parameter's name or its module's class decides. The
    number of dims does not: a bias may be a table and a weight may be a vector.
    """
    names: set[str] = set()
    norms: list[str] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.LayerNorm):
            norms.append(f"{prefix}.")
        dotted = f"{prefix}." if prefix else ""
        if not dotted.startswith(tuple(norms)):
            names.update(dotted + name for name in module._parameters if not _spared(dotted + name))
    return names


def _spared(name: str) -> bool:
    return _SPARED.search(name.lower()) is not None


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float, decays: Collection[str]
) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay.

    Args:
        parameters: by name.
        weight_decay: of the first group.
        decays: the names of the first group; see :func:`decaying`.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if name in decays], "weight_decay": weight_decay},
        {"params": [p for name, p in trained.items() if name not in decays], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    settings: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    decays: Collection[str],
    embeddings: Collection[nn.Parameter] = (),
) -> FusedAdamW | FusedSGD | Adafactor | AdamW8bit:
    """Build ``train.optimizer``.

    A step is a no-op if the flag ``found_inf`` on the device is set. The fused optimizers take a step in one
    kernel launch.

    Args:
        settings: the train section.
        parameters: by name.
        decays: the names of parameters with weight decay; see :func:`decaying`.
        embeddings: the parameters that keep 32-bit moments in an 8-bit optimizer.
    """
    groups = parameter_groups(parameters, settings.weight_decay, decays)
    beta1, beta2 = settings.betas
    if settings.optimizer == "adamw":
        return FusedAdamW(groups, lr=settings.learning_rate, betas=(beta1, beta2), eps=settings.eps)
    if settings.optimizer == "adamw_8bit":
        return AdamW8bit(
            groups, lr=settings.learning_rate, betas=(beta1, beta2), eps=settings.eps, exact=embeddings
        )
    if settings.optimizer == "adafactor":
        return Adafactor(groups, lr=settings.learning_rate, rule=RULES[settings.adafactor_rule])
    assert settings.optimizer == "sgd", settings.optimizer
    return FusedSGD(groups, lr=settings.learning_rate, momentum=beta1)


def set_rates(optimizer: Any, learning_rate: float, betas: tuple[float, float] | None) -> None:
    """Set this step's learning rate in all parameter groups, and its betas if the schedule changes them."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        if betas is not None:
            group["betas"] = betas


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)``."""

    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Two moments, sharded like the parameter, and the step count on its device."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


class FusedSGD(torch.optim.Optimizer):
    """SGD with momentum, like ``torch.optim.SGD(fused=True)``, but also for sharded parameters.

    torch's fused kernel does not support DTensors. The update is elementwise, so it works on local shards.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """One moment, sharded like the parameter; none without momentum."""
        moving = any(group["momentum"] for group in self.param_groups)
        return {"momentum_buffer": torch.zeros_like(parameter)} if moving else {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            buffers: list[torch.Tensor] = []
            if group["momentum"]:
                for parameter in trained:
                    if not self.state[parameter]:
                        self.state[parameter] = self.initial_state(parameter)
                buffers = [self.state[parameter]["momentum_buffer"] for parameter in trained]
            if trained:
                torch._fused_sgd_(
                    [local(p) for p in trained],
                    [local(p.grad) for p in trained],
                    [local(buffer) for buffer in buffers],
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
