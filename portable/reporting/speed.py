"""Measure the speed of a run: samples and tokens per second, MFU, and time spent waiting for batches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from portable.data.samples.loader import BatchIterator


@dataclass(frozen=True)
class SpeedUnits:
    """Factors that convert samples per second to tokens per second and MFU.

    Attributes:
        tokens_per_sample: Mean number of tokens per sample, without padding.
        flops_per_token: Floating-point operations per token, in the forward and the backward pass.
        peak_flops: Total peak FLOP/s of all devices of the run. None if the peak is unknown.
    """

    tokens_per_sample: float
    flops_per_token: float
    peak_flops: float | None

    def compute_tokens_per_second(self, samples_per_second: float) -> float:
        """Convert samples per second to tokens per second.

        Args:
            samples_per_second: Samples per second of all ranks.
        """
        return samples_per_second * self.tokens_per_sample

    def compute_mfu(self, samples_per_second: float) -> float | None:
        """Compute the model FLOPs utilization (MFU).

        Args:
            samples_per_second: Total number of samples that all ranks process per second.

        Returns:
            The achieved FLOP/s divided by the total peak FLOP/s of all devices. None if the peak is
            unknown.
        """
        if self.peak_flops is None:
            return None
        return self.compute_tokens_per_second(samples_per_second) * self.flops_per_token / self.peak_flops


class _Reading(NamedTuple):
    """Reading of a clock that is paused during evaluations and saves.

    Attributes:
        seconds: Time of the reading, in seconds.
        samples: Number of samples that this launch of the run had trained on at the time of the
            reading.
    """

    seconds: float
    samples: int


class SpeedMeter:
    """Meter for the training speed of one launch, which is one start or resume of the run.

    It measures samples per second, and how much time is spent waiting for batches. Evaluations and
    saves are excluded. The first step includes compilation and allocation, so it is excluded once
    there is a second step. Work after the last measurement, such as the export, is not measured.

    Args:
        samples_per_step: Number of samples in each step, on all ranks.
        batches: Iterator over the training batches. Its ``wait_seconds`` is the total time that
            steps have waited for it.

    Attributes:
        start_time: Start time of the launch, in seconds of ``time.perf_counter``.
        num_steps: Number of steps of this launch, as of the last measurement.
        excluded_seconds: Total duration of evaluations and saves so far, in seconds.
        samples_per_second: Speed from the start of this launch to the last measurement, without the
            first step if there are later steps.
        wait_share: Fraction of the time between the last two measurements that was spent waiting
            for batches, from 0 to 1.
    """

    def __init__(self, samples_per_step: int, batches: BatchIterator) -> None:
        self.start_time = time.perf_counter()
        self.num_steps = 0
        self.excluded_seconds = 0.0
        self.samples_per_second = 0.0
        self.wait_share = 0.0
        self._samples_per_step = samples_per_step
        self._batches = batches
        self._waited_seconds = batches.wait_seconds
        self._start = self._first_step_end = self._last_reading = self._read_clock()

    @property
    def first_step_seconds(self) -> float:
        """Seconds from the start of the launch to the end of its first step.

        The first step is always logged, so its end is always measured.
        """
        return self._first_step_end.seconds - self.start_time

    def _read_clock(self) -> _Reading:
        return _Reading(time.perf_counter() - self.excluded_seconds, self.num_steps * self._samples_per_step)

    def compute_seconds_per_step(self) -> float:
        """Compute the mean duration of the steps of this launch, including evaluations and saves."""
        return (time.perf_counter() - self.start_time) / max(self.num_steps, 1)

    def measure_speed(self, num_steps: int) -> float:
        """Measure the speed since the last call.

        The reporter calls this method at each logged step. The method also updates the attributes
        ``num_steps``, ``samples_per_second``, and ``wait_share``.

        Args:
            num_steps: Number of steps of this launch so far.

        Returns:
            The samples per second since the last call.
        """
        self.num_steps = num_steps
        now = self._read_clock()
        if num_steps == 1:
            self._first_step_end = now
        waited_seconds = self._batches.wait_seconds
        self.wait_share = min(
            1.0,
            (waited_seconds - self._waited_seconds) / max(now.seconds - self._last_reading.seconds, 1e-9),
        )
        self._waited_seconds = waited_seconds
        start = self._first_step_end if num_steps > 1 else self._start
        latest_rate = _compute_rate(max(start, self._last_reading), now)
        self.samples_per_second, self._last_reading = _compute_rate(start, now), now
        return latest_rate

    def exclude_seconds(self, seconds: float) -> None:
        """Exclude the duration of an evaluation or a save from the measured speed.

        Args:
            seconds: Duration in seconds.
        """
        self.excluded_seconds += seconds


def _compute_rate(start: _Reading, end: _Reading) -> float:
    return (end.samples - start.samples) / max(end.seconds - start.seconds, 1e-9)
