"""An exponential moving average of the weights (EMA), as one more state of the optimizer.

So it is sharded like the parameters, is in checkpoints, and moves between engines as moments do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.optim.sharded import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

AVERAGE = "ema"
"""The name of this state: fp32, of the parameter's shape."""


def keep_average(optimizer: Any, decay: float) -> None:
    """Make ``optimizer`` average its parameters: ``ema = decay * ema + (1 - decay) * parameter``.

    After every step, on the device and without a sync; a masked step changes nothing. The average begins at
    the values before the first step.

    Args:
        optimizer: of :func:`portable.optim.optimizers.build_optimizer`.
        decay: share of the average that stays in a step.
    """
    begun: dict[Tensor, Tensor] = {}

    def before(of: Any, *_: Any) -> None:
        for parameter in _trained(of):
            if AVERAGE not in of.state.get(parameter, ()):
                begun[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def after(of: Any, *_: Any) -> None:
        masked: Tensor | None = getattr(of, "found_inf", None)
        for parameter in _trained(of):
            state = of.state[parameter]
            if parameter in begun:  # only now: optimizers begin their state where there is none
                state[AVERAGE] = begun.pop(parameter)
            average = local(state[AVERAGE])
            fresh = 1 - decay if masked is None else (1 - masked.to(average.device)) * (1 - decay)
            average.lerp_(local(parameter), fresh)

    of_torch = getattr(optimizer, "inner", optimizer)
    of_torch.register_step_pre_hook(before)
    of_torch.register_step_post_hook(after)
    if hasattr(of_torch, "initial_state"):
        begin = optimizer.initial_state
        optimizer.initial_state = lambda p: {**begin(p), AVERAGE: p.detach().clone()}


@torch.no_grad()
def exchange(pairs: Iterable[tuple[Tensor, Any]]) -> None:
    """Exchange the values of parameters and their averages, in place.

    Args:
        pairs: of a parameter and its state. One that has not been trained yet has no average.
    """
    for parameter, state in pairs:
        if AVERAGE in state:
            weights, average = local(parameter), local(state[AVERAGE])
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)


def _trained(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
