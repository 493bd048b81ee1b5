"""Keep activations and logits sharded along the batch and token dims.

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

    Args:
        model: Transformers model. Hooks are added to its modules.
        layout: Placement of tensors on the devices.
        segments: Segments whose layers run in a loop. The loop annotates the layers' inputs and outputs
            itself.
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
    """Return a copy of a tensor that is sharded along the batch and token dims. Its gradient is also sharded.

    Values that are not tensors, and tensors with fewer than two dims, are returned unchanged.
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
    """Prevent the compiler from fusing the matrix product that computes the logits with the loss.

    The compiler only lets the gradients overwrite the logits if the logits are not the result of such a
    fusion. Without this forward hook, both would exist at the same time.
    """
    if torch.is_grad_enabled() and isinstance(logits, torch.Tensor):
        xla.barrier_([logits])
