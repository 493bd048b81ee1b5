"""Save, list and delete the checkpoints of a run.

A checkpoint is a folder ``<run>/checkpoints/step-000100/``: the shards in the strategy's native format, the
model's config and tokenizer, ``trainer_state.json`` and a manifest of all files (:mod:`converters.manifest`).

It is written into a local folder. On a disk that all ranks share this is ``.step-000100.partial``, which is
then renamed; so a folder named by a step is always complete, even if the run was killed. For an object store
each rank has a folder of its own, and its mirror uploads it; a marker completes the checkpoint there.
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
from typing import TYPE_CHECKING, Any, Generic

from converters import manifest_entries, manifest_text
from converters.manifest import MANIFEST
from converters.storage.places import (
    PARTIAL,
    P,
    folders_in,
    is_left_over,
    is_taken,
    is_unfinished,
    move_folder,
    remove_folder,
    set_aside,
    unused_name,
)
from converters.storage.store_errors import RetriesUsedUpError
from converters.writers.replace_folder import exchange
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState, step_of
from portable.errors import RunError, UserError, one_line
from portable.paths import exists, place_of, storage_errors, sync_folder, sync_tree
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.manifest import Entries
    from converters.storage.path_or_url import Place
    from portable.backend import Backend, SaveHandle
    from portable.config import RunConfig
    from portable.output.mirror import Mirror

NO_CHECKPOINT = f"has no {STATE_FILE}, so it is not a checkpoint"
_AGAIN = 5.0  # seconds between two attempts at the last save of a run


class AwayError(RunError):
    """A save failed on a rank because the store is away, which may pass."""


@dataclass
class _Save(Generic[P]):
    """A save in progress.

    Attributes:
        final: the path of the checkpoint.
        written: this rank's folder of it.
        write: waits for the shards and adds the other files; returns the manifest entries of this rank's.
        manifest: the text of the manifest of all ranks' files.
        best: the steps that are kept.
        completion: its end or error.
    """

    final: P
    written: Path
    write: Callable[[], Entries]
    manifest: Callable[[Entries], str]
    best: set[int]
    completion: Future[None] = field(init=False)

    @cached_property
    def entries(self) -> Entries:
        return self.write()


class _Together:
    """What all ranks do, and fail at, alike.

    Args:
        outage: seconds for which it may fail because the store is away.
    """

    def __init__(self, outage: float) -> None:
        self._outage = outage
        self.away_since: float | None = None

    @cached_property
    def group(self) -> Any:
        from portable.ranks.collectives import background_group  # not at the top: imports torch

        return background_group()

    def __call__(self, act: Callable[[], Entries | None]) -> Entries:
        """``act()`` on every rank; the entries of all. Raises on all ranks if it failed on one of them.

        Raises:
            AwayError: the store is away on some rank, for less than the time of an outage so far.
        """
        failure: BaseException | None = None
        entries: Entries | None = None
        try:
            entries = act()
        except BaseException as error:
            failure = error
        passing = isinstance(failure, RetriesUsedUpError)
        if passing:
            self.away_since = self.away_since or time.monotonic()
            passing = time.monotonic() - self.away_since < self._outage
        ours = (None if failure is None else one_line(failure), passing, entries or {})
        everyone = [ours]
        if self.group is not None:
            import torch.distributed as dist

            everyone = [ours] * dist.get_world_size(self.group)
            dist.all_gather_object(everyone, ours, group=self.group)
        failures = [(rank, text, away) for rank, (text, away, _) in enumerate(everyone) if text is not None]
        if failures and all(away for _, _, away in failures):
            self.away_since = self.away_since or time.monotonic()
            raise AwayError(failures[0][1])
        if failure is not None and not passing:
            raise failure
        for rank, text, away in failures:
            if not away:
                raise RunError(f"rank {rank}: {text}")
        return {name: entry for _, _, found in everyone for name, entry in found.items()}


class Checkpoints(Generic[P]):
    """The checkpoints of a run. Rank 0 completes them; saves never overlap.

    Args:
        path: the folder or URL of the checkpoints.
        keep: number of checkpoints to keep; None for all.
        rank: of this process.
        mirror: what uploads them, for a URL that is written to.
        outage_seconds: for how long saves may fail because the store is away.
    """

    def __init__(
        self,
        path: P,
        *,
        keep: int | None = None,
        rank: int = 0,
        mirror: Mirror | None = None,
        outage_seconds: float = 0.0,
    ) -> None:
        self.path: P = path
        self._keep = keep
        self._rank = rank
        self._mirror = mirror
        self._together = _Together(outage_seconds)
        self._unwanted: list[P] = []
        """Folders that are to be deleted: old ones, and what failed saves left in the store."""
        self._pending: _Save[P] | None = None
        self._unsent: _Save[P] | None = None
        """A save that failed because the store is away, until the next one replaces it."""
        self._last: P | None = None  # the last complete checkpoint, as far as this rank knows
        self.on_complete: Callable[[P], None] = lambda folder: None
        """Called on rank 0 with each new checkpoint, where it was saved: mostly in a background thread."""
        self.in_use: Callable[[], set[int]] = set
        """The steps of checkpoints that must not be deleted yet."""

    def complete(self) -> list[tuple[int, P]]:
        """Return the complete checkpoints as (step, folder), oldest first."""
        steps = [(step_of(folder.name), folder) for folder in folders_in(self.path)]
        return sorted(
            (
                (step, folder)
                for step, folder in steps
                if step is not None and (folder / STATE_FILE).is_file() and not is_unfinished(folder)
            ),
            key=lambda one: one[0],
        )

    def latest(self) -> P | None:
        """Return the newest complete checkpoint, or None."""
        self._last = next((folder for _, folder in reversed(self.complete())), None)
        return self._last

    def newest_known(self) -> P | None:
        """``latest()``, or the last that was seen while the store is away."""
        with suppress(RetriesUsedUpError):
            return self.latest()
        return self._last

    def set_aside(self, folder: P) -> P:
        """Mark a damaged checkpoint so that it no longer counts, without deleting it; return its path."""
        aside = set_aside(folder)
        self.latest()
        return aside

    def remove_partial(self) -> None:
        """Delete the files of interrupted saves. Called on rank 0, which holds the run's lock."""
        for entry in folders_in(self.path):
            if is_left_over(entry):
                remove_folder(entry)
            elif (
                step_of(entry.name) is not None
                and not (entry / STATE_FILE).is_file()
                and not is_unfinished(entry)
            ):
                tell(f"warning: {entry}: {NO_CHECKPOINT}")

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
        if self._unsent is not None:
            shutil.rmtree(self._unsent.written, ignore_errors=True)
            self._unwanted.append(self._unsent.final)
            self._unsent = None
        with self._failure(final):
            written = self._open(final)
        backend.barrier()
        with self._failure(final):
            handle = save(written)

        def write() -> Entries:
            handle.wait()
            if self._rank == 0:
                add_files(written)
                state.write(written)
            return manifest_entries(written) if self._mirror is not None or self._rank == 0 else {}

        def manifest(entries: Entries) -> str:
            return manifest_text(entries, step=state.step, run=state.run_digest)

        best = {step for step, _ in state.eval_history.best}
        self._pending = _Save(final, written, write, manifest, best)
        self._start()

    def finish_if_written(self) -> None:
        """Finish a save that has ended, and raise its error if it failed. Does not wait."""
        if self._pending is not None and self._pending.completion.done():
            self.finish()

    def finish(self, *, last: bool = False) -> None:
        """Wait until the save in progress, if any, is complete.

        Where the store is away, training goes on without this checkpoint, and the next save tries again.

        Args:
            last: no other save will follow, so try again until it has succeeded.

        Raises:
            RunError: if it failed. Earlier checkpoints are intact.
        """
        if last and self._pending is None:
            self._pending, self._unsent = self._unsent, None
            self._start()
        while (pending := self._pending) is not None:
            self._pending = None
            try:
                with self._failure(pending.final):
                    pending.completion.result()
                self._last = pending.final
            except AwayError as error:
                if self._rank == 0:
                    then = "trying again" if last else "training goes on, and the next save tries again"
                    tell(f"warning: {error}; {then}")
                if last:
                    time.sleep(_AGAIN)
                    self._pending = pending
                    self._start()
                else:
                    self._unsent = pending

    def _start(self) -> None:
        # Syncing, uploading and deleting an older checkpoint take time, so they run in the background too.
        if self._pending is not None:
            complete = partial(self._complete, self._pending)
            self._pending.completion = in_background(complete, name="checkpoint")

    @contextmanager
    def _failure(self, folder: P) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # torch's CheckpointException is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = one_line(_cause(error))
            reason = reason if len(reason) <= 300 else f"... {reason[-300:]}"
            kind = AwayError if isinstance(error, AwayError) else RunError
            raise kind(
                f"{folder}: could not be written ({reason}); last good checkpoint: {self._last or 'none'}"
            ) from error

    def prune(self, best: set[int]) -> None:
        """Delete old checkpoints, except those of the steps ``best`` and those in use."""
        if self._keep is not None:
            kept = best | self.in_use()
            old = [folder for step, folder in self.complete()[: -self._keep] if step not in kept]
            self._unwanted += [folder for folder in old if folder not in self._unwanted]
        # A folder stays in the list until it is gone, since half of one is no longer complete.
        while self._unwanted:
            remove_folder(self._unwanted[-1])
            self._unwanted.pop()

    # -- in the background -----------------------------------------------------------------------------------

    def _open(self, final: P) -> Path:
        """Create an empty folder for this rank's files of ``final``, on all ranks before a barrier."""
        if self._mirror is not None:
            self._together.group  # noqa: B018  (creating it is a collective, so not in a thread)
            written = self._mirror.shards / final.name
        else:
            written = Path(str(self.path)) / f".{final.name}{PARTIAL}"
        if self._mirror is not None or self._rank == 0:
            shutil.rmtree(written, ignore_errors=True)
            written.mkdir(parents=True)
        if self._mirror is None and self._rank == 0:
            sync_folder(written.parent.parent)
        return written

    def _complete(self, save: _Save[P]) -> None:
        """Complete a checkpoint, on every rank."""
        if self._mirror is not None:
            self._upload(save, self._mirror)
        else:
            entries = save.entries
            if self._rank == 0:
                _rename(save, entries)
        if self._rank == 0:
            self.on_complete(save.final)
            self._clear(save)

    def _upload(self, save: _Save[P], mirror: Mirror) -> None:
        """Upload all ranks' files; then rank 0 writes the marker. A failure is one on all ranks."""
        final = mirror.store / "checkpoints" / save.final.name

        def begin() -> Entries:
            ours = save.entries
            if self._rank == 0:
                _make_way(save.final)
                remove_folder(final)
                mirror.begin(final)
            return ours

        def send() -> None:
            mirror.send(save.written, final)

        def complete() -> None:
            if self._rank == 0:
                (final / MANIFEST).write_bytes(save.manifest(entries).encode())
                mirror.complete(final, step_of(final.name))

        entries: Entries = self._together(begin)
        self._together(send)
        self._together(complete)
        self._together.away_since = None
        shutil.rmtree(save.written, ignore_errors=True)

    def _clear(self, save: _Save[P]) -> None:
        """Delete older checkpoints, and what failed saves left; later where the store is away."""
        try:
            self._unwanted = [folder for folder in self._unwanted if folder != save.final]
            self.prune(save.best)
        except RetriesUsedUpError as error:  # this checkpoint is complete
            tell(f"warning: older checkpoints are not deleted yet: {one_line(error)}")


