"""The fourth stage: the run's folder, what happens beside the steps, and the steps."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from portable.callbacks import Run
from portable.checkpoint.store import resume_source
from portable.config import dump_yaml
from portable.converters.storage.path_or_url import in_store
from portable.data.preview import SHOWN, preview
from portable.data.samples.loader import worker_died
from portable.errors import UserError
from portable.loop import StopSignals, train
from portable.output.existing_run import PREVIEW_FILE, check_unchanged
from portable.output.export import recover_export
from portable.paths import CONFIG_FILE, FINAL, storage_errors, write_durably
from portable.ranks import launch
from portable.ranks.collectives import agree, all_or_none
from portable.ranks.watchdog import Watchdog
from portable.reporting.reporter import Reporter
from portable.run.batches import train_loader
from portable.run.evaluation import Evaluations, why_ended
from portable.run.finish import export_with_card, finish, headline, sample
from portable.run.restore import restore
from portable.run.save import Saving
from portable.run.user_callbacks import callback_order, load_callbacks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.callbacks import Callback
    from portable.output.hub import Hub
    from portable.output.output_dir import Output
    from portable.ranks.peers import PeerWatch
    from portable.reporting.profiling import Profiler
    from portable.reporting.run_log import RunLog
    from portable.run.stages import Prepared, Restored
    from portable.run.uploads import Uploads

EXIT_DONE, EXIT_STOPPED = 0, 75


class DeviceMemoryError(Exception):
    """A training step ran out of device memory.

    Attributes:
        step: which, counted from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"out of device memory in step {step}")
        self.step = step


def train_run(
    prepared: Prepared, output: Output, log: RunLog, peers: PeerWatch, *, profile: bool = False
) -> int:
    """Train in ``output`` from where its run stands; all ranks call it.

    Args:
        prepared: the run.
        output: kept from other runs meanwhile.
        log: gets its file in ``output``.
        peers: Connection to the other ranks.
        profile: write a trace of a few steps.

    Returns:
        the exit code: 0 when the schedule or ``train.stop_after`` is reached, 75 when stopped by a signal.

    Raises:
        DeviceMemoryError: a step ran out of device memory.
    """
    with storage_errors("output_dir"), ExitStack() as held:
        hub = _hold(prepared, output, held)
        signals = StopSignals()
        held.callback(signals.restore)
        run, restored = _begin(prepared, output, log)
        batches = iter(train_loader(prepared, run.samples))
        reporter = Reporter(run, output, restored, batches)
        watchdog = _watchdog(run, output, peers)
        profiler = _profiler(run, output) if profile else None
        uploads = None if hub is None else _uploads(run, output, hub)
        by_name: dict[str, Callback | None] = {
            **load_callbacks(run.config.train.callbacks),
            "profile": profiler,
            "report": reporter,
            "evaluate": Evaluations(run, reporter.has_evaluation, watchdog),
            "save": Saving(run, watchdog),
            "upload": uploads,
        }
        names = callback_order(run.config, profile=profile)
        ordered = [*(by_name[name] for name in names), reporter.bar]
        run.callbacks = [callback for callback in ordered if callback is not None]
        for line in (*prepared.notes, headline(prepared, restored)):
            reporter.say(line)
        with _gc_frozen(), ExitStack() as opened:  # closes the last first
            for callback in run.callbacks:
                opened.callback(callback.close)
            opened.callback(prepared.data.train.close)
            opened.callback(batches.close)
            with _named_errors(run), watchdog:
                run.call("on_start")
                watchdog.watch(batches)
                stopped = train(run, batches, signals)
            run.call("on_end")
            if stopped:
                reporter.record("stop", run.progress)
                reporter.say(f"stopped at step {run.step}, checkpoint saved; run the same command to go on")
                return EXIT_STOPPED
            if run.progress.ended:
                reporter.say(why_ended(run))
            reporter.record("end", run.progress, complete=run.complete)
            if run.complete:
                sample(prepared, run.engine, reporter)
        finish(run, output, reporter, profiler, uploads, warnings=log.foreign)
        output.publish()
    return EXIT_DONE


def _hold(prepared: Prepared, output: Output, held: ExitStack) -> Hub | None:
    """Keep other runs away from the folder, and make the repository on the hub, if any."""
    error: UserError | None = None
    hub: Hub | None = None
    try:
        if prepared.backend.rank == 0:
            held.enter_context(output.lock())
            check_unchanged(output.place, prepared.resolved.existing)
            if prepared.config.hub.push is not None:
                from portable.output.hub import Hub

                hub = Hub(prepared.config)
                hub.create()
    except UserError as refused:
        error = refused
    all_or_none(error)
    return hub


def _begin(prepared: Prepared, output: Output, log: RunLog) -> tuple[Run, Restored]:
    """Open the folder, and restore the run that is to go on there."""
    config, backend = prepared.config, prepared.backend
    output.open(lambda: _shard_bytes(prepared))  # which only a bucket needs
    checkpoints = output.checkpoints(keep=config.checkpoint.keep)
    source = resume_source(config, checkpoints)
    agree(backend, {"the checkpoint to go on from": source.name if source is not None else "none"})
    restored = restore(prepared, source, checkpoints)
    # A checkpoint of another folder may stand where this run began, and a user may have deleted some.
    present = {step for step, _ in checkpoints.complete()}
    eval_history = restored.progress.eval_history
    eval_history.best = [one for one in eval_history.best if one[0] in present]
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


def _shard_bytes(prepared: Prepared) -> int:
    """About the size of a rank's shards of a checkpoint."""
    from portable.planner.meta_model import inspect

    train = prepared.config.train
    return inspect(prepared.model, train).checkpoint_bytes(train) // prepared.backend.world_size


def _write_preview(prepared: Prepared, output: Output) -> None:
    """Write some samples for the report, which needs no data then."""
    can = prepared.config.model.task == "causal-lm" and bool(prepared.data.opened)
    if can and not (output.work / PREVIEW_FILE).exists():
        shown = preview(prepared.data, SHOWN, prepared.config.seed).as_json()
        write_durably(output.work / PREVIEW_FILE, json.dumps(shown, ensure_ascii=False) + "\n")


def _watchdog(run: Run, output: Output, peers: PeerWatch) -> Watchdog:
    def report(line: str) -> None:
        peers.leave()  # the other ranks report where they hang, too
        launch.report_hang(line)
        output.publish_soon(at_once=True)

    return Watchdog(
        rank=run.rank,
        seconds=run.config.log.hang_timeout,
        folder=output.work / "hang",
        report=report,
        record=run.backend.diagnostics.dump_collectives,
    )


def _profiler(run: Run, output: Output) -> Profiler:
    from portable.reporting.profiling import Profiler

    return Profiler(output.work / "profile", run.rank)


def _uploads(run: Run, output: Output, hub: Hub) -> Uploads:
    from portable.run.uploads import Uploads

    export, every = partial(export_with_card, run.prepared, output.work), run.config.hub.push == "checkpoints"
    uploads = Uploads(hub, export, output.scratch, checkpoints=every)
    if every:
        run.checkpoints.in_use = uploads.in_use
    return uploads


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Within this context the model and the libraries stay: no collection need visit them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _named_errors(run: Run) -> Iterator[None]:
    """Within this context, tell memory that has run out and dead workers from other errors."""
    try:
        yield
    except Exception as error:
        if (died := worker_died(error)) is not None:
            raise died from error
        if run.backend.ran_out_of_memory(error):
            raise DeviceMemoryError(run.step + 1) from error
        raise
