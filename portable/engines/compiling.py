"""torch.compile per transformer layer: layers of one kind share their compiled code."""

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
"""The modes that capture CUDA graphs, which contain the addresses of parameters."""

# For training, evaluation, and another batch size.
_GRAPHS_PER_LAYER = 4


def check_compile_settings(config: RunConfig, world_size: int, device_compiler: str) -> None:
    """Raise UserError for an unknown compiler, or a mode that the strategy does not support.

    Args:
        device_compiler: the device's own, which may be registered only where the device is opened.
    """
    if config.compile_backend not in ("inductor", device_compiler):
        compilers = torch.compiler.list_backends(exclude_tags=())
        require(
            config.compile_backend in compilers,
            f"compile_backend: unknown {config.compile_backend}; use one of {', '.join(compilers)}",
        )
    sharded = config.strategy != "no_shard" and (
        world_size > 1 or config.memory.offload_params != "none" or config.strategy.startswith("zero")
    )
    require(
        not (sharded and config.compile_mode in CUDA_GRAPH_MODES),
        f"compile_mode: {config.compile_mode} captures CUDA graphs, which need parameters at fixed "
        f"addresses; strategy {config.strategy} gathers them into new memory; use default or "
        "max-autotune-no-cudagraphs, or strategy no_shard",
    )


def compile_layers(model: nn.Module, config: RunConfig) -> None:
    """Make each transformer layer of ``model`` compile on its first call, as the settings say.

    So does the loss that a head computes in chunks, but without CUDA graphs, whose memory each chunk would
    overwrite.
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

    A graph reuses the memory of its outputs in the next pass, and by default every call of a compiled layer
    starts one. That would overwrite accumulated gradients and, with recomputation, the gradient in flight.
    """

    def __init__(self) -> None:
        self._is_first_pass = True

    @staticmethod
    def begin_pass() -> None:
        """Call before each forward pass: the calls until the next one, backward included, are one pass."""
        torch.compiler.cudagraph_mark_step_begin()

    def keep_gradients(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """Call after each backward pass: copy gradients that accumulate out of the graphs' memory.

        Args:
            parameters: with their gradients.
            last: whether the optimizer step follows, so that no pass can overwrite them.
        """
        if self._is_first_pass and not last:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        self._is_first_pass = last
