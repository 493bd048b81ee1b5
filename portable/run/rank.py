"""Work of one rank in a launch: run the stages in order, and report failures to the other ranks."""

from __future__ import annotations

import errno
import json
import os
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from portable.checkpoint.store import choose_resume_source, open_checkpoints
from portable.converters.console import print_line
from portable.errors import RUN_ERROR, ReportedElsewhereError, RunError, UserError
from portable.formatting import format_table
from portable.hub_requests import get_revisions
from portable.output.output_dir import open_output
from portable.paths import make_path_inside, write_durably
from portable.ranks import launch
from portable.ranks.collectives import agree, agree_on_outcome, collect_settings_and_versions
from portable.ranks.failure_notification import PeerWatch
from portable.ranks.open_file_limit import prepare_open_files
from portable.registry import create_backend
from portable.reporting.metrics import EVALUATION
from portable.reporting.run_log import RunLog
from portable.run.custom_code import compute_code_digests, prepare_code
from portable.run.evaluation import check_evaluation_data, evaluate_all
from portable.run.garbage_collection import free_unreachable_objects
from portable.run.prepare import prepare, with_agreed_micro_batch
from portable.run.resolve import resolve
from portable.run.restore import restore
from portable.run.stages import Prepared, Resolved
from portable.run.train import EXIT_DONE, DeviceMemoryError, train_run
from portable.terminal import set_quiet, tell

if TYPE_CHECKING:
    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.output.output_dir import Output
    from portable.run.micro_batch import Search

