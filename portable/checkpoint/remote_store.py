"""Checkpoints in an object store: ranks send their own shards, and a marker written last completes them."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from converters import manifest_entries
from converters.manifest import MANIFEST
from converters.storage.completion import begin, complete, is_complete, is_unfinished
from converters.storage.object_store import RemotePath
from portable.checkpoint.store import NO_CHECKPOINT, Checkpoints, unused_name
from portable.checkpoint.trainer_state import STATE_FILE, step_of
from portable.errors import RunError, one_line
from portable.ranks.collectives import background_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from converters.manifest import Entries
    from portable.backend import SaveHandle

DAMAGED_FILE = "_DAMAGED"
UPLOADS = 8
"""Files that a rank sends at a time."""
PARTS = 4
"""Parts of a large file at a time."""


class RemoteCheckpoints(Checkpoints[RemotePath]):
    """``<url>/checkpoints``.

    Ranks write into folders of this machine, one each, and send from there behind the training. Nothing is
    renamed in a store: a checkpoint is complete by a marker, see :mod:`converters.storage.completion`.

    Args:
        staging: this rank's folder for shards on their way; None where nothing is to be written.
        before_complete: called on every rank, in the thread that sends, when the rank's shards are there.
        check_held: raises where this run may not write any more.
    """

    def __init__(
        self,
        place: RemotePath,
        *,
        keep: int | None = None,
        rank: int = 0,
        staging: Path | None = None,
        before_complete: Callable[[], None] | None = None,
        check_held: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(place, keep=keep, rank=rank)
        self._staging = staging
        self._before_complete = before_complete
        self._check_held = check_held
        self._token = ""

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        return background_group()

    def _complete_ones(self) -> Iterator[RemotePath]:
        for entry in self._entries():
            # One without markers was copied here from a disk, where it was complete by its name.
            if is_complete(entry) or ((entry / STATE_FILE).is_file() and not is_unfinished(entry)):
                yield entry

    def _entries(self) -> list[RemotePath]:
        self.path.refresh()
        try:
            entries = [entry for entry in self.path.iterdir() if step_of(entry.name) is not None]
        except FileNotFoundError:
            return []
        return [entry for entry in entries if entry.is_dir()]

    def _set_aside(self, folder: RemotePath) -> RemotePath:
        """Mark it; it stays where it is until the run comes to that step again."""
        aside = folder / DAMAGED_FILE
        aside.write_bytes(b"")
        begin(folder)
        return aside

    def remove_partial(self) -> None:
        complete_ones = set(self._complete_ones())
        for entry in self._entries():
            if is_unfinished(entry) and not (entry / DAMAGED_FILE).is_file():
                entry.remove_tree()
            elif entry not in complete_ones and not is_unfinished(entry):
                print(f"warning: {entry}: {NO_CHECKPOINT}", file=sys.stderr)

    def _open(self, final: RemotePath) -> Path:
        assert self._staging is not None
        self._group  # noqa: B018  (made by all ranks at once, before any thread needs it)
        if self._rank == 0:
            self._make_way(final)
            self._token = begin(final)
        written = self._staging / final.name
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        return written

    def _complete(
        self,
        handle: SaveHandle,
        written: Path,
        final: RemotePath,
        add_files: Callable[[], None],
        manifest: Callable[[Entries], str],
    ) -> None:
        """Send this rank's files; when all ranks have sent theirs, the first one marks the checkpoint."""
        failure: BaseException | None = None
        entries: Entries = {}
        try:
            handle.wait()
            if self._rank == 0:
                add_files()
            entries = manifest_entries(written)
            send_files({path: final / name for name, path in files_in(written).items()})
            shutil.rmtree(written, ignore_errors=True)
            if self._before_complete is not None:
                self._before_complete()
        except BaseException as error:
            failure = error
        entries = self._agree(failure, entries)
        if self._rank == 0:
            (final / MANIFEST).write_bytes(manifest(entries).encode())
            if self._check_held is not None:
                self._check_held()
            complete(final, self._token, step=step_of(final.name))

    def _agree(self, failure: BaseException | None, entries: Entries) -> Entries:
        """The files of all ranks; raises on all ranks if one of them has failed."""
        if self._group is not None:
            told: list[Any] = [None] * dist.get_world_size(self._group)
            ours = one_line(failure) if failure is not None else entries
            dist.all_gather_object(told, ours, group=self._group)
            for rank, given in enumerate(told):
                if isinstance(given, str) and failure is None:
                    raise RunError(f"rank {rank}: {given}")
                entries = entries | given if isinstance(given, dict) else entries
        if failure is not None:
            raise failure
        return entries

    def _make_way(self, final: RemotePath) -> None:
        """The same step again, after a resume from an earlier one, goes; what is no checkpoint is kept."""
        final.refresh()
        marked = is_complete(final) or is_unfinished(final)
        if not marked and final.exists() and not (final / STATE_FILE).is_file():
            aside = unused_name(final.with_name(f"{final.name}.kept"))
            for name in final.files():
                (final / name).move_to(aside / name)
            print(
                f"warning: {final}: held no {STATE_FILE}, so it was no checkpoint; kept as {aside}",
                file=sys.stderr,
            )
        self._remove(final)

    def _remove(self, folder: RemotePath) -> None:
        if folder.exists():
            begin(folder)  # also of one without markers: half of it is nobody's, and would stay
        folder.remove_tree()


def files_in(folder: Path) -> dict[str, Path]:
    """The files below ``folder``, by their names relative to it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def send_files(files: dict[Path, RemotePath]) -> None:
    """Send files, a few at a time; the first failure is raised once those under way have ended."""
    if not files:
        return
    with ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as pool:
        for sent in [pool.submit(_send_file, path, target) for path, target in files.items()]:
            sent.result()


def _send_file(path: Path, target: RemotePath) -> None:
    """Send a file, the parts of a large one a few at a time, where the store takes them in any order."""
    size = path.stat().st_size
    upload = target.upload(size)
    length = upload.part_bytes
    if upload.ordered or size <= length:
        target.upload_file(path)
        return

    def send(number: int) -> None:
        with path.open("rb") as file:
            file.seek(number * length)
            upload.part(number + 1, file.read(length))

    try:
        with ThreadPoolExecutor(PARTS, thread_name_prefix="part") as pool:
            list(pool.map(send, range(-(-size // length))))
        upload.commit()
    except BaseException:
        upload.discard()
        raise
