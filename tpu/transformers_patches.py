"""Patches of transformers and torch that keep models from reading tensor values while they are traced."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def use_fixed_shapes(model: Any, along_tokens: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make mixtures of experts compute every expert for every token; see :func:`every_expert`.

    Args:
        model: is changed.
        along_tokens: shards a tensor ``[experts, tokens, ...]`` along its tokens.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    for module in experts:
        module.along_tokens = along_tokens
    if experts and hasattr(model, "set_experts_implementation"):
        ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT, every_expert)
        model.set_experts_implementation(EVERY_EXPERT)


EVERY_EXPERT = "every_expert"


def every_expert(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """All experts for all tokens, added up by their weights, which are zero for those not chosen.

    transformers' other ways sort tokens by expert into groups of data-dependent sizes, or gather a copy of
    the chosen experts' matrices for each token. The first has no fixed shapes. The second takes
    ``hidden size x experts per token / experts`` times the memory of this one, and a TPU would wait for it
    longer than it multiplies here.

    Args:
        experts: the module of a layer's experts.
        hidden: ``[tokens, hidden size]``.
        chosen: the experts of each token, int64 ``[tokens, experts per token]``; a number that is no expert's
            counts for none.
        weights: of the chosen experts, of the same shape.
    """
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    shares = (weights.unsqueeze(-1) * (chosen.unsqueeze(-1) == numbers)).sum(dim=1)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    # Else the products take the sharding of the weights, and all tokens are sent to every device.
    inner = experts.along_tokens(_products(experts, name, hidden.unsqueeze(0)))
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outer = experts.along_tokens(_products(experts, "down_proj", experts.along_tokens(inner)))
    if experts.has_post_expert_norm:
        outer = experts.post_expert_norm(outer)
    weighted: torch.Tensor = (outer * shares.t().unsqueeze(-1)).sum(dim=0)
    return weighted.to(hidden.dtype)


def _products(experts: Any, name: str, inputs: torch.Tensor) -> torch.Tensor:
    """``[experts, tokens, out]`` from ``[experts or 1, tokens, in]``."""
    weight = getattr(experts, name)
    found = torch.matmul(inputs, weight if experts.is_transposed else weight.transpose(1, 2))
    return found + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else found


@cache  # once per process
def keep_padding_masks_lazy() -> None:
    """Keep transformers from reading the values of padding masks.

    It drops a mask that is all true, which on a lazy tensor executes the graph so far and syncs. It does not
    check if it believes that it is being traced, which is the case here.
    """
    for name in ("masking_utils", "modeling_attn_mask_utils"):  # the second ended with transformers 5.23
        if find_spec(f"transformers.{name}") is not None:
            module: Any = import_module(f"transformers.{name}")
            module.is_tracing = _true_on_xla(module.is_tracing)


@cache  # once per process
def count_tokens_on_device() -> None:
    """Make transformers count the tokens of each expert on the device, for the load-balancing loss.

    It uses ``torch.histc``, which torch_xla runs on the CPU, where it does not exist for integers.
    """
    torch.histc = _integers_on_xla(torch.histc)


def _integers_on_xla(histc: Any) -> Any:
    def counted(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        first, last = kwargs.get("min", 0), kwargs.get("max", 0)
        one_bin_per_integer = kwargs.get("bins") == last - first  # the last two share one
        if values.device.type != "xla" or values.is_floating_point() or not one_bin_per_integer:
            return histc(values, *args, **kwargs)  # type: ignore[no-any-return]
        numbers = torch.arange(first, last, dtype=values.dtype, device=values.device)
        return (values.reshape(-1, 1) == numbers).sum(dim=0).to(values.dtype)

    return counted


def _true_on_xla(is_tracing: Any) -> Any:
    def patched(tensor: Any = None) -> bool:
        lazy = isinstance(tensor, torch.Tensor) and tensor.device.type == "xla"
        return lazy or bool(is_tracing(tensor))

    return patched
