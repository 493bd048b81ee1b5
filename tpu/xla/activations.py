"""Activations and logits stay sharded along batch and tokens.

Propagation from the parameters would choose otherwise: with a tied table, each device would hold the logits
of all tokens.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from portable.model.layers import find_transformer_layers
from portable.tpu.xla.layout import constrain_with_gradient
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from portable.tpu.xla.layout import MeshLayout
    from portable.tpu.xla.scan_layers import LayerSegment


def shard_activations(model: nn.Module, layout: MeshLayout, segments: Iterable[LayerSegment]) -> None:
    """Constrain what the modules of ``model`` take and return; a loop over a segment does so itself."""
    untyped_model: Any = model
    input_hook, output_hook = partial(_shard_first_input, layout), partial(_shard_first_output, layout)
    in_loops = {name for segment in segments for name in segment.layer_names}
    layers = [layer for name, layer in find_transformer_layers(model) if name not in in_loops]
    for layer in layers:  # the first input may be a sum with a replicated tensor
        layer.register_forward_pre_hook(input_hook)
    for _, layer in find_transformer_layers(model):
        for module in layer.modules():
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            if weight is not None and weight.dim() == 2:
                module.register_forward_hook(output_hook)
    for module in (*layers, untyped_model.get_input_embeddings(), untyped_model.get_output_embeddings()):
        if module is not None:
            module.register_forward_hook(output_hook)
    if (head := untyped_model.get_output_embeddings()) is not None:
        head.register_forward_hook(_prevent_loss_fusion)


def shard_batch_and_tokens(layout: MeshLayout, tensor: Any) -> Any:
    """``tensor`` sharded along batch and tokens, and so its gradient; what has neither, as it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        return tensor
    sharding = layout.to_op_sharding(layout.get_activation_spec(tensor.dim()))
    return constrain_with_gradient(tensor, sharding, sharding)


def _shard_first_input(layout: MeshLayout, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (shard_batch_and_tokens(layout, arguments[0]), *arguments[1:]) if arguments else arguments


def _shard_first_output(layout: MeshLayout, _: nn.Module, __: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (shard_batch_and_tokens(layout, output[0]), *output[1:])
    return shard_batch_and_tokens(layout, output)


def _prevent_loss_fusion(_: nn.Module, __: Any, logits: Any) -> None:
    """Keep the compiler from fusing the product that makes the logits with the loss. Logits that come out of
    such a fusion are not overwritten by their gradients: both would exist."""
    if torch.is_grad_enabled() and isinstance(logits, torch.Tensor):
        xla.barrier_([logits])
