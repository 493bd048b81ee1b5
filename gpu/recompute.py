"""Activation checkpointing: recompute activations in the backward pass in place of keeping them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from torch import nn


def checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Switch on what ``memory.activation_checkpointing`` names: ``none``, ``full`` or ``selective``.

    Raises:
        UserError: for a model that cannot recompute.
    """
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        aten = torch.ops.aten
        kept = [
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        ]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(kept)
    # transformers renamed it; the options are the first argument of both.
    enable: Any = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )
    try:
        enable(options)
    except ValueError as error:
        raise UserError(f"memory.activation_checkpointing: {one_line(error)}") from error
