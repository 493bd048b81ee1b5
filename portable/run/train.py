"""The fourth stage: open the output folder, restore the run, build its callbacks, and train."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from portable.callbacks import Run
from portable.checkpoint.store import choose_resume_source
from portable.config import dump_yaml
from portable.converters.storage.path_or_url import in_store
from portable.data.preview import SHOWN, build_preview
from portable.data.samples.loader import parse_worker_error
from portable.errors import UserError
from portable.loop import StopSignals, train
from portable.output.existing_run import PREVIEW_FILE, check_unchanged
from portable.output.export import recover_export
from portable.paths import CONFIG_FILE, FINAL, convert_storage_errors, write_durably
from portable.ranks import launch
from portable.ranks.collectives import agree, agree_on_outcome
from portable.ranks.watchdog import Watchdog
from portable.reporting.reporter import Reporter
from portable.run.batches import build_train_loader
from portable.run.checkpointing import Saving
from portable.run.custom_callbacks import list_callback_names, load_callbacks
from portable.run.evaluation import Evaluations, describe_end
from portable.run.finish import export_with_card, finish, format_headline, sample
from portable.run.garbage_collection import freeze_existing_objects
from portable.run.restore import restore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.callbacks import Callback
    from portable.output.hub import Hub
    from portable.output.output_dir import Output
    from portable.ranks.failure_notification import PeerWatch
    from portable.reporting.profiling import Profiler
    from portable.reporting.run_log import RunLog
    from portable.run.stages import Prepared, Restored
    from portable.run.uploads import Uploads

EXIT_DONE, EXIT_STOPPED = 0, 75


class DeviceMemoryError(Exception):
    """Raised if a training step runs out of device memory.

    Attributes:
        step: Number of the step, counted from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"out of device memory in step {step}")
        self.step = step


def train_run(
    prepared: Prepared, output: Output, log: RunLog, peers: PeerWatch, *, profile: bool = False
) -> int:
    """Train in ``output``, starting from its latest checkpoint. Must be called on all ranks.

    Args:
        prepared: The run.
        output: Output folder, which is locked against other runs during the training.
        log: Log of the run. Its file is opened in ``output``.
        peers: Connection to the other ranks.
        profile: Whether to write a trace of a few steps.

    Returns:
        The exit code: 0 if the schedule or ``train.stop_after`` is reached, 75 if a signal stopped the run.

    Raises:
        DeviceMemoryError: If a step runs out of device memory.
    """
    with convert_storage_errors("output_dir"), ExitStack() as stack:
        hub = _lock_output(prepared, output, stack)
        signals = StopSignals()
        stack.callback(signals.restore)
        run, restored = _begin(prepared, output, log)
        batches = iter(build_train_loader(prepared, run.samples))
        reporter = Reporter(run, output, restored, batches)
        watchdog = _build_watchdog(run, output, peers)
        profiler = _build_profiler(run, output) if profile else None
        uploads = None if hub is None else _build_uploads(run, output, hub)
        by_name: dict[str, Callback | None] = {
            **load_callbacks(run.config.train.callbacks),
            "profile": profiler,
            "report": reporter,
            "evaluate": Evaluations(run, reporter.has_evaluation, watchdog),
            "save": Saving(run, watchdog),
            "upload": uploads,
        }
        names = list_callback_names(run.config, profile=profile)
        ordered = [*(by_name[name] for name in names), reporter.bar]
        run.callbacks = [callback for callback in ordered if callback is not None]
        for line in (*prepared.notes, format_headline(prepared, restored)):
            reporter.say(line)
        with freeze_existing_objects(), ExitStack() as opened:  # closes in reverse order
            for callback in run.callbacks:
                opened.callback(callback.close)
            opened.callback(prepared.data.train.close)
            opened.callback(batches.close)
            with _translate_errors(run), watchdog:
                run.call("on_start")
                watchdog.watch(batches)
                stopped = train(run, batches, signals)
            run.call("on_end")
            if stopped:
                reporter.record("stop", run.progress)
                reporter.say(f"stopped at step {run.step}, checkpoint saved; run the same command to go on")
                return EXIT_STOPPED
            if run.progress.ended:
                reporter.say(describe_end(run))
            reporter.record("end", run.progress, complete=run.complete)
            if run.complete:
                sample(prepared, run.engine, reporter)
        finish(run, output, reporter, profiler, uploads, warnings=log.foreign)
        output.publish()
    return EXIT_DONE


