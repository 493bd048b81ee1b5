"""Training of a prepared run, from opening the output folder to writing the final model.

This module restores the state of the run, builds its callbacks, and runs the training loop.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from portable.callbacks import Run
from portable.checkpoint.store import choose_resume_source
from portable.config import dump_yaml
from portable.converters.storage.path_or_url import is_in_store
from portable.data.preview import REPORT_SAMPLES, build_preview
from portable.data.samples.loader import build_worker_death_error
from portable.errors import RunError, UserError
from portable.loop import StopSignals, run_training_loop
from portable.output.existing_run import DATA_SAMPLES_FILE, check_config_unchanged
from portable.output.export import recover_export
from portable.paths import CONFIG_FILE, FINAL_FOLDER, write_durably
from portable.ranks import launch
from portable.ranks.collectives import check_ranks_agree, raise_if_any_rank_failed
from portable.ranks.watchdog import Watchdog
from portable.reporting.reporter import RunReporter
from portable.run.batches import build_train_loader
from portable.run.checkpointing import CheckpointCallback
from portable.run.custom_callbacks import list_callback_names, load_custom_callbacks
from portable.run.evaluation import EvaluationCallback, describe_early_end
from portable.run.finish import export_with_card, finish_run, format_start_summary, print_sample_text
from portable.run.garbage_collection import freeze_existing_objects
from portable.run.restore import restore_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.callbacks import Callback
    from portable.output.hub import HubRepository
    from portable.output.output_dir import RunOutput
    from portable.ranks.failure_notification import PeerWatch
    from portable.reporting.profiling import Profiler
    from portable.reporting.run_log import RunLogHandler
    from portable.run.stages import PreparedRun, RestoredRun
    from portable.run.uploads import HubUploadCallback

EXIT_DONE, EXIT_STOPPED = 0, 75


class DeviceMemoryError(Exception):
    """Error raised when a training step runs out of device memory.

    Attributes:
        step: Step, counted from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"out of device memory in step {step}")
        self.step = step


def train_in_output(
    prepared: PreparedRun, output: RunOutput, log: RunLogHandler, peers: PeerWatch, *, profile: bool = False
) -> int:
    """Train in ``output``, and export the final model. Must be called on all ranks.

    The run starts from the latest checkpoint in ``output``. If there is none, it starts from
    ``checkpoint.resume`` or from the initial weights. See :func:`portable.run.finish.finish_run`
    for the export.

    Args:
        prepared: The run.
        output: Output folder. It is locked against other runs during training.
        log: Log of the run. Its file is opened in ``output``.
        peers: Connection to the other ranks.
        profile: Whether to write a trace of a few steps.

    Returns:
        The exit code: 75 if a signal stopped the run. 0 if the schedule or ``train.stop_after``
        is reached, or if a callback or an evaluation has ended the run.

    Raises:
        DeviceMemoryError: If a step runs out of device memory.
        UserError: If another run holds the lock, or if a checkpoint or the storage of
            ``output`` cannot be used.
        RunError: If a data worker has died, if training ends because of non-finite losses,
            gradients or weights, or if all retries of a storage request have failed.
        NotExportedError: If training is complete, but the model cannot be exported.
        ReportedElsewhereError: If rank 0 cannot lock the folder or create the hub repository, or if
            the export fails. Only raised on ranks other than 0.
    """
    with ExitStack() as stack:
        hub = _lock_output_and_create_hub(prepared, output, stack)
        signals = StopSignals()
        stack.callback(signals.restore_handlers)
        run, restored = _open_output_and_restore(prepared, output, log)
        batches = iter(build_train_loader(prepared, run.samples))
        reporter = RunReporter(run, output, restored, batches)
        watchdog = _build_watchdog(run, output, peers)
        profiler = _build_profiler(run, output) if profile else None
        uploads = None if hub is None else _build_hub_uploads(run, output, hub)
        by_name: dict[str, Callback | None] = {
            **load_custom_callbacks(run.config.train.callbacks),
            "profile": profiler,
            "report": reporter,
            "evaluate": EvaluationCallback(run, reporter.has_evaluation, watchdog),
            "save": CheckpointCallback(run, watchdog),
            "upload": uploads,
        }
        names = list_callback_names(run.config, profile=profile)
        ordered = [*(by_name[name] for name in names), reporter.bar]
        run.callbacks = [callback for callback in ordered if callback is not None]
        for line in (*prepared.notes, format_start_summary(prepared, restored)):
            reporter.print_on_rank0(line)
        with freeze_existing_objects(), ExitStack() as opened:  # closes in reverse order
            for callback in run.callbacks:
                opened.callback(callback.close)
            opened.callback(prepared.data.train.close)
            opened.callback(batches.close)
            with _identify_step_errors(run), watchdog:
                run.call_callbacks("on_start")
                watchdog.watch_batches(batches)
                stopped = run_training_loop(run, batches, signals)
            run.call_callbacks("on_end")
            if stopped:
                reporter.record_event("stop", run.progress)
                reporter.print_on_rank0(
                    f"stopped at step {run.step}, checkpoint saved; run the same command to continue"
                )
                return EXIT_STOPPED
            if run.progress.has_ended:
                reporter.print_on_rank0(describe_early_end(run))
            reporter.record_event("end", run.progress, complete=run.is_complete)
            if run.is_complete:
                print_sample_text(prepared, run.engine, reporter)
        finish_run(run, output, reporter, profiler, uploads, num_library_warnings=log.num_library_warnings)
        output.publish()
    return EXIT_DONE


