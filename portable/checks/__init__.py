"""Rules between settings, one function per section of the config.

Each function yields the problems of its section. Backends and engines contribute theirs through
:meth:`portable.registry.BackendPackage.find_problems`. A resolved config that contains every key passes like
the short file that it was made from, because rules read values instead of whether the user set them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.checks.adapter import check_adapter
from portable.checks.data import check_columns, check_data, check_sources
from portable.checks.memory import check_compile, check_deepspeed, check_fsdp, check_memory
from portable.checks.model import check_attention, check_model, check_paths
from portable.checks.output import check_best, check_checkpoint, check_evaluation, check_hub, check_trackers
from portable.checks.ranks import check_context_parallel, check_tensor_parallel
from portable.checks.train import check_batch, check_length, check_loss
from portable.config.rules import format_problem
from portable.errors import UserError, to_one_line
from portable.optim.checks import check_schedule, check_schedule_params
from portable.registry import BACKENDS, load_backend_package

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig
    from portable.config.rules import SettingProblem

CHECKS = (
    check_paths,
    check_model,
    check_adapter,
    check_data,
    check_columns,
    check_sources,
    check_length,
    check_schedule,
    check_loss,
    check_schedule_params,
    check_batch,
    check_deepspeed,
    check_compile,
    check_attention,
    check_memory,
    check_fsdp,
    check_context_parallel,
    check_tensor_parallel,
    check_trackers,
    check_checkpoint,
    check_hub,
    check_evaluation,
    check_best,
)
"""Rules for all backends, in the order in which problems are reported."""


def check(config: RunConfig, *, late: bool = False, with_location: bool = True) -> None:
    """Refuse settings that do not work together.

    Args:
        config: Config of a run.
        late: Whether the config is resolved. This adds the rules that need a resolved config or user code.
        with_location: Whether the message names the file and line, or the flag, of the setting.

    Raises:
        UserError: The first problem.
    """
    for problem in find_problems(config, late=late):
        raise UserError(to_one_line(format_problem(problem, config) if with_location else problem.reason))


def find_problems(config: RunConfig, *, late: bool = False) -> Iterator[SettingProblem]:
    """Yield the problems of a config; see :func:`check`."""
    for check_section in CHECKS:
        yield from check_section(config)
    if config.backend in BACKENDS:  # not auto
        yield from load_backend_package(config.backend).find_problems(config, late=late)
