"""Upload exports to the hub in the background. Only used on rank 0."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, NamedTuple

from portable.callbacks import Callback
from portable.checkpoint.store import start_background_call
from portable.checkpoint.trainer_state import parse_checkpoint_step
from portable.converters.storage.path_or_url import is_in_store
from portable.errors import to_one_line
from portable.formatting import format_count
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from portable.callbacks import Run
    from portable.converters.storage.path_or_url import AnyPath
    from portable.output.hub import HubRepository


class UploadOutcome(NamedTuple):
    """Result of all uploads of a launch: the repository's address, and the uploads that went wrong."""

    url: str | None
    """Address of the repository. None if the final model was not uploaded."""
    problems: list[str]
    """Descriptions of failed or skipped uploads, one line each."""


class HubUploadCallback(Callback):
    """Callback that uploads exports to the hub, one at a time.

    Checkpoints are exported and uploaded in a background thread. A checkpoint that is completed
    during an upload waits until the upload ends. The waiting checkpoint is skipped if a newer
    checkpoint is completed first, so that uploads do not fall behind when saves are faster. The
    first failed upload prints a warning. :meth:`finish_uploads` reports how many checkpoints were
    not uploaded.

    Args:
        hub: Repository on the hub.
        export_checkpoint: Function that writes the export of a checkpoint into a folder.
        scratch_folder: Local folder for the exports. The constructor deletes it if it exists. It is
            also deleted after each upload of an export in this folder.
        uploads_checkpoints: Whether to upload checkpoints in addition to the final model.
    """

    def __init__(
        self,
        hub: HubRepository,
        export_checkpoint: Callable[[AnyPath, Path], None],
        scratch_folder: Path,
        *,
        uploads_checkpoints: bool = True,
    ) -> None:
        self._checkpoints = uploads_checkpoints
        self._hub = hub
        self._export = export_checkpoint
        self._scratch = scratch_folder
        self._lock = threading.Lock()
        self._waiting_checkpoint: AnyPath | None = None
        self._checkpoint_being_read: AnyPath | None = None
        self._worker: Future[None] | None = None
        self._num_replaced = 0
        self._num_failed = 0
        self._last_failure = ""
        shutil.rmtree(scratch_folder, ignore_errors=True)  # left by a killed launch

    def handle_completed_checkpoint(self, run: Run, checkpoint: AnyPath) -> None:
        """Request an upload of the checkpoint, if ``uploads_checkpoints`` is set."""
        if self._checkpoints:
            self.request_upload(checkpoint)

    def request_upload(self, checkpoint: AnyPath) -> None:
        """Export and upload a complete checkpoint in the background.

        If an earlier checkpoint is still waiting, the new one replaces it, and the number of
        replaced checkpoints increases by one.
        """
        with self._lock:
            if self._waiting_checkpoint is not None:
                self._num_replaced += 1
            self._waiting_checkpoint = checkpoint
            if self._worker is None:
                self._worker = start_background_call(self._upload_waiting, name="hub")

    def get_steps_in_use(self) -> set[int]:
        """Return the steps of the checkpoints that are being exported or are waiting to be exported.

        These checkpoints must not be deleted.
        """
        with self._lock:
            steps = [
                parse_checkpoint_step(place.name)
                for place in (self._waiting_checkpoint, self._checkpoint_being_read)
                if place is not None
            ]
        return {step for step in steps if step is not None}

    def finish_uploads(self, final: AnyPath | None, checkpoint: AnyPath | None) -> UploadOutcome:
        """Wait for the uploads of checkpoints, then upload the final model.

        If there is a final model, a checkpoint that is still waiting is not uploaded.

        Args:
            final: Folder or URL of the final model. None if the run is not complete.
            checkpoint: Checkpoint that the final model was exported from. If None, the final model
                is not uploaded.

        Returns:
            The address of the repository, and descriptions of failed or skipped uploads. The
            address is None if the final model was not uploaded.
        """
        if final is not None:
            with self._lock:
                self._waiting_checkpoint = None  # the final model is uploaded instead
        while (worker := self._worker) is not None:
            worker.result()
        url, problems = None, list[str]()
        if num_missed := self._num_failed + self._num_replaced:
            reasons = [self._last_failure] * bool(self._num_failed)
            if self._num_replaced:
                number = f"{self._num_replaced} " if self._num_failed else ""
                reasons.append(f"{number}replaced by newer checkpoints before the upload")
            missed = format_count(num_missed, "checkpoint")
            problems.append(f"hub.push: {missed} not uploaded to {self._hub.name} ({'; '.join(reasons)})")
        if final is not None and checkpoint is not None:
            message = f"Final model, step {parse_checkpoint_step(checkpoint.name)}"
            try:
                if not is_in_store(final):
                    url = self._hub.push_export(final, message)
                else:
                    url = self._export_and_upload(checkpoint, message)
            except Exception as error:
                problems.append(
                    f"hub.push: {final} was not uploaded ({to_one_line(error)}); upload the folder "
                    "manually: "
                    + ("" if not is_in_store(final) else "copy it to a local folder, FOLDER, and run: ")
                    + self._hub.format_upload_command("FOLDER" if is_in_store(final) else final)
                )
        return UploadOutcome(url, problems)

    def _upload_waiting(self) -> None:
        """Upload waiting checkpoints until none is left. Runs in a background thread.

        A failed upload is recorded and does not end the thread.
        """
        while True:
            with self._lock:
                self._checkpoint_being_read, self._waiting_checkpoint = self._waiting_checkpoint, None
                if (checkpoint := self._checkpoint_being_read) is None:
                    self._worker = None
                    return
            try:
                self._export_and_upload(checkpoint, f"Step {parse_checkpoint_step(checkpoint.name)}")
            except Exception as error:
                self._record_failure(error)

    def _export_and_upload(self, checkpoint: AnyPath, message: str) -> str:
        """Export a checkpoint to the scratch folder, and upload the export.

        Once the export is written, the checkpoint no longer counts as in use and may be deleted.
        The scratch folder is always deleted afterwards, even if the upload fails.

        Returns:
            The URL of the repository.
        """
        folder = self._scratch / checkpoint.name
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
            self._export(checkpoint, folder)
            with self._lock:
                self._checkpoint_being_read = None  # the checkpoint may be deleted now
            return self._hub.push_export(folder, message)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _record_failure(self, error: Exception) -> None:
        """Record a failed upload. Print a warning if it is the first one."""
        with self._lock:
            self._num_failed, self._last_failure = self._num_failed + 1, to_one_line(error)
            is_first = self._num_failed == 1
        if is_first:
            print_status(f"warning: hub.push: {self._last_failure}; the run continues")
