"""Write DeepSpeed's checkpoint files, in the foreground or in the background.

DeepSpeed determines the content of each file, and passes it to the ``save`` method of its
*checkpoint engine*. This module replaces the method. In a background save, the replacement copies
the content to host memory. A thread then writes the copy with ``torch.save``, as DeepSpeed would,
while training continues.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from portable.checkpoint.store import start_background_call
from portable.engines.background_saving import BackgroundWriteHandle, copy_state_to_host
from portable.errors import to_one_line
from portable.gpu.zero import private_api
from portable.model.parameters import get_checkpointed_tensors, has_peft_adapter
from portable.ranks.collectives import gather_text, get_or_create_background_group
from portable.terminal import discard_native_stdout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from portable.backend import SaveHandle


class ZeroSaver:
    """Checkpoint writer for a DeepSpeed engine.

    Args:
        engine: Engine returned by ``deepspeed.initialize``. The ``save`` method of its checkpoint
            engine is replaced.
        exact_frozen: Frozen fp32 parameters, keyed by name. They are saved instead of the engine's
            parameters in the compute dtype, which are rounded. The mapping is read at each save, so
            it can be extended later.
    """

    def __init__(self, engine: Any, exact_frozen: Mapping[str, Tensor]) -> None:
        self._engine, self._exact_frozen = engine, exact_frozen
        self._has_adapter = has_peft_adapter(engine.module)
        self._stored_names = set(get_checkpointed_tensors(engine.module)) if self._has_adapter else None
        self._deferred_files: list[_CheckpointFile] | None = None
        """List that collects the files of a background save. If None, each file is written immediately."""
        self._failure: Exception | None = None
        """First failure of :meth:`_save_or_defer_file` in the current save."""
        self._uses_zip_format = private_api.replace_file_saver(engine, self._handle_file)

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        return get_or_create_background_group()

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write a checkpoint to ``folder``. All ranks must call this method.

        See :meth:`portable.backend.Engine.save_shards`. State on NVMe is always copied in the foreground,
        because the next step overwrites the swap files.

        Args:
            folder: Existing folder.
            background: Whether to write the files in a background thread.

        Returns:
            Handle for waiting until the files are written. If ``background`` is False, the files are
            already written.
        """
        group = self._group  # creating the group is a collective, so it must precede the thread
        files: list[_CheckpointFile] = []
        self._deferred_files = files if background else None
        self._failure = None
        with discard_native_stdout():
            self._engine.save_checkpoint(str(folder), exclude_frozen_parameters=self._has_adapter)
        rank, failure = self._engine.global_rank, self._failure

        def write() -> None:
            self._write_files_collectively(files, folder, rank, group, failure)

        if background:
            return BackgroundWriteHandle(start_background_call(write, name="checkpoint"))
        write()
        return BackgroundWriteHandle(None)

    def _handle_file(self, state_dict: Any, path: str) -> None:
        """Call :meth:`_save_or_defer_file`, and store its first failure.

        DeepSpeed calls this method for each file, and then waits for all ranks. After a failure,
        this rank must therefore continue until :meth:`_write_files_collectively`.
        """
        try:
            self._save_or_defer_file(state_dict, path)
        except Exception as error:
            self._failure = self._failure or error

    def _save_or_defer_file(self, state_dict: Any, path: str) -> None:
        """Write a checkpoint file or, in a background save, copy its content to host memory.

        First, the content is changed in place: if the model has an adapter, tensors and buffers that
        an adapter checkpoint does not store are removed. Frozen parameters that were rounded to the
        compute dtype are replaced with their fp32 values.

        Args:
            state_dict: Content of the file.
            path: Path of the file.
        """
        # The state dict contains all names of tied frozen parameters, so keep only the stored names.
        if self._stored_names is not None and "module" in state_dict:
            module_state = state_dict["module"]
            state_dict["module"] = {
                name: module_state[name] for name in module_state if name in self._stored_names
            }
            # Remove the names of the frozen model's buffers as well, because these buffers are not stored.
            buffers: list[str] = state_dict["buffer_names"]
            state_dict["buffer_names"] = [name for name in buffers if name in self._stored_names]
        module, fragments = (state_dict.get(part) or {} for part in ("module", "frozen_param_fragments"))
        fragments.update({name: tensor for name, tensor in self._exact_frozen.items() if name in fragments})
        for name, tensor in {**fragments, **self._exact_frozen}.items():
            # Do not replace placeholders of stage 3, because they have other shapes.
            if name in module and module[name].shape == tensor.shape:
                module[name] = tensor  # torch.save stores a tensor with two names once
        if self._deferred_files is None:
            _CheckpointFile(Path(path), state_dict, self._uses_zip_format).write()
        else:
            self._deferred_files.append(
                _CheckpointFile(Path(path), copy_state_to_host(state_dict), self._uses_zip_format)
            )

    def _write_files_collectively(
        self,
        files: list[_CheckpointFile],
        folder: Path,
        rank: int,
        group: dist.ProcessGroup | None,
        failure: Exception | None,
    ) -> None:
        """Write and sync this rank's files, and wait until the files of all ranks are written.

        Args:
            files: Files to write. The list is emptied.
            folder: Folder of the checkpoint. All files that this rank wrote to it are synced to the disk.
            rank: This rank.
            group: Process group of all ranks. None in a single process.
            failure: Earlier failure of this rank. Nothing is written in this case.

        Raises:
            OSError: If another rank fails to write its files. If this rank fails, its original exception is
                raised instead.
        """
        if failure is None:
            try:
                while files:
                    files.pop(0).write()  # free the copy of each file after it is written
                for path in folder.rglob("*"):
                    if path.is_file() and _is_written_by(rank, path.name):
                        _sync_file(path)
            except Exception as error:
                failure = error
        reasons = gather_text("" if failure is None else to_one_line(failure), group)
        if failure is None and any(reasons):
            failures = (f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
            raise OSError("; ".join(failures))
        if failure is not None:
            raise failure


class _CheckpointFile:
    """Checkpoint file that has not been written yet.

    Args:
        path: Path of the file.
        content: Content of the file, written with ``torch.save``.
        zipfile_serialization: Whether ``torch.save`` uses its zip format.
    """

    def __init__(self, path: Path, content: Any, zipfile_serialization: bool) -> None:
        self.path = path
        self._content = content
        self._zipfile = zipfile_serialization

    def write(self) -> None:
        """Write the file with ``torch.save``."""
        # Open the file in Python, because torch's own file writer hides operating system errors.
        with self.path.open("wb") as file:
            torch.save(self._content, file, _use_new_zipfile_serialization=self._zipfile)


def _is_written_by(rank: int, name: str) -> bool:
    """Return whether a rank writes the DeepSpeed checkpoint file with this name.

    Rank 0 writes the files whose names do not contain a rank.
    """
    return f"pp_rank_{rank}_" in name or (rank == 0 and "pp_rank_" not in name)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
