"""Validate settings for backends that do not support NVIDIA GPUs or DeepSpeed.

These backends call the checks in their ``find_problems`` method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, uses_zero_strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_cuda_only_settings(config: RunConfig, *, is_resolved: bool) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that only NVIDIA GPUs support.

    The settings are ``precision: tf32``, ``log.memory_snapshot``, and all values of
    ``model.attention`` except ``sdpa`` and ``eager``.

    Args:
        config: Config of a run on a backend without NVIDIA GPUs.
        is_resolved: Whether all defaults of the config have been resolved. If not,
            ``log.memory_snapshot`` is not checked.
    """
    if config.precision == "tf32":
        yield SettingProblem(
            ("precision", "backend"),
            f"precision: tf32 is a mode of NVIDIA GPUs, but the backend is {config.backend}; set precision "
            "to fp32 or bf16",
        )
    if config.model.attention not in ("sdpa", "eager"):
        yield SettingProblem(
            ("model.attention", "backend"),
            f"model.attention: {config.model.attention} needs backend cuda, but the backend is "
            f"{config.backend}; set model.attention to sdpa",
        )
    if is_resolved and config.log.memory_snapshot:
        yield SettingProblem(
            ("log.memory_snapshot",),
            "log.memory_snapshot: PyTorch can record memory allocations only on GPUs; set "
            "log.memory_snapshot to false",
        )


def check_strategy_without_zero(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem if the strategy requires DeepSpeed.

    Only called for backends that DeepSpeed does not support.
    """
    if uses_zero_strategy(config):
        yield SettingProblem(
            ("strategy", "backend"),
            f"strategy: {config.strategy} needs DeepSpeed, which does not run on backend {config.backend}; "
            "set strategy to full_shard",
        )
