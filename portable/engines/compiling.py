"""Apply ``torch.compile`` to each transformer layer. Layers of the same kind share compiled code."""

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
"""Modes of ``torch.compile`` that capture CUDA graphs, which require parameters at fixed addresses."""

# Maximum number of compiled graphs per layer: for training, for evaluation, and for other batch sizes.
_GRAPHS_PER_LAYER = 4


def check_compile_settings(config: RunConfig, world_size: int, device_compiler: str) -> None:
    """Check that the compiler and mode of ``torch.compile`` are supported.

    The modes in :data:`CUDA_GRAPH_MODES` are supported by the strategy ``no_shard``. On a single
    rank, the FSDP strategies also support these modes, unless ``memory.offload_params`` is set.

    Args:
        config: Config of the run.
        world_size: Number of ranks.
        device_compiler: Default compiler of the device. It is always accepted, because it may not
            be registered before the device has been opened.

    Raises:
        UserError: If the compiler is not registered, or if the strategy does not support the mode.
    """
    if config.compile_backend not in ("inductor", device_compiler):
        compilers = torch.compiler.list_backends(exclude_tags=())
        require(
            config.compile_backend in compilers,
            f"compile_backend: unknown backend {config.compile_backend}; use one of {', '.join(compilers)}",
        )
    sharded = config.strategy != "no_shard" and (
        world_size > 1 or config.memory.offload_params != "none" or config.strategy.startswith("zero")
    )
    require(
        not (sharded and config.compile_mode in CUDA_GRAPH_MODES),
        f"compile_mode: {config.compile_mode} captures CUDA graphs, which need parameters at fixed "
        f"addresses, but strategy {config.strategy} gathers parameters into new memory; set compile_mode "
        "to default or max-autotune-no-cudagraphs, or set strategy to no_shard",
    )


def compile_layers(model: nn.Module, config: RunConfig) -> None:
    """Set up each transformer layer of a model to compile on its first call.

    The chunked loss is also compiled, but without CUDA graphs, because each chunk would overwrite
    the graph's memory. This function also changes torch's compiler settings in this process. It
    raises the recompile limit, which all layers of a class share, and turns on automatic dynamic
    shapes.

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
    """Guard that keeps CUDA graphs from overwriting gradients.

    A CUDA graph reuses the memory of its outputs in the next pass. By default, torch assumes that every
    call of a compiled layer begins a new pass. This would overwrite accumulated gradients and, with
    activation checkpointing, the gradients of the current backward pass.
    """

    def __init__(self) -> None:
        self._is_first_pass = True

    @staticmethod
    def begin_pass() -> None:
        """Mark the start of a new pass: a forward pass and the backward pass that follows it.

        This method must be called before each forward pass. CUDA graphs then reuse only the memory
        of earlier passes. They do not overwrite tensors that the current pass still needs.
        """
        torch.compiler.cudagraph_mark_step_begin()

    def copy_gradients_out_of_graph_memory(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """Copy gradients out of the memory of CUDA graphs, so that the next pass can add to them.

        Call this method after each backward pass. It makes copies only after the first of several
        micro-batches. Autograd then adds the gradients of later micro-batches to the copies in
        place.

        Args:
            parameters: Parameters whose gradients are replaced by copies.
            last: Whether this was the last micro-batch of the step. If so, nothing is copied,
                because no other pass runs before the optimizer step.
        """
        if self._is_first_pass and not last:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        self._is_first_pass = last