_DISK_FAULTS = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO)
_IN_THE_WAY = (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class LaunchMode:
    """Options of a launch that are not settings of the run.

    Attributes:
        eval_only: Whether to evaluate instead of training.
        profile: Whether to write a trace of a few steps into ``profile`` in the run's folder.
        replay: Number of a step, counted from 1, to repeat with :mod:`portable.run.replay` instead of
            training. None to train.
        json_file: Path of an additional file for the values of ``eval_only``. None for no file.
    """

    eval_only: bool = False
    profile: bool = False
    replay: int | None = None
    json_file: str | None = None

    @property
    def writes_output(self) -> bool:
        """Whether the launch trains, and so writes into ``output_dir``."""
        return not self.eval_only and self.replay is None


def run_rank(backend_name: str, resolved: Resolved | RunConfig, mode: LaunchMode | None = None) -> int:
    """Run a launch on this rank: train, resume, evaluate, or repeat a step.

    Args:
        backend_name: Name of the backend, such as ``cuda``.
        resolved: Result of :func:`portable.run.resolve.resolve` in this program's launcher. If another
            launcher such as torchrun started this rank, the config, which is resolved here.
        mode: Options of the launch. None for plain training.

    Returns:
        The exit code: 0 if the schedule or ``train.stop_after`` is reached, 75 if a signal stopped the run.

    Raises:
        UserError: If the config, the model, the data or a checkpoint is not valid, or device memory runs out.
        RunError: If the run fails for another reason that is not a bug.
        ReportedElsewhereError: If another rank has failed first.
    """
    prepare_open_files(int(os.environ.get("WORLD_SIZE", "1")))
    backend = create_backend(backend_name)
    set_quiet((resolved.config if isinstance(resolved, Resolved) else resolved).log.quiet)
    with RunLog(backend.rank) as log:
        return _run(backend, resolved, log, mode or LaunchMode())


def _run(backend: Backend, resolved: Resolved | RunConfig, log: RunLog, mode: LaunchMode) -> int:
    """Prepare the run, and connect the ranks."""
    config = resolved.config if isinstance(resolved, Resolved) else resolved
    if isinstance(resolved, Resolved):  # otherwise `resolve` does it
        prepare_code(config)
    output = open_output(config, backend.rank)
    prepared = _try_prepare(backend, resolved, mode)
    peers = PeerWatch(lambda failure: log.record_failure(RunError(failure.describe())))
    with peers:
        return _run_with_peers(backend, prepared, output, log, peers, mode)


def _run_with_peers(
    backend: Backend,
    prepared: Prepared | UserError,
    output: Output,
    log: RunLog,
    peers: PeerWatch,
    mode: LaunchMode,
) -> int:
    """Start the backend, agree on the run with the other ranks, and carry out the launch.

    Args:
        backend: Backend of this rank, which is not started yet.
        prepared: The run, or the error that this rank raises once the ranks are connected.
        output: Output of the run.
        log: Log of the run.
        peers: Connection to the other ranks, which is not started yet.
        mode: Options of the launch.
    """
    try:
        backend.start()
        peers.start()
        prepared = agree_on_outcome(prepared)
        _agree(prepared, output)
        if prepared.config.log.memory_snapshot:
            backend.diagnostics.record_memory()
        prepared = with_agreed_micro_batch(prepared)
        if mode.eval_only:
            return _evaluate_only(prepared, mode.json_file)
        if mode.replay is not None:
            from portable.run.replay import replay_step

            return replay_step(prepared, mode.replay)
        return train_run(prepared, output, log, peers, profile=mode.profile)
    except ReportedElsewhereError:
        peers.announce_end()
        raise
    except (UserError, RunError) as error:
        log.record_failure(error)
        raise _report_error(error, peers) from error.__cause__
    except Exception as error:
        log.record_failure(error)
        launch.record_failure_time()
        if isinstance(error, OSError) and (refused := _explain_write_error(error, output)) is not None:
            raise _report_error(refused, peers) from error
        full = isinstance(error, DeviceMemoryError) or backend.is_out_of_memory(error)
        if not full or not isinstance(prepared, Prepared):
            first = _report_error(error, peers)
            if first is error:
                raise
            raise first from None
        # The search for a batch that fits takes seconds, and another rank may finish it earlier.
        peers.announce_end()
        step = error.step if isinstance(error, DeviceMemoryError) else None
        from portable.run import micro_batch

        search = micro_batch.build_search(prepared)
        sequences = prepared.plan.micro_batch_size // prepared.plan.groups
        snapshot = _write_memory_snapshot(backend, output) if prepared.config.log.memory_snapshot else None
        del prepared  # free the model, which holds what filled the memory
        backend.leave()
    finally:
        output.close()
        backend.stop()
    # The engine is freed only here: the error's traceback referenced it.
    raise _build_out_of_memory_error(search, sequences, step, output, snapshot)


def _report_error(error: Exception, peers: PeerWatch) -> Exception:
    """Report an error to the other ranks, and return the error that this rank raises.

    Returns:
        The error itself if this rank failed first, with the rank and the host in its message if the error
        depends on them. If another rank failed first, an error that is not printed.
    """
    first = peers.report(error)
    if first is None:
        return error
    if not peers.is_first:
        # The first failure explains more than an error of this rank that followed from it.
        return first.as_error()
    # This program's launcher adds the rank to the message itself.
    if isinstance(error, UserError) or first.code != RUN_ERROR or launch.is_launched():
        return error
    if not isinstance(error, RunError):
        traceback.print_exception(error)
    return RunError(f"{first.describe()}{'' if isinstance(error, RunError) else ' (traceback above)'}")


def _try_prepare(backend: Backend, resolved: Resolved | RunConfig, mode: LaunchMode) -> Prepared | UserError:
    """Resolve and prepare the run.

    If there are several ranks, an error is returned instead of raised, so that all ranks fail together once
    they are connected.
    """
    try:
        if not isinstance(resolved, Resolved):
            resolved = resolve(resolved, backend.name, writes=mode.writes_output)
        if mode.replay is not None:  # hooks of modules do not run in compiled layers
            resolved = replace(
                resolved, config=resolved.config.replaced({"compile": False, "xla.scan_layers": False})
            )
        return prepare(resolved, backend)
    except UserError as error:
        if backend.world_size == 1:
            raise
        return error


def _agree(prepared: Prepared, output: Output) -> None:
    """Raise UserError on all ranks if a rank has other settings, files or library versions."""
    facts = {
        "output_dir": output.agreed,
        "the text of data.source (its fingerprint)": prepared.data.fingerprint,
        "the code of your own": compute_code_digests(prepared.config),
        "the text of data.eval (its fingerprints)": dict(prepared.data.eval_fingerprints),
    }
    facts |= {f"the commit of the {name} on the hub": commit for name, commit in get_revisions().items()}
    agree(prepared.backend, collect_settings_and_versions(prepared.resolved.config) | facts)


def _evaluate_only(prepared: Prepared, json_file: str | None) -> int:
    """Evaluate the model of the latest checkpoint, print the values, and write them to files.

    A collective call.

    Args:
        prepared: The run.
        json_file: Path of an additional file for the values, or None.

    Returns:
        The exit code.
    """
    check_evaluation_data(prepared.data)
    place = prepared.resolved.place
    source = choose_resume_source(prepared.config, open_checkpoints(place))
    if source is None and prepared.backend.rank == 0:
        message = f"warning: output_dir: {place} has no checkpoint"
        tell(f"{message}; evaluating the model that a run would start with")
    restored = restore(prepared, source)
    values = evaluate_all(prepared, restored.engine)
    if prepared.backend.rank == 0:
        text = json.dumps({"step": restored.progress.step, **values}) + "\n"
        if place.exists():
            write_durably(place / "evaluation.json", text)
        if json_file is not None:
            try:
                write_durably(Path(json_file), text)
            except OSError as error:
                message = (
                    f"--json: {json_file}: cannot be written: {error.strerror or error}; name another file"
                )
                raise UserError(message) from error
        rows = [("step", str(restored.progress.step))]
        for name, value in values.items():
            shown = f"{value:.6f}" if isinstance(value, float) else json.dumps(value)
            rows.append((name.replace(EVALUATION, "evaluation ", 1), shown))
        print_line(format_table(rows))
    return EXIT_DONE


def _explain_write_error(error: OSError, output: Output) -> RunError | UserError | None:
    """Build the error for a failed write into the output folder, with a remedy.

    Returns:
        The error to raise. None if ``error`` does not come from a write into the output folder.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        latest = open_checkpoints(output.place).find_latest()
        return RunError(
            f"output_dir: {output.work} cannot be written to: {error.strerror}; free some space and run the "
            f"same command to go on; last good checkpoint: {latest or 'none'}"
        )
    if error.errno in _DISK_FAULTS:
        latest = open_checkpoints(output.place).find_latest()
        return RunError(
            f"output_dir: {output.work} cannot be written to: {error.strerror}; check the file system and "
            f"run the same command to go on; last good checkpoint: {latest or 'none'}"
        )
    # The path is not a regular file but a link, a folder or a device.
    path = str(error.filename or "")
    if error.errno in _IN_THE_WAY and path.startswith(f"{output.work}{os.sep}"):
        return UserError(f"output_dir: {path} cannot be written to: {error.strerror}; move it away")
    return None


def _write_memory_snapshot(backend: Backend, output: Output) -> str:
    """Write the memory snapshot of this rank (``log.memory_snapshot``), and return its path or URL."""
    name = f"memory/rank{backend.rank}.pickle"
    backend.diagnostics.dump_memory(make_path_inside(output.work, name))
    return str(output.place / name)


def _build_out_of_memory_error(
    search: Search, sequences: int, step: int | None, output: Output, snapshot: str | None
) -> UserError:
    """Build the error of a rank that ran out of device memory, with settings that would fit.

    Args:
        search: Search for a micro-batch that fits.
        sequences: Sequences of a micro-batch on each device when memory ran out.
        step: Step in which memory ran out, or None if it was before the first step.
        output: Output of the run.
        snapshot: Path or URL of the memory snapshot, or None if none was written.
    """
    from portable.run import micro_batch

    free_unreachable_objects()
    when = "at the start" if step is None else f"in step {step}"
    message = (
        f"train.micro_batch_size: out of memory {when} with {sequences} sequences at a time; "
        f"{micro_batch.describe_fitting_settings(search, sequences)}"
    )
    latest = open_checkpoints(output.place).find_latest()
    message += f"; last good checkpoint: {latest}" if latest is not None else ""
    message += f"; memory snapshot: {snapshot}" if snapshot is not None else ""
    return UserError(message)
