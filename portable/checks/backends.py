"""Rules for backends that have no NVIDIA GPUs or no DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, is_zero

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_without_cuda(config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
    """Yield the settings that only NVIDIA GPUs support.

    Args:
        config: Config of a run on another backend.
        late: Whether the config is resolved.
    """
    if config.precision == "tf32":
        yield SettingProblem(
            ("precision", "backend"),
            f"precision tf32 is a mode of NVIDIA GPUs, not of backend {config.backend}; use fp32 or bf16",
        )
    if config.model.attention not in ("sdpa", "eager"):
        yield SettingProblem(
            ("model.attention", "backend"),
            f"model.attention {config.model.attention} needs backend cuda, not {config.backend}; use sdpa",
        )
    if late and config.log.memory_snapshot:
        yield SettingProblem(
            ("log.memory_snapshot",),
            "log.memory_snapshot: torch records the allocations of GPUs only; set it to false",
        )


def check_without_zero(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem if the strategy needs DeepSpeed, on a backend that DeepSpeed does not support."""
    if is_zero(config):
        yield SettingProblem(
            ("strategy", "backend"),
            f"strategy {config.strategy} is DeepSpeed's, which does not run on backend {config.backend}; "
            "use full_shard",
        )
