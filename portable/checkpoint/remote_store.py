"""Checkpoints in an object store. Each rank uploads its shards; a marker, written last, completes them."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from converters import manifest_entries
from converters.manifest import MANIFEST
from converters.storage.completion_markers import begin, complete, is_complete, is_unfinished, remove_tree
from converters.storage.object_store import RemotePath
from portable.checkpoint.store import NO_CHECKPOINT, Checkpoints, unused_name
from portable.checkpoint.trainer_state import STATE_FILE, step_of
from portable.errors import RunError, one_line
from portable.ranks.collectives import background_group
from portable.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from converters.manifest import Entries
    from portable.backend import SaveHandle

DAMAGED_FILE = "_DAMAGED"
UPLOADS = 8
"""Concurrent uploads per rank."""
PARTS = 4
"""Concurrent parts of a large file."""


class RemoteCheckpoints(Checkpoints[RemotePath]):
    """``<url>/checkpoints``.

    Each rank writes into a local folder and uploads from there in the background. Object stores cannot
    rename, so a marker completes a checkpoint; see :mod:`converters.storage.completion_markers`.

    Args:
        staging: this rank's local folder for shards; None for read-only access.
        before_complete: called on every rank, in the upload thread, after the rank's shards are uploaded.
        check_held: raises if this run may no longer write.
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
            # One without markers was copied from a disk, where its name implies that it is complete.
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
        """Mark it. It stays until the run saves this step again."""
        aside = folder / DAMAGED_FILE
        aside.write_bytes(b"")
        begin(folder)
        return aside

    def remove_partial(self) -> None:
        complete_ones = set(self._complete_ones())
        for entry in self._entries():
            if is_unfinished(entry) and not (entry / DAMAGED_FILE).is_file():
                remove_tree(entry)
            elif entry not in complete_ones and not is_unfinished(entry):
                tell(f"warning: {entry}: {NO_CHECKPOINT}")

    def _open(self, final: RemotePath) -> Path:
        if self._staging is None:
            raise ValueError("opened for reading, without a staging folder")
        self._group  # noqa: B018  (creating it is a collective, so not in a thread)
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
        """Upload this rank's files. Once all ranks have, rank 0 writes the marker."""
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
        """Return the files of all ranks. Raises on all ranks if one of them failed."""
        if self._group is not None:
            gathered: list[Any] = [None] * dist.get_world_size(self._group)
            ours = one_line(failure) if failure is not None else entries
            dist.all_gather_object(gathered, ours, group=self._group)
            for rank, result in enumerate(gathered):
                if isinstance(result, str) and failure is None:
                    raise RunError(f"rank {rank}: {result}")
                entries = entries | result if isinstance(result, dict) else entries
        if failure is not None:
            raise failure
        return entries

    def _make_way(self, final: RemotePath) -> None:
        """Delete a checkpoint of the same step from before a resume. Move away anything else."""
        final.refresh()
        marked = is_complete(final) or is_unfinished(final)
        if not marked and final.exists() and not (final / STATE_FILE).is_file():
            aside = unused_name(final.with_name(f"{final.name}.kept"))
            for name in final.files():
                (final / name).move_to(aside / name)
            tell(f"warning: {final}: had no {STATE_FILE}, so it was not a checkpoint; moved to {aside}")
        self._remove(final)

    def _remove(self, folder: RemotePath) -> None:
        if folder.exists():
            begin(folder)  # so that remove_partial finds it if the deletion is interrupted
        remove_tree(folder)


def files_in(folder: Path) -> dict[str, Path]:
    """The files below ``folder`` by relative name."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def send_files(files: dict[Path, RemotePath]) -> None:
    """Upload files concurrently. The first error is raised after the running uploads have ended."""
    if not files:
        return
    with ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload") as pool:
        for sent in [pool.submit(_send_file, path, target) for path, target in files.items()]:
            sent.result()


def _send_file(path: Path, target: RemotePath) -> None:
    """Upload a file; a large one in concurrent parts if the store accepts parts in any order."""
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
