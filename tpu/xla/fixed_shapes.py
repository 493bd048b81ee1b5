"""Operations of transformers and torch with fixed shapes, which read no values while they are traced."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import library

from portable.private import transformers_internals

if TYPE_CHECKING:
    from collections.abc import Callable


def use_fixed_shape_experts(model: Any, shard_along_tokens: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make mixtures of experts compute every expert for every token; see :func:`compute_every_expert`.

    Args:
        model: is changed.
        shard_along_tokens: shards a tensor ``[experts, tokens, ...]`` along its tokens.
    """
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    for module in experts:
        module.along_tokens = shard_along_tokens
    if experts and hasattr(model, "set_experts_implementation"):
        transformers_internals.set_experts_function(model, EVERY_EXPERT, compute_every_expert)


EVERY_EXPERT = "every_expert"


def compute_every_expert(
    experts: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """All experts for all tokens, added up by their weights, which are zero for those not chosen.

    transformers' other ways sort tokens by expert into groups of data-dependent sizes, or gather a copy of
    the chosen experts' matrices for each token. The first has no fixed shapes. The second takes
    ``hidden size x experts per token / experts`` times the memory of this one, and a TPU would wait for it
    longer than it multiplies here.

    Args:
        experts: the module of a layer's experts.
        hidden: ``[tokens, hidden size]``.
        expert_ids: the experts of each token, int64 ``[tokens, experts per token]``; a number that is no
        expert's
            counts for none.
        weights: of the chosen experts, of the same shape.
    """
    all_expert_ids = torch.arange(experts.num_experts, device=expert_ids.device)
    shares = (weights.unsqueeze(-1) * (expert_ids.unsqueeze(-1) == all_expert_ids)).sum(dim=1)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    # Else the products take the sharding of the weights, and all tokens are sent to every device.
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
    """``[experts, tokens, out]`` from ``[experts or 1, tokens, in]``."""
    weight = getattr(experts, weight_name)
    products = torch.matmul(inputs, weight if experts.is_transposed else weight.transpose(1, 2))
    return products + getattr(experts, f"{weight_name}_bias").unsqueeze(1) if experts.has_bias else products


@cache  # once per process
def run_histc_on_device() -> None:
    """Make ``torch.histc`` count integers on the device: it counts each expert's tokens.

    torch_xla runs it on the CPU, where it does not exist for integers.
    """
    library.impl("aten::histc", "XLA", _compute_histogram)


def _compute_histogram(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    if values.is_floating_point() or bins != max - min:  # with one bin an integer, the last two share one
        return torch.histc(values.cpu(), bins, min, max).to(values.device)
    numbers = torch.arange(min, max, dtype=values.dtype, device=values.device)
    return (values.reshape(-1, 1) == numbers).sum(dim=0).to(values.dtype)
