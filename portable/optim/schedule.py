"""Learning-rate schedules, as pure functions of the step.

Schedules with lowercase names equal transformers' schedules at every step. The others have the
names and the arithmetic of DeepSpeed's schedules (``deepspeed/runtime/lr_schedules.py``). All
schedules except :data:`ZERO_ONLY_SCHEDULES` run on every backend, so that a run that started with a
DeepSpeed JSON can resume without DeepSpeed, and vice versa.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from portable import plugins
from portable.config.derived_defaults import compute_warmup_steps
from portable.config.number_types import MAX_LEARNING_RATE, MAX_STEPS
from portable.config.rules import SettingProblem
from portable.config.sections import ScheduleKind as Kind
from portable.errors import UserError, require

if TYPE_CHECKING:
    from portable.config.sections import TrainConfig

Rate = Annotated[float, Field(ge=0, le=MAX_LEARNING_RATE)]
PartOfSteps = Annotated[float, Field(ge=0, le=MAX_STEPS)]
Stairs = Annotated[int, Field(ge=0, le=MAX_STEPS)]
Growth = Annotated[float, Field(ge=-MAX_LEARNING_RATE, le=MAX_LEARNING_RATE)]
Momentum = Annotated[float, Field(ge=0, le=1)]
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_STRICT)
class Schedule:
    """Base class of all schedules, which are callables that return the learning rate at a step.

    A subclass has a field for each key of ``train.schedule_params``. The constructor raises
    pydantic's ``ValidationError`` for a missing, unknown or invalid value.

    Attributes:
        peak: Value of ``train.learning_rate``.
        minimum: Lower bound of the decay, and start of the warmup of :class:`WarmupStableDecay`.
            It is ``train.learning_rate`` multiplied by
            ``train.min_learning_rate_ratio``. :class:`WarmupLR`, :class:`WarmupDecayLR`,
            :class:`OneCycle`, :class:`LRRangeTest` and :class:`CustomSchedule` do not use it.
        warmup_steps: Number of warmup steps. Schedules without a warmup do not use it.
        total_steps: Length of the run in optimizer steps.
    """

    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based). Subclasses implement this method."""
        raise NotImplementedError


@dataclass(frozen=True, config=_STRICT)
class Constant(Schedule):
    """Linear warmup from zero, then a constant learning rate.

    The rate of the first step is 0 if there is a warmup. If the minimum is 0, this schedule and its
    subclasses equal transformers' schedules, such as ``get_constant_schedule_with_warmup``, at
    every step. Subclasses override :meth:`_compute_decay`.
    """

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based).

        The rate rises linearly from 0 to the peak during the warmup. Afterwards, :meth:`_compute_decay`
        determines its position between the minimum and the peak.
        """
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        # Progress stays below 1 during the run, so no step after the warmup has a learning rate of zero.
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.minimum + (self.peak - self.minimum) * self._compute_decay(progress)

    def _compute_decay(self, progress: float) -> float:
        """Return the position of the learning rate between the minimum (0) and the peak (1).

        The position applies after the warmup. The learning rate is interpolated linearly between
        the minimum and the peak. Here, the position is 1, so the rate stays at the peak. Subclasses
        return a value that falls from 1 to 0.

        Args:
            progress: Completed fraction of the steps after the warmup, from 0 to 1.
        """
        return 1.0


@dataclass(frozen=True, config=_STRICT)
class Linear(Constant):
    """Linear warmup from zero, then linear decay to the minimum."""

    def _compute_decay(self, progress: float) -> float:
        return 1 - progress


@dataclass(frozen=True, config=_STRICT)
class Cosine(Constant):
    """Linear warmup from zero, then a decay to the minimum along half a cosine."""

    def _compute_decay(self, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


_Shape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True, config=_STRICT)
class WarmupStableDecay(Schedule):
    """Warmup from the minimum to the peak, a constant rate, and a decay to the minimum at the end of the run.

    Attributes:
        decay_ratio: Number of decay steps as a fraction of all steps. The number is rounded up, and
            limited to the steps after the warmup.
        decay_type: Shape of the decay.
        warmup_type: Shape of the warmup.
    """

    decay_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    decay_type: _Shape = "linear"
    warmup_type: _Shape = "linear"

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based)."""
        # Subtract an epsilon before rounding up, because fractions such as 0.07 are not exact.
        decay = math.ceil(self.decay_ratio * self.total_steps - 1e-9)
        decay = min(decay, self.total_steps - self.warmup_steps)
        steps_left = min(self.total_steps - step, decay)
        if step < self.warmup_steps:
            share = _compute_rising_share(step / self.warmup_steps, self.warmup_type)
        else:
            share = _compute_falling_share(1 - steps_left / decay, self.decay_type) if decay > 0 else 1.0
        return self.minimum + (self.peak - self.minimum) * share


