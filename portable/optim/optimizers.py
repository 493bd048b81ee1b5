"""Optimizers by their config names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from portable.errors import require
from portable.optim.adafactor import RULES, Adafactor
from portable.optim.adamw_8bit import AdamW8bit
from portable.optim.muon import Muon
from portable.optim.sharded import local
from portable.patterns import matching

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


def layer_matrices(model: nn.Module) -> set[str]:
    """The names of the matrices of the layers, which are in module lists, and of their experts' stacks.

    Not of embeddings, convolutions, norms and biases, nor of vectors that are stored as matrices.
    """
    decays = decaying(model)
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    found = set()
    for prefix, module in model.named_modules():
        if not prefix.startswith(lists) or isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if 2 <= parameter.dim() <= 3 and min(parameter.shape[-2:]) > 1 and name in decays:
                found.add(name)
    return found


def _spared(name: str) -> bool:
    return _SPARED.search(name.lower()) is not None


class Group(NamedTuple):
    """A parameter group; groups are sorted by their fields.

    Attributes:
        number: 0, or the number of its pattern in ``train.parameter_groups``, from 1.
        spared: whether weight decay leaves it out.
        learning_rate: its highest; the schedule scales all rates alike.
        weight_decay: of its parameters.
        matrices: whether Muon updates them as matrices.
    """

    number: int
    spared: bool
    learning_rate: float
    weight_decay: float
    matrices: bool = False


def groups_of(model: nn.Module, settings: TrainConfig) -> dict[str, Group]:
    """The group of each trained parameter of ``model``, by its first name.

    Raises:
        UserError: if a pattern is not a regular expression or decides nothing.
    """
    decays = decaying(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    every = {first: [first, *others] for first, *others in names.values()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    number: dict[str, int] = {}
    key = "train.parameter_groups"
    for place, group in enumerate(settings.parameter_groups, start=1):
        found = matching(key, group.pattern, every)
        new = (found & trained) - number.keys()
        why = "an earlier pattern matches" if found & trained else "are frozen"
        require(
            bool(new), f"{key}: {group.pattern!r} matches only parameters that {why}; correct or remove it"
        )
        number.update(dict.fromkeys(new, place))
    matrices = layer_matrices(model) if settings.optimizer == "muon" else set()
    require(
        settings.optimizer != "muon" or bool(matrices & trained),
        "train.optimizer: muon is for the matrices of transformer layers, and none is trained; use adamw",
    )
    made = {}
    for name in every:
        if name in trained:
            place, spared = number.get(name, 0), name not in decays
            rate, decay = settings.learning_rate, settings.weight_decay
            if place:
                given = settings.parameter_groups[place - 1]
                rate = rate if given.learning_rate is None else given.learning_rate
                decay = decay if given.weight_decay is None else given.weight_decay
            made[name] = Group(place, spared, rate, 0.0 if spared else decay, name in matrices)
    return made


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], groups: Mapping[str, Group], learning_rate: float
) -> list[dict[str, Any]]:
    """The groups of an optimizer: by default two, with and without weight decay.

    Args:
        parameters: by name; those outside ``groups`` are left out.
        groups: see :func:`groups_of`.
        learning_rate: the run's. A group with another one has it as ``initial_lr``, torch's name for the
            value that a schedule scales.
    """
    made: dict[Group, dict[str, Any]] = {}
    muon = any(group.matrices for group in groups.values())
    for group in sorted({groups[name] for name in parameters if name in groups}):
        made[group] = {"params": [], "weight_decay": group.weight_decay}
        if muon:
            made[group]["matrices"] = group.matrices
        if group.learning_rate != learning_rate:
            made[group] |= {"lr": group.learning_rate, "initial_lr": group.learning_rate}
    for name, parameter in parameters.items():
        if name in groups:
            made[groups[name]]["params"].append(parameter)
    return list(made.values())


def build_optimizer(
    settings: TrainConfig,
    parameters: Mapping[str, nn.Parameter],
    groups: Mapping[str, Group],
    embeddings: Collection[nn.Parameter] = (),
    compute: torch.dtype = torch.float32,
) -> FusedAdamW | FusedSGD | Adafactor | AdamW8bit | Muon:
    """Build ``train.optimizer``.

    A step is a no-op if the flag ``found_inf`` on the device is set. The fused optimizers take a step in one
    kernel launch.

    Args:
        settings: the train section.
        parameters: by name.
        groups: by the same names; see :func:`groups_of`.
        embeddings: the parameters that keep 32-bit moments in an 8-bit optimizer.
        compute: the run's compute type; Muon's products are in fp32 or bf16.
    """
    made = parameter_groups(parameters, groups, settings.learning_rate)
    beta1, beta2 = settings.betas
    if settings.optimizer == "adamw":
        return FusedAdamW(made, lr=settings.learning_rate, betas=(beta1, beta2), eps=settings.eps)
    if settings.optimizer == "adamw_8bit":
        return AdamW8bit(
            made, lr=settings.learning_rate, betas=(beta1, beta2), eps=settings.eps, exact=embeddings
        )
    if settings.optimizer == "adafactor":
        return Adafactor(made, lr=settings.learning_rate, rule=RULES[settings.adafactor_rule])
    if settings.optimizer == "muon":
        return muon(settings, made, compute)
    assert settings.optimizer == "sgd", settings.optimizer
    return FusedSGD(made, lr=settings.learning_rate, momentum=beta1)


def muon(settings: TrainConfig, groups: list[dict[str, Any]], compute: torch.dtype) -> Muon:
    """Build Muon; the arguments are those of :func:`build_optimizer`."""
    return Muon(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        momentum=settings.muon_momentum,
        rate_rule=settings.muon_rate,
        compute=torch.float32 if compute == torch.float32 else torch.bfloat16,
    )


def set_rates(
    optimizer: Any, learning_rate: float, betas: tuple[float, float] | None, settings: TrainConfig
) -> None:
    """Set this step's learning rate in all parameter groups, and its betas if the schedule changes them."""
    highest = settings.learning_rate
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * (group.get("initial_lr", highest) / highest)
        if betas is not None and not group.get("matrices"):
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
