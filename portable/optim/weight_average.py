"""Exponential moving average (EMA) of the weights, stored as an additional entry in the optimizer state.

The average is therefore sharded like the parameters, saved in checkpoints, and converted between
engines without additional code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.optim.local_shards import to_local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

AVERAGE_KEY = "ema"
"""Name of the average in the state of a parameter. It is fp32, with the shape of the parameter."""


def install_weight_average(optimizer: Any, decay: float) -> None:
    """Add an exponential moving average of the parameters to an optimizer.

    After every step, a hook of the optimizer updates the average of each parameter with a gradient
    as ``ema = decay * ema + (1 - decay) * parameter``. This happens on the device, without a host
    sync. The average is stored under :data:`AVERAGE_KEY` in the state of the parameter. It is
    initialized with the values before the parameter's first update. If ``found_inf`` is 1 in a
    step, the average does not change.

    Args:
        optimizer: A ``torch.optim.Optimizer``, or a wrapper with an optimizer in its attribute
            ``inner``, such as :class:`portable.optim.custom_optimizer.CustomOptimizer`. Modified in
            place. :func:`portable.optim.optimizers.build_optimizer` already calls this function for
            its result if ``train.ema`` is set.
        decay: Weight of the old average in each update.
    """
    initial_averages: dict[Tensor, Tensor] = {}

    def begin_averages(stepped: Any, *_: Any) -> None:
        for parameter in _iter_parameters_with_gradients(stepped):
            if AVERAGE_KEY not in stepped.state.get(parameter, ()):
                initial_averages[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def update_averages(stepped: Any, *_: Any) -> None:
        found_inf: Tensor | None = getattr(stepped, "found_inf", None)
        for parameter in _iter_parameters_with_gradients(stepped):
            state = stepped.state[parameter]
            # Store the initial average only after the step, because optimizers create their state only if it
            # is empty.
            if parameter in initial_averages:
                state[AVERAGE_KEY] = initial_averages.pop(parameter)
            average = to_local(state[AVERAGE_KEY])
            new_share = 1 - decay if found_inf is None else (1 - found_inf.to(average.device)) * (1 - decay)
            average.lerp_(to_local(parameter), new_share)

    torch_optimizer = getattr(optimizer, "inner", optimizer)
    torch_optimizer.register_step_pre_hook(begin_averages)
    torch_optimizer.register_step_post_hook(update_averages)
    if hasattr(torch_optimizer, "build_initial_state"):
        begin = optimizer.build_initial_state
        optimizer.build_initial_state = lambda p: {**begin(p), AVERAGE_KEY: p.detach().clone()}


@torch.no_grad()
def swap_weights_and_averages(pairs: Iterable[tuple[Tensor, Any]]) -> None:
    """Swap the values of parameters with their averages, in place.

    Args:
        pairs: Parameters with their optimizer states. Parameters that have no average yet, because they
            have not been trained, are skipped.
    """
    for parameter, state in pairs:
        if AVERAGE_KEY in state:
            weights, average = to_local(parameter), to_local(state[AVERAGE_KEY])
            old_weights = weights.clone()
            weights.copy_(average)
            average.copy_(old_weights)


def _iter_parameters_with_gradients(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