def _compute_rising_share(progress: float, shape: str) -> float:
    """Return a value that rises from 0 to 1 as ``progress`` rises from 0 to 1.

    Args:
        progress: Completed fraction of the warmup, from 0 to 1.
        shape: Shape of the curve: ``linear``, ``cosine`` or ``1-sqrt``. The value is
            ``1 - sqrt(1 - progress)`` for ``1-sqrt``.
    """
    if shape == "cosine":
        return 0.5 * (1 - math.cos(math.pi * progress))
    return 1 - math.sqrt(1 - progress) if shape == "1-sqrt" else progress


def _compute_falling_share(progress: float, shape: str) -> float:
    """Return a value that falls from 1 to 0 as ``progress`` rises from 0 to 1.

    Args:
        progress: Completed fraction of the decay, from 0 to 1.
        shape: Shape of the curve: ``linear``, ``cosine`` or ``1-sqrt``.
    """
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - math.sqrt(progress) if shape == "1-sqrt" else 1 - progress


@dataclass(frozen=True, config=_STRICT)
class InverseSqrt(Schedule):
    """Linear warmup from zero, then inverse-square-root decay down to the minimum.

    Attributes:
        timescale: Number of steps after the warmup until the rate has decayed to
            ``peak / sqrt(2)``. If this is None, the number of warmup steps is used, or 10,000
            without a warmup.
    """

    timescale: Annotated[int, Field(gt=0, le=MAX_STEPS)] | None = None

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based).

        After the warmup, the rate is ``peak / sqrt(1 + steps_after_warmup / timescale)``, but not less than
        the minimum.
        """
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        scale = self.timescale or self.warmup_steps or 10_000
        return max(self.minimum, self.peak / math.sqrt((step - self.warmup_steps + scale) / scale))


@dataclass(frozen=True, config=_STRICT)
class WarmupLR(Schedule):
    """Warmup from ``warmup_min_lr`` to the peak, then a constant learning rate, as in DeepSpeed.

    DeepSpeed's step count is ``max(0, step - 1)``, so steps 0 and 1 have the same rate. The warmup
    takes at least two steps.

    Attributes:
        warmup_min_lr: Learning rate at the start of the warmup.
        warmup_type: Shape of the warmup: linear or logarithmic.
    """

    warmup_min_lr: Rate = 0.0
    warmup_type: Literal["log", "linear"] = "log"

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based)."""
        return self.warmup_min_lr + (self.peak - self.warmup_min_lr) * self._compute_peak_share(
            max(0, step - 1)
        )

    def _compute_peak_share(self, counted_steps: int) -> float:
        """Return the position of the learning rate between ``warmup_min_lr`` (0) and the peak (1).

        The position rises from 0 to 1 during the warmup. Subclasses may lower it afterwards.

        Args:
            counted_steps: Step count of DeepSpeed's scheduler. It is 0 in the first two steps, and
                then one less than the zero-based step.
        """
        warmup = max(2, self.warmup_steps)
        return (
            _compute_warmup_share(counted_steps, warmup, self.warmup_type)
            if counted_steps < warmup
            else self._compute_after_warmup(counted_steps, warmup)
        )

    def _compute_after_warmup(self, counted: int, warmup: int) -> float:
        return 1.0


@dataclass(frozen=True, config=_STRICT)
class WarmupDecayLR(WarmupLR):
    """Warmup from ``warmup_min_lr`` to the peak, then linear decay to ``warmup_min_lr``, as in DeepSpeed."""

    def _compute_after_warmup(self, counted: int, warmup: int) -> float:
        return max(0.0, (self.total_steps - counted) / max(1.0, self.total_steps - warmup))


