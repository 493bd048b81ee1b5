"""Run the stages of a launch on one rank, and report failures to the other ranks."""

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
from portable.formatting import format_count, format_table
from portable.hub_requests import get_revisions_read
from portable.output.output_dir import open_output
from portable.paths import convert_storage_errors, prepare_path_inside, write_durably
from portable.ranks import launch
from portable.ranks.collectives import (
    check_ranks_agree,
    collect_values_equal_on_all_ranks,
    raise_if_any_rank_failed,
)
from portable.ranks.failure_notification import PeerWatch
from portable.ranks.open_file_limit import raise_open_file_limit
from portable.registry import create_backend
from portable.reporting.metrics import EVALUATION_PREFIX
from portable.reporting.run_log import RunLogHandler
from portable.run.custom_code import compute_custom_code_digests, install_and_check_custom_code
from portable.run.evaluation import check_evaluation_data, evaluate_all_sources
from portable.run.garbage_collection import free_unreachable_objects
from portable.run.prepare import agree_on_micro_batch_size, prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from portable.run.stages import PreparedRun, ResolvedRun
from portable.run.train import EXIT_DONE, DeviceMemoryError, train_in_output
from portable.terminal import print_status, set_quiet

if TYPE_CHECKING:
    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.output.output_dir import RunOutput
    from portable.run.micro_batch import MicroBatchSearch

