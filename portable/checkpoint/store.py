"""Checkpoints: when they are complete, which one is the last, how many are kept.

A checkpoint is ``<run>/checkpoints/step-000100/``: the shards in the strategy's native format, the model's
config and tokenizer, ``trainer_state.json``, and a manifest of them all (:mod:`converters.manifest`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from converters import CheckpointError, check_manifest, manifest_entries, manifest_text
from converters.manifest import MANIFEST
from converters.storage.guarded import open_new
from converters.storage.object_store import RemotePath
from converters.writers.replace_folder import exchange
from portable.checkpoint.background import in_background
from portable.errors import DamagedError, RunError, UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from converters.manifest import Entries
    from portable.backend import Backend, SaveHandle
    from portable.paths import Place

P = TypeVar("P", Path, RemotePath)
"""The kind of place where checkpoints are kept."""

FORMAT_VERSION = 2
"""1: without a manifest."""
_WITH_MANIFEST = 2
STATE_FILE = "trainer_state.json"
NO_CHECKPOINT = f"holds no {STATE_FILE}, so it counts as no checkpoint"
_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_PARTIAL_SUFFIX = ".partial"
_DAMAGED_SUFFIX = ".damaged"
_KINDS: dict[str, type] = {
    "step": int,
    "samples": int,
    "seed": int,
    "schedule": dict,
    "run": dict,
    "data": str,
    "backend": str,
    "strategy": str,
    "world_size": int,
    "metadata": dict,
    "format_version": int,
}


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, in plain JSON beside the shards.

    Attributes:
        step: optimizer steps done.
        samples: sequences consumed, which is the position in the data.
        seed: of the run.
        schedule: the learning-rate schedule's settings.
        run: the settings that make two runs the same run.
        data: digest of every token of the data set, by which another machine's text is told apart.
        backend, strategy, world_size: what wrote the checkpoint; the next leg may choose others.
        metadata: what a person may want to know besides.
    """

    step: int
    samples: int
    seed: int
    schedule: dict[str, Any]
    run: dict[str, Any]
    data: str
    backend: str
    strategy: str
    world_size: int
    metadata: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, folder: Place) -> TrainerState:
        """Read ``folder/trainer_state.json``.

        Raises:
            DamagedError: if it does not say what it must.
            UserError: if it is missing, or of a newer format.
        """
        path = folder / STATE_FILE
        try:
            values = json.loads(path.read_text("utf-8"))
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise UserError(
                    f"{path}: format version {version} is newer than this program ({FORMAT_VERSION})"
                )
            state = cls(**values)._checked()
            if (named := step_of(folder.name)) is not None and named != state.step:
                raise ValueError(f"step is {state.step}")
            return state
        except FileNotFoundError as error:
            raise UserError(f"{path}: missing; is {folder} a checkpoint of this program?") from error
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            reason = one_line(error)
            reason = f"{type(error).__name__}: {reason if len(reason) <= 200 else reason[:197] + '...'}"
            raise DamagedError(f"{path}: damaged ({reason}); use an older checkpoint") from error

    def _checked(self) -> TrainerState:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"{name} is of type {type(value).__name__}")
        for name, least in (("step", 0), ("samples", 0), ("world_size", 1), ("format_version", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}")
        return self

    def check_files(self, folder: Place) -> str | None:
        """Hold every file of the checkpoint in ``folder``, whose state this is, against its manifest.

        Returns:
            a warning, where an older version of this program wrote the checkpoint, without a manifest.

        Raises:
            DamagedError: if one is missing, or not as it was written.
        """
        try:
            manifest = check_manifest(folder)
        except CheckpointError as error:
            raise DamagedError(f"{one_line(error)}; use an older checkpoint") from error
        if manifest is None:
            if self.format_version >= _WITH_MANIFEST:
                raise DamagedError(f"{folder / MANIFEST}: missing; use an older checkpoint")
            return (
                f"{folder}: an older version of this program wrote it, without a manifest of its files; only "
                "its shards are checked"
            )
        if manifest.get("step") != self.step or manifest.get("run") != self.run_digest:
            raise DamagedError(f"{folder / MANIFEST}: of another checkpoint; use an older checkpoint")
        return None

    @property
    def run_digest(self) -> str:
        """A digest of ``run``."""
        return hashlib.blake2b(json.dumps(self.run, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def skipped_steps(self) -> int:
        """Of ``step``, those whose update was left out because it was not finite."""
        counted = self.metadata.get("skipped_steps", 0)
        return counted if isinstance(counted, int) else 0

    def write(self, folder: Path) -> None:
        write_durably(folder / STATE_FILE, json.dumps(asdict(self), indent=2) + "\n")


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


def step_of(name: str) -> int | None:
    """The step that the name of a checkpoint tells; None where it is no such name."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def _cause(error: BaseException) -> BaseException:
    """The first rank's own error, where torch has put those of all ranks together."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return error
    cause: BaseException = failures[min(failures)][0]
    return cause


def write_durably(path: Path, text: str) -> None:
    """Replace ``path`` as a whole, and have its bytes on disk when this returns."""
    partial = path.with_name(f".{path.name}{_PARTIAL_SUFFIX}")
    if os.path.lexists(partial):  # a killed process left it; or it is a link, and leads anywhere
        partial.unlink()
    with os.fdopen(open_new(partial), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Have all files below a folder on disk, and their names. What is there already costs next to nothing."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(path, name))
        sync_folder(Path(path))


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk, where the system can (not on Windows)."""
    if os.name != "nt":
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
