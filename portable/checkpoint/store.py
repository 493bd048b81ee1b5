"""Checkpoints: when they are complete, which one is the last, how many are kept.

A checkpoint is ``<run>/checkpoints/step-000100/``: the shards in the strategy's native format, the model's
config and tokenizer, ``trainer_state.json``, and a manifest of them all (:mod:`converters.manifest`).
"""

from __future__ import annotations

import os
import shutil
import sys
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from converters.manifest import Entries
    from portable.backend import Backend, SaveHandle

P = TypeVar("P", Path, RemotePath)
"""The kind of place where checkpoints are kept."""

NO_CHECKPOINT = f"holds no {STATE_FILE}, so it counts as no checkpoint"
_PARTIAL_SUFFIX = ".partial"
_DAMAGED_SUFFIX = ".damaged"


@dataclass(frozen=True)
class _Pending(Generic[P]):
    """A save under way: the folder it is to become, and its end."""

    final: P
    completion: Future[None]


class Checkpoints(ABC, Generic[P]):
    """The checkpoints of a run, wherever they are kept. Rank 0 makes them complete; saves never overlap.

    Args:
        path: the folder or URL that holds them.
        keep: how many of the newest stay; None: all.
        rank: of this process.
    """

    def __init__(self, path: P, *, keep: int | None = None, rank: int = 0) -> None:
        self.path: P = path
        self._keep = keep
        self._rank = rank
        self._pending: _Pending[P] | None = None
        self._last: P | None = None  # as far as this rank knows

    # -- what depends on where they are kept -------------------------------------------------------------

    @abstractmethod
    def _complete_ones(self) -> Iterator[P]:
        """The complete checkpoints, in any order."""

    @abstractmethod
    def _set_aside(self, folder: P) -> P:
        """As :meth:`set_aside`."""

    @abstractmethod
    def remove_partial(self) -> None:
        """Delete what interrupted saves left behind. Called on rank 0, which holds the run's lock."""

    @abstractmethod
    def _open(self, final: P) -> Path:
        """An empty folder for this rank's files of ``final``; there on all ranks after a barrier."""

    @abstractmethod
    def _complete(
        self,
        handle: SaveHandle,
        written: Path,
        final: P,
        add_files: Callable[[], None],
        manifest: Callable[[Entries], str],
    ) -> None:
        """Wait for the shards and make the checkpoint complete; every rank, in a thread of its own.

        Args:
            handle: of the shards.
            written: this rank's folder.
            final: where they are to be.
            add_files: puts the small files that go along into ``written``; for rank 0.
            manifest: the text of the manifest of the files of all ranks; for rank 0.
        """

    @abstractmethod
    def _remove(self, folder: P) -> None:
        """Delete a checkpoint; it must count as none from the first file on that is gone."""

    # -- the same everywhere -----------------------------------------------------------------------------

    def complete(self) -> list[tuple[int, P]]:
        """The complete checkpoints as (step, folder), oldest first."""
        steps = [(step_of(folder.name), folder) for folder in self._complete_ones()]
        return sorted(((step, folder) for step, folder in steps if step is not None), key=lambda one: one[0])

    def latest(self) -> P | None:
        """The newest complete checkpoint."""
        self._last = next((folder for _, folder in reversed(self.complete())), None)
        return self._last

    def set_aside(self, folder: P) -> P:
        """Have a damaged checkpoint count as none any more, and keep it; returns where it is now."""
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
        """Start to write a checkpoint; all ranks call it together. It is complete after :meth:`finish`.

        Args:
            backend: for the waiting of ranks on each other.
            state: what to write as ``trainer_state.json``.
            save: writes this rank's shards into a folder, perhaps in the background.
            add_files: writes the small files that go along; called on rank 0.
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

        # What comes after the shards takes its time, too: syncing or sending, removing an older checkpoint.
        def complete() -> None:
            self._complete(handle, written, final, add, manifest)
            if self._rank == 0:
                self._prune()

        self._pending = _Pending(final, in_background(complete, name="checkpoint"))

    def finish_if_written(self) -> None:
        """Raise what went wrong with the checkpoint under way, if it is over by now; does not wait."""
        if self._pending is not None and self._pending.completion.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint under way, if there is one, is complete.

        Raises:
            RunError: if it could not be written. The checkpoints before are as they were.
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
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = one_line(_cause(error))
            reason = reason if len(reason) <= 300 else f"... {reason[-300:]}"
            raise RunError(
                f"{folder}: could not be written ({reason}); last good checkpoint: {self._last or 'none'}"
            ) from error

    def _prune(self) -> None:
        if self._keep is None:
            return
        for _, folder in self.complete()[: -self._keep]:
            self._remove(folder)


class CheckpointFolder(Checkpoints[Path]):
    """``<run>/checkpoints`` in a file system that all ranks see.

    A checkpoint is written as ``.step-000100.partial`` and appears by rename, so that a folder with a step's
    name is complete, whenever the run was killed.
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
                print(f"warning: {entry}: {NO_CHECKPOINT}", file=sys.stderr)

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
        """On rank 0, have everything on disk, then give it its name."""
        handle.wait()
        if self._rank == 0:
            add_files()
            (written / MANIFEST).write_text(manifest(manifest_entries(written)), "utf-8")
            sync_tree(written)
            self._put(written, final)
            sync_folder(self.path)

    def _put(self, written: Path, final: Path) -> None:
        """Give a checkpoint its name. One of the same step, from before a resume, is there until then."""
        if os.path.lexists(final) and not (final / STATE_FILE).is_file():
            aside = unused_name(final.with_name(f"{final.name}.kept"))
            final.rename(aside)
            print(
                f"warning: {final}: held no {STATE_FILE}, so it was no checkpoint; kept as {aside}",
                file=sys.stderr,
            )
        if os.path.lexists(final) and exchange(written, final):
            shutil.rmtree(written, ignore_errors=True)
            return
        self._remove(final)
        written.rename(final)

    def _remove(self, folder: Path) -> None:
        """Take its name first: half a checkpoint must not pass for one."""
        doomed = folder.with_name(f".{folder.name}.old{_PARTIAL_SUFFIX}")
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def unused_name(path: P) -> P:
    """``path``, or the first of ``path-2``, ``path-3`` ... that there is not."""
    found, number = path, 1
    while found.exists() if isinstance(found, RemotePath) else os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _cause(error: BaseException) -> BaseException:
    """The first rank's own error, where torch has put those of all ranks together."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return error
    cause: BaseException = failures[min(failures)][0]
    return cause