_DISK_ERRNOS = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO)
_WRONG_FILE_TYPE_ERRNOS = (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class LaunchMode:
    """Options of a launch that are not settings of the run.

    Attributes:
        eval_only: Whether to evaluate instead of training.
        profile: Whether to write a trace of a few steps into ``profile`` in the run's folder.
        replay: Step, counted from 1, to replay with :mod:`portable.run.replay` instead of
            training. None to replay no step.
        json_file: Path of an additional file for the results of ``eval_only``. None for no
            file.
    """

    eval_only: bool = False
    profile: bool = False
    replay: int | None = None
    json_file: str | None = None

    @property
    def writes_output(self) -> bool:
        """Whether the launch trains, and thus writes into ``output_dir``."""
        return not self.eval_only and self.replay is None


def run_rank(backend_name: str, resolved: ResolvedRun | RunConfig, mode: LaunchMode | None = None) -> int:
    """Run a launch on this rank: train, resume, evaluate, or replay a step.

    Args:
        backend_name: Name of the backend, such as ``cuda``.
        resolved: Result of :func:`portable.run.resolve.resolve_run`, if this program's launcher
            started the rank. The config if another launcher such as torchrun started it. The
            config is then resolved here.
        mode: Options of the launch. None for plain training.

    Returns:
        The exit code: 75 if a signal stopped the training. Otherwise 0: the schedule or
        ``train.stop_after`` is reached, a callback or an evaluation has ended the training, or
        the evaluation or the replay is complete.

    Raises:
        UserError: If the config, the model, the data or a checkpoint is not valid, or device
            memory runs out.
        RunError: If the run fails for another reason that is not a bug.
        ReportedElsewhereError: If another rank has failed first.
    """
    raise_open_file_limit(int(os.environ.get("WORLD_SIZE", "1")))
    backend = create_backend(backend_name)
    set_quiet((resolved.config if isinstance(resolved, ResolvedRun) else resolved).log.quiet)
    with RunLogHandler(backend.rank) as log:
        return _prepare_and_run(backend, resolved, log, mode or LaunchMode())


def _prepare_and_run(
    backend: Backend, resolved: ResolvedRun | RunConfig, log: RunLogHandler, mode: LaunchMode
) -> int:
    """Prepare the run, and carry out the launch. If another rank fails, this rank ends as well.

    Args:
        backend: Backend of this rank, which is not started yet.
        resolved: The resolved run, or the config if the launcher has not resolved it.
        log: Log of the run.
        mode: Options of the launch.

    Returns:
        The exit code.
    """
    config = resolved.config if isinstance(resolved, ResolvedRun) else resolved
    if isinstance(resolved, ResolvedRun):  # otherwise `resolve_run` does it
        install_and_check_custom_code(config)
    output = open_output(config, backend.rank)
    prepared = _try_prepare(backend, resolved, mode)
    peers = PeerWatch(lambda failure: log.record_failure(RunError(failure.describe())))
    with peers:
        return _start_and_run(backend, prepared, output, log, peers, mode)


def _start_and_run(
    backend: Backend,
    prepared: PreparedRun | UserError | RunError,
    output: RunOutput,
    log: RunLogHandler,
    peers: PeerWatch,
    mode: LaunchMode,
) -> int:
    """Start the backend, check that all ranks agree on the run, and carry out the launch.

    Args:
        backend: Backend of this rank, which is not started yet.
        prepared: The run, or the error that this rank raises once the ranks are connected.
        output: Output of the run.
        log: Log of the run.
        peers: Connection to the other ranks, which is not started yet.
        mode: Options of the launch.

    Returns:
        The exit code.

    Raises:
        UserError: If a setting, a file or a checkpoint is not valid, or if device memory runs out.
        RunError: If the run fails for another reason that is not a bug.
        ReportedElsewhereError: If another rank has failed first.
    """
    try:
        backend.start()
        peers.start()
        prepared = raise_if_any_rank_failed(prepared)
        _check_all_ranks_agree(prepared, output)
        if prepared.config.log.memory_snapshot:
            backend.diagnostics.record_memory()
        prepared = agree_on_micro_batch_size(prepared)
        with convert_storage_errors("output_dir"):
            if mode.eval_only:
                return _evaluate_and_print(prepared, mode.json_file)
            if mode.replay is not None:
                from portable.run.replay import replay_and_print_step

                return replay_and_print_step(prepared, mode.replay)
            return train_in_output(prepared, output, log, peers, profile=mode.profile)
    except ReportedElsewhereError:
        peers.announce_own_exit()
        raise
    except (UserError, RunError) as error:
        log.record_failure(error)
        raise _report_error(error, peers) from error.__cause__
    except Exception as error:
        log.record_failure(error)
        launch.record_failure_time()
        if (
            isinstance(error, OSError)
            and (explained_error := _explain_output_write_error(error, output)) is not None
        ):
            raise _report_error(explained_error, peers) from error
        ran_out_of_memory = isinstance(error, DeviceMemoryError) or backend.is_out_of_memory(error)
        if not ran_out_of_memory or not isinstance(prepared, PreparedRun):
            first = _report_error(error, peers)
            if first is error:
                raise
            raise first from None
        # Announce the exit now, because the search for a micro-batch size takes seconds and another rank may
        # finish it first.
        peers.announce_own_exit()
        step = error.step if isinstance(error, DeviceMemoryError) else None
        from portable.run import micro_batch

        search = micro_batch.build_micro_batch_search(prepared)
        sequences = prepared.batch_plan.micro_batch_size // prepared.batch_plan.groups_per_rank
        snapshot = _dump_memory_snapshot(backend, output) if prepared.config.log.memory_snapshot else None
        del prepared  # free the model, which references the tensors that filled the memory
        backend.abandon_process_group()
    finally:
        output.close()
        backend.stop()
    # Search only now, because the traceback of the error kept the engine in memory.
    raise _build_out_of_memory_error(search, sequences, step, output, snapshot)


def _report_error(error: Exception, peers: PeerWatch) -> Exception:
    """Report an error to the other ranks, and return the error that this rank should raise.

    Waits up to five seconds for the answer of rank 0. If a RunError replaces an unexpected error,
    the traceback of the unexpected error is printed.

    Returns:
        If another rank failed first, an error that ends this rank without being printed. If this
        rank failed first, but the cause may be specific to this rank or host, a RunError whose
        message also names the rank and the host. In all other cases, ``error`` itself. This also
        applies under this program's launcher, because the launcher adds the rank to the message.
    """
    first = peers.report_error(error)
    if first is None:
        return error
    if not peers.failed_first:
        # The first failure explains more than an error of this rank that followed from it.
        return first.to_error()
    # This program's launcher adds the rank to the message itself.
    if isinstance(error, UserError) or first.code != RUN_ERROR or launch.is_launched_by_portable():
        return error
    if not isinstance(error, RunError):
        traceback.print_exception(error)
    return RunError(f"{first.describe()}{'' if isinstance(error, RunError) else ' (traceback above)'}")


def _try_prepare(
    backend: Backend, resolved: ResolvedRun | RunConfig, mode: LaunchMode
) -> PreparedRun | UserError | RunError:
    """Resolve and prepare the run.

    If a step is replayed, ``compile``, ``xla.scan_layers`` and ``train.fused_backward`` are
    turned off.

    With several ranks, a UserError or RunError is returned instead of raised. All ranks can then
    fail together once they are connected, so that no rank waits for a connection to a rank that
    has ended. Other errors are raised.

    Raises:
        UserError: If there is only one rank, and the run cannot be prepared.
        RunError: If there is only one rank, and for example an object store cannot be reached.
    """
    try:
        if not isinstance(resolved, ResolvedRun):
            resolved = resolve_run(resolved, backend.name, writes_output=mode.writes_output)
        if mode.replay is not None:
            # Compile nothing, because module hooks do not run in compiled layers. Do not fuse the backward
            # pass, because the report needs the gradients.
            changes = {"compile": False, "xla.scan_layers": False, "train.fused_backward": False}
            resolved = replace(resolved, config=resolved.config.replaced(changes))
        return prepare_run(resolved, backend)
    except (UserError, RunError) as error:
        if backend.world_size == 1:
            raise
        return error


def _check_all_ranks_agree(prepared: PreparedRun, output: RunOutput) -> None:
    """Raise UserError on all ranks if their settings, data, code or library versions differ."""
    facts = {
        "output_dir": output.agreed_location,
        "data.source (fingerprint of the text)": prepared.data.fingerprint,
        "the digests of the custom code": compute_custom_code_digests(prepared.config),
        "data.eval (fingerprints of the texts)": dict(prepared.data.eval_fingerprints),
    }
    facts |= {f"the commit of the {name} on the hub": commit for name, commit in get_revisions_read().items()}
    check_ranks_agree(prepared.backend, collect_values_equal_on_all_ranks(prepared.resolved.config) | facts)


def _evaluate_and_print(prepared: PreparedRun, json_file: str | None) -> int:
    """Evaluate the model of the latest checkpoint, print the results, and write them to files.

    Must be called on all ranks. Without a checkpoint, the model that the run would start with is
    evaluated. Rank 0 writes the results to ``evaluation.json`` in the output folder if this folder
    exists, and to ``json_file``.

    Args:
        prepared: Run to evaluate.
        json_file: Path of an additional file for the results. None for no additional file.

    Returns:
        The exit code.

    Raises:
        UserError: If there is no evaluation data, or if the checkpoint cannot be used. Also raised
            on rank 0 if ``json_file`` cannot be written.
    """
    check_evaluation_data(prepared.data)
    output_place = prepared.resolved.output_place
    source = choose_resume_source(prepared.config, open_checkpoints(output_place))
    if source is None and prepared.backend.rank == 0:
        message = f"warning: output_dir: {output_place} has no checkpoint"
        print_status(f"{message}; evaluating the model that a run would start with")
    restored = restore_run(prepared, source)
    values = evaluate_all_sources(prepared, restored.engine)
    if prepared.backend.rank == 0:
        text = json.dumps({"step": restored.progress.step, **values}) + "\n"
        if output_place.exists():
            write_durably(output_place / "evaluation.json", text)
        if json_file is not None:
            try:
                write_durably(Path(json_file), text)
            except OSError as error:
                raise UserError(
                    f"--json: {json_file}: cannot be written ({error.strerror or error}); use another file"
                ) from error
        rows = [("step", str(restored.progress.step))]
        for name, value in values.items():
            value_text = f"{value:.6f}" if isinstance(value, float) else json.dumps(value)
            rows.append((name.replace(EVALUATION_PREFIX, "evaluation ", 1), value_text))
        print_line(format_table(rows))
    return EXIT_DONE


def _explain_output_write_error(error: OSError, output: RunOutput) -> RunError | UserError | None:
    """Turn a failed write to the output folder into an error with a remedy.

    The cause is determined from the error number. An error that indicates a full or a faulty
    disk is always attributed to the output folder.

    Returns:
        The error to raise. None if the error number has another meaning. Also None if the
        number indicates a link, a folder or missing permissions, but the path is not in the
        output folder.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        latest = open_checkpoints(output.place).find_latest()
        return RunError(
            f"output_dir: cannot write to {output.work_folder} ({error.strerror}); free some space and run "
            f"the same command to continue; last good checkpoint: {latest or 'none'}"
        )
    if error.errno in _DISK_ERRNOS:
        latest = open_checkpoints(output.place).find_latest()
        return RunError(
            f"output_dir: cannot write to {output.work_folder} ({error.strerror}); check the file system "
            f"and run the same command to continue; last good checkpoint: {latest or 'none'}"
        )
    # The path is a link, a folder or a device instead of a regular file.
    path = str(error.filename or "")
    if error.errno in _WRONG_FILE_TYPE_ERRNOS and path.startswith(f"{output.work_folder}{os.sep}"):
        return UserError(
            f"output_dir: cannot write to {path} ({error.strerror}); move {path} to another folder"
        )
    return None


def _dump_memory_snapshot(backend: Backend, output: RunOutput) -> str:
    """Write this rank's memory snapshot for ``log.memory_snapshot``, and return its path or URL."""
    name = f"memory/rank{backend.rank}.pickle"
    backend.diagnostics.dump_memory(prepare_path_inside(output.work_folder, name))
    return str(output.place / name)


def _build_out_of_memory_error(
    search: MicroBatchSearch,
    failed_sequences: int,
    step: int | None,
    output: RunOutput,
    snapshot_path: str | None,
) -> UserError:
    """Build the error for a rank that ran out of device memory, with settings that would fit.

    This function searches for a micro-batch size on the device. Before the call, the references to
    the model and the engine must be deleted, and the backend must be disconnected from the other
    ranks.

    Args:
        search: Search for a micro-batch that fits.
        failed_sequences: Number of sequences per micro-batch on each device when memory ran out.
        step: Step that ran out of memory. None if it happened before the first step.
        output: Output of the run.
        snapshot_path: Path or URL of the memory snapshot, or None if none was written.
    """
    from portable.run import micro_batch

    free_unreachable_objects()
    when = "at the start" if step is None else f"in step {step}"
    message = (
        f"train.micro_batch_size: out of memory {when} with micro-batches of "
        f"{format_count(failed_sequences, 'sequence')}; "
        f"{micro_batch.describe_fitting_settings(search, failed_sequences)}"
    )
    latest = open_checkpoints(output.place).find_latest()
    message += f"; last good checkpoint: {latest}" if latest is not None else ""
    message += f"; memory snapshot: {snapshot_path}" if snapshot_path is not None else ""
    return UserError(message)
