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
NO_CHECKPOINT = f"has no {STATE_FILE}, so the folder is not a checkpoint"
"""Reason why a folder is not a checkpoint, used in error messages."""
_RETRY_SECONDS = 5.0
"""Seconds between attempts to write the last checkpoint of a run, if the object store is unavailable."""


class StoreUnavailableError(RunError):
    """Raised if a save fails because the object store is unavailable. A later save may succeed."""


class CompleteCheckpoint(NamedTuple, Generic[P]):
    """Complete checkpoint of a run.

    Attributes:
        step: Step at which the checkpoint was saved.
        folder: Folder or URL of the checkpoint.
    """

    step: int
    folder: P


@dataclass
class _PendingSave(Generic[P]):
    """Save in progress.

    Attributes:
        final: Path or URL of the complete checkpoint.
        local_folder: Local folder that this rank writes to until the checkpoint is complete.
        write_files: Function that waits for the shards, writes the other files on rank 0, and
            returns manifest entries. With an object store, these are the entries of this rank's
            files. On a shared disk, rank 0 returns the entries of all files, and other ranks
            return none.
        build_manifest: Function that formats the manifest from the entries of all ranks.
        best_steps: Steps of the best checkpoints, which must not be deleted.
        completion: Future that is done once the background thread of this rank has ended. The
            checkpoint is then complete, except on ranks other than 0 on a shared disk, where
            only this rank's shards are complete. If the save fails, the future contains the
            exception.
    """

    final: P
    local_folder: Path
    write_files: Callable[[], ManifestEntries]
    build_manifest: Callable[[ManifestEntries], str]
    best_steps: set[int]
    completion: Future[None] = field(init=False)

    @cached_property
    def entries(self) -> ManifestEntries:
        """Entries of this rank's files in the checkpoint's manifest.

        The first access calls :attr:`write_files`. It therefore waits until the shards are written,
        and writes the other files on rank 0.
        """
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
        """Process group for collectives in background threads.

        None if torch.distributed is not initialized, as in a single process. The first access may
        create the group, so all ranks must access it at the same point.
        """
        from portable.ranks.collectives import (
            get_or_create_background_group,  # imported here because it imports torch
        )

        return get_or_create_background_group()

    def __call__(self, function: Callable[[], ManifestEntries | None]) -> ManifestEntries:
        """Call a function on this rank, and return the manifest entries from the calls on all ranks.

        Must be called on all ranks. If the function fails on any rank, all ranks raise an error. A
        failure is temporary if the object store is unavailable and the outage has not exceeded
        ``max_outage_seconds``. If the failure on this rank is permanent, the function's own
        exception is raised.

        Args:
            function: Function to call. It returns None if this rank has no entries.

        Returns:
            The manifest entries of all ranks.

        Raises:
            StoreUnavailableError: If the failures on all failed ranks are temporary.
            RunError: If the function failed permanently only on other ranks. The message states the
                rank and the cause.
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

        A checkpoint is complete if its folder has a name such as ``step-000100``, contains
        ``trainer_state.json``, and is not marked as incomplete. Other files are not checked.

        Returns:
            The steps and folders, oldest first. Empty if the folder does not exist.

        Raises:
            RemoteError: If a request to the object store fails. It is a RetriesExhaustedError if
                the store is unavailable.
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
        """Return the newest complete checkpoint, or None if there is none.

        The newest checkpoint is the checkpoint with the highest step. The result is stored
        for :meth:`find_newest_known` and for error messages.

        Raises:
            RemoteError: See :meth:`list_complete`.
        """
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
        """Prevent runs from resuming from a damaged checkpoint. Keeps the files.

        Must be called only on rank 0.

        On a disk, the folder is renamed. In an object store, markers are written to the folder,
        which then counts as incomplete.

        Returns:
            The new path of the folder on a disk, or the path of the marker ``_DAMAGED`` in an
            object store.
        """
        damaged_folder = quarantine_folder(folder)
        self.find_latest()
        return damaged_folder

    def remove_interrupted_saves(self) -> None:
        """Delete the remains of interrupted saves and deletions, and warn about other folders.

        The warning is about folders that have the name of a checkpoint but no
        ``trainer_state.json``. These folders are kept. Must be called only on rank 0, which holds
        the run's lock.
        """
        for entry in list_subfolders(self.path):
            if is_abandoned_folder(entry):
                remove_folder(entry)
            elif (
                parse_checkpoint_step(entry.name) is not None
                and not (entry / STATE_FILE).is_file()
                and not is_incomplete_folder(entry)
            ):
                print_status(f"warning: {entry}: {NO_CHECKPOINT}; restore the file, or delete the folder")

    def begin_save(
        self,
        backend: Backend,
        state: TrainerState,
        save_shards: Callable[[Path], SaveHandle],
        write_other_files: Callable[[Path], None],
    ) -> None:
        """Start saving a checkpoint once the previous save has ended. Must be called on all ranks.

        Call :meth:`finish_save` to wait for the result. If the previous save failed because the
        object store was unavailable, that save is discarded.

        Args:
            backend: Backend of this rank. Its barrier is called after the folder is created.
            state: Contents of ``trainer_state.json``.
            save_shards: Function that writes this rank's shards to a folder, possibly in the
                background.
            write_other_files: Function that writes the other files to a folder. Called only on rank
                0, in the background thread.

        Raises:
            RunError: If the previous save failed permanently, or if this save fails before its
                background thread starts. :meth:`finish_save` raises later errors.
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
        """Wait until the save in progress has ended. Does nothing if there is no save.

        On a shared disk, ranks other than 0 wait only for their shards. Call a barrier afterwards
        if these ranks need the complete checkpoint. If the object store is unavailable, rank 0
        prints a warning, and this method returns without a complete checkpoint, so that training
        continues.

        Args:
            is_last_save: Whether this is the last save of the run. If so, the save is retried while
                the object store is unavailable, until the time limit for outages. If no save is in
                progress, an earlier save that failed for this reason is retried.

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
        """Replace errors during a save with errors that explain the failure.

        The new message names the checkpoint, the cause, and the last good checkpoint. A
        StoreUnavailableError keeps its type. Any other exception, except KeyboardInterrupt and
        SystemExit, is converted to a RunError.

        Args:
            folder: Checkpoint that is being written.
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
            newest = self._newest_known or "none yet"
            if isinstance(error, StoreUnavailableError):
                raise StoreUnavailableError(
                    f"{folder}: could not be written ({reason}); last good checkpoint: {newest}; check the "
                    "connection to the object store"
                ) from error
            raise RunError(
                f"{folder}: could not be written ({reason}); last good checkpoint: {newest}; correct the "
                "cause, and run the command again to resume"
            ) from error

    def delete_old_checkpoints(self, best_steps: set[int]) -> None:
        """Delete old checkpoints, folders that could not be deleted earlier, and leftovers.

        The newest ``keep`` checkpoints, the best checkpoints, and checkpoints in use are kept.
        Leftovers are the files of failed uploads.

        Args:
            best_steps: Steps of the best checkpoints.

        Raises:
            RemoteError: If a request to the object store fails. It is a RetriesExhaustedError if
                the store is unavailable. A later call tries the remaining deletions again.
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
        """Create an empty local folder for the files that this rank writes.

        With a publisher, which uploads the files to an object store, each rank creates its own
        folder. Without one, all ranks use a single folder that only rank 0 creates. Call this
        method on all ranks and then synchronize them with a barrier, so that no rank writes before
        the folder exists.

        Args:
            final: Path or URL of the complete checkpoint. The local folder is named after it.
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
        """Upload the files of this rank, and complete the checkpoint.

        An existing checkpoint of the same step is deleted first. After all ranks have uploaded
        their files, rank 0 writes the manifest and the marker, which is the object that marks the
        checkpoint as complete. This method must be called on all ranks. If it fails on one rank,
        all ranks raise an error.

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

        If the object store is unavailable, this method only prints a warning. The deletion is tried
        again after a later save.
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

    Does nothing if the path does not exist, is a checkpoint, or is marked as an incomplete
    upload or deletion.
    """
    if is_taken(final) and not (final / STATE_FILE).is_file() and not is_incomplete_folder(final):
        new_path = move_folder(final, find_unused_path(final.parent / f"{final.name}.kept"))
        print_status(
            f"warning: {final}: is moved to {new_path}, because the folder has no {STATE_FILE} and so is "
            "not a checkpoint"
        )


