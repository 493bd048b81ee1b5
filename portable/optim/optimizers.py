"""Optimizers by their config names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from portable.optim.local_shards import to_local
from portable.plugins import is_plugin_name
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from portable.config.sections import TrainConfig
    from portable.optim.adafactor import Adafactor
    from portable.optim.adamw_8bit import AdamW8bit
    from portable.optim.custom_optimizer import CustomOptimizer
    from portable.optim.muon import Muon
    from portable.optim.schedule import OneCycle


class EngineOptimizer(Protocol):
    """The interface that an engine needs, beyond that of torch's optimizers."""

    param_groups: list[dict[str, Any]]
    state: Any
    found_inf: Tensor | None
    """An fp32 scalar on the parameters' device. If it is 1, the step is a no-op."""

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of ``parameter`` before the first step, sharded."""

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class OptimizerGroup(NamedTuple):
    """A parameter group; groups are sorted by their fields.

    Attributes:
        pattern_number: 0, or the number of its pattern in ``train.parameter_groups``, from 1.
        is_undecayed: whether weight decay leaves it out.
        learning_rate: its highest; the schedule scales all rates alike.
        weight_decay: of its parameters.
        uses_muon: whether Muon updates them as matrices.
    """

    pattern_number: int
    is_undecayed: bool
    learning_rate: float
    weight_decay: float
    uses_muon: bool = False


def build_parameter_groups(
    parameters: Mapping[str, nn.Parameter], groups: Mapping[str, OptimizerGroup], learning_rate: float
) -> list[dict[str, Any]]:
    """The groups of an optimizer: by default two, with and without weight decay.

    Args:
        parameters: by name; those outside ``groups`` are left out.
        groups: see :func:`portable.model.parameter_groups.assign_parameter_groups`.
        learning_rate: the run's. A group with another one has it as ``initial_lr``, torch's name for the
            value that a schedule scales.
    """
    optimizer_groups: dict[OptimizerGroup, dict[str, Any]] = {}
    muon = any(group.uses_muon for group in groups.values())
    for group in sorted({groups[name] for name in parameters if name in groups}):
        optimizer_groups[group] = {"params": [], "weight_decay": group.weight_decay}
        if muon:
            optimizer_groups[group]["matrices"] = group.uses_muon
        if group.learning_rate != learning_rate:
            optimizer_groups[group] |= {"lr": group.learning_rate, "initial_lr": group.learning_rate}
    for name, parameter in parameters.items():
        if name in groups:
            optimizer_groups[groups[name]]["params"].append(parameter)
    return list(optimizer_groups.values())


def build_optimizer(
    settings: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    groups: Mapping[str, OptimizerGroup],
    embeddings: Collection[nn.Parameter] = (),
    compute_dtype: torch.dtype = torch.float32,
) -> FusedAdamW | FusedSGD | Adafactor | AdamW8bit | Muon | CustomOptimizer:
    """Build ``train.optimizer``, which also averages the weights if ``train.ema`` is set.

    A step is a no-op if the flag ``found_inf`` on the device is set. The fused optimizers take a step in one
    kernel launch.

    Args:
        settings: the train section.
        parameters: by name.
        groups: by the same names; see :func:`portable.model.parameter_groups.assign_parameter_groups`.
        embeddings: the parameters that keep 32-bit moments in an 8-bit optimizer.
        compute_dtype: the run's compute type; Muon's products are in fp32 or bf16.
    """
    optimizer_groups = build_parameter_groups(parameters, groups, settings.learning_rate)
    optimizer = _create_optimizer(settings, parameters, optimizer_groups, embeddings, compute_dtype)
    if settings.ema is not None:
        from portable.optim.weight_average import install_weight_average

        install_weight_average(optimizer, settings.ema)
    return optimizer


def _create_optimizer(
    settings: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    optimizer_groups: list[dict[str, Any]],
    embeddings: Collection[nn.Parameter],
    compute_dtype: torch.dtype,
) -> FusedAdamW | FusedSGD | Adafactor | AdamW8bit | Muon | CustomOptimizer:
    beta1, beta2 = settings.betas
    if is_plugin_name(settings.optimizer):
        from portable.optim.custom_optimizer import CustomOptimizer

        return CustomOptimizer(settings, parameters, optimizer_groups)
    if settings.optimizer == "adamw":
        return FusedAdamW(optimizer_groups, lr=settings.learning_rate, betas=(beta1, beta2), eps=settings.eps)
    if settings.optimizer == "adamw_8bit":
        from portable.optim.adamw_8bit import AdamW8bit

        return AdamW8bit(
            optimizer_groups,
            lr=settings.learning_rate,
            betas=(beta1, beta2),
            eps=settings.eps,
            full_precision_parameters=embeddings,
        )
    if settings.optimizer == "adafactor":
        from portable.optim.adafactor import ADAFACTOR_RULES, Adafactor

        return Adafactor(
            optimizer_groups, lr=settings.learning_rate, rule=ADAFACTOR_RULES[settings.adafactor_rule]
        )
    if settings.optimizer == "muon":
        return build_muon(settings, optimizer_groups, compute_dtype)
    assert settings.optimizer == "sgd", settings.optimizer
    return FusedSGD(optimizer_groups, lr=settings.learning_rate, momentum=beta1)


def build_muon(settings: TrainConfig, groups: list[dict[str, Any]], compute_dtype: torch.dtype) -> Muon:
    """Build Muon; the arguments are those of :func:`build_optimizer`."""
    from portable.optim.muon import Muon

    return Muon(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        momentum=settings.muon_momentum,
        rate_rule=settings.muon_rate,
        compute_dtype=torch.float32 if compute_dtype == torch.float32 else torch.bfloat16,
    )


def set_learning_rates(optimizer: Any, learning_rate: float, settings: TrainConfig) -> None:
    """Set this step's learning rate in all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = compute_group_learning_rate(group, learning_rate, settings)


def set_betas(optimizer: Any, cycle: OneCycle | None, step: int) -> None:
    """Set Adam's betas as ``cycle`` has them in ``step``, but for Muon's matrices."""
    betas = None if cycle is None else cycle.compute_betas(step)
    for group in optimizer.param_groups:
        if betas is not None and not group.get("matrices"):
            group["betas"] = betas


def compute_group_learning_rate(group: Mapping[str, Any], learning_rate: Any, settings: TrainConfig) -> Any:
    """The learning rate of a parameter group where the run's is ``learning_rate``, a number or a tensor."""
    highest = settings.learning_rate
    return learning_rate * (group.get("initial_lr", highest) / highest)


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)``."""

    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
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

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
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
                        self.state[parameter] = self.build_initial_state(parameter)
                buffers = [self.state[parameter]["momentum_buffer"] for parameter in trained]
            if trained:
                torch_internals.fused_sgd_(
                    [to_local(p) for p in trained],
                    [to_local(p.grad) for p in trained],
                    [to_local(buffer) for buffer in buffers],
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
