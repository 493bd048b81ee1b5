"""Validate the settings for memory, sharding and torch.compile.

The checks for ZeRO are in :mod:`portable.gpu.zero.checks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.derived_defaults import HYBRID_STRATEGIES
from portable.config.rules import SettingProblem, is_not_default, uses_zero_strategy
from portable.registry import import_engine_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_deepspeed_config_is_used(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem if ``deepspeed.config`` is unused because the user has set an FSDP strategy."""
    # Only a strategy that the user set can contradict the JSON, because the stage of the JSON overrides the
    # default strategy. XLA ignores the JSON.
    overrides = config.is_set("strategy") and config.strategy != "no_shard" and config.backend != "xla"
    if config.deepspeed.config is not None and overrides and not uses_zero_strategy(config):
        yield SettingProblem(
            ("deepspeed.config", "strategy"),
            f"deepspeed.config: has no effect with strategy {config.strategy}; set strategy to zero1, "
            "zero2 or zero3 (no_shard for stage 0), or remove deepspeed.config",
        )


def check_compile_mode(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem if ``compile_mode`` is set and ``compile_backend`` is not inductor."""
    if is_not_default(config, "compile_mode") and is_not_default(config, "compile_backend"):
        yield SettingProblem(
            ("compile_mode", "compile_backend"),
            f"compile_mode: {config.compile_mode} works only with compile_backend: inductor, but "
            f"compile_backend is {config.compile_backend}; remove compile_mode or compile_backend",
        )


def check_memory_settings(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems in the section ``memory``."""
    memory = config.memory
    offloads_to_nvme = "nvme" in (memory.offload_optimizer, memory.offload_params)
    for key in ("memory.offload_optimizer", "memory.offload_params"):
        if config.get(key) == "nvme" and memory.nvme_path is None:
            yield SettingProblem(
                (key, "memory.nvme_path"),
                f"{key}: nvme needs memory.nvme_path; set memory.nvme_path to a folder on a local disk",
            )
    # Accept nvme_path with a DeepSpeed JSON, because the JSON may enable offloading and only the backend
    # reads it.
    if memory.nvme_path is not None and not offloads_to_nvme and config.deepspeed.config is None:
        yield SettingProblem(
            ("memory.nvme_path",),
            f"memory.nvme_path: {memory.nvme_path} is set, but nothing is offloaded to nvme; set "
            "memory.offload_optimizer or memory.offload_params to nvme, or remove memory.nvme_path",
        )
    yield from _check_offloaded_activations(config)
    if uses_zero_strategy(config):
        yield from import_engine_module(config.strategy, "checks").check_memory(config)


def _check_offloaded_activations(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with ``memory.offload_activations``."""
    key = "memory.offload_activations"
    if not config.memory.offload_activations:
        return
    if config.backend in ("xla", "tpu"):
        yield SettingProblem(
            (key, "backend"),
            f"{key}: backend {config.backend} cannot offload activations to host memory; remove {key}, and "
            "set memory.activation_checkpointing to full",
        )
    if config.tensor_parallel_size > 1:
        yield SettingProblem(
            (key, "tensor_parallel_size"),
            f"{key}: does not work with tensor_parallel_size above 1; remove {key}",
        )
    if config.memory.activation_checkpointing != "none":
        return
    checkpointing = "memory.activation_checkpointing"
    if config.compile:
        yield SettingProblem(
            (key, "compile"),
            f"{key}: cannot offload the activations inside compiled layers, because the compiler manages "
            f"them; set {checkpointing} to full, or set compile to false",
        )
    if uses_zero_strategy(config):
        yield SettingProblem(
            (key, "strategy"),
            f"{key}: with strategy {config.strategy}, the weights that DeepSpeed gathers would be offloaded "
            f"as well; set {checkpointing} to full, or set strategy to full_shard",
        )


def check_fsdp_settings(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems in the section ``fsdp``."""
    fsdp, policy = config.fsdp, config.fsdp.auto_wrap_policy
    if fsdp.shard_group_size is not None and config.strategy not in HYBRID_STRATEGIES:
        yield SettingProblem(
            ("fsdp.shard_group_size", "strategy"),
            f"fsdp.shard_group_size: {fsdp.shard_group_size} needs strategy hybrid_shard or "
            f"hybrid_shard_zero2, but the strategy is {config.strategy}; remove fsdp.shard_group_size, or "
            "set strategy to hybrid_shard",
        )
    if policy == "size_based_wrap" and fsdp.min_num_params is None:
        yield SettingProblem(
            ("fsdp.auto_wrap_policy", "fsdp.min_num_params"),
            "fsdp.auto_wrap_policy: size_based_wrap needs fsdp.min_num_params; set fsdp.min_num_params, for "
            "example to 100000000",
        )
    if fsdp.min_num_params is not None and policy not in (None, "size_based_wrap"):
        yield SettingProblem(
            ("fsdp.min_num_params", "fsdp.auto_wrap_policy"),
            f"fsdp.min_num_params: {fsdp.min_num_params} works only with fsdp.auto_wrap_policy: "
            f"size_based_wrap, but fsdp.auto_wrap_policy is {policy}; remove fsdp.min_num_params",
        )
    if fsdp.transformer_layer_cls_to_wrap is not None and policy not in (None, "transformer_based_wrap"):
        yield SettingProblem(
            ("fsdp.transformer_layer_cls_to_wrap", "fsdp.auto_wrap_policy"),
            "fsdp.transformer_layer_cls_to_wrap: works only with fsdp.auto_wrap_policy: "
            f"transformer_based_wrap, but fsdp.auto_wrap_policy is {policy}; remove "
            "fsdp.transformer_layer_cls_to_wrap",
        )
