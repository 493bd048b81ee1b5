"""Save, list and delete the checkpoints of a run.

A checkpoint is a folder ``<run>/checkpoints/step-000100/``. It contains the shards in the
strategy's native format, the model's config and tokenizer, ``trainer_state.json``, and a manifest
with the checksums of all files (see :mod:`portable.converters.manifest`).

On a shared disk, the ranks write to ``.step-000100.partial``. Rank 0 renames it once all files are
complete. A folder with the final name is therefore always a complete checkpoint, even if the run
was killed. With an object store, each rank writes to a local folder, and its publisher uploads the
files. A marker object, which is uploaded last, shows that the checkpoint is complete.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from portable.checkpoint.trainer_state import STATE_FILE, TrainerState, parse_checkpoint_step
from portable.converters import compute_manifest_entries, format_manifest
from portable.converters.manifest import MANIFEST
from portable.converters.storage.folder_operations import (
    PARTIAL_SUFFIX,
    P,
    find_unused_path,
    is_abandoned_folder,
    is_incomplete_folder,
    is_taken,
    list_subfolders,
    move_folder,
    quarantine_folder,
    remove_folder,
)
from portable.converters.storage.path_or_url import is_within, resolve_links
from portable.converters.storage.store_errors import RetriesExhaustedError
from portable.converters.writers.replace_folder import exchange_paths
from portable.errors import RunError, UserError, to_one_line
from portable.paths import convert_storage_errors, parse_place_setting, path_exists, sync_folder, sync_tree
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from portable.backend import Backend, SaveHandle
    from portable.config import RunConfig
    from portable.converters.manifest import ManifestEntries
    from portable.converters.storage.path_or_url import AnyPath
    from portable.output.publisher import Publisher

CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the checkpoints in a run's output folder."""
NO_CHECKPOINT = f"has no {STATE_FILE}, so it is not a checkpoint"
"""Text for messages that gives the reason why a folder is not a checkpoint."""
_RETRY_SECONDS = 5.0
"""Seconds between attempts to write the last checkpoint of a run, if the object store is unavailable."""


class StoreUnavailableError(RunError):
    """Raised if a save fails because the object store is unavailable. A later save may succeed."""


class CompleteCheckpoint(NamedTuple, Generic[P]):
    """Complete checkpoint of a run."""

    step: int
    folder: P


@dataclass
class _PendingSave(Generic[P]):
    """Save in progress.

    Attributes:
        final: Path or URL of the complete checkpoint.
        local_folder: Local folder that this rank writes to until the checkpoint is complete.
        write_files: Function that waits for the shards, writes the other files on rank 0, and returns
            this rank's manifest entries.
        build_manifest: Function that formats the manifest from the entries of all ranks.
        best_steps: Steps of the best checkpoints, which must not be deleted.
        completion: Future that is done once the checkpoint is complete. If the save fails, it contains
            the exception.
    """

    final: P
    local_folder: Path
    write_files: Callable[[], ManifestEntries]
    build_manifest: Callable[[ManifestEntries], str]
    best_steps: set[int]
    completion: Future[None] = field(init=False)

    @cached_property
    def entries(self) -> ManifestEntries:
        """Manifest entries of this rank. The first access calls :attr:`write_files`."""
        return self.write_files()