def _lock_output_and_create_hub(
    prepared: PreparedRun, output: RunOutput, stack: ExitStack
) -> HubRepository | None:
    """Lock the output folder, and create the hub repository if ``hub.push`` is set.

    Must be called on all ranks, but only rank 0 locks the folder and creates the repository. The
    lock is released when ``stack`` is closed.

    Returns:
        The repository. None on ranks other than 0, or if ``hub.push`` is not set.

    Raises:
        UserError: If another run holds the lock, if the run in the folder has changed since its
            config was read, or if the repository cannot be created. Only rank 0 raises this error.
        RunError: If the object store is unavailable. Only rank 0 raises this
            error.
        ReportedElsewhereError: On all other ranks, if rank 0 raises a UserError or RunError.
    """
    error: UserError | RunError | None = None
    hub: HubRepository | None = None
    try:
        if prepared.backend.rank == 0:
            stack.enter_context(output.lock_against_other_runs())
            check_config_unchanged(output.place, prepared.resolved.existing)
            if prepared.config.hub.push is not None:
                from portable.output.hub import HubRepository

                hub = HubRepository(prepared.config)
                hub.create_repository()
    except (UserError, RunError) as lock_error:
        error = lock_error
    raise_if_any_rank_failed(error)
    return hub


def _open_output_and_restore(
    prepared: PreparedRun, output: RunOutput, log: RunLogHandler
) -> tuple[Run, RestoredRun]:
    """Open the output folder, and restore the run. A collective call.

    The run continues from its latest checkpoint. If there is none, it starts from
    ``checkpoint.resume`` or from the initial weights.

    Also opens the log file. Rank 0 removes leftovers of interrupted saves and exports, and writes
    ``config.yaml`` and the data preview.
    """
    config, backend = prepared.config, prepared.backend
    output.prepare_work_folder(lambda: _estimate_shard_bytes(prepared))  # only a bucket needs the estimate
    checkpoints = output.open_checkpoints(keep=config.checkpoint.keep)
    source = choose_resume_source(config, checkpoints)
    check_ranks_agree(
        backend, {"the checkpoint to continue from": source.name if source is not None else "none"}
    )
    restored = restore_run(prepared, source, checkpoints)
    # Forget best checkpoints that do not exist here, because the run started from another folder or because a
    # user has deleted them.
    present = {step for step, _ in checkpoints.list_complete()}
    eval_history = restored.progress.eval_history
    eval_history.best = [entry for entry in eval_history.best if entry[0] in present]
    if restored.adopted is not None:
        restored.adopted.check_steps_remain(prepared.end_step)
    log.open_log_file(output.work_folder)
    if backend.rank == 0:
        checkpoints.remove_interrupted_saves()
        if not is_in_store(output.place):
            recover_export(output.place / FINAL_FOLDER)
        write_durably(output.work_folder / CONFIG_FILE, dump_yaml(config))
        _write_data_preview(prepared, output)
        output.publish()
    return Run(prepared, restored, checkpoints, output.work_folder), restored