def _rename(save: _Save[P], entries: Entries) -> None:
    """Flush everything to disk, then rename it, replacing a checkpoint from before a resume."""
    final = Path(str(save.final))
    (save.written / MANIFEST).write_text(save.manifest(entries), "utf-8")
    sync_tree(save.written)
    _make_way(save.final)
    if os.path.lexists(final) and exchange(save.written, final):
        shutil.rmtree(save.written, ignore_errors=True)
    else:
        remove_folder(final)
        save.written.rename(final)
    sync_folder(final.parent)


def _make_way(final: P) -> None:
    """Move away what has the name of a checkpoint and is none."""
    if is_taken(final) and not (final / STATE_FILE).is_file() and not is_unfinished(final):
        aside = move_folder(final, unused_name(final.with_name(f"{final.name}.kept")))
        tell(f"warning: {final}: had no {STATE_FILE}, so it was not a checkpoint; moved to {aside}")


def _cause(error: BaseException) -> BaseException:
    """The lowest rank's error, if torch has combined the errors of all ranks."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return error
    cause: BaseException = failures[min(failures)][0]
    return cause


def in_background(function: Callable[[], None], *, name: str) -> Future[None]:
    """Call ``function`` in a daemon thread called ``name``; return a future for its end or exception."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name=name, daemon=True).start()
    return future