@dataclass(frozen=True, config=_STRICT)
class WarmupCosineLR(Schedule):
    """Warmup from a fraction of the peak, then cosine decay to the minimum, as in DeepSpeed.

    The first step has a learning rate of 0, and the warmup begins with the second step. The
    warmup takes at least two steps.

    Attributes:
        warmup_min_ratio: Learning rate at the start of the warmup, as a fraction of the peak.
        warmup_type: Shape of the warmup: linear or logarithmic.
    """

    warmup_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_type: Literal["log", "linear"] = "log"

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based).

        The rate is 0 at step 0. It then rises to the peak during the warmup, and finally decays to
        the minimum along a cosine.
        """
        counted, warmup = step - 1, max(2, self.warmup_steps)
        if counted < 0:
            return 0.0
        if counted < warmup:
            risen = _compute_warmup_share(counted, warmup, self.warmup_type)
            return self.peak * (self.warmup_min_ratio + risen * (1.0 - self.warmup_min_ratio))
        progress = min(1.0, (counted - warmup + 1) / max(1, self.total_steps - warmup))
        end = self.minimum / self.peak
        return self.peak * max(0.0, end + (1.0 - end) * (1 + math.cos(math.pi * progress)) / 2)


def _compute_warmup_share(counted: int, warmup: int, shape: str) -> float:
    return 1.0 / math.log(warmup) * math.log(counted + 1) if shape == "log" else counted / warmup


@dataclass(frozen=True, config=_STRICT)
class OneCycle(Schedule):
    """One cycle from ``cycle_min_lr`` to the peak and back, then an optional decay, as in DeepSpeed.

    At ``n`` steps after the cycle, the learning rate is
    ``cycle_min_lr / (1 + decay_lr_rate * n / decay_step_size)``.

    If ``cycle_momentum`` is true, Adam's first beta falls while the learning rate rises, and vice
    versa. This schedule requires ZeRO, because only the ZeRO engine calls :meth:`compute_betas`.

    Source: L. N. Smith, "A disciplined approach to neural network hyper-parameters",
    arXiv:1803.09820.

    Attributes:
        cycle_min_lr: Learning rate at the start and the end of the cycle.
        decay_lr_rate: Decay rate of the learning rate per ``decay_step_size`` steps after the
            cycle. 0 for no decay.
        cycle_first_step_size: Number of steps over which the learning rate rises.
        cycle_second_step_size: Number of steps over which the learning rate falls. If None, it is
            equal to ``cycle_first_step_size``.
        cycle_first_stair_count: Number of equal stairs into which the rise is divided. 0 for a
            continuous rise.
        cycle_second_stair_count: Number of equal stairs into which the fall is divided. 0 for a
            continuous fall. If None, it is equal to ``cycle_first_stair_count``.
        decay_step_size: Number of steps to which ``decay_lr_rate`` and ``decay_mom_rate`` refer. 0
            for a constant learning rate and a constant first beta after the cycle.
        cycle_momentum: Whether Adam's first beta changes. If so, the second beta is always 0.99,
            and ``train.betas`` is not used.
        cycle_min_mom: Minimum of the first beta in the cycle.
        cycle_max_mom: Maximum of the first beta in the cycle.
        decay_mom_rate: Growth rate of the first beta per ``decay_step_size`` steps after the cycle.
            0 for a constant beta.
    """

    cycle_min_lr: Rate
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Annotated[PartOfSteps, Field(gt=0)] = 2000
    cycle_second_step_size: PartOfSteps | None = None
    cycle_first_stair_count: Stairs = 0
    cycle_second_stair_count: Stairs | None = None
    decay_step_size: PartOfSteps = 0.0
    cycle_momentum: bool = True
    cycle_min_mom: Momentum = 0.8
    cycle_max_mom: Momentum = 0.9
    decay_mom_rate: Growth = 0.0

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based).

        After the cycle, the rate stays at ``cycle_min_lr``, or decays further if ``decay_step_size`` and
        ``decay_lr_rate`` are not 0.
        """
        if step - 1 < self._cycle_length:
            return self.cycle_min_lr + (self.peak - self.cycle_min_lr) * self._compute_cycle_height(step)
        if self.decay_step_size == 0 or self.decay_lr_rate == 0:
            return self.cycle_min_lr
        return self.cycle_min_lr / (
            1 + self.decay_lr_rate * (step - self._cycle_length) / self.decay_step_size
        )

    def compute_betas(self, step: int) -> tuple[float, float] | None:
        """Return Adam's betas at a step.

        In the cycle, the first beta falls while the learning rate rises, and vice versa. At step 0,
        however, it is ``cycle_min_mom``. After the cycle, it is ``cycle_max_mom``, and grows
        further if ``decay_step_size`` and ``decay_mom_rate`` are not 0. The second beta is always
        0.99.

        Args:
            step: Zero-based optimizer step.

        Returns:
            Both betas. None if ``cycle_momentum`` is false, so that the betas of the run apply.
        """
        if not self.cycle_momentum:
            return None
        low, high = self.cycle_min_mom, self.cycle_max_mom
        if step == 0:  # DeepSpeed has not counted a step yet
            return low, 0.99
        if step - 1 < self._cycle_length:
            return high - (high - low) * self._compute_cycle_height(step), 0.99
        if self.decay_step_size == 0 or self.decay_mom_rate == 0:
            return high, 0.99
        return high * (1 + self.decay_mom_rate * (step - self._cycle_length) / self.decay_step_size), 0.99

    @property
    def _second_step_size(self) -> float:
        second = self.cycle_second_step_size
        return float(self.cycle_first_step_size if second is None else second)

    @property
    def _cycle_length(self) -> float:
        return self.cycle_first_step_size + self._second_step_size

    def _compute_cycle_height(self, step: int) -> float:
        """Return the height of the learning rate in the cycle: 0 for ``cycle_min_lr``, 1 for the peak.

        During a cycle, the height rises from 0 to 1 and falls back to 0. The settings
        ``cycle_first_stair_count`` and ``cycle_second_stair_count`` can divide the rise and the
        fall into discrete steps.
        """
        first_step_size, length = self.cycle_first_step_size, self._cycle_length
        cycle_position = 1.0 + step / length - math.floor(1 + step / length)
        rising = cycle_position <= first_step_size / length
        stairs = self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs > 0:
            cycle_step = step % length
            climbed = (
                cycle_step / first_step_size
                if cycle_step <= first_step_size
                else (length - cycle_step) / self._second_step_size
            )
            return math.floor(climbed * stairs) / stairs
        return (
            cycle_position / (first_step_size / length)
            if rising
            else (cycle_position - 1) / (first_step_size / length - 1)
        )