class _AllRanksCaller:
    """Callable that runs a function on all ranks. If it fails on one rank, all ranks raise an error.

    Args:
        max_outage_seconds: Time in seconds after which an outage of the object store counts as a
            permanent failure.
    """

    def __init__(self, max_outage_seconds: float) -> None:
        self._max_outage_seconds = max_outage_seconds
        self.unavailable_since: float | None = None
        """``time.monotonic()`` of the first failure of the current outage. None if the store is available."""

    @cached_property
    def group(self) -> Any:
        """Process group for collectives in background threads. None if there is only one rank.

        The first access may create the group, so all ranks must access it at the same point.
        """
        from portable.ranks.collectives import (
            get_or_create_background_group,  # imported here because it imports torch
        )

        return get_or_create_background_group()

    def __call__(self, function: Callable[[], ManifestEntries | None]) -> ManifestEntries:
        """Call a function on this rank, and gather the manifest entries that it returns on all ranks.

        Must be called on all ranks.

        Args:
            function: Function to call. It returns None if this rank has no entries.

        Returns:
            The manifest entries of all ranks.

        Raises:
            StoreUnavailableError: If the only cause of failure, on any rank, is that the object store is
                unavailable, and the outage has not exceeded the time limit.
            RunError: If the function failed on another rank for another reason. If it failed on this rank,
                the original exception is raised.
        """
        failure: BaseException | None = None
        entries: ManifestEntries | None = None
        try:
            entries = function()
        except BaseException as error:
            failure = error
        is_temporary = isinstance(failure, RetriesExhaustedError)
        if is_temporary:
            self.unavailable_since = self.unavailable_since or time.monotonic()
            is_temporary = time.monotonic() - self.unavailable_since < self._max_outage_seconds
        own_result = (None if failure is None else to_one_line(failure), is_temporary, entries or {})
        all_results = [own_result]
        if self.group is not None:
            import torch.distributed as dist

            all_results = [own_result] * dist.get_world_size(self.group)
            dist.all_gather_object(all_results, own_result, group=self.group)
        failures = [
            (rank, text, away) for rank, (text, away, _) in enumerate(all_results) if text is not None
        ]
        if failures and all(away for _, _, away in failures):
            self.unavailable_since = self.unavailable_since or time.monotonic()
            raise StoreUnavailableError(failures[0][1])
        if failure is not None and not is_temporary:
            raise failure
        for rank, text, away in failures:
            if not away:
                raise RunError(f"rank {rank}: {text}")
        return {name: entry for _, _, rank_entries in all_results for name, entry in rank_entries.items()}