def resume_source(config: RunConfig, checkpoints: Checkpoints[Any]) -> Place | None:
    """Return the checkpoint to resume from, or None to start at step 0.

    Raises:
        UserError: if ``checkpoint.resume`` is ``never`` and there are checkpoints, or if its path cannot be
            resumed.
    """
    with storage_errors("output_dir"):
        latest: Place | None = checkpoints.latest()
    resume = config.checkpoint.resume
    if resume == "auto":
        return latest
    if resume == "never":
        if latest is not None:
            raise UserError(
                f"checkpoint.resume: never, but {checkpoints.path} has checkpoints; "
                "set it to auto to resume, or choose another output_dir"
            )
        return None
    path = place_of("checkpoint.resume", resume)
    with storage_errors("checkpoint.resume"):
        if latest is None and not exists(path):
            name = resume if len(resume) <= 200 else f"{resume[:197]}..."
            raise UserError(
                f"checkpoint.resume: {name} does not exist; give auto, never or a checkpoint's path"
            )
    if latest is None or path.resolve() == latest.resolve():
        return path
    if path.resolve().is_relative_to(checkpoints.path.resolve()):
        raise UserError(
            f"checkpoint.resume: {latest} is newer than {path} in the same run; "
            "choose another output_dir to resume from the older one"
        )
    return latest  # the run started from `path`, which may be gone, and has newer checkpoints since


def checkpoints_of(run: Place) -> Checkpoints[Any]:
    """The checkpoints of a run, read-only."""
    return Checkpoints(run / "checkpoints")


def checkpoint_of(path: Place) -> Place:
    """Return the newest checkpoint if ``path`` is a run's folder, else ``path`` itself."""
    newest: Place | None = checkpoints_of(path).latest()
    return path if newest is None else newest
