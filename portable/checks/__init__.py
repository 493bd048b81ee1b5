"""Check that the settings of a config work together. The checks are grouped by section.

Each ``check_...`` function yields the problems that it finds, as
:class:`~portable.config.rules.SettingProblem`. Backends and engines add their own checks through
:meth:`portable.registry.BackendPackage.find_problems`.

Nearly all checks use only the values of settings, not whether the user has set them explicitly. The
reason is that a resolved config sets all keys explicitly, and it must still pass the checks that
the original config has passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.checks.adapter import check_adapter
from portable.checks.data import check_columns, check_data, check_sources
from portable.checks.memory import (
    check_compile_mode,
    check_deepspeed_config_is_used,
    check_fsdp_settings,
    check_memory_settings,
)
from portable.checks.model import (
    check_attention_precision,
    check_fp8,
    check_model_source,
    check_paths_are_local,
)
from portable.checks.output import (
    check_best_checkpoint,
    check_has_evaluation,
    check_hub_settings,
    check_resume_counters,
    check_tracker_names,
)
from portable.checks.ranks import check_context_parallel, check_expert_parallel, check_tensor_parallel
from portable.checks.train import (
    check_batch_sizes,
    check_fused_backward,
    check_loss_and_ema,
    check_master_dtype,
    check_run_length,
)
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
    check_master_dtype,
    check_batch_sizes,
    check_fused_backward,
    check_deepspeed_config_is_used,
    check_compile_mode,
    check_attention_precision,
    check_fp8,
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
"""Checks for all backends, in the order in which :func:`iter_setting_problems` calls them."""


def check_config(config: RunConfig, *, is_resolved: bool = False, with_location: bool = True) -> None:
    """Check that all settings are supported and do not contradict each other.

    Args:
        config: Config of a run.
        is_resolved: Whether all defaults of the config have been resolved. If so, checks that require
            resolved defaults also run.
        with_location: Whether the error message begins with the location of the setting: its file and
            line, or its flag.

    Raises:
        UserError: If there is a problem. Reports only the first one.
    """
    for problem in iter_setting_problems(config, is_resolved=is_resolved):
        raise UserError(to_one_line(format_problem(problem, config) if with_location else problem.reason))


def is_valid_with(config: RunConfig, changes: dict[str, Any]) -> bool:
    """Return whether a config is still valid after some settings are changed.

    Args:
        config: Config of a run.
        changes: New values, keyed by dotted setting.
    """
    try:
        check_config(config.replaced(changes))
    except UserError:
        return False
    return True


def iter_setting_problems(config: RunConfig, *, is_resolved: bool = False) -> Iterator[SettingProblem]:
    """Yield the problems of all settings in a config.

    The backend-independent checks run first, followed by the checks of the config's backend unless
    ``backend`` is ``auto``.

    Args:
        config: Config of a run.
        is_resolved: Whether all defaults of the config have been resolved. See :func:`check_config`.
    """
    for check_section in SETTING_CHECKS:
        yield from check_section(config)
    if config.backend in BACKENDS:  # false for auto
        yield from load_backend_package(config.backend).find_problems(config, late=is_resolved)
