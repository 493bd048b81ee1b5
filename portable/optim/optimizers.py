"""Build the optimizer of a run, with its parameter groups and their learning rates."""

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
    from portable.optim.adamw_bf16 import AdamWBf16
    from portable.optim.custom_optimizer import CustomOptimizer
    from portable.optim.muon import Muon
    from portable.optim.schedule import OneCycle


class EngineOptimizer(Protocol):
    """Interface of the optimizers that engines use.

    It consists of the parts of ``torch.optim.Optimizer`` that engines need, and two additions: a
    method that returns the initial state of a parameter, and a flag that makes ``step()`` skip the
    update.
    """

    param_groups: list[dict[str, Any]]
    state: Any
    found_inf: Tensor | None
    """Flag on the device of the parameters, an fp32 scalar. If it is 1, the step does not change anything."""

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the initial state of ``parameter``, keyed by name.

        Moments are usually sharded like the parameter. Step counts are not sharded.
        """

    def step(self) -> None:
        """Update every parameter that has a gradient, unless ``found_inf`` is 1."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None or zero, as ``torch.optim.Optimizer.zero_grad`` does."""


class OptimizerGroup(NamedTuple):
    """Properties shared by all parameters of an optimizer group. Groups are sorted by these fields.

    Attributes:
        pattern_number: One-based position of the matching pattern in ``train.parameter_groups``. 0 if
            none matches.
        is_undecayed: Whether the parameters are excluded from weight decay.
        learning_rate: Peak learning rate. The schedule scales the rates of all groups by the same
            factor.
        weight_decay: Weight decay of the parameters.
        uses_muon: Whether Muon updates the parameters as matrices.
    """

    pattern_number: int
    is_undecayed: bool
    learning_rate: float
    weight_decay: float
    uses_muon: bool = False


