"""Activation checkpointing: recompute activations in the backward pass instead of storing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import save_on_cpu

from portable.errors import UserError, to_one_line
from portable.private import torch_internals, transformers_internals

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def enable_activation_checkpointing(model: nn.Module, mode: str, *, inputs_on_host: bool = False) -> None:
    """Enable the ``memory.activation_checkpointing`` mode ``full`` or ``selective``.

    The mode ``selective`` also adds the profiler operations to the global ``SAC_IGNORED_OPS`` of
    torch, so that selective checkpoints ignore profiler ranges.

    Args:
        model: A transformers model. Modified in place.
        mode: ``full`` or ``selective``. With ``selective``, the results of matrix products and
            fused attention are stored instead of recomputed.
        inputs_on_host: Whether to store the input hidden states of each layer in host memory until
            the backward pass recomputes the layer.

    Raises:
        UserError: If the model class does not support activation checkpointing.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        torch_internals.exclude_profiler_from_selective_checkpoints()
        aten = torch.ops.aten
        saved_ops = [
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            torch_internals.get_private_aten_operation("scaled_mm"),
            *(
                torch_internals.get_private_aten_operation(f"scaled_dot_product_{kernel}")
                for kernel in _SAVED_ATTENTION_KERNELS
            ),
        ]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(saved_ops)
    transformer: Any = model
    try:
        transformer.activation_checkpointing_enable(options)
    except ValueError as error:
        raise UserError(
            f"memory.activation_checkpointing: {to_one_line(error)}; set memory.activation_checkpointing to "
            "none"
        ) from error
    if inputs_on_host:
        transformers_internals.wrap_activation_checkpointing(model, _offload_checkpoint_inputs)


_SAVED_ATTENTION_KERNELS = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)


def _offload_checkpoint_inputs(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a checkpoint function so that it stores the layer inputs in host memory.

    Only the layer inputs are copied to the host. Tensors that are saved inside the layer are
    handled by the checkpoint function, which has its own saved-tensor hooks.

    Args:
        checkpoint: Function with the interface of ``torch.utils.checkpoint.checkpoint``.
    """

    def checkpoint_with_inputs_on_host(*args: Any, **kwargs: Any) -> Any:
        on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
        with save_on_cpu(pin_memory=on_gpu):
            return checkpoint(*args, **kwargs)

    return checkpoint_with_inputs_on_host
