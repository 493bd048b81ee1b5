"""Annotate activations and logits so that they stay sharded along the batch and token dims.

Without these annotations, the compiler would propagate the sharding of the parameters to the
activations. With a tied embedding table, each device would then have the logits for all tokens.
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
    """Annotate the inputs and outputs of a model's modules with their sharding.

    Hooks annotate the first input of each layer. They also annotate the first output of each layer,
    of each module with a 2-D ``weight`` inside a layer, and of the input and output embeddings. The
    output embeddings also get the hook :func:`_prevent_loss_fusion`.

    Args:
        model: Transformers model. Hooks are added to its modules.
        layout: Placement of tensors on the devices.
        segments: Segments whose layers run in a loop. These layers get no hooks for their own
            inputs and outputs, because the loop annotates them. Modules inside these layers still
            get hooks.
    """
    untyped_model: Any = model
    input_hook, output_hook = partial(_shard_first_input, layout), partial(_shard_first_output, layout)
    in_loops = {name for segment in segments for name in segment.layer_names}
    layers = [layer for name, layer in find_transformer_layers(model) if name not in in_loops]
    for layer in layers:  # annotate inputs as well, because the first may be a sum with a replicated tensor
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
    """Return a copy of a tensor that is sharded along the batch and token dims.

    The gradient is sharded in the same way. A 2-D tensor contains the tokens of all sequences, and
    is sharded along its first dim. See
    :meth:`portable.tpu.xla.layout.MeshLayout.get_activation_spec`. Values that are not tensors, and
    tensors with fewer than two dims, are returned unchanged.
    """
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
    """Prevent the compiler from fusing the logits' matrix product with the loss.

    This saves a buffer of the size of the logits: without the fusion, the compiler can write the
    gradients of the logits into the buffer of the logits. The function is a forward hook of the LM
    head. If gradients are enabled, it adds an XLA optimization barrier to the logits.
    """
    if torch.is_grad_enabled() and isinstance(logits, torch.Tensor):
        xla.barrier_([logits])
