"""Checks for settings that do not work together, grouped by section of the config.

Each ``check_...`` function yields the problems that it finds, as
:class:`~portable.config.rules.SettingProblem`. Backends and engines add their own checks through
:meth:`portable.registry.BackendPackage.find_problems`. The checks use values, and hardly ever whether the
user has set them. Therefore, a resolved config that contains every key passes if the short file that it was
made from passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.checks.adapter import check_adapter
from portable.checks.data import check_columns, check_data, check_sources
from portable.checks.memory import (
    check_compile_mode,
    check_deepspeed_config_is_used,
    check_fsdp_settings,
    check_memory_settings,
)
from portable.checks.model import check_attention_precision, check_model_source, check_paths_are_local
from portable.checks.output import (
    check_best_checkpoint,
    check_has_evaluation,
    check_hub_settings,
    check_resume_counters,
    check_tracker_names,
)
from portable.checks.ranks import check_context_parallel, check_expert_parallel, check_tensor_parallel
from portable.checks.train import check_batch_sizes, check_loss_and_ema, check_run_length
from portable.config.rules import format_problem
from portable.errors import UserError, to_one_line
from portable.optim.checks import check_schedule, check_schedule_params
from portable.registry import BACKENDS, load_backend_package

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig
    from portable.config.rules import SettingProblem

SETTING_CHECKS = (
    check_paths_are_local,
    check_model_source,
    check_adapter,
    check_data,
    check_columns,
    check_sources,
    check_run_length,
    check_schedule,
    check_loss_and_ema,
    check_schedule_params,
    check_batch_sizes,
    check_deepspeed_config_is_used,
    check_compile_mode,
    check_attention_precision,
    check_memory_settings,
    check_fsdp_settings,
    check_context_parallel,
    check_tensor_parallel,
    check_expert_parallel,
    check_tracker_names,
    check_resume_counters,
    check_hub_settings,
    check_has_evaluation,
    check_best_checkpoint,
)
"""Checks for all backends, in the order of reported problems."""


def check_config(config: RunConfig, *, is_resolved: bool = False, with_location: bool = True) -> None:
    """Raise an error for the first setting that is not supported or that contradicts a different setting.

    Args:
        config: Config of a run.
        is_resolved: Whether the config is resolved. If it is, checks that need a resolved config or custom
            code are included.
        with_location: Whether the message names the file and line, or the flag, of the setting.

    Raises:
        UserError: The first problem.
    """
    for problem in iter_setting_problems(config, is_resolved=is_resolved):
        raise UserError(to_one_line(format_problem(problem, config) if with_location else problem.reason))


def iter_setting_problems(config: RunConfig, *, is_resolved: bool = False) -> Iterator[SettingProblem]:
    """Yield the problems of a config: of the checks for all backends, then of its backend.

    The checks of the backend are skipped while ``backend`` is ``auto``.

    Args:
        config: Config of a run.
        is_resolved: Whether the config is resolved. See :func:`check_config`.
    """
    for check_section in SETTING_CHECKS:
        yield from check_section(config)
    if config.backend in BACKENDS:  # not auto
        yield from load_backend_package(config.backend).find_problems(config, late=is_resolved)
