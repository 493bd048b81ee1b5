"""An exponential moving average of the weights (EMA), as one more state of the optimizer.

So it is sharded like the parameters, is in checkpoints, and moves between engines as moments do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.optim.local_shards import to_local

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

    def begin_averages(stepped: Any, *_: Any) -> None:
        for parameter in _iter_trained(stepped):
            if AVERAGE not in stepped.state.get(parameter, ()):
                begun[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def update_averages(stepped: Any, *_: Any) -> None:
        masked: Tensor | None = getattr(stepped, "found_inf", None)
        for parameter in _iter_trained(stepped):
            state = stepped.state[parameter]
            if parameter in begun:  # only now: optimizers begin their state where there is none
                state[AVERAGE] = begun.pop(parameter)
            average = to_local(state[AVERAGE])
            fresh = 1 - decay if masked is None else (1 - masked.to(average.device)) * (1 - decay)
            average.lerp_(to_local(parameter), fresh)

    of_torch = getattr(optimizer, "inner", optimizer)
    of_torch.register_step_pre_hook(begin_averages)
    of_torch.register_step_post_hook(update_averages)
    if hasattr(of_torch, "build_initial_state"):
        begin = optimizer.build_initial_state
        optimizer.build_initial_state = lambda p: {**begin(p), AVERAGE: p.detach().clone()}


@torch.no_grad()
def exchange(pairs: Iterable[tuple[Tensor, Any]]) -> None:
    """Exchange the values of parameters and their averages, in place.

    Args:
        pairs: of a parameter and its state. One that has not been trained yet has no average.
    """
    for parameter, state in pairs:
        if AVERAGE in state:
            weights, average = to_local(parameter), to_local(state[AVERAGE])
            old_weights = weights.clone()
            weights.copy_(average)
            average.copy_(old_weights)


def _iter_trained(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
