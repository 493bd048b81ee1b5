"""Background saves: copy the state to host memory, and write it in a thread while training continues."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from portable.private import torch_internals

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor


class BackgroundWriteHandle:
    """Handle for a background write. Implements :class:`portable.backend.SaveHandle`.

    Args:
        writing: Future of the writer thread. None if the files have already been written.
    """

    def __init__(self, writing: Future[None] | None) -> None:
        self._writing = writing

    def is_done(self) -> bool:
        """Return whether the write has finished or failed."""
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Block until the write has finished. If the write failed, raise its exception."""
        if self._writing is not None:
            self._writing.result()


def copy_state_to_host(value: Any) -> Any:
    """Copy a nested state of dicts, lists and tuples, including all tensors, to host memory.

    Tensors that share a storage also share its copy, so that saved files do not become larger. The
    copy of a ``DTensor`` is a ``DTensor`` whose local shard is on the host. Values of other types,
    including named tuples, are deep-copied, so tensors inside them stay on their device. Returns
    after all copies are complete.
    """
    copier = _HostCopier()
    result = copier.copy_value(value)
    copier.wait_for_copies()
    return result


class _HostCopier:
    """Helper that copies nested values, such as state dicts, to host memory.

    If several tensors share a storage, this storage is copied only once.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._devices: set[torch.device] = set()

    def copy_value(self, value: Any) -> Any:
        """Copy a value to host memory, including dicts, lists, tuples and tensors inside it.

        Values of other types, including named tuples, are deep-copied with ``copy.deepcopy``.

        Copies of tensors may be incomplete until :meth:`wait_for_copies` returns.
        """
        if isinstance(value, DTensor):
            return torch_internals.build_dtensor_like(value, self._copy_tensor(value.to_local()))
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if type(value) is tuple:
            return tuple(self.copy_value(item) for item in value)
        if type(value) is list:
            return [self.copy_value(item) for item in value]
        if isinstance(value, dict):
            result = copy.copy(value)
            for key, item in value.items():
                result[key] = self.copy_value(item)
            return result
        return copy.deepcopy(value)

    @torch.no_grad()
    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        """Copy a tensor's storage unless it has already been copied, and return the same view of the copy."""
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        number = torch_internals.get_storage_id(storage)
        if number not in self._storages:
            self._storages[number] = self._copy_storage(storage)
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self._storages[number], tensor.storage_offset(), tensor.shape, tensor.stride())

    def _copy_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Start copying a storage to host memory, and return the copy.

        If the storage is on an accelerator, the copy is in pinned memory, and is incomplete until
        :meth:`wait_for_copies` returns.
        """
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # Pinned memory makes the copy asynchronous, and torch caches it for reuse. Without an accelerator, it
        # has no benefit.
        target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        target.copy_(source, non_blocking=True)
        self._devices.add(storage.device)
        return target.untyped_storage()

    def wait_for_copies(self) -> None:
        """Wait until the copies from all devices are complete."""
        for device in self._devices:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
