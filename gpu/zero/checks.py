"""Find settings that DeepSpeed ZeRO does not support.

If the strategy is a ZeRO stage, :mod:`portable.checks` calls :func:`check_adapter` and
:func:`check_memory`, and the backend calls :func:`find_problems`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, format_setting_with_value
from portable.plugins import is_plugin_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig

ZERO_OPTIMIZERS = ("adamw", "sgd", "muon")
"""Built-in optimizers that ZeRO supports."""


def check_adapter(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each ``adapter`` setting that the ZeRO strategy does not support.

    Unsupported are a quantized base (``nf4`` or ``int8``), an ``fp32`` base with precision bf16 or
    fp16, and, with zero3, ``trainable_token_indices``.
    """
    base, strategy = config.adapter.base, config.strategy
    if base in ("nf4", "int8"):
        yield SettingProblem(
            ("adapter.base", "strategy"),
            f"adapter.base: {base} is not supported with strategy {strategy}, which casts the weights; set "
            "strategy to full_shard",
        )
    if config.adapter.trainable_token_indices and strategy == "zero3":
        yield SettingProblem(
            ("adapter.trainable_token_indices", "strategy"),
            "adapter.trainable_token_indices: does not work with strategy zero3, because no rank has the "
            "complete embedding table; set strategy to full_shard",
        )
    if base == "fp32" and config.precision in ("bf16", "fp16"):
        yield SettingProblem(
            ("adapter.base", "strategy"),
            f"adapter.base: fp32 is not supported with strategy {strategy}, which keeps frozen weights in "
            "the compute dtype; set strategy to full_shard",
        )


def check_memory(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each unsupported setting in the sections ``memory`` and ``fsdp``.

    ``memory.loss_chunk_tokens`` must be ``auto`` or 0. The offloading of parameters requires zero3,
    as does the offloading of optimizer state to NVMe. All settings in the section ``fsdp`` must be
    unset.
    """
    memory, strategy = config.memory, config.strategy
    if memory.loss_chunk_tokens not in ("auto", 0):
        yield SettingProblem(
            ("memory.loss_chunk_tokens", "strategy"),
            f"memory.loss_chunk_tokens: {memory.loss_chunk_tokens} does not work with strategy {strategy}; "
            "set memory.loss_chunk_tokens to auto",
        )
    if memory.offload_params != "none" and strategy != "zero3":
        yield SettingProblem(
            ("memory.offload_params", "strategy"),
            f"memory.offload_params: {memory.offload_params} needs sharded parameters, but strategy "
            f"{strategy} replicates them; set strategy to zero3",
        )
    if memory.offload_optimizer == "nvme" and strategy != "zero3":
        yield SettingProblem(
            ("memory.offload_optimizer", "strategy"),
            f"memory.offload_optimizer: nvme needs strategy zero3, but the strategy is {strategy}; set "
            "memory.offload_optimizer to cpu, or set strategy to zero3",
        )
    for name, value in config.fsdp:
        if value is not None:
            key = f"fsdp.{name}"
            yield SettingProblem(
                (key, "strategy"),
                f"{format_setting_with_value(config, key)} has no effect with strategy {strategy}; remove "
                f"{key}, or set strategy to full_shard",
            )


def find_problems(config: RunConfig, *, late: bool, has_cuda: bool) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that ZeRO does not support on a backend.

    Args:
        config: Config of a run whose strategy is a ZeRO stage.
        late: Whether the config is resolved. Some checks require a resolved config or import custom
            code. They only run if this is True.
        has_cuda: Whether the backend has NVIDIA GPUs.
    """
    optimizer = config.train.optimizer
    if not has_cuda and config.precision == "fp16":
        yield SettingProblem(
            ("precision", "backend", "strategy"),
            f"precision: fp16 does not work with strategy {config.strategy} on backend cpu; use fp32 or bf16",
        )
    if optimizer not in ZERO_OPTIMIZERS and not is_plugin_name(optimizer):
        yield SettingProblem(
            ("train.optimizer",),
            f"train.optimizer: ZeRO does not support {optimizer}; use adamw, sgd or muon",
        )
    if late:
        yield from check_parameters(config)
        if is_plugin_name(optimizer):
            yield from check_custom_optimizer(config)
        if _is_swapping(config):
            yield from check_nvme(config)


def check_parameters(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each conflict with how ZeRO gathers, saves or swaps parameters.

    Unsupported are ``train.micro_batch_size: auto`` with offloading to NVMe, ``compile`` with
    zero3, and frozen parameter patterns with parameters on NVMe.
    """
    if _is_swapping(config) and config.train.micro_batch_size == "auto":
        yield SettingProblem(
            ("train.micro_batch_size",),
            "train.micro_batch_size: auto tries several sizes, and would write the complete training state "
            "to nvme for each size; set train.micro_batch_size to a number",
        )
    if config.compile and config.strategy == "zero3":
        yield SettingProblem(
            ("compile", "strategy"),
            "compile: is not supported with strategy zero3, which gathers and frees parameters inside the "
            "layers; set strategy to zero2 or full_shard",
        )
    if config.train.has_frozen_patterns and config.memory.offload_params == "nvme":
        yield SettingProblem(
            ("memory.offload_params",),
            "memory.offload_params: DeepSpeed does not save frozen parameters that are offloaded to nvme; "
            "set memory.offload_params to cpu, or train all parameters",
        )


def check_custom_optimizer(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each reason why ZeRO does not support a custom optimizer.

    The optimizer must update each element separately, and must not create state in its constructor.
    To check this, the function runs the optimizer's code.
    """
    from portable.optim import custom_optimizer  # imports torch

    key, optimizer = "train.optimizer", config.train.optimizer
    if not custom_optimizer.is_elementwise(config.train):
        yield SettingProblem(
            (key,),
            f"{key}: {optimizer} is not elementwise, so it cannot run on ZeRO's flat partitions; set "
            "strategy to full_shard",
        )
    if custom_optimizer.has_state_before_first_step(config.train):
        yield SettingProblem(
            (key,),
            f"{key}: the constructor of {optimizer} creates state for parameters that ZeRO replaces; set "
            "strategy to full_shard",
        )


def check_nvme(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with offloading to NVMe.

    These settings are a weight average (``train.ema``), Muon, and a custom optimizer. The caller
    checks that parameters or optimizer state are offloaded.
    """
    key, optimizer = "train.optimizer", config.train.optimizer
    offloading = "memory.offload_optimizer"
    remedy = "set memory.offload_optimizer and memory.offload_params to cpu or none"
    if config.train.ema is not None:
        yield SettingProblem(
            ("train.ema", offloading), f"train.ema: does not work with offloading to nvme; {remedy}"
        )
    if optimizer == "muon":
        yield SettingProblem(
            (key, offloading),
            f"{key}: muon does not work with offloading to nvme, because DeepSpeed swaps the parts of a "
            f"matrix separately; {remedy}",
        )
    if is_plugin_name(optimizer):
        yield SettingProblem(
            (key, offloading),
            f"{key}: {optimizer} does not work with offloading to nvme, because only DeepSpeed can read the "
            f"swapped values; {remedy}",
        )


def _is_swapping(config: RunConfig) -> bool:
    """Return whether parameters or optimizer state are offloaded to NVMe."""
    return "nvme" in (config.memory.offload_params, config.memory.offload_optimizer)
