"""The fourth stage: everything around the training loop that has to be open while it runs."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from converters.storage.places import in_store
from portable.checkpoint.resume_source import resume_source
from portable.config import dump_yaml
from portable.data.preview import SHOWN, preview
from portable.data.samples.loader import worker_died
from portable.durable import write_durably
from portable.errors import UserError
from portable.loop import Cadence, train
from portable.output.existing_run import PREVIEW_FILE, check_unchanged
from portable.output.export import recover_export
from portable.output.hub import Hub, pushes
from portable.paths import CONFIG_FILE, FINAL, storage_errors
from portable.planner.meta_model import inspect
from portable.ranks import launch
from portable.ranks.collectives import all_or_none
from portable.ranks.consistency import agree
from portable.ranks.watchdog import Watchdog
from portable.reporting.profiling import Profiler
from portable.reporting.reporter import Reporter
from portable.run.batches import Awaited, train_loader
from portable.run.callbacks import Callbacks, Run
from portable.run.evaluation import Evaluations, why_ended
from portable.run.finish import checkpoint_to_export, export_with_card, finish, headline, sample
from portable.run.restore import Restored, restore
from portable.run.save import save
from portable.run.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.checkpoint.store import Checkpoints
    from portable.loop import Progress
    from portable.output.output_dir import Output
    from portable.reporting.run_log import RunLog
    from portable.run.prepare import Prepared

EXIT_DONE, EXIT_STOPPED = 0, 75


class DeviceMemoryError(Exception):
    """A training step ran out of device memory.

    Attributes:
        step: which, counted from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"out of device memory in step {step}")
        self.step = step


@dataclass(frozen=True)
class Open:
    """What is open while a run trains."""

    output: Output
    checkpoints: Checkpoints[Any]
    restored: Restored
    profiler: Profiler | None
    log: RunLog


def train_run(prepared: Prepared, output: Output, log: RunLog, *, profile: bool = False) -> int:
    """Train in ``output`` from where its run stands; all ranks call it.

    Args:
        prepared: the run.
        output: kept from other runs meanwhile.
        log: gets its file in ``output``.
        profile: write a trace of a few steps.

    Returns:
        the exit code: 0 when the schedule or ``train.stop_after`` is reached, 75 when stopped by a signal.

    Raises:
        DeviceMemoryError: a step ran out of device memory.
    """
    with storage_errors("output_dir"), ExitStack() as stack:
        held: UserError | None = None
        hub: Hub | None = None
        try:
            if prepared.backend.rank == 0:
                stack.enter_context(output.held())
                check_unchanged(output.place, prepared.settled.existing)
                if pushes(prepared.config):
                    hub = Hub(prepared.config)
                    hub.create()
        except UserError as error:
            held = error
        all_or_none(held)
        return _train(prepared, _open(prepared, output, log, profile=profile), hub)


