"""torch.compile, layer by layer: what is compiled for one layer serves all layers like it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portable.errors import require
from portable.model.layers import transformer_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from portable.config import RunConfig

CAPTURING = ("reduce-overhead", "max-autotune")
"""The modes that capture CUDA graphs, into which the addresses of parameters are written."""

# A layer may be compiled for training, for evaluation, and once more for a batch of another size.
_GRAPHS_A_LAYER = 4


def check(config: RunConfig, world_size: int) -> None:
    """Raise UserError for a compiler that is not there, or a mode that does not fit the strategy."""
    if not config.compile:
        return
    if config.compile_backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())
        require(
            config.compile_backend in known,
            f"compile_backend: torch has no {config.compile_backend}; use one of {', '.join(known)}",
        )
    sharded = config.strategy != "no_shard" and (
        world_size > 1 or config.memory.offload_params != "none" or config.strategy.startswith("zero")
    )
    require(
        not (sharded and config.compile_mode in CAPTURING),
        f"compile_mode: {config.compile_mode} captures CUDA graphs, whose parameters must stay in place, "
        f"and strategy {config.strategy} gathers them anew; use default or max-autotune-no-cudagraphs, or "
        "strategy no_shard",
    )


def compile_layers(model: nn.Module, config: RunConfig) -> None:
    """Have each transformer layer of ``model`` compiled when it first runs, if ``compile`` says so."""
    if not config.compile:
        return
    layers = transformer_layers(model)
    dynamo = torch._dynamo.config
    # A layer's number among its attributes is no reason to compile it anew. Where torch_xla is installed
    # transformers imports it, and that import turns automatic dynamic shapes off for the process.
    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.automatic_dynamic_shapes = True
    # Layers that do differ are compiled each; past the limit they would run uncompiled, in silence.
    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS_A_LAYER * len(layers))
    mode = None if config.compile_mode == "default" else config.compile_mode
    for _, layer in layers:
        layer.compile(backend=config.compile_backend, mode=mode)


class CapturedMemory:
    """What has to be said and done around CUDA graphs, whose outputs live in memory that they use again.

    Every call of a compiled layer would count as a new pass, at which torch takes back the outputs of the one
    before: among them, where layers are recomputed, the gradient that the backward pass stands at, and the
    parameters' gradients while they are accumulated.

    Args:
        config: of the run; unless its layers are captured, this does nothing.
    """

    def __init__(self, config: RunConfig) -> None:
        self.captured = config.compile and config.compile_mode in CAPTURING
        self._first = True

    def begin_pass(self) -> None:
        """Before each forward pass: all layers until the next are one pass, with their backward pass."""
        if self.captured:
            torch.compiler.cudagraph_mark_step_begin()

    def keep_gradients(self, parameters: Iterable[nn.Parameter], *, last: bool) -> None:
        """After each backward pass: move what is to be added to out of the graphs' memory.

        Args:
            parameters: whose gradients were computed.
            last: whether the optimizer takes them now, before the next pass.
        """
        if self.captured and self._first and not last:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        self._first = last
