"""torch.compile, layer by layer: what is compiled for one layer serves all layers like it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portable.backend import require
from portable.model import transformer_layers

if TYPE_CHECKING:
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
    # A layer's number among its attributes is no reason to compile it anew.
    dynamo.allow_unspec_int_on_nn_module = True
    # Layers that do differ are compiled each; past the limit they would run uncompiled, in silence.
    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS_A_LAYER * len(layers))
    mode = None if config.compile_mode == "default" else config.compile_mode
    for _, layer in layers:
        layer.compile(backend=config.compile_backend, mode=mode)