class CheckpointStore(Generic[P]):
    """Checkpoints of a run, in a local folder or an object store.

    At most one save is in progress at a time. A background thread waits for the shards, completes the
    checkpoint, and deletes older checkpoints. Only rank 0 completes and deletes checkpoints.

    Args:
        path: Folder or URL that contains the checkpoints.
        keep: Number of recent checkpoints to keep. None keeps all checkpoints.
        rank: Rank of this process.
        publisher: Publisher that uploads this rank's files. Required for saving if ``path`` is a URL,
            None for a local folder.
    """

    def __init__(
        self,
        path: P,
        *,
        keep: int | None = None,
        rank: int = 0,
        publisher: Publisher | None = None,
    ) -> None:
        self.path: P = path
        self._keep = keep
        self._rank = rank
        self._publisher = publisher
        self._on_all_ranks = _AllRanksCaller(0.0 if publisher is None else publisher.outage_seconds)
        self._folders_to_delete: list[P] = []
        """Folders that are deleted after the next save: old checkpoints, and leftovers of failed uploads."""
        self._pending_save: _PendingSave[P] | None = None
        self._postponed_save: _PendingSave[P] | None = None
        """Save that failed because the object store was unavailable.

        The last save of a run retries it. Any other save discards it.
        """
        self._newest_known: P | None = None
        """Newest complete checkpoint that this rank has seen."""
        self.on_complete: Callable[[P], None] = lambda folder: None
        """Callback that rank 0 invokes with each new checkpoint, usually in a background thread."""
        self.get_steps_in_use: Callable[[], set[int]] = set
        """Callback that returns the steps of checkpoints that must not be deleted yet."""

    def list_complete(self) -> list[CompleteCheckpoint[P]]:
        """Find the complete checkpoints.

        Returns:
            The steps and folders, oldest first.
        """
        steps = [(parse_checkpoint_step(folder.name), folder) for folder in list_subfolders(self.path)]
        return sorted(
            (
                CompleteCheckpoint(step, folder)
                for step, folder in steps
                if step is not None and (folder / STATE_FILE).is_file() and not is_incomplete_folder(folder)
            ),
            key=lambda checkpoint: checkpoint.step,
        )

    def find_latest(self) -> P | None:
        """Return the newest complete checkpoint, or None if there is none."""
        self._newest_known = next((folder for _, folder in reversed(self.list_complete())), None)
        return self._newest_known

    def find_newest_known(self) -> P | None:
        """Return the newest complete checkpoint that is known, or None if there is none.

        Unlike :meth:`find_latest`, this method does not fail if the object store is unavailable. It then
        returns the newest checkpoint that this rank has seen so far.
        """
        with suppress(RetriesExhaustedError):
            return self.find_latest()
        return self._newest_known

    def mark_damaged(self, folder: P) -> P:
        """Rename the folder of a damaged checkpoint, so that it is not used again. Keeps the files.

        Returns:
            The new path of the damaged checkpoint.
        """
        damaged_folder = quarantine_folder(folder)
        self.find_latest()
        return damaged_folder

    def remove_interrupted_saves(self) -> None:
        """Delete the folders of interrupted saves, and warn about folders that only look like checkpoints.

        Must be called only on rank 0, which holds the run's lock.
        """
        for entry in list_subfolders(self.path):
            if is_abandoned_folder(entry):
                remove_folder(entry)
            elif (
                parse_checkpoint_step(entry.name) is not None
                and not (entry / STATE_FILE).is_file()
                and not is_incomplete_folder(entry)
            ):
                print_status(f"warning: {entry}: {NO_CHECKPOINT}")

    def begin_save(
        self,
        backend: Backend,
        state: TrainerState,
        save_shards: Callable[[Path], SaveHandle],
        write_other_files: Callable[[Path], None],
    ) -> None:
        """Start saving a checkpoint once the previous save is complete. Must be called on all ranks.

        The checkpoint is complete once :meth:`finish_save` has returned.

        Args:
            backend: Backend of this rank. Its barrier is called after the folder is created.
            state: Contents of ``trainer_state.json``.
            save_shards: Function that writes this rank's shards to a folder, possibly in the background.
            write_other_files: Function that writes the other files to a folder. Called only on rank 0, in
                the background thread.

        Raises:
            RunError: If this or the previous save failed.
        """
        self.finish_save()
        final = self.path / f"step-{state.step:06d}"
        if self._postponed_save is not None:
            shutil.rmtree(self._postponed_save.local_folder, ignore_errors=True)
            self._folders_to_delete.append(self._postponed_save.final)
            self._postponed_save = None
        with self._convert_save_errors(final):
            local_folder = self._create_local_folder(final)
        backend.barrier()
        with self._convert_save_errors(final):
            handle = save_shards(local_folder)

        def write() -> ManifestEntries:
            handle.wait()
            if self._rank == 0:
                write_other_files(local_folder)
                state.write(local_folder)
            return (
                compute_manifest_entries(local_folder)
                if self._publisher is not None or self._rank == 0
                else {}
            )

        def format_lines(entries: ManifestEntries) -> str:
            return format_manifest(entries, step=state.step, run=state.run_digest)

        best = {step for step, _ in state.eval_history.best}
        self._pending_save = _PendingSave(final, local_folder, write, format_lines, best)
        self._start_completion_thread()

    def finish_save_if_written(self) -> None:
        """Call :meth:`finish_save` if the save in progress has ended. Does not block.

        Raises:
            RunError: If the save failed.
        """
        if self._pending_save is not None and self._pending_save.completion.done():
            self.finish_save()

    def finish_save(self, *, is_last_save: bool = False) -> None:
        """Wait until the save in progress is complete. Does nothing if there is no save.

        If the object store is unavailable, prints a warning and returns, so that training continues without
        this checkpoint.

        Args:
            is_last_save: Whether this is the last save of the run. If so, the save is retried while the
                object store is unavailable, until the time limit for outages.

        Raises:
            RunError: If the save failed. Earlier checkpoints are intact.
        """
        if is_last_save and self._pending_save is None:
            self._pending_save, self._postponed_save = self._postponed_save, None
            self._start_completion_thread()
        while (pending := self._pending_save) is not None:
            self._pending_save = None
            try:
                with self._convert_save_errors(pending.final):
                    pending.completion.result()
                self._newest_known = pending.final
            except StoreUnavailableError as error:
                if self._rank == 0:
                    consequence = (
                        "trying again"
                        if is_last_save
                        else "training continues, and the next save tries again"
                    )
                    print_status(f"warning: {error}; {consequence}")
                if is_last_save:
                    time.sleep(_RETRY_SECONDS)
                    self._pending_save = pending
                    self._start_completion_thread()
                else:
                    self._postponed_save = pending

    def _start_completion_thread(self) -> None:
        """Start a background thread that completes the pending save. Does nothing without a pending save."""
        # Syncing, uploading, and deleting files take time, and training should not wait for them.
        if self._pending_save is not None:
            complete_save = partial(self._complete_save, self._pending_save)
            self._pending_save.completion = start_background_call(complete_save, name="checkpoint")

    @contextmanager
    def _convert_save_errors(self, folder: P) -> Iterator[None]:
        """Add the failed folder and the last good checkpoint to errors raised within this context.

        A StoreUnavailableError keeps its type. Any other exception is converted to a RunError.

        Args:
            folder: Checkpoint that is being written, used in the error message.
        """
        try:
            yield
        except (
            BaseException
        ) as error:  # BaseException, because torch's CheckpointException is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = to_one_line(_find_root_cause(error))
            reason = reason if len(reason) <= 300 else f"... {reason[-300:]}"
            error_type = StoreUnavailableError if isinstance(error, StoreUnavailableError) else RunError
            raise error_type(
                f"{folder}: could not be written ({reason}); last good checkpoint: "
                f"{self._newest_known or 'none'}"
            ) from error

    def delete_old_checkpoints(self, best_steps: set[int]) -> None:
        """Delete old checkpoints, and folders that could not be deleted earlier.

        The newest ``keep`` checkpoints, the best checkpoints, and checkpoints in use are kept.

        Args:
            best_steps: Steps of the best checkpoints.
        """
        if self._keep is not None:
            protected_steps = best_steps | self.get_steps_in_use()
            old = [
                folder for step, folder in self.list_complete()[: -self._keep] if step not in protected_steps
            ]
            self._folders_to_delete += [folder for folder in old if folder not in self._folders_to_delete]
        # Only remove a folder from the list once it is deleted. Otherwise, an interrupted deletion would
        # never be resumed, because a partially deleted checkpoint is no longer listed as complete.
        while self._folders_to_delete:
            remove_folder(self._folders_to_delete[-1])
            self._folders_to_delete.pop()

    # -- Completion of a save, in the background thread ------------------------------------------------------

    def _create_local_folder(self, final: P) -> Path:
        """Create an empty local folder for this rank's files of the checkpoint ``final``.

        Must be called on all ranks, followed by a barrier: without a publisher, rank 0 creates one folder
        for all.
        """
        if self._publisher is not None:
            # Create the process group here, because that is a collective and must not happen in a thread.
            self._on_all_ranks.group  # noqa: B018
            local_folder = self._publisher.shards_folder / final.name
        else:
            local_folder = Path(str(self.path)) / f".{final.name}{PARTIAL_SUFFIX}"
        if self._publisher is not None or self._rank == 0:
            shutil.rmtree(local_folder, ignore_errors=True)
            local_folder.mkdir(parents=True)
        if self._publisher is None and self._rank == 0:
            sync_folder(local_folder.parent.parent)
        return local_folder

    def _complete_save(self, save: _PendingSave[P]) -> None:
        """Complete a checkpoint: upload this rank's files, or rename the shared folder on rank 0.

        Rank 0 also calls ``on_complete`` and deletes older checkpoints. This method runs in the background
        thread of every rank.
        """
        if self._publisher is not None:
            self._upload_save(save, self._publisher)
        else:
            entries = save.entries
            if self._rank == 0:
                _rename_to_final(save, entries)
        if self._rank == 0:
            self.on_complete(save.final)
            self._delete_old_or_warn(save)

    def _upload_save(self, save: _PendingSave[P], publisher: Publisher) -> None:
        """Upload the files of this rank, and then write the manifest and the marker on rank 0.

        Must be called on all ranks. If it fails on one rank, all ranks raise an error.

        Args:
            save: Save to upload. Its local folder is deleted afterwards.
            publisher: Publisher of this rank.
        """
        final = publisher.store / CHECKPOINTS_FOLDER / save.final.name

        def prepare_upload() -> ManifestEntries:
            entries_of_rank = save.entries
            if self._rank == 0:
                _move_non_checkpoint_away(save.final)
                remove_folder(final)
                publisher.begin_checkpoint(final)
            return entries_of_rank

        def upload() -> None:
            publisher.upload_checkpoint(save.local_folder, final)

        def write_marker() -> None:
            if self._rank == 0:
                (final / MANIFEST).write_bytes(save.build_manifest(entries).encode())
                publisher.complete_checkpoint(final, parse_checkpoint_step(final.name))

        entries: ManifestEntries = self._on_all_ranks(prepare_upload)
        self._on_all_ranks(upload)
        self._on_all_ranks(write_marker)
        self._on_all_ranks.unavailable_since = None
        shutil.rmtree(save.local_folder, ignore_errors=True)

    def _delete_old_or_warn(self, save: _PendingSave[P]) -> None:
        """Delete old checkpoints and the leftovers of failed saves, after a save is complete.

        If the object store is unavailable, prints a warning. A later save then deletes them.
        """
        try:
            self._folders_to_delete = [folder for folder in self._folders_to_delete if folder != save.final]
            self.delete_old_checkpoints(save.best_steps)
        except RetriesExhaustedError as error:  # only a warning, because this checkpoint is complete
            print_status(
                f"warning: older checkpoints could not be deleted ({to_one_line(error)}); the next save "
                "tries again"
            )