@dataclass(frozen=True, config=_STRICT)
class LRRangeTest(Schedule):
    """Learning rate that grows without limit from ``train.learning_rate``, to find where a run diverges.

    In each interval of ``lr_range_test_step_size`` steps, the rate increases by
    ``lr_range_test_step_rate`` times the initial rate. It increases continuously or, with
    ``lr_range_test_staircase``, only at the end of each interval.

    This schedule requires ZeRO.
    """

    lr_range_test_step_size: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: bool = False

    def __call__(self, step: int) -> float:
        """Return the learning rate at ``step`` (zero-based)."""
        interval = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.peak * (1 + self.lr_range_test_step_rate * interval)


@dataclass(frozen=True, config=_STRICT)
class CustomSchedule(Schedule):
    """Schedule that multiplies ``train.learning_rate`` by a custom function ``(step, total_steps)``.

    Attributes:
        code: Import path of the function or class (see :mod:`portable.plugins`), which is imported at
            the first step.
    """

    code: str = ""

    def __call__(self, step: int) -> float:
        """Call the custom function, and return the learning rate at ``step`` (zero-based).

        Raises:
            UserError: If the function cannot be imported, if it fails, or if it does not return a
                finite int or float of at least 0. A tensor or a NumPy float32 is not accepted.
        """
        context = f"train.schedule: {self.code}"
        with plugins.convert_user_errors(context):
            factor = self._loaded_function(step, self.total_steps)
        fits = isinstance(factor, int | float) and math.isfinite(factor) and factor >= 0
        require(
            fits,
            f"{context}: returns {factor!r} for step {step}; return a finite int or float of at least 0, by "
            "which train.learning_rate is multiplied",
        )
        return self.peak * float(factor)

    @cached_property
    def _loaded_function(self) -> Any:
        return plugins.load_plugin("train.schedule", self.code)


SCHEDULES: dict[str, type[Schedule]] = dict(
    zip(
        get_args(Kind),
        (
            Cosine,
            Linear,
            Constant,
            WarmupStableDecay,
            InverseSqrt,
            WarmupLR,
            WarmupDecayLR,
            WarmupCosineLR,
            OneCycle,
            LRRangeTest,
        ),
        strict=True,
    )
)


