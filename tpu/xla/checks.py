"""Find settings that XLA does not support. See :mod:`portable.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.checks.backends import check_cuda_only_settings, check_strategy_without_zero
from portable.config.rules import SettingProblem
from portable.errors import UserError
from portable.plugins import is_plugin_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig

STRATEGIES_GATHERED_ONCE = ("shard_grad_op", "hybrid_shard_zero2")
"""Strategies that gather parameters once for the forward and the backward pass."""
XLA_OPTIMIZERS = ("adamw", "adafactor", "sgd", "muon")
"""Built-in optimizers that run on XLA."""


def find_problems(config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that XLA does not support.

    Args:
        config: Config of a run on XLA.
        late: Whether the config is resolved. If True, the checks that need a resolved config or
            load the user's code also run.
    """
    yield from check_cuda_only_settings(config, is_resolved=late)
    if config.model.experts is not None:
        yield SettingProblem(
            ("model.experts",),
            "model.experts: has no effect on backend xla, which has only one implementation of experts; "
            "remove model.experts",
        )
    yield from check_strategy_without_zero(config)
    chunk = config.memory.loss_chunk_tokens
    if chunk not in ("auto", 0):
        yield SettingProblem(
            ("memory.loss_chunk_tokens", "backend"),
            f"memory.loss_chunk_tokens: {chunk} does not work with backend xla, which keeps only one copy "
            "of the logits, in the compute dtype; set memory.loss_chunk_tokens to auto",
        )
    if late:
        yield from check_optimizer(config)
        yield from check_memory(config)
        yield from check_sharding(config)


def check_text_metrics(config: RunConfig, *, num_hosts: int) -> None:
    """Check that metrics of generated text are not used with several hosts.

    Each host only has the labels for the rows that it has loaded, but it reads the predictions for the
    rows of all hosts. The order of these rows depends on the device mesh.

    Args:
        config: Config of the run.
        num_hosts: Number of hosts.

    Raises:
        UserError: If there are several hosts and the config sets a metric of generated text.
    """
    from portable.evaluation.generation import TEXT_METRICS  # imports torch

    names = [name for name in config.train.metrics or () if name in TEXT_METRICS]
    if names and num_hosts > 1:
        raise UserError(
            "train.metrics: XLA does not generate text on several hosts, so metrics of generated text are "
            f"not available; remove {' and '.join(names)}"
        )


def check_optimizer(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield problems with the optimizer and the precision.

    This function loads the code of a custom optimizer. A built-in optimizer must be in
    :data:`XLA_OPTIMIZERS`. A custom optimizer must not initialize its state from the first
    gradient. It must be elementwise if ``xla.scan_layers`` is set. The precision must be ``fp32``,
    ``bf16`` or ``auto``.
    """
    key, optimizer = "train.optimizer", config.train.optimizer
    if is_plugin_name(optimizer):
        from portable.optim import custom_optimizer  # imports torch

        if not custom_optimizer.has_neutral_initial_state(config.train):
            yield SettingProblem(
                (key,),
                f"{key}: {optimizer} creates state from the first gradient, which XLA does not support; "
                "initialize the state with zeros",
            )
        if config.xla.scan_layers and not custom_optimizer.is_elementwise(config.train):
            yield SettingProblem(
                (key, "xla.scan_layers"),
                f"{key}: {optimizer} is not elementwise, but xla.scan_layers stacks the parameters of "
                "layers; set xla.scan_layers to false",
            )
    if config.precision not in ("fp32", "bf16", "auto"):
        yield SettingProblem(
            ("precision",), f"precision: {config.precision} is not supported on backend xla; use bf16 or fp32"
        )
    if optimizer not in XLA_OPTIMIZERS and not is_plugin_name(optimizer):
        supported = ", ".join(XLA_OPTIMIZERS)
        yield SettingProblem((key,), f"{key}: {optimizer} needs CUDA or CPU kernels; use one of {supported}")


def check_memory(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each memory setting that only works on other backends.

    Unsupported settings are quantized base weights (``adapter.base``), the micro-batch size
    ``auto``, selective activation checkpointing, and offloading of parameters or optimizer state.
    """
    if config.adapter.base in ("nf4", "int8"):
        yield SettingProblem(
            ("adapter.base",),
            f"adapter.base: {config.adapter.base} needs bitsandbytes, which does not run on backend xla; "
            "set adapter.base to auto",
        )
    if config.train.micro_batch_size == "auto":
        yield SettingProblem(
            ("train.micro_batch_size",),
            "train.micro_batch_size: auto would compile a graph for each size that it tries on backend "
            "xla; set train.micro_batch_size to a number",
        )
    if config.memory.activation_checkpointing == "selective":
        yield SettingProblem(
            ("memory.activation_checkpointing",),
            "memory.activation_checkpointing: selective works on operations of eager torch, but backend xla "
            "compiles complete layers; set memory.activation_checkpointing to full, or to none to leave the "
            "choice to the compiler",
        )
    for key in ("memory.offload_optimizer", "memory.offload_params"):
        if config.get(key) != "none":
            yield SettingProblem((key,), f"{key}: backend xla does not support offloading; set {key} to none")


def check_sharding(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting in the sections ``fsdp`` and ``xla`` that has no effect.

    In the section ``fsdp``, only ``shard_group_size`` is supported. ``xla.sharding`` and
    ``xla.shard_param_on_dim_0`` have no effect with the strategy ``no_shard``.
    """
    for name, value in config.fsdp:
        if value is not None and name != "shard_group_size":
            key = f"fsdp.{name}"
            reason = (
                f"{key}: has no effect, because the compiler schedules the gathers under SPMD; remove {key}"
            )
            yield SettingProblem((key,), reason)
    xla = config.xla
    if config.strategy == "no_shard" and (xla.sharding, xla.shard_param_on_dim_0) != (None, None):
        yield SettingProblem(
            ("xla.sharding", "xla.shard_param_on_dim_0", "strategy"),
            "xla.sharding, xla.shard_param_on_dim_0: have no effect with strategy no_shard; remove these "
            "settings",
        )