def _estimate_shard_bytes(prepared: PreparedRun) -> int:
    """Estimate the size in bytes of this rank's shards in a checkpoint."""
    from portable.planner.meta_model import build_inventory

    train = prepared.config.train
    return (
        build_inventory(prepared.model, train).compute_checkpoint_bytes(train) // prepared.backend.world_size
    )


def _write_data_preview(prepared: PreparedRun, output: RunOutput) -> None:
    """Write a preview of the data into the output folder, so that the report does not need the data.

    Does nothing if there already is a preview. Only runs that train a causal language model on
    tokenized sources have a preview.
    """
    has_preview = prepared.config.model.task == "causal-lm" and bool(prepared.data.tokenized_sources)
    if has_preview and not (output.work_folder / DATA_SAMPLES_FILE).exists():
        preview = build_preview(
            prepared.data, REPORT_SAMPLES, prepared.config.seed, with_thumbnails=True
        ).to_json_dict()
        write_durably(output.work_folder / DATA_SAMPLES_FILE, json.dumps(preview, ensure_ascii=False) + "\n")


def _build_watchdog(run: Run, output: RunOutput, peers: PeerWatch) -> Watchdog:
    """Build the watchdog. It reports a hang of this rank to the launcher and in the output folder."""

    def report(line: str) -> None:
        peers.disconnect()  # otherwise the other ranks would end before they write their reports
        launch.report_hang(line)
        output.publish_in_background(starts_now=True)

    return Watchdog(
        rank=run.rank,
        timeout_seconds=run.config.log.hang_timeout,
        folder=output.work_folder / "hang",
        report=report,
        dump_collectives=run.backend.diagnostics.dump_collectives,
    )


def _build_profiler(run: Run, output: RunOutput) -> Profiler:
    from portable.reporting.profiling import Profiler

    return Profiler(output.work_folder / "profile", run.rank)


def _build_hub_uploads(run: Run, output: RunOutput, hub: HubRepository) -> HubUploadCallback:
    """Build the callback that uploads exports to the hub.

    If ``hub.push`` is ``checkpoints``, the callback also protects each checkpoint from deletion
    until the checkpoint has been exported.
    """
    from portable.run.uploads import HubUploadCallback

    export, uploads_checkpoints = (
        partial(export_with_card, run.prepared, output.work_folder),
        run.config.hub.push == "checkpoints",
    )
    uploads = HubUploadCallback(hub, export, output.scratch_folder, uploads_checkpoints=uploads_checkpoints)
    if uploads_checkpoints:
        run.checkpoints.get_steps_in_use = uploads.get_steps_in_use
    return uploads


@contextmanager
def _identify_step_errors(run: Run) -> Iterator[None]:
    """Replace errors of training steps within this context with errors that name the cause.

    There are two known causes: the device is out of memory, or a data worker has died. All other
    errors propagate unchanged.

    Raises:
        DeviceMemoryError: If the device is out of memory.
        RunError: If a data worker has died.
    """
    try:
        yield
    except Exception as error:
        if (worker_error := build_worker_death_error(error)) is not None:
            raise worker_error from error
        if run.backend.is_out_of_memory(error):
            raise DeviceMemoryError(run.step + 1) from error
        raise
