"""Report a launch through a progress bar, log lines, metrics, events, and a final summary."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from portable.callbacks import Callback
from portable.converters.console import get_terminal_width
from portable.errors import UserError, to_one_line
from portable.formatting import format_bytes, format_table, format_time
from portable.paths import REPORT_FILE
from portable.plugins import convert_user_errors
from portable.reporting.html_report import write_report
from portable.reporting.metrics import (
    EventsFile,
    MetricsFile,
    format_evaluation_line,
)
from portable.reporting.speed import SpeedMeter, SpeedUnits
from portable.reporting.trackers import TRACKERS_KEY, Tracker, open_trackers
from portable.terminal import LOG, print_status, shows_run_progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.callbacks import Run
    from portable.data.samples.loader import BatchIterator
    from portable.output.output_dir import RunOutput
    from portable.progress import RunProgress
    from portable.reporting.metrics import EventKind
    from portable.run.stages import RestoredRun

_WAIT_SHARE_WARNING = 0.05
"""Fraction of the training time above which waiting for batches causes a warning."""
_MAX_REPORT_TIME_SHARE = 0.01
"""Maximum fraction of the training time that updates of the HTML report may take."""
_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""Format of tqdm's progress bar without the time per step.

The bar already shows tokens per second, and a terminal of 80 columns has no room for both.
"""


class TrainingProgressBar(Callback):
    """Terminal progress bar that counts the training steps during one launch of a run.

    Args:
        total_steps: Number of steps in the schedule of the run.
        completed_steps: Number of steps that previous launches completed.
    """

    def __init__(self, total_steps: int, completed_steps: int) -> None:
        self._bar = tqdm(
            total=total_steps,
            initial=completed_steps,
            unit="step",
            desc="training",
            dynamic_ncols=True,
            bar_format=_BAR_FORMAT,
        )

    def on_step(self, run: Run) -> None:
        """Advance the bar by one step."""
        self._bar.update(1)

    def show_values(self, values: Mapping[str, str]) -> None:
        """Show values next to the bar.

        Args:
            values: Formatted values, keyed by label. ``mem`` is omitted for lack of space.
        """
        # A terminal of 100 columns has no room for the memory.
        self._bar.set_postfix({name: value for name, value in values.items() if name != "mem"})

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


