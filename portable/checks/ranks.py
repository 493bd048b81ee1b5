"""Validate the settings of context, tensor and expert parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, format_value, uses_zero_strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_context_parallel(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with ``context_parallel_size``."""
    size = config.context_parallel_size
    if config.data.seq_len % size:
        yield SettingProblem(
            ("data.seq_len", "context_parallel_size"),
            f"data.seq_len: {config.data.seq_len} is not divisible by context_parallel_size: {size}; set "
            f"data.seq_len to a multiple of {size}",
        )
    if size > 1:
        needs_sequences = {
            **_list_unshardable_settings(config),
            "deepspeed.config": config.deepspeed.config is not None,
        }
        for key, is_needed in needs_sequences.items():
            if is_needed:
                value = format_value(config.get(key))
                yield SettingProblem(
                    (key,),
                    f"{key}: {value} does not work with context parallelism, which divides each sequence "
                    "among ranks; set context_parallel_size to 1",
                )


def check_tensor_parallel(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with ``tensor_parallel_size``."""
    if config.tensor_parallel_size == 1:
        return
    train, adapter = config.train, config.adapter
    needs_layers = {
        "backend": config.backend in ("xla", "tpu"),
        "strategy": config.strategy == "no_shard" or uses_zero_strategy(config),
        "context_parallel_size": config.context_parallel_size > 1,
        "precision": config.precision == "fp16",
        "compile": config.compile,
        **_list_unshardable_settings(config),
        "model.function": config.model.function is not None,
        "adapter.base": adapter.base in ("nf4", "int8"),
        "adapter.target_parameters": bool(adapter.target_parameters),
        "train.optimizer": train.optimizer not in ("adamw", "sgd"),
        "train.callbacks": bool(train.callbacks),
        "train.micro_batch_size": train.micro_batch_size == "auto",
    }
    for key, is_needed in needs_layers.items():
        if is_needed:
            value = format_value(config.get(key))
            reason = f"{key}: {value} does not work with tensor parallelism; set tensor_parallel_size to 1"
            yield SettingProblem((key,), reason)


def check_expert_parallel(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with expert parallelism.

    Yields nothing if the config does not use expert parallelism.
    """
    if config.expert_parallel_size == 1:
        return
    train, adapter = config.train, config.adapter
    is_refused = {
        "backend": config.backend in ("xla", "tpu"),
        "strategy": config.strategy == "no_shard" or uses_zero_strategy(config),
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "precision": config.precision == "fp16",
        "model.function": config.model.function is not None,
        "adapter.base": adapter.base in ("nf4", "int8"),
        "train.optimizer": train.optimizer not in ("adamw", "sgd", "muon"),
        "train.micro_batch_size": train.micro_batch_size == "auto",
    }
    for key, refused in is_refused.items():
        if refused:
            value = format_value(config.get(key))
            reason = f"{key}: {value} does not work with expert parallelism; set expert_parallel_size to 1"
            yield SettingProblem((key,), reason)


def _list_unshardable_settings(config: RunConfig) -> dict[str, bool]:
    """Check which settings have a value that does not work with context or tensor parallelism.

    Returns:
        Whether the value is unsupported, keyed by setting.
    """
    return {
        "model.task": config.model.task != "causal-lm",
        "data.format": config.data.format == "samples",
        "train.loss": config.train.loss is not None,
        "train.metrics": any(":" in name for name in config.train.metrics or ()),
        "train.neftune_noise_alpha": config.train.neftune_noise_alpha > 0,
    }
