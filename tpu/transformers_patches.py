"""Patches of transformers and torch that keep models from reading tensor values while they are traced."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def use_fixed_shapes(model: Any) -> None:
    """Make mixtures of experts multiply with the weights gathered for each token.

    The other implementations sort tokens by expert into groups of data-dependent sizes. This one needs
    memory: tokens x experts per token x the size of an expert's matrix.
    """
    experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    if experts and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")


@cache  # once per process
def keep_padding_masks_lazy() -> None:
    """Keep transformers from reading the values of padding masks.

    It drops a mask that is all true, which on a lazy tensor executes the graph so far and syncs. It does not
    check if it believes that it is being traced, which is the case here.
    """
    from transformers import masking_utils, modeling_attn_mask_utils

    modules: tuple[Any, ...] = (masking_utils, modeling_attn_mask_utils)
    for module in modules:
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
