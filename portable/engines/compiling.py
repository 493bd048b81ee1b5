"""``torch.compile`` per transformer layer. Layers of the same kind share their compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portable.errors import require
from portable.model.chunked_loss import ChunkedHead
from portable.model.layers import find_transformer_layers
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from portable.config import RunConfig

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes that capture CUDA graphs. A graph contains the addresses of the parameters."""

# Maximum number of graphs per layer: for training, for evaluation, and for another batch size.
_GRAPHS_PER_LAYER = 4


def check_compile_settings(config: RunConfig, world_size: int, device_compiler: str) -> None:
    """Check the compiler and the mode of ``torch.compile``.

    Args:
        config: Config of the run.
        world_size: Number of ranks.
        device_compiler: Compiler of the device. It may be registered only after the device has been opened,
            so it is not looked up.

    Raises:
        UserError: If the compiler is not registered, or the strategy does not support the mode.
    """
    if config.compile_backend not in ("inductor", device_compiler):
        compilers = torch.compiler.list_backends(exclude_tags=())
        require(
            config.compile_backend in compilers,
            f"compile_backend: {config.compile_backend} is unknown; use one of {', '.join(compilers)}",
        )
    sharded = config.strategy != "no_shard" and (
        world_size > 1 or config.memory.offload_params != "none" or config.strategy.startswith("zero")
    )
    require(
        not (sharded and config.compile_mode in CUDA_GRAPH_MODES),
        f"compile_mode: {config.compile_mode} captures CUDA graphs, which need parameters at fixed "
        f"addresses, but strategy {config.strategy} gathers parameters into new memory; use default or "
        "max-autotune-no-cudagraphs, or strategy no_shard",
    )


def compile_layers(model: nn.Module, config: RunConfig) -> None:
    """Make each transformer layer of a model compile on its first call.

    The chunked loss is compiled as well, but without CUDA graphs, because each chunk would overwrite the
    memory of the graph.

    Args:
        model: The transformers model. Its layers are changed in place.
        config: Config of the run, with ``compile_backend`` and ``compile_mode``.
    """
    layers = find_transformer_layers(model)
    torch_internals.raise_recompile_limit(_GRAPHS_PER_LAYER * len(layers))
    mode = None if config.compile_mode == "default" else config.compile_mode
    for _, layer in layers:
        layer.compile(backend=config.compile_backend, mode=mode)
    for module in model.modules():
        if isinstance(module, ChunkedHead):
            module.compile(backend=config.compile_backend)


class CudaGraphMemory:
    """Keeps tensors in the memory of CUDA graphs valid.

    A CUDA graph reuses the memory of its outputs in the next pass, and by default every call of a compiled
    layer begins a new pass. This would overwrite accumulated gradients and, with recomputed activations, the
    gradients of the running backward pass.
    """

    def __init__(self) -> None:
        self._is_first_pass = True

    @staticmethod
    def begin_pass() -> None:
        """Begin a pass, that is, one forward and one backward. Call it before each forward pass."""
        torch.compiler.cudagraph_mark_step_begin()

    def copy_gradients_out_of_graph_memory(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """Copy accumulating gradients out of the memory of the graphs. Call it after each backward pass.

        Args:
            parameters: Parameters with their gradients.
            last: Whether the optimizer step follows. In this case no further pass can overwrite the
                gradients.
        """
        if self._is_first_pass and not last:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        self._is_first_pass = last