def _lock_output(prepared: Prepared, output: Output, stack: ExitStack) -> Hub | None:
    """Lock the output folder, and create the repository on the hub if ``hub.push`` is set. A collective call.

    Only rank 0 locks and creates. The lock is released when ``stack`` is closed.

    Returns:
        The repository on rank 0. None on other ranks, and if nothing is pushed.

    Raises:
        UserError: If another run holds the lock, the folder has changed, or the repository cannot be created.
    """
    error: UserError | None = None
    hub: Hub | None = None
    try:
        if prepared.backend.rank == 0:
            stack.enter_context(output.lock())
            check_unchanged(output.place, prepared.resolved.existing)
            if prepared.config.hub.push is not None:
                from portable.output.hub import Hub

                hub = Hub(prepared.config)
                hub.create()
    except UserError as refused:
        error = refused
    agree_on_outcome(error)
    return hub


def _begin(prepared: Prepared, output: Output, log: RunLog) -> tuple[Run, Restored]:
    """Open the output folder, and restore the run from its latest checkpoint. A collective call."""
    config, backend = prepared.config, prepared.backend
    output.open(lambda: _estimate_shard_bytes(prepared))  # only a bucket needs the estimate
    checkpoints = output.open_checkpoints(keep=config.checkpoint.keep)
    source = choose_resume_source(config, checkpoints)
    agree(backend, {"the checkpoint to go on from": source.name if source is not None else "none"})
    restored = restore(prepared, source, checkpoints)
    # Forget best checkpoints that do not exist here, because the run started from another folder or because a
    # user has deleted them.
    present = {step for step, _ in checkpoints.list_complete()}
    eval_history = restored.progress.eval_history
    eval_history.best = [entry for entry in eval_history.best if entry[0] in present]
    if restored.external is not None:
        restored.external.check_length(prepared.until)
    log.open(output.work)
    if backend.rank == 0:
        checkpoints.remove_partial()
        if not in_store(output.place):
            recover_export(output.place / FINAL)
        write_durably(output.work / CONFIG_FILE, dump_yaml(config))
        _write_preview(prepared, output)
        output.publish()
    return Run(prepared, restored, checkpoints, output.work), restored


def _estimate_shard_bytes(prepared: Prepared) -> int:
    """Estimate the size of this rank's shards of a checkpoint in bytes."""
    from portable.planner.meta_model import inspect

    train = prepared.config.train
    return inspect(prepared.model, train).compute_checkpoint_bytes(train) // prepared.backend.world_size


def _write_preview(prepared: Prepared, output: Output) -> None:
    """Write some samples into the output folder, so that the report does not need the data."""
    can = prepared.config.model.task == "causal-lm" and bool(prepared.data.opened)
    if can and not (output.work / PREVIEW_FILE).exists():
        shown = build_preview(prepared.data, SHOWN, prepared.config.seed).as_json()
        write_durably(output.work / PREVIEW_FILE, json.dumps(shown, ensure_ascii=False) + "\n")


def _build_watchdog(run: Run, output: Output, peers: PeerWatch) -> Watchdog:
    def report(line: str) -> None:
        peers.leave()  # otherwise the other ranks would end before they report where they hang
        launch.report_hang(line)
        output.publish_soon(at_once=True)

    return Watchdog(
        rank=run.rank,
        seconds=run.config.log.hang_timeout,
        folder=output.work / "hang",
        report=report,
        record=run.backend.diagnostics.dump_collectives,
    )


def _build_profiler(run: Run, output: Output) -> Profiler:
    from portable.reporting.profiling import Profiler

    return Profiler(output.work / "profile", run.rank)


def _build_uploads(run: Run, output: Output, hub: Hub) -> Uploads:
    from portable.run.uploads import Uploads

    export, every = partial(export_with_card, run.prepared, output.work), run.config.hub.push == "checkpoints"
    uploads = Uploads(hub, export, output.scratch, checkpoints=every)
    if every:
        run.checkpoints.in_use = uploads.list_steps_in_use
    return uploads


@contextmanager
def _translate_errors(run: Run) -> Iterator[None]:
    """Convert errors of the steps within this context: out of device memory, and workers that have died."""
    try:
        yield
    except Exception as error:
        if (died := parse_worker_error(error)) is not None:
            raise died from error
        if run.backend.is_out_of_memory(error):
            raise DeviceMemoryError(run.step + 1) from error
        raise
