"""Progress bar, log lines, metrics, events and the closing summary of a launch."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from converters.console import columns
from portable.errors import UserError
from portable.formatting import human_bytes, human_time, table
from portable.loop import Events, Progress
from portable.paths import CONFIG_FILE
from portable.ranks import launch
from portable.reporting.events import History
from portable.reporting.metrics import (
    MetricsFile,
    Throughput,
    evaluation_in_words,
    is_evaluation,
    read_metrics,
)
from portable.reporting.trackers import Tracker, open_trackers
from portable.terminal import LOG, at_a_terminal, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.backend import Backend
    from portable.checkpoint.store import Checkpoints
    from portable.config.sections import LogConfig
    from portable.output.output_dir import Output
    from portable.reporting.events import Kind
    from portable.reporting.profiling import Profiler


_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""Without the seconds of a step: tokens a second say it, and eighty columns have no room for both."""


class Reporter(Events):
    """Reports one launch of a run. On ranks other than 0 it only saves."""

    def __init__(
        self,
        *,
        backend: Backend,
        output: Output,
        progress: Progress,
        total_steps: int,
        tokens_per_sample: float,
        flops_per_token: float,
        precision: str,
        rates: Mapping[str, float],
        log: LogConfig,
        config: dict[str, Any],
        checkpoints: Checkpoints[Any],
        save: Callable[[Progress], None],
        profiler: Profiler | None,
        facts: dict[str, Any],
    ) -> None:
        """Open the logs and record the start.

        Args:
            rates: of groups with a learning rate of their own, by pattern: its ratio to the run's.
            facts: fields of the start event; ``source``, if given, is the checkpoint that the launch resumes.
        """
        self._backend = backend
        self._output = output
        self._folder = folder = output.work
        self._tokens_per_sample = tokens_per_sample
        self._flops_per_token = flops_per_token
        self._rates = rates
        peak = backend.peak_flops(precision)
        self._peak_flops = None if peak is None else peak * backend.world_size * backend.devices_per_rank
        self._checkpoints = checkpoints
        self._save = save
        self._profiler = profiler
        self._samples = progress.samples
        self._main = backend.rank == 0
        self.last_loss: float | None = None
        self.last_evaluation: Mapping[str, float] = {}
        self._metrics: MetricsFile | None = None
        self._history: History | None = None
        self._trackers: list[Tracker] = []
        self._bar: tqdm[Any] | None = None
        if self._main:
            self._metrics = MetricsFile(folder, from_step=progress.step)
            self._history = History(folder)
            self._history.record(
                "resume" if facts.get("source") else "start", progress.step, samples=progress.samples, **facts
            )
            self._trackers = open_trackers(log, folder, config, from_step=progress.step)
            # A bar on a terminal; in a log file, a line for each logged step.
            self._bar = tqdm(
                total=total_steps,
                initial=progress.step,
                unit="step",
                desc="training",
                dynamic_ncols=True,
                bar_format=_BAR,
                disable=not at_a_terminal(),
            )
        self._total_steps = total_steps
        self._throughput = Throughput()

    # -- called by the loop ------------------------------------------------------------------------------

    def on_step(self, progress: Progress) -> None:
        self._throughput.add(progress.samples - self._samples)
        self._samples = progress.samples
        if self._bar is not None:
            self._bar.update(1)
        self._checkpoints.finish_if_written()
        if self._profiler is not None:
            self._profiler.step()

    def on_log(
        self,
        progress: Progress,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        numbers: Mapping[str, float],
    ) -> None:
        self.last_loss = loss
        if self._metrics is None:
            return
        samples_per_second = self._throughput.window()
        tokens_per_second = samples_per_second * self._tokens_per_sample
        memory, _ = self._backend.memory()
        values = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            **{f"learning_rate/{pattern}": learning_rate * ratio for pattern, ratio in self._rates.items()},
            "tokens_per_second": tokens_per_second,
            "samples_per_second": samples_per_second,
            "memory": memory,
            "skipped_steps": progress.skipped,
            **self._backend.metrics(),
        }
        if taken := next((name for name in numbers if name in (*values, "step", "samples", "time")), None):
            raise UserError(
                f"{taken}: logged by train.loss or a callback, and the name of a metric; rename it"
            )
        values |= numbers
        if self._peak_flops is not None:
            values["mfu"] = tokens_per_second * self._flops_per_token / self._peak_flops
        self._record(progress, values)
        shown = {
            "loss": f"{loss:.4f}",
            "lr": f"{learning_rate:.1e}",
            "tok/s": f"{tokens_per_second:,.0f}",
            "mem": human_bytes(memory),
        }
        if "mfu" in values:
            shown["mfu"] = f"{values['mfu']:.1%}"
        assert self._bar is not None
        # A bar of a hundred columns has no room for more.
        self._bar.set_postfix({name: value for name, value in shown.items() if name != "mem"})
        left = (self._total_steps - progress.step) * self._throughput.seconds_per_step()
        pairs = "  ".join(f"{name} {value}" for name, value in shown.items())
        line = f"step {progress.step}/{self._total_steps}  {pairs}  left {human_time(left)}"
        LOG.log(logging.INFO if self._bar.disable else logging.DEBUG, "%s", line)

    def on_save(self, progress: Progress) -> None:
        for tracker in self._trackers:
            tracker.flush()
        self._save(progress)
        self._happened("save", progress, checkpoint=f"step-{progress.step:06d}")

    def on_skipped(self, progress: Progress, count: int, told: str) -> None:
        since = "" if count == 1 else f"{count} updates were skipped since the last check, the latest in "
        self.say(f"warning: {since}{told}")
        self._happened("skip", progress, count=count, told=told)

    def on_pause(self, seconds: float) -> None:
        self._throughput.pause(seconds)

    def last_checkpoint(self) -> str:
        self._checkpoints.finish()
        self._backend.barrier()  # rank 0 has now renamed the folder
        return str(self._checkpoints.latest() or "none yet")

    def replay(self, step: int) -> str:
        # On XLA the processes of a slice discover each other.
        ranks = 1 if self._backend.one_program else self._backend.world_size
        return launch.command(ranks, config=self._folder / CONFIG_FILE, replay=step)

    # -- called by the run -------------------------------------------------------------------------------

    def on_eval(self, progress: Progress, values: Mapping[str, Any]) -> None:
        """An evaluation is done.

        Args:
            progress: where.
            values: of its metrics: numbers, and mappings that only ``metrics.jsonl`` gets.
        """
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self.last_evaluation = numbers
        self._record(progress, values)
        self.say(f"step {progress.step}  evaluation  {evaluation_in_words(numbers)}")

    def lacks_eval(self, progress: Progress) -> bool:
        """Whether no evaluation of this step is recorded."""
        if self._metrics is None:
            return False
        rows = read_metrics(self._folder)
        return not any(row["step"] == progress.step and any(map(is_evaluation, row)) for row in rows)

    def on_stop(self, progress: Progress) -> None:
        """The launch ends early, at a signal."""
        self._happened("stop", progress)

    def on_end(self, progress: Progress, *, complete: bool) -> None:
        """The launch is done.

        Args:
            progress: where it ended.
            complete: whether the schedule is complete.
        """
        self._happened("end", progress, complete=complete)

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        if self._main:
            tell(line)

    def summary(self, places: Sequence[tuple[str, str]]) -> str:
        """The closing table of a launch."""
        seconds = time.perf_counter() - self._throughput.started
        rate = self._throughput.launch
        _, peak = self._backend.memory()
        rows = [("time", human_time(seconds))]
        if trained := self._throughput.steps > 0:
            first, paused = self._throughput.first_step, self._throughput.paused
            rows[0] = (
                "time",
                f"{human_time(seconds)}, of which first step {human_time(first)}, "
                f"evaluations and saves {human_time(paused)}",
            )
            rows.append(("samples/s", f"{rate:,.2f}"))
            after = " in the steps after the first" if self._throughput.steps > 1 else ""
            rows.append(("tokens/s", f"{rate * self._tokens_per_sample:,.0f}{after}"))
        rows.append(("peak memory", human_bytes(peak) + (" a rank" if self._backend.world_size > 1 else "")))
        if trained and self._peak_flops is not None:
            mfu = rate * self._tokens_per_sample * self._flops_per_token / self._peak_flops
            rows.append(("MFU", f"{mfu:.1%}"))
        if (counted := self._backend.diagnostics.driver_memory()) is not None:
            used, total = counted
            rows.append(
                (
                    f"{self._backend.device.type.upper()} memory",
                    f"{human_bytes(used)} of {human_bytes(total)} in use, reported by the driver",
                )
            )
        if self.last_loss is not None:
            rows.append(("training loss", f"{self.last_loss:.4f}"))
        if self.last_evaluation:
            rows.append(("evaluation", evaluation_in_words(self.last_evaluation)))
        return table([*rows, *places], columns(sys.stderr))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._history is not None:
            self._history.close()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._profiler is not None:
            self._profiler.close()

    def _record(self, progress: Progress, values: Mapping[str, Any]) -> None:
        if self._metrics is None:
            return
        row = {"step": progress.step, **values, "samples": progress.samples, "time": round(time.time(), 3)}
        self._metrics.write(row)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(numbers, progress.step)
        self._output.publish_soon()

    def _happened(self, kind: Kind, progress: Progress, **facts: Any) -> None:
        if self._history is not None:
            self._history.record(kind, progress.step, samples=progress.samples, **facts)
