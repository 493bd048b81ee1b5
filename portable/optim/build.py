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
    """What an engine asks of an optimizer, beyond what torch's all offer."""

    param_groups: list[dict[str, Any]]
    state: Any
    found_inf: Tensor | None
    """An fp32 scalar on the parameters' device; where it is 1, a step changes nothing."""

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """What is kept of ``parameter`` before the first step, sharded as it will be."""

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decaying(model: nn.Module) -> set[str]:
    """The names of the parameters that weight decay is for: all but those of norms, and biases.

    What a parameter is, by the rule of the Trainer's ``get_decay_parameter_names``: its name tells, or the
    class of the module that it lies in. The number of its dims does not: there are tables of biases, and
    vectors that are weights.
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
    """Two groups: what decays, and what does not.

    Args:
        parameters: by name.
        weight_decay: of the first group.
        decays: the names of what decays; see :func:`decaying`.
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
    """The optimizer that ``train.optimizer`` names.

    All of them leave everything as it is when a device-side flag (``found_inf``) says that the gradients are
    not finite; the fused ones take the whole step in one launch.

    Args:
        settings: which, and how.
        parameters: by name.
        decays: the names of those that weight decay is for; see :func:`decaying`.
        embeddings: the parameters whose moments stay in 32 bits when those of others are kept in 8.
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
    """Set this step's learning rate in all parameter groups, and its betas where the schedule moves them."""
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
        """Two moments that lie as the parameter does, and its steps, counted where it lies."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


class FusedSGD(torch.optim.Optimizer):
    """SGD with momentum, as ``torch.optim.SGD(fused=True)``, also on sharded parameters.

    torch's fused kernel has no rule for DTensors. The update is elementwise, so each rank's shard can be
    taken as a plain tensor.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """One moment that lies as the parameter does, where there is momentum at all."""
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
