"""Replace operations in transformers and torch whose result shapes depend on tensor values.

The replacements have fixed shapes, so tracing does not have to read values.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import library

from portable.private import transformers_internals

if TYPE_CHECKING:
    from collections.abc import Callable


def use_fixed_shape_experts(model: Any, shard_along_tokens: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make mixtures of experts compute every expert for every token.

    See :func:`compute_every_expert`. This applies to modules whose class name ends with
    ``Experts``. The experts implementation :data:`EVERY_EXPERT` is registered in transformers, and
    selected for the model. Models without such modules are left unchanged.

    Args:
        model: Model. Modified in place.
        shard_along_tokens: Function that shards a tensor ``[experts, tokens, ...]`` along its
            tokens. It is stored in the attribute ``along_tokens`` of the modules.
    """
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    for module in experts:
        module.along_tokens = shard_along_tokens
    if experts and hasattr(model, "set_experts_implementation"):
        transformers_internals.set_experts_function(model, EVERY_EXPERT, compute_every_expert)


EVERY_EXPERT = "every_expert"
"""Name under which transformers registers :func:`compute_every_expert`."""


def compute_every_expert(
    experts: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute all experts for all tokens, and return the weighted sums of their outputs.

    The weight of an expert that was not chosen is 0.

    transformers has two other implementations:

    - The first sorts tokens into groups by expert. The group sizes depend on the data, so the
      shapes are not fixed.
    - The second gathers a copy of the chosen experts' matrices for each token. Compared with
      this implementation, it requires ``hidden size * experts per token / experts`` times as much
      memory. On a TPU, reading these copies would take longer than the matrix products of this
      implementation.

    Args:
        experts: Module that contains a layer's experts.
        hidden: Hidden states ``[tokens, hidden size]``.
        expert_ids: IDs of the chosen experts for each token, int64 ``[tokens, experts per token]``.
            IDs that are out of range are ignored.
        weights: Weights of the chosen experts, with the shape of ``expert_ids``.

    Returns:
        Weighted sums of the experts' outputs, ``[tokens, hidden size]``.
    """
    all_expert_ids = torch.arange(experts.num_experts, device=expert_ids.device)
    shares = (weights.unsqueeze(-1) * (expert_ids.unsqueeze(-1) == all_expert_ids)).sum(dim=1)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    # Without the annotation, the products would take the sharding of the weights, and all tokens would be
    # sent to every device.
    inner = experts.along_tokens(_multiply_by_expert_weights(experts, name, hidden.unsqueeze(0)))
    inner = (
        transformers_internals.apply_expert_gate(experts, inner)
        if experts.has_gate
        else experts.act_fn(inner)
    )
    outer = experts.along_tokens(
        _multiply_by_expert_weights(experts, "down_proj", experts.along_tokens(inner))
    )
    if experts.has_post_expert_norm:
        outer = experts.post_expert_norm(outer)
    weighted: torch.Tensor = (outer * shares.t().unsqueeze(-1)).sum(dim=0)
    return weighted.to(hidden.dtype)


def _multiply_by_expert_weights(experts: Any, weight_name: str, inputs: torch.Tensor) -> torch.Tensor:
    """Multiply inputs by each expert's matrix, and add the experts' biases if there are any.

    Args:
        experts: Module that contains a layer's experts.
        weight_name: Name of the parameter that contains the matrices.
        inputs: Inputs ``[experts, tokens, in]``, or ``[1, tokens, in]`` if all experts have the same
            inputs.

    Returns:
        Products ``[experts, tokens, out]``.
    """
    weight = getattr(experts, weight_name)
    products = torch.matmul(inputs, weight if experts.is_transposed else weight.transpose(1, 2))
    return products + getattr(experts, f"{weight_name}_bias").unsqueeze(1) if experts.has_bias else products


@cache  # once per process
def run_histc_on_device() -> None:
    """Make ``torch.histc`` count integers on the device.

    Models use ``torch.histc`` to count the tokens per expert. The function replaces torch_xla's
    implementation of ``aten::histc`` in this process. The old implementation runs on the CPU and
    fails because torch's CPU kernel does not support integers. The new implementation requires that
    ``bins`` equals ``max - min`` or ``max - min + 1``. Other calls, and calls with floating-point
    values, still run on the CPU.
    """
    library.impl("aten::histc", "XLA", _compute_histogram)


def _compute_histogram(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    span = max - min
    if values.is_floating_point() or span <= 0 or bins not in (span, span + 1):
        # A bin may contain several integers, or is not known before the values are read.
        on_host = values.cpu() if values.is_floating_point() else values.cpu().double()
        return torch.histc(on_host, bins, min, max).to(values.device, values.dtype)
    if bins == span:  # the last bin contains max - 1 and max
        values = torch.where(values == max, values - 1, values)
    numbers = torch.arange(min, min + bins, dtype=values.dtype, device=values.device)
    return (values.reshape(-1, 1) == numbers).sum(dim=0).to(values.dtype)