class RunReporter(Callback):
    """Callback that reports one launch of a run.

    All ranks create a reporter, because each rank reads the loss from its device and passes it to
    the ``on_log`` hooks of its callbacks. Only rank 0 prints and writes files. On rank 0, the
    constructor opens ``metrics.jsonl``, ``events.jsonl`` and the trackers, records the start of the
    launch, and creates the progress bar.

    Args:
        run: The run that owns this callback.
        output: Output of the run.
        restored: The engine, and the checkpoint that was loaded into it.
        batches: Iterator over the training batches.

    Attributes:
        speed: Samples per second, and the time that steps wait for batches.
        bar: Progress bar, which is also a callback of the run. None on ranks other than 0, if
            stderr is not a terminal, or if the run is quiet.
        last_loss: Training loss of the last logged step. None before the first one.
        last_evaluation: Scalar results of the last evaluation, keyed by metric name. Empty before
            the first evaluation.

    Raises:
        UserError: If a tracker cannot be opened.
    """

    def __init__(self, run: Run, output: RunOutput, restored: RestoredRun, batches: BatchIterator) -> None:
        prepared, backend, config, progress = run.prepared, run.backend, run.config, run.progress
        source = restored.source
        self._backend = backend
        self._output = output
        self._folder = folder = output.work_folder
        self._training_samples = samples = prepared.data.train
        self._learning_rate_ratios = {
            group.pattern: group.learning_rate / config.train.learning_rate
            for group in config.train.parameter_groups
            if group.learning_rate is not None
        }
        peak = backend.get_peak_flops(config.precision)
        self._speed_units = SpeedUnits(
            tokens_per_sample=config.data.seq_len
            * samples.sequences_per_sample
            * (1 - samples.padding_share),
            flops_per_token=prepared.flops_per_token,
            peak_flops=None if peak is None else peak * backend.world_size * backend.devices_per_rank,
        )
        self._is_rank0 = backend.rank == 0
        self._has_logged = self._has_warned = False
        self._next_report_time = 0.0
        self._log_every = config.log.every_steps
        self._has_streams = bool(prepared.data.stream_names)
        self.last_loss: float | None = None
        self.last_evaluation: Mapping[str, float] = {}
        self._metrics_file: MetricsFile | None = None
        self._events_file: EventsFile | None = None
        self._trackers: list[Tracker] = []
        self.bar: TrainingProgressBar | None = None
        if self._is_rank0:
            self._metrics_file = MetricsFile(folder, from_step=progress.step)
            self._events_file = EventsFile(folder)
            self.record_event(
                "start" if source is None else "resume",
                progress,
                backend=backend.name,
                strategy=config.strategy,
                world_size=backend.world_size,
                devices_per_rank=backend.devices_per_rank,
                device=backend.device.type,
                precision=config.precision,
                model=prepared.architecture,
                parameters=prepared.num_parameters,
                trained=prepared.num_trained_parameters,
                steps=prepared.steps,
                source=None if source is None else str(source),
                changes="; ".join(change.arrow_text for change in restored.setting_changes) or None,
            )
            self._trackers = open_trackers(config.log, folder, config.fingerprint(), from_step=progress.step)
            # Without a terminal, each logged step is a line in the log file.
            self.bar = (
                TrainingProgressBar(prepared.steps, progress.step) if shows_run_progress_bars() else None
            )
        self._total_steps = prepared.steps
        self._first_step = run.first_step
        self.speed = SpeedMeter(prepared.batch_plan.global_batch_size, batches)

    # -- hooks -------------------------------------------------------------------------------------------

    def log_step(self, run: Run) -> None:
        """Read the loss and the metrics of the step from the device, and log them.

        The loss, the gradient norm, the learning rate, and the metrics of the loss are passed to
        ``on_log`` of all callbacks. These values are then written to ``metrics.jsonl`` and the
        trackers, together with the speed, the memory, and the values from
        :meth:`portable.callbacks.Run.log`. The main values are printed. Must be called on all
        ranks.

        Raises:
            RunError: If too many updates were skipped.
            UserError: If a custom callback fails, or if a custom loss or a callback logs a value
                under a name that is already in use.
        """
        run.health.report_skipped_updates(run)
        result = run.result
        loss, grad_norm, *metrics = self._backend.read_to_host(
            [result.loss, result.grad_norm, result.metrics]
        )
        of_step = {"loss": loss, "grad_norm": grad_norm, "learning_rate": result.learning_rate}
        of_loss = run.engine.objective.compute_logged_values(
            dict(zip(result.metric_names, metrics, strict=True))
        )
        run.call_callbacks("on_log", {**of_step, **of_loss})
        samples_per_second = self.speed.measure_speed(run.step + 1 - self._first_step)
        of_data = {
            "data_wait": self._get_wait_share_and_warn(),
            **self._training_samples.compute_progress_metrics(run.samples),
        }
        self._log_values(
            run.progress,
            samples_per_second,
            {**of_step, **of_data},
            {"train.loss": of_loss, "train.callbacks": run.take_logged_values()},
        )

    def _get_wait_share_and_warn(self) -> float:
        """Return the fraction of time since the last logged step that steps waited for data.

        If the fraction exceeds ``_WAIT_SHARE_WARNING``, this method prints a warning once per
        launch. The first ``log.every_steps`` steps of the launch cause no warning.
        """
        share = self.speed.wait_share
        # The first steps always wait, because the queue of batches is still empty.
        if share > _WAIT_SHARE_WARNING and self.speed.num_steps > self._log_every and not self._has_warned:
            self._has_warned = True
            remedy = "raise data.num_workers" + (", or use more CPU cores" if self._has_streams else "")
            self.print_on_rank0(
                f"warning: steps wait for data {share:.0%} of the time (see the metric data_wait); {remedy}"
            )
        self._has_logged = True
        return share

    def _log_values(
        self,
        progress: RunProgress,
        samples_per_second: float,
        of_step: Mapping[str, float],
        custom_values: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Write a step's values to ``metrics.jsonl`` and the trackers, and print them to the terminal.

        Only the main values, such as loss and speed, are printed. A rank without a metrics file
        only stores the loss.

        Args:
            progress: Progress of the run after the step.
            samples_per_second: Samples per second since the last logged step.
            of_step: Loss, gradient norm, learning rate, and metrics of the data.
            custom_values: Values that the loss and the callbacks log, keyed by the setting that
                defines the loss or the callbacks.

        Raises:
            UserError: If a custom loss or a callback logs a value under the name of a built-in
                metric, or if a callback logs a value under the name of a value of the loss.
        """
        loss, learning_rate = of_step["loss"], of_step["learning_rate"]
        self.last_loss = loss
        if self._metrics_file is None:
            return
        tokens_per_second = self._speed_units.compute_tokens_per_second(samples_per_second)
        memory = self._backend.measure_memory().current_bytes
        values = {
            **of_step,
            **{
                f"learning_rate/{pattern}": learning_rate * ratio
                for pattern, ratio in self._learning_rate_ratios.items()
            },
            "tokens_per_second": tokens_per_second,
            "samples_per_second": samples_per_second,
            "memory": memory,
            "skipped_steps": progress.skipped_updates,
            **self._backend.get_metrics(),
        }
        if (mfu := self._speed_units.compute_mfu(samples_per_second)) is not None:
            values["mfu"] = mfu
        reserved_names = {*values, "mfu", "step", "samples", "time"}
        for key, numbers in custom_values.items():
            for name in numbers:
                if name in reserved_names:
                    raise UserError(
                        f"{key}: logs a value under the name of the metric {name}, which the run already "
                        "logs; rename the value"
                    )
            reserved_names.update(numbers)
            values |= numbers
        self._append_metrics(progress, values)
        shown = {
            "loss": f"{loss:.4f}",
            "lr": f"{learning_rate:.1e}",
            "tok/s": f"{tokens_per_second:,.0f}",
            "mem": format_bytes(memory),
        }
        if "mfu" in values:
            shown["mfu"] = f"{values['mfu']:.1%}"
        if self.bar is not None:
            self.bar.show_values(shown)
        pairs = "  ".join(f"{name} {value}" for name, value in shown.items())
        line = f"step {progress.step}/{self._total_steps}  {pairs}"
        if self.speed.num_steps > 1:  # the first step also compiles, so it does not predict later ones
            remaining = (self._total_steps - progress.step) * self.speed.compute_seconds_per_step()
            line += f"  left {format_time(remaining)}"
        LOG.log(logging.INFO if self.bar is None else logging.DEBUG, "%s", line)

    def on_save(self, run: Run) -> None:
        """Record the save as an event, and update the HTML report if an update is due."""
        self.record_event("save", run.progress, checkpoint=f"step-{run.step:06d}")
        self._update_report_if_due()

    def record_skipped_updates(self, run: Run, count: int, message: str) -> None:
        """Print a warning about skipped updates, and record them as an event.

        Args:
            run: The run.
            count: Number of updates that were skipped since the last check.
            message: Description of the latest skipped update.
        """
        since = "" if count == 1 else f"{count} updates were skipped since the last check, the latest in "
        self.print_on_rank0(f"warning: {since}{message}")
        self.record_event("skip", run.progress, count=count, told=message)

    def record_pause(self, run: Run, seconds: float) -> None:
        """Exclude a pause from the measured speed.

        Args:
            run: The run.
            seconds: Duration of the evaluation or save in seconds.
        """
        self.speed.exclude_seconds(seconds)

    def on_evaluation(self, run: Run, values: Mapping[str, Any]) -> None:
        """Log the results of an evaluation, and update the HTML report if an update is due.

        The results are written to ``metrics.jsonl`` and the trackers, and the scalar ones are printed.

        Args:
            run: The run.
            values: Results, keyed by metric name. Confusion matrices are mappings and are only written to
                ``metrics.jsonl``.
        """
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self.last_evaluation = numbers
        self._append_metrics(run.progress, values)
        self.print_on_rank0(f"step {run.step}  evaluation  {format_evaluation_line(numbers)}")
        self._update_report_if_due()

    # -- called by the run -------------------------------------------------------------------------------

    def has_evaluation(self, step: int) -> bool:
        """Return whether the evaluation of a step is recorded.

        Args:
            step: Number of the step. It must be at least the step that the launch continues from.

        Returns:
            Whether ``metrics.jsonl`` contains the evaluation. Always True on ranks other than 0,
            which have no log.
        """
        return True if self._metrics_file is None else self._metrics_file.has_evaluation(step)

    def record_event(self, kind: EventKind, progress: RunProgress, **facts: Any) -> None:
        """Append an event to ``events.jsonl``. Does nothing on ranks other than 0.

        Args:
            kind: Kind of the event.
            progress: Progress of the run.
            facts: Further fields of the event.
        """
        if self._events_file is not None:
            self._events_file.append_event(kind, progress.step, samples=progress.samples, **facts)

    def print_on_rank0(self, line: str) -> None:
        """Print a line above the progress bar. Does nothing on ranks other than 0."""
        if self._is_rank0:
            print_status(line)

    def format_launch_summary(self, output_rows: Sequence[tuple[str, str]]) -> str:
        """Format the summary table that is printed at the end of a launch.

        Args:
            output_rows: Pairs of a label and a path or URL, one for each file that the launch has written.
                Shown as the last rows.
        """
        seconds = time.perf_counter() - self.speed.start_time
        rate = self.speed.samples_per_second
        peak = self._backend.measure_memory().peak_bytes
        rows = [("time", format_time(seconds))]
        if trained := self.speed.num_steps > 0:
            first, paused = self.speed.first_step_seconds, self.speed.excluded_seconds
            rows[0] = (
                "time",
                f"{format_time(seconds)}, including {format_time(first)} for the first step and "
                f"{format_time(paused)} for evaluations and saves",
            )
            rows.append(("samples/s", f"{rate:,.2f}"))
            after = " in the steps after the first" if self.speed.num_steps > 1 else ""
            rows.append(("tokens/s", f"{self._speed_units.compute_tokens_per_second(rate):,.0f}{after}"))
        rows.append(
            ("peak memory", format_bytes(peak) + (" per rank" if self._backend.world_size > 1 else ""))
        )
        if trained and (mfu := self._speed_units.compute_mfu(rate)) is not None:
            rows.append(("MFU", f"{mfu:.1%}"))
        if (driver_memory := self._backend.diagnostics.query_driver_memory()) is not None:
            rows.append(
                (
                    f"{self._backend.device.type.upper()} memory",
                    f"{format_bytes(driver_memory.used_bytes)} of "
                    f"{format_bytes(driver_memory.total_bytes)} in use, reported by the driver",
                )
            )
        if self.last_loss is not None:
            rows.append(("training loss", f"{self.last_loss:.4f}"))
        if self.last_evaluation:
            rows.append(("evaluation", format_evaluation_line(self.last_evaluation)))
        return format_table([*rows, *output_rows], get_terminal_width(sys.stderr))

    def close(self) -> None:
        """Close the logs, update the HTML report one last time, and close the trackers."""
        if self._metrics_file is not None:
            self._metrics_file.close()
        if self._events_file is not None:
            self._events_file.close()
        self._update_report_if_due(is_last=True)
        self._call_trackers(lambda tracker: tracker.finish())
        self._trackers = []

    def _update_report_if_due(self, *, is_last: bool = False) -> None:
        """Rewrite the HTML report, unless the updates would take too much of the training time.

        The limit is ``_MAX_REPORT_TIME_SHARE``. Does nothing on ranks other than 0, and before the
        first logged step. If ``output_dir`` is a URL, the report is uploaded in the background. A
        failed update does not stop the run. Only the last update prints warnings about a failed
        update or unreadable files.

        Args:
            is_last: Whether this is the last update of the launch. The last update is always due,
                and its page no longer reloads itself in the browser.
        """
        now = time.perf_counter()
        if not self._is_rank0 or not self._has_logged or (now < self._next_report_time and not is_last):
            return
        warnings: list[str] = []
        try:
            warnings = write_report([self._folder], self._folder / REPORT_FILE, reloads=not is_last)
        except Exception as error:  # the run continues without a report
            warnings = [f"{REPORT_FILE} cannot be written ({to_one_line(error)}); run portable-report later"]
        self._next_report_time = now + (time.perf_counter() - now) / _MAX_REPORT_TIME_SHARE
        for warning in warnings if is_last else ():
            self.print_on_rank0(f"warning: {warning}")
        self._output.publish_in_background()

    def _append_metrics(self, progress: RunProgress, values: Mapping[str, Any]) -> None:
        """Append a row to ``metrics.jsonl``, and send its scalar values to the trackers.

        Does nothing on ranks other than 0. If ``output_dir`` is a URL, the file is uploaded in the
        background.
        """
        if self._metrics_file is None:
            return
        row = {"step": progress.step, **values, "samples": progress.samples, "time": round(time.time(), 3)}
        self._metrics_file.append_row(row)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._call_trackers(lambda tracker: tracker.log(numbers, progress.step))
        self._output.publish_in_background()

    def _call_trackers(self, function: Callable[[Tracker], None]) -> None:
        """Call a function with each tracker. A tracker that fails is removed.

        A failure only causes a warning, because ``metrics.jsonl`` contains the same values.
        """
        for tracker in tuple(self._trackers):
            try:
                with convert_user_errors(f"{TRACKERS_KEY}: {tracker.name}"):
                    function(tracker)
            except UserError as error:
                self._trackers.remove(tracker)
                self.print_on_rank0(f"warning: {error}; the run continues without this tracker")