def build_parameter_groups(
    parameters: Mapping[str, nn.Parameter], groups: Mapping[str, OptimizerGroup], learning_rate: float
) -> list[dict[str, Any]]:
    """Build the parameter groups of an optimizer, one for each distinct group in ``groups``.

    By default, there are two: one with and one without weight decay.

    Args:
        parameters: Parameters, keyed by name. Parameters that are not in ``groups`` are skipped.
        groups: Group of each parameter, keyed by parameter name. See
            :func:`portable.model.parameter_groups.assign_parameter_groups`.
        learning_rate: Learning rate of the run. If a group has a different rate, its keys ``lr``
            and ``initial_lr`` contain this rate. ``initial_lr`` is the peak from which
            :func:`set_learning_rates` computes ``lr``, and has the same name as in torch's
            schedules.

    Returns:
        Parameter groups in the format that torch's optimizers accept. If Muon updates any group in
        ``groups``, each parameter group has an additional bool ``matrices``. It is True for the
        parameter groups that Muon updates.
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
    seed: int = 0,
) -> FusedAdamW | FusedSGD | Adafactor | AdamW8bit | Muon | CustomOptimizer:
    """Build the optimizer that ``train.optimizer`` selects.

    If ``train.master_dtype`` is bf16, the result is an
    :class:`portable.optim.adamw_bf16.AdamWBf16`. If ``train.ema`` is set, the optimizer also
    averages the weights. The combination of both settings is not supported. The optimizer's
    attribute ``found_inf`` is a flag on the device. If the flag is 1, a step does not change
    anything.

    Args:
        settings: The ``train`` section.
        parameters: Parameters, keyed by name.
        groups: Group of each parameter, keyed by parameter name. See
            :func:`portable.model.parameter_groups.assign_parameter_groups`.
        embeddings: Parameters whose moments an 8-bit optimizer does not quantize.
        compute_dtype: Compute dtype of the run. If it is fp32, Muon's matrix products are also in
            fp32, otherwise in bf16.
        seed: Seed of the stochastic rounding, which is used if ``train.master_dtype`` is bf16.
    """
    optimizer_groups = build_parameter_groups(parameters, groups, settings.learning_rate)
    if settings.master_dtype == "bf16":
        return build_bf16_adamw(settings, parameters, optimizer_groups, embeddings, seed)
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
    """Create the optimizer that ``train.optimizer`` selects, without weight averaging.

    The momentum of ``sgd`` is the first value of ``train.betas``. See :func:`build_optimizer` for
    the arguments.
    """
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


def build_bf16_adamw(
    settings: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    groups: list[dict[str, Any]],
    embeddings: Collection[nn.Parameter],
    seed: int,
) -> AdamWBf16:
    """Build AdamW for bf16 weights from the ``train`` section.

    The moments are quantized to 8 bits if ``train.optimizer`` is ``adamw_8bit``. Otherwise, they
    are bf16.

    Args:
        settings: The ``train`` section.
        parameters: Parameters, keyed by name.
        groups: Result of :func:`build_parameter_groups`.
        embeddings: Parameters that keep bf16 moments if ``train.optimizer`` is ``adamw_8bit``.
        seed: Seed of the stochastic rounding.
    """
    from portable.optim.adamw_bf16 import AdamWBf16

    quantizes = settings.optimizer == "adamw_8bit"
    return AdamWBf16(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        names={parameter: name for name, parameter in parameters.items()},
        seed=seed,
        unquantized_parameters=embeddings if quantizes else list(parameters.values()),
    )


def build_muon(settings: TrainConfig, groups: list[dict[str, Any]], compute_dtype: torch.dtype) -> Muon:
    """Build Muon from the ``train`` section.

    Args:
        settings: The ``train`` section.
        groups: Result of :func:`build_parameter_groups`.
        compute_dtype: Compute dtype of the run. If it is fp32, Muon's matrix products are also in
            fp32, otherwise in bf16.
    """
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
    """Set the learning rate of every parameter group for a step.

    A group may have a different peak, ``initial_lr``. Its learning rate is the same fraction of
    this peak as ``learning_rate`` is of the peak of the schedule.

    Args:
        optimizer: Optimizer whose groups are updated.
        learning_rate: Learning rate of the schedule at this step.
        settings: The ``train`` section. Its ``learning_rate`` is the peak of the schedule.
    """
    for group in optimizer.param_groups:
        group["lr"] = compute_group_learning_rate(group, learning_rate, settings)


def set_betas(optimizer: Any, cycle: OneCycle | None, step: int) -> None:
    """Set Adam's betas for a step in all parameter groups, except in groups that Muon updates.

    Args:
        optimizer: Optimizer whose groups are updated.
        cycle: Schedule that changes the betas. None to leave them unchanged.
        step: Zero-based optimizer step.
    """
    betas = None if cycle is None else cycle.compute_betas(step)
    for group in optimizer.param_groups:
        if betas is not None and not group.get("matrices"):
            group["betas"] = betas


def compute_group_learning_rate(group: Mapping[str, Any], learning_rate: Any, settings: TrainConfig) -> Any:
    """Compute the learning rate of a parameter group at a step. The schedule scales all groups equally.

    Args:
        group: Parameter group. It has ``initial_lr`` if its rate differs from the rate of the run.
        learning_rate: Learning rate of the run at this step, a number or a tensor.
        settings: The ``train`` section.
    """
    highest = settings.learning_rate
    return learning_rate * (group.get("initial_lr", highest) / highest)


class FusedAdamW(torch.optim.AdamW):
    """Fused AdamW that implements :class:`EngineOptimizer`.

    Torch creates the state of a parameter in the first step. :meth:`build_initial_state` returns
    the same state earlier, for example to load a checkpoint into it, but does not store it in the
    optimizer.

    Args:
        groups: Parameter groups, as for ``torch.optim.AdamW``.
        lr: Learning rate of groups that do not set one.
        betas: Decay rates of the moments.
        eps: Term added to the denominator of an update.

    Attributes:
        found_inf: Flag on the device, set by the engine. If it is 1, the next step changes nothing.
            None if every step is applied.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the initial state of ``parameter``: two moments and a step count, all zero.

        The moments are sharded like the parameter, and the step count is on its device.
        """
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


class FusedSGD(torch.optim.Optimizer):
    """SGD with momentum like ``torch.optim.SGD(fused=True)``, but also for sharded parameters.

    The fused kernel of torch does not support DTensors. The update is elementwise, so it is applied to
    local shards.

    Args:
        groups: Parameter groups, as for ``torch.optim.SGD``.
        lr: Learning rate of groups that do not set one.
        momentum: Momentum. If 0, there are no momentum buffers.

    Attributes:
        found_inf: Flag on the device. If it is 1, a step does not change anything. None for no flag.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the initial state of ``parameter``, which is empty if the momentum is 0.

        Otherwise, the state is a momentum buffer, sharded like the parameter.
        """
        moving = any(group["momentum"] for group in self.param_groups)
        return {"momentum_buffer": torch.zeros_like(parameter)} if moving else {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters with torch's fused kernel.

        Parameters without a gradient are skipped. If ``found_inf`` is 1, the step changes neither
        parameters nor momentum buffers. The argument ``closure`` is ignored.
        """
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
