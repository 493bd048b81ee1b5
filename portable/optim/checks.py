"""Check the settings of the learning-rate schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.derived_defaults import compute_warmup_steps, has_warmup
from portable.config.rules import SettingProblem, format_setting_with_value, uses_zero_strategy
from portable.converters.similar_names import format_name_suggestion
from portable.optim.schedule import (
    ZERO_ONLY_SCHEDULES,
    ScheduleParamsError,
    build_schedule,
    explain_long_warmup,
    list_schedule_params,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_schedule(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that is incompatible with ``train.schedule``.

    The schedules ``OneCycle`` and ``LRRangeTest`` need a ZeRO strategy. ``train.warmup_ratio`` and
    ``train.warmup_steps`` must be null or 0 if the schedule has no warmup.

    Args:
        config: The config of the run.

    Yields:
        Names of the settings, and an error message.
    """
    schedule = config.train.schedule
    if schedule in ZERO_ONLY_SCHEDULES and not uses_zero_strategy(config):
        yield SettingProblem(
            ("train.schedule",),
            f"train.schedule: {schedule} needs DeepSpeed; set strategy to zero1, zero2 or zero3, or "
            "set train.schedule to cosine or a custom function",
        )
    for key in ("train.warmup_ratio", "train.warmup_steps"):
        if config.get(key) and not has_warmup(schedule):
            yield SettingProblem(
                (key, "train.schedule"),
                f"{format_setting_with_value(config, key)} has no effect with train.schedule: {schedule}, "
                f"which has no warmup; set {key} to 0",
            )


def check_schedule_params(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems with the warmup settings and ``train.schedule_params``.

    There is a problem in these cases:

    * ``train.warmup_ratio`` is set, but ``train.warmup_steps`` is nonzero and differs from the
      number of steps for this ratio.
    * ``train.warmup_steps`` exceeds ``train.steps``. This is allowed for the schedule ``WarmupLR``.
    * ``train.schedule_params`` contains an unknown key or an invalid value, or lacks a required
      key.
    * The schedule changes ``train.betas``, but ``train.optimizer`` is neither ``adamw`` nor
      ``muon``.

    Args:
        config: The config of the run.

    Yields:
        Names of the settings, and an error message.
    """
    train = config.train
    warmup_of_ratio = (None, 0, compute_warmup_steps(train, train.steps or 0))
    if train.warmup_ratio is not None and train.warmup_steps not in warmup_of_ratio:
        yield SettingProblem(
            ("train.warmup_ratio", "train.warmup_steps"),
            f"train.warmup_ratio {train.warmup_ratio:g} and train.warmup_steps {train.warmup_steps} both "
            "set the length of the warmup; remove one of the two settings",
        )
    if train.steps is not None and (reason := explain_long_warmup(train, train.steps)) is not None:
        yield SettingProblem(("train.warmup_steps", "train.steps"), reason)
    params = list_schedule_params(train.schedule)
    for name in train.schedule_params:
        if name not in params:
            key = f"train.schedule_params.{name}"
            if not params:
                reason = f"{key}: has no effect, because {train.schedule} has no parameters; remove {key}"
            elif hint := format_name_suggestion(name, params):
                reason = f"unknown key {key}{hint}"
            else:
                reason = f"unknown key {key}; use one of {', '.join(params)}"
            yield SettingProblem((key,), reason)
    try:
        schedule = build_schedule(train, train.steps or 1)
    except ScheduleParamsError as error:
        yield error.problem
        return
    if getattr(schedule, "cycle_momentum", False) and train.optimizer not in ("adamw", "muon"):
        yield SettingProblem(
            ("train.schedule_params.cycle_momentum", "train.betas", "train.optimizer"),
            "train.schedule_params.cycle_momentum: changes train.betas, which train.optimizer: "
            f"{train.optimizer} does not use; set train.schedule_params.cycle_momentum to false",
        )
