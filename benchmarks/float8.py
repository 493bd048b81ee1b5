"""Linear layers that multiply in fp8, by torchao: ``model.function: benchmarks.float8:converted``."""

from __future__ import annotations

from typing import Any

import torch


def converted(model: Any) -> Any:
    """Replace the linear layers of ``model``, on the meta device, except the head.

    Layers whose sizes are no multiples of 16 stay as well. A tensor has one scale, which each step computes.
    Where the GPU has no fp8, the arithmetic is emulated.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    head = model.get_output_embeddings()

    def chosen(module: Any, _: str) -> bool:
        sizes = (module.in_features, module.out_features)
        return module is not head and all(size % 16 == 0 for size in sizes)

    emulated = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
    config = Float8LinearConfig(emulate=emulated)
    return convert_to_float8_training(model, config=config, module_filter_fn=chosen)