def _find_root_cause(error: BaseException) -> BaseException:
    """Return the exception of the first failed rank if torch combined exceptions from several ranks.

    The first failed rank is the failed rank with the lowest number. Other exceptions are returned
    unchanged.
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
        The path of the checkpoint, or None to start at step 0. If the run already has checkpoints,
        the newest of them is chosen. This also applies if ``checkpoint.resume`` is a path outside
        the folder of these checkpoints, because the run started from that path and has made
        progress since then.

    Raises:
        UserError: If ``checkpoint.resume`` is ``never`` but the run already has checkpoints. Also
            if it is a path that does not exist and the run has no checkpoints, or if it is a path
            in the folder of the run's checkpoints other than the newest checkpoint.
    """
    with convert_storage_errors("output_dir"):
        latest: AnyPath | None = checkpoints.find_latest()
    resume = config.checkpoint.resume
    if resume == "auto":
        return latest
    if resume == "never":
        if latest is not None:
            raise UserError(
                f"checkpoint.resume: is set to 'never', but {checkpoints.path} contains checkpoints; set "
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
            f"checkpoint.resume: {latest} is newer than {path} in the same run; choose another output_dir to "
            "resume from the older checkpoint"
        )
    # The run started from `path`, which may have been deleted, and has written newer checkpoints since then.
    return latest


def open_checkpoints(run_folder: AnyPath) -> CheckpointStore[Any]:
    """Return a store that finds and reads the checkpoints of a run.

    To save checkpoints, construct a :class:`CheckpointStore` directly.

    Args:
        run_folder: Output folder of the run, or its URL.
    """
    return CheckpointStore(run_folder / CHECKPOINTS_FOLDER)


def resolve_to_newest_checkpoint(path: AnyPath) -> AnyPath:
    """Return the newest complete checkpoint in a run's output folder.

    Returns ``path`` itself if it contains no complete checkpoint of this project, for example
    because it is the folder of a checkpoint.

    Raises:
        RemoteError: If a request to the object store fails.
    """
    newest: AnyPath | None = open_checkpoints(path).find_latest()
    return path if newest is None else newest
