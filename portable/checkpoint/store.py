"""Save, list and delete the checkpoints of a run.

A checkpoint is a folder ``<run>/checkpoints/step-000100/``: the shards in the strategy's native format, the
model's config and tokenizer, ``trainer_state.json`` and a manifest of all files (:mod:`converters.manifest`).
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from converters import manifest_entries, manifest_text
from converters.manifest import MANIFEST
from converters.storage.object_store import RemotePath
from converters.writers.replace_folder import exchange
from portable.checkpoint.background import in_background
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState, step_of
from portable.durable import sync_folder, sync_tree
from portable.errors import RunError, one_line
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from converters.manifest import Entries
    from portable.backend import Backend, SaveHandle

P = TypeVar("P", Path, RemotePath)
"""The type of the paths: local or in an object store."""

NO_CHECKPOINT = f"has no {STATE_FILE}, so it is not a checkpoint"
_PARTIAL_SUFFIX = ".partial"
_DAMAGED_SUFFIX = ".damaged"


@dataclass(frozen=True)
class _Pending(Generic[P]):
    """A save in progress: its final path and its completion."""

    final: P
    completion: Future[None]


class Checkpoints(ABC, Generic[P]):
    """The checkpoints of a run. Rank 0 completes them; saves never overlap.

    Args:
        path: the folder or URL of the checkpoints.
        keep: number of checkpoints to keep; None for all.
        rank: of this process.
    """

    def __init__(self, path: P, *, keep: int | None = None, rank: int = 0) -> None:
        self.path: P = path
        self._keep = keep
        self._rank = rank
        self._pending: _Pending[P] | None = None
        self._last: P | None = None  # the last complete checkpoint, as far as this rank knows
        self.on_complete: Callable[[P], None] = lambda folder: None
        """Called on rank 0 with each new checkpoint, where it was saved: mostly in a background thread."""
        self.in_use: Callable[[], set[int]] = set
        """The steps of checkpoints that must not be deleted yet."""

    # -- implemented for each kind of storage ------------------------------------------------------------

    @abstractmethod
    def _complete_ones(self) -> Iterator[P]:
        """The complete checkpoints, in any order."""

    @abstractmethod
    def _set_aside(self, folder: P) -> P:
        """See :meth:`set_aside`."""

    @abstractmethod
    def remove_partial(self) -> None:
        """Delete the files of interrupted saves. Called on rank 0, which holds the run's lock."""

    @abstractmethod
    def _open(self, final: P) -> Path:
        """Create an empty folder for this rank's files of ``final``, on all ranks after a barrier."""

    @abstractmethod
    def _complete(
        self,
        handle: SaveHandle,
        written: Path,
        final: P,
        add_files: Callable[[], None],
        manifest: Callable[[Entries], str],
    ) -> None:
        """Wait for the shards and complete the checkpoint. Runs on every rank in a background thread.

        Args:
            handle: of the shards.
            written: this rank's folder.
            final: the path of the checkpoint.
            add_files: adds the other files to ``written``; for rank 0.
            manifest: returns the text of the manifest of all ranks' files; for rank 0.
        """

    @abstractmethod
    def _remove(self, folder: P) -> None:
        """Delete a checkpoint. It must not count as complete once the first file is deleted."""

    # -- common to all storage ---------------------------------------------------------------------------

    def complete(self) -> list[tuple[int, P]]:
        """Return the complete checkpoints as (step, folder), oldest first."""
        steps = [(step_of(folder.name), folder) for folder in self._complete_ones()]
        return sorted(((step, folder) for step, folder in steps if step is not None), key=lambda one: one[0])

    def latest(self) -> P | None:
        """Return the newest complete checkpoint, or None."""
        self._last = next((folder for _, folder in reversed(self.complete())), None)
        return self._last

    def set_aside(self, folder: P) -> P:
        """Mark a damaged checkpoint so that it no longer counts, without deleting it; return its path."""
        aside = self._set_aside(folder)
        self.latest()
        return aside

    def begin(
        self,
        backend: Backend,
        state: TrainerState,
        save: Callable[[Path], SaveHandle],
        add_files: Callable[[Path], None],
    ) -> None:
        """Start writing a checkpoint. A collective call; the checkpoint is complete after :meth:`finish`.

        Args:
            backend: for barriers.
            state: the contents of ``trainer_state.json``.
            save: writes this rank's shards into a folder, possibly in the background.
            add_files: writes the other files; called on rank 0.
        """
        self.finish()
        final = self.path / f"step-{state.step:06d}"
        with self._failure(final):
            written = self._open(final)
        backend.barrier()
        with self._failure(final):
            handle = save(written)

        def add() -> None:
            add_files(written)
            state.write(written)

        def manifest(entries: Entries) -> str:
            return manifest_text(entries, step=state.step, run=state.run_digest)

        # Syncing, uploading and deleting an older checkpoint take time, so they run in the background too.
        def complete() -> None:
            self._complete(handle, written, final, add, manifest)
            if self._rank == 0:
                self.on_complete(final)
                self.prune({step for step, _ in state.standing.best})

        self._pending = _Pending(final, in_background(complete, name="checkpoint"))

    def finish_if_written(self) -> None:
        """Finish a save that has ended, and raise its error if it failed. Does not wait."""
        if self._pending is not None and self._pending.completion.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the save in progress, if any, is complete.

        Raises:
            RunError: if it failed. Earlier checkpoints are intact.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._failure(pending.final):
            pending.completion.result()
        self._last = pending.final

    @contextmanager
    def _failure(self, folder: P) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # torch's CheckpointException is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = one_line(_cause(error))
            reason = reason if len(reason) <= 300 else f"... {reason[-300:]}"
            raise RunError(
                f"{folder}: could not be written ({reason}); last good checkpoint: {self._last or 'none'}"
            ) from error

    def prune(self, best: set[int]) -> None:
        """Delete old checkpoints, except those of the steps ``best`` and those in use."""
        if self._keep is None:
            return
        for step, folder in self.complete()[: -self._keep]:
            if step not in best | self.in_use():
                self._remove(folder)