def _rename_to_final(save: _PendingSave[P], entries: ManifestEntries) -> None:
    """Write the manifest, sync all files to disk, and rename the local folder to its final name.

    An existing checkpoint of the same step is replaced. There can be one if the run resumed from an
    older checkpoint.

    Args:
        save: The save in a local folder.
        entries: Manifest entries of all files.
    """
    final = Path(str(save.final))
    (save.local_folder / MANIFEST).write_text(save.build_manifest(entries), "utf-8")
    sync_tree(save.local_folder)
    _move_non_checkpoint_away(save.final)
    if os.path.lexists(final) and exchange_paths(save.local_folder, final):
        shutil.rmtree(save.local_folder, ignore_errors=True)
    else:
        remove_folder(final)
        save.local_folder.rename(final)
    sync_folder(final.parent)


def _move_non_checkpoint_away(final: P) -> None:
    """Rename a file or folder that occupies the path of a new checkpoint, and print a warning.

    Does nothing if the path does not exist or is a checkpoint.
    """
    if is_taken(final) and not (final / STATE_FILE).is_file() and not is_incomplete_folder(final):
        new_path = move_folder(final, find_unused_path(final.parent / f"{final.name}.kept"))
        print_status(
            f"warning: {final}: had no {STATE_FILE}, so it was not a checkpoint; moved to {new_path}"
        )