ZERO_ONLY_SCHEDULES = ("OneCycle", "LRRangeTest")


def get_schedule_class(name: str) -> type[Schedule]:
    """Return the class for a value of ``train.schedule``: :class:`CustomSchedule` for custom code."""
    return CustomSchedule if plugins.is_plugin_name(name) else SCHEDULES[name]


class ScheduleParamsError(UserError):
    """Error raised for invalid values of ``train.schedule_params``.

    Args:
        problem: Settings that are incompatible with the schedule, and the reason.
    """

    def __init__(self, problem: SettingProblem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


def build_schedule(settings: TrainConfig, total_steps: int) -> Schedule:
    """Build the schedule of a run.

    Args:
        settings: The ``train`` section.
        total_steps: Length of the run in optimizer steps.

    Raises:
        ScheduleParamsError: If ``train.schedule_params`` lacks a required key of the schedule, or
            contains an unknown key or an invalid value. Also raised if Adam's first beta leaves its
            range within the run.
    """
    values: dict[str, Any] = {
        "peak": settings.learning_rate,
        "minimum": settings.learning_rate * settings.min_learning_rate_ratio,
        "warmup_steps": compute_warmup_steps(settings, total_steps),
        "total_steps": total_steps,
        **settings.schedule_params,
    }
    schedule_type = get_schedule_class(settings.schedule)
    if schedule_type is CustomSchedule:
        values["code"] = settings.schedule
    try:
        schedule = schedule_type(**values)
    except ValidationError as error:
        first_error = error.errors()[0]
        key = f"train.schedule_params.{first_error['loc'][0]}"
        problem = SettingProblem((key,), f"{key}: {first_error['msg']}")
        if first_error["type"] == "missing":
            problem = SettingProblem(
                ("train.schedule", key), f"train.schedule: {settings.schedule} needs {key}; set {key}"
            )
        raise ScheduleParamsError(problem) from error
    if (
        isinstance(schedule, OneCycle)
        and (last_betas := schedule.compute_betas(total_steps - 1)) is not None
        and not 0 <= last_betas[0] < 1
    ):
        key = "train.schedule_params." + ("decay_mom_rate" if schedule.decay_mom_rate else "cycle_max_mom")
        message = (
            f"{key}: Adam's first beta is {last_betas[0]:.4g} at step {total_steps}, but must be at least 0 "
            f"and less than 1; set {key} closer to 0"
        )
        raise ScheduleParamsError(SettingProblem((key,), message))
    return schedule


def build_one_cycle_schedule(settings: TrainConfig) -> OneCycle | None:
    """Build the run's ``OneCycle`` schedule, to compute Adam's betas for each step.

    Use the result only for :meth:`OneCycle.compute_betas`. This function does not receive the
    length of the run, and therefore builds the schedule for a run of one step. The betas do not
    depend on the length.

    Args:
        settings: The ``train`` section.

    Returns:
        The schedule. None if the run uses a different schedule.
    """
    schedule = build_schedule(settings, 1)
    return schedule if isinstance(schedule, OneCycle) else None


def explain_long_warmup(settings: TrainConfig, total_steps: int) -> str | None:
    """Build the error message for a ``train.warmup_steps`` that exceeds the length of the run.

    Args:
        settings: The ``train`` section.
        total_steps: Length of the run in optimizer steps.

    Returns:
        The message, on one line. None if the warmup fits into the run, or if the schedule is
        ``WarmupLR``, which allows a run to end during the warmup.
    """
    steps = settings.warmup_steps or 0
    # WarmupLR consists of a warmup, so a run may end during it.
    if steps <= total_steps or settings.schedule == "WarmupLR":
        return None
    asked = "" if settings.epochs is None else f" (train.epochs {settings.epochs:g})"
    return (
        f"train.warmup_steps {steps} exceeds train.steps {total_steps}{asked}; lower train.warmup_steps, "
        "or raise train.steps"
    )


def list_schedule_params(schedule_name: str) -> tuple[str, ...]:
    """List the allowed keys of ``train.schedule_params``.

    Args:
        schedule_name: Value of ``train.schedule``.

    Returns:
        Keys, in the order used in error messages.
    """
    common = Schedule.__dataclass_fields__
    fields = get_schedule_class(schedule_name).__dataclass_fields__
    return tuple(name for name in fields if name not in common and name != "code")
