"""Replacement of a model's linear layers with torchao's fp8 layers (setting ``fp8``).

In the forward and backward passes, an fp8 layer converts its inputs, its weight and the gradient of
its output to fp8, with one scale per tensor or per row. The weight keeps its name and its dtype,
and is converted only for the matrix products.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable.errors import UserError
from portable.model.layers import find_transformer_layers
from portable.private import GuardedPackage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE_MULTIPLE = 16
"""Multiple that the fp8 kernels require for both dimensions of a weight."""
MIN_CUDA_CAPABILITY = (8, 9)
"""Minimum compute capability of NVIDIA GPUs with fp8 (Ada Lovelace)."""
_torchao = GuardedPackage("torchao", "0.18.0")


def find_fp8_layers(model: PreTrainedModel) -> list[str]:
    """Find the linear layers whose matrix products can be computed in fp8.

    These are the trained linear layers inside transformer layers, if both dimensions of the
    weight are multiples of :data:`SIZE_MULTIPLE`. The modules inside ``experts`` are excluded,
    because an expert may receive no token. Shared experts are included, because they receive all
    tokens.

    Args:
        model: The model, on any device.

    Returns:
        Names of the modules.
    """
    return [
        f"{prefix}.{name}"
        for prefix, layer in find_transformer_layers(model)
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
        and module.weight.requires_grad
        and not module.in_features % SIZE_MULTIPLE
        and not module.out_features % SIZE_MULTIPLE
        and "experts" not in name.split(".")
    ]


def install_fp8_layers(model: PreTrainedModel, recipe: str, device: str) -> None:
    """Replace linear layers of a model with torchao's fp8 layers, in place.

    :func:`find_fp8_layers` selects the layers. On a CPU, torchao emulates fp8: values are rounded
    to fp8, and the products are computed in bf16.

    Args:
        model: The model, on any device. Its parameters stay the same objects.
        recipe: Name of a torchao recipe: ``tensorwise`` or ``rowwise``.
        device: Type of the device that runs the model, such as ``cuda``.

    Raises:
        UserError: If torchao is not installed, if the GPU does not support fp8, or if the model has
            no suitable layer.
    """
    _torchao.check_installed("fp8", "fp8")
    if device == "cuda" and torch.cuda.get_device_capability() < MIN_CUDA_CAPABILITY:
        raise UserError(
            f"fp8: {torch.cuda.get_device_name()} does not support fp8; use a GPU with compute capability "
            "8.9 or higher, or set fp8: none"
        )
    names = set(find_fp8_layers(model))
    if not names:
        raise UserError(
            f"fp8: {type(model).__name__} has no trained linear layer whose sizes are multiples of "
            f"{SIZE_MULTIPLE}; set fp8: none"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=device != "cuda",
        # Pad, because the products for weight gradients sum over tokens, whose number may not be a multiple
        # of 16.
        pad_inner_dim=True,
    )

    def is_chosen(_: nn.Module, name: str) -> bool:
        return name in names

    converted: Any = model
    convert_to_float8_training(converted, config=config, module_filter_fn=is_chosen)