def _find_root_cause(error: BaseException) -> BaseException:
    """Return the exception of the lowest failed rank if torch combined exceptions from several ranks.

    Other exceptions are returned unchanged.
    """
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return error
    cause: BaseException = failures[min(failures)][0]
    return cause


def start_background_call(function: Callable[[], None], *, name: str) -> Future[None]:
    """Call a function in a new daemon thread.

    Args:
        function: Function to call.
        name: Name of the thread.

    Returns:
        A future that is done when the function has returned. If the function raises an exception, the
        future contains it.
    """
    future: Future[None] = Future()

    def run_function() -> None:
        try:
            function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run_function, name=name, daemon=True).start()
    return future


def choose_resume_source(config: RunConfig, checkpoints: CheckpointStore[Any]) -> AnyPath | None:
    """Choose the checkpoint to resume from.

    Args:
        config: Config of the run. ``checkpoint.resume`` is ``auto``, ``never`` or the path of a
            checkpoint.
        checkpoints: Checkpoints in the run's output folder.

    Returns:
        The path of the checkpoint, or None to start at step 0. If ``checkpoint.resume`` is a path and
        the run has already written newer checkpoints, the newest one.

    Raises:
        UserError: If ``checkpoint.resume`` is ``never`` but the run already has checkpoints, or if it
            is a path that does not exist or the path of an older checkpoint of the same run.
    """
    with convert_storage_errors("output_dir"):
        latest: AnyPath | None = checkpoints.find_latest()
    resume = config.checkpoint.resume
    if resume == "auto":
        return latest
    if resume == "never":
        if latest is not None:
            raise UserError(
                f"checkpoint.resume: is never, but {checkpoints.path} has checkpoints; set "
                "checkpoint.resume: auto to resume, or choose another output_dir"
            )
        return None
    path = parse_place_setting("checkpoint.resume", resume)
    with convert_storage_errors("checkpoint.resume"):
        if latest is None and not path_exists(path):
            name = resume if len(resume) <= 200 else f"{resume[:197]}..."
            raise UserError(
                f"checkpoint.resume: {name} does not exist; use auto, never or the path of a checkpoint"
            )
    if latest is None or resolve_links(path) == resolve_links(latest):
        return path
    if is_within(resolve_links(path), resolve_links(checkpoints.path)):
        raise UserError(
            f"checkpoint.resume: {latest} is newer than {path} in the same run; "
            "choose another output_dir to resume from the older one"
        )
    # The run started from `path`, which may have been deleted, and has written newer checkpoints since then.
    return latest


def open_checkpoints(run_folder: AnyPath) -> CheckpointStore[Any]:
    """Return a read-only store of a run's checkpoints. To save, use :class:`CheckpointStore`.

    Args:
        run_folder: Output folder of the run, or its URL.
    """
    return CheckpointStore(run_folder / CHECKPOINTS_FOLDER)


def resolve_to_newest_checkpoint(path: AnyPath) -> AnyPath:
    """Return the newest checkpoint if ``path`` is a run's output folder, otherwise ``path`` itself."""
    newest: AnyPath | None = open_checkpoints(path).find_latest()
    return path if newest is None else newest