def _open(prepared: Prepared, output: Output, log: RunLog, *, profile: bool) -> Open:
    config, backend = prepared.config, prepared.backend
    output.open(inspect(prepared.model, config.train).checkpoint_bytes(config.train) // backend.world_size)
    checkpoints = output.checkpoints(keep=config.checkpoint.keep)
    source = resume_source(config, checkpoints)
    agree(backend, {"the checkpoint to go on from": source.name if source is not None else "none"})
    restored = restore(prepared, source, checkpoints)
    # A checkpoint of another folder may stand where this run began, and a user may have deleted some.
    present = {step for step, _ in checkpoints.complete()}
    standing = restored.progress.standing
    standing.best = [one for one in standing.best if one[0] in present]
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
    profiler = Profiler(output.work / "profile", backend.rank) if profile else None
    return Open(output, checkpoints, restored, profiler, log)


def _write_preview(prepared: Prepared, output: Output) -> None:
    """Write some samples for the report, which needs no data then."""
    can = prepared.config.model.task == "causal-lm" and bool(prepared.data.opened)
    if can and not (output.work / PREVIEW_FILE).exists():
        shown = preview(prepared.data, SHOWN, prepared.config.seed).as_json()
        write_durably(output.work / PREVIEW_FILE, json.dumps(shown, ensure_ascii=False) + "\n")


def _train(prepared: Prepared, opened: Open, hub: Hub | None) -> int:
    config, backend, output = prepared.config, prepared.backend, opened.output
    engine, progress, checkpoints = opened.restored.engine, opened.restored.progress, opened.checkpoints
    uploads = None if hub is None else _uploads(prepared, opened, hub)

    def report_hang(line: str) -> None:
        launch.report_hang(line)
        output.publish_soon(at_once=True)

    watchdog = Watchdog(
        rank=backend.rank,
        seconds=config.log.hang_timeout,
        folder=output.work / "hang",
        report=report_hang,
        record=backend.diagnostics.dump_collectives,
    )

    def save_at(at: Progress) -> None:
        with watchdog.paused():
            save(prepared, checkpoints, engine, at)

    reporter = new_reporter(prepared, opened, save_at)
    for line in (*prepared.notes, headline(prepared, opened.restored)):
        reporter.say(line)
    run = Run(prepared, engine, progress, checkpoints)
    batches = Awaited(watchdog.over(train_loader(prepared, progress.samples)))
    events = Callbacks(reporter, run, prepared, batches)
    evaluation = Evaluations(prepared, engine, events, watchdog.over)
    gc.collect()
    gc.freeze()  # the model and the libraries stay: no collection need visit them
    try:
        try:
            with watchdog:
                events.call("on_start")
                stopped = train(
                    backend,
                    engine,
                    batches,
                    evaluation if prepared.data.evals else None,
                    progress=progress,
                    cadence=_cadence(prepared),
                    schedule=prepared.schedule,
                    plan=prepared.plan,
                    max_grad_norm=config.train.max_grad_norm or 0.0,
                    events=events,
                )
        except Exception as error:
            if (died := worker_died(error)) is not None:
                raise died from error
            if backend.ran_out_of_memory(error):
                raise DeviceMemoryError(progress.step + 1) from error
            raise
        events.call("on_end")
        checkpoints.finish(last=True)
        backend.barrier()  # no rank ends before rank 0 has renamed the checkpoint's folder
        if stopped:
            reporter.on_stop(progress)
            reporter.say(f"stopped at step {progress.step}, checkpoint saved; run the same command to go on")
            return EXIT_STOPPED
        complete = progress.ended or progress.step == prepared.steps
        if progress.ended:
            by_callback = f"ended at step {progress.step}, as a callback asked"
            reporter.say(by_callback if events.stopped else why_ended(progress))
        reporter.on_end(progress, complete=complete)
        if complete:
            sample(prepared, engine, reporter)
    finally:
        batches.close()
        reporter.close()
        gc.unfreeze()
    if backend.rank == 0:
        finish(
            prepared,
            output,
            reporter,
            checkpoints.latest(),
            opened.profiler,
            step=progress.step,
            complete=complete,
            exported=checkpoint_to_export(prepared, checkpoints, progress, reporter),
            uploads=uploads,
            warnings=opened.log.foreign,
        )
        if uploads is not None:  # it kept some from being deleted
            checkpoints.prune({step for step, _ in progress.standing.best})
    output.publish()
    return EXIT_DONE


def _uploads(prepared: Prepared, opened: Open, hub: Hub) -> Uploads:
    output, checkpoints = opened.output, opened.checkpoints
    uploads = Uploads(hub, partial(export_with_card, prepared, output.work), output.scratch)
    if prepared.config.hub.push == "checkpoints":
        checkpoints.on_complete, checkpoints.in_use = uploads.add, uploads.in_use
    return uploads


def _cadence(prepared: Prepared) -> Cadence:
    config, samples = prepared.config, prepared.data.train.epoch_samples
    return Cadence(
        until=prepared.until,
        stops_early=prepared.until < prepared.steps,
        log_every=config.log.every_steps,
        eval_every=config.train.eval_every or 0,
        save_every=config.checkpoint.every_steps or 0,
        eval_samples=(config.train.eval_every_epochs or 0) * samples,
        save_samples=(config.checkpoint.every_epochs or 0) * samples,
    )


def new_reporter(prepared: Prepared, opened: Open, save_at: Callable[[Progress], None]) -> Reporter:
    """What shows and records this launch in the run's folder."""
    config, backend, source = prepared.config, prepared.backend, opened.restored.source
    peak, groups = config.train.learning_rate, config.train.parameter_groups
    samples = prepared.data.train
    return Reporter(
        backend=backend,
        output=opened.output,
        progress=opened.restored.progress,
        total_steps=prepared.steps,
        tokens_per_sample=config.data.seq_len * samples.sequences * (1 - samples.waste),
        flops_per_token=prepared.flops_per_token,
        precision=config.precision,
        rates={g.pattern: g.learning_rate / peak for g in groups if g.learning_rate is not None},
        log=config.log,
        config=config.fingerprint(),
        checkpoints=opened.checkpoints,
        save=save_at,
        profiler=opened.profiler,
        facts={
            "backend": backend.name,
            "strategy": config.strategy,
            "world_size": backend.world_size,
            "devices_per_rank": backend.devices_per_rank,
            "device": backend.device.type,
            "precision": config.precision,
            "model": prepared.architecture,
            "parameters": prepared.parameters,
            "trained": prepared.trained,
            "steps": prepared.steps,
            "source": str(source) if source is not None else None,
        },
    )
