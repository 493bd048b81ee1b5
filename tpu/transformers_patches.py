"""Where transformers looks at values while the model is only being recorded."""

from __future__ import annotations

from typing import Any

import torch


def use_fixed_shapes(model: Any) -> None:
    """Have mixtures of experts multiply with the weights gathered for each token.

    The other ways sort tokens by expert, into groups whose sizes are values. This one costs memory: tokens x
    experts a token x the size of an expert's matrix.
    """
    experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    if experts and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")


def let_models_be_traced() -> None:
    """Have transformers leave the values of padding masks alone.

    To save a mask that would change nothing, it asks whether all of it is true: on a lazy tensor that stops
    the recording, runs what there is, and waits. It does not ask where it believes a graph is being traced,
    and one is.
    """
    from transformers import masking_utils, modeling_attn_mask_utils

    modules: tuple[Any, ...] = (masking_utils, modeling_attn_mask_utils)
    for module in modules:
        if not hasattr(module.is_tracing, "knows_xla"):
            module.is_tracing = _also_on_xla(module.is_tracing)


def let_tokens_be_counted() -> None:
    """Have transformers count the tokens of each expert on the device, for the loss that balances experts.

    It uses ``torch.histc`` there, which torch_xla leaves to the CPU, and the CPU has none for whole numbers.
    """
    if not hasattr(torch.histc, "knows_xla"):
        torch.histc = _counted_on_xla(torch.histc)


def _counted_on_xla(histc: Any) -> Any:
    def counted(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if values.device.type != "xla" or values.is_floating_point():
            return histc(values, *args, **kwargs)  # type: ignore[no-any-return]
        first, last = kwargs["min"], kwargs["max"]
        assert kwargs["bins"] == last - first  # a bin for each whole number, the last two share one
        numbers = torch.arange(first, last, dtype=values.dtype, device=values.device)
        return (values.reshape(-1, 1) == numbers).sum(dim=0).to(values.dtype)

    counted.knows_xla = True  # type: ignore[attr-defined]
    return counted


def _also_on_xla(is_tracing: Any) -> Any:
    def asked(tensor: Any = None) -> bool:
        recorded = isinstance(tensor, torch.Tensor) and tensor.device.type == "xla"
        return recorded or bool(is_tracing(tensor))

    asked.knows_xla = True  # type: ignore[attr-defined]
    return asked