class CheckpointFolder(Checkpoints[Path]):
    """``<run>/checkpoints`` in a file system shared by all ranks.

    A checkpoint is written as ``.step-000100.partial`` and then renamed, so a folder named by a step is
    always complete, even if the run was killed.
    """

    def _complete_ones(self) -> Iterator[Path]:
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if (entry / STATE_FILE).is_file():
                yield entry

    def _set_aside(self, folder: Path) -> Path:
        """Rename it."""
        aside = unused_name(folder.with_name(f"{folder.name}{_DAMAGED_SUFFIX}"))
        folder.rename(aside)
        sync_folder(self.path)
        return aside

    def remove_partial(self) -> None:
        for entry in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            if entry.name.startswith(".") and entry.name.endswith(_PARTIAL_SUFFIX):
                shutil.rmtree(entry, ignore_errors=True)
            elif step_of(entry.name) is not None and not (entry / STATE_FILE).is_file():
                tell(f"warning: {entry}: {NO_CHECKPOINT}")

    def _open(self, final: Path) -> Path:
        partial = self.path / f".{final.name}{_PARTIAL_SUFFIX}"
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            sync_folder(self.path.parent)
        return partial

    def _complete(
        self,
        handle: SaveHandle,
        written: Path,
        final: Path,
        add_files: Callable[[], None],
        manifest: Callable[[Entries], str],
    ) -> None:
        """On rank 0, flush everything to disk, then rename it."""
        handle.wait()
        if self._rank == 0:
            add_files()
            (written / MANIFEST).write_text(manifest(manifest_entries(written)), "utf-8")
            sync_tree(written)
            self._put(written, final)
            sync_folder(self.path)

    def _put(self, written: Path, final: Path) -> None:
        """Rename a checkpoint, replacing one of the same step that was written before a resume."""
        if os.path.lexists(final) and not (final / STATE_FILE).is_file():
            aside = unused_name(final.with_name(f"{final.name}.kept"))
            final.rename(aside)
            tell(f"warning: {final}: had no {STATE_FILE}, so it was not a checkpoint; moved to {aside}")
        if os.path.lexists(final) and exchange(written, final):
            shutil.rmtree(written, ignore_errors=True)
            return
        self._remove(final)
        written.rename(final)

    def _remove(self, folder: Path) -> None:
        """Rename it first, so that a partly deleted checkpoint never counts as one."""
        doomed = folder.with_name(f".{folder.name}.old{_PARTIAL_SUFFIX}")
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def unused_name(path: P) -> P:
    """Return the first of ``path``, ``path-2``, ``path-3`` ... that does not exist."""
    found, number = path, 1
    while found.exists() if isinstance(found, RemotePath) else os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _cause(error: BaseException) -> BaseException:
    """The lowest rank's error, if torch has combined the errors of all ranks."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return error
    cause: BaseException = failures[min(failures)][0]
    return cause
