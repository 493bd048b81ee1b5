"""Copies in host memory of what is being saved: one pass over the bytes, while the training waits for it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor


def staged(value: Any) -> Any:
    """``value`` with every tensor in its dicts, lists and tuples copied to host memory, and all else copied.

    Tensors that share a storage share its copy, so that what is written later is what would be written now.
    A ``DTensor`` stays one, over the copy of its local part.
    """
    copier = _Copier()
    result = copier.copied(value)
    copier.wait()
    return result


class _Copier:
    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._devices: set[torch.device] = set()

    def copied(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            # Not from_local, which would move the copy to the devices of the mesh.
            part = self._tensor(value.to_local())
            return DTensor(part, value._spec, requires_grad=False)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) is tuple:
            return tuple(self.copied(item) for item in value)
        if type(value) is list:
            return [self.copied(item) for item in value]
        if isinstance(value, dict):
            result = copy.copy(value)
            for key, item in value.items():
                result[key] = self.copied(item)
            return result
        return copy.deepcopy(value)

    @torch.no_grad()
    def _tensor(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self._storage(storage)
        room = torch.empty(0, dtype=tensor.dtype)
        return room.set_(
            self._storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        everything = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        # Torch keeps page-locked memory for the next time. Without a GPU there is nothing to gain by it.
        room = torch.empty(everything.shape, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        room.copy_(everything, non_blocking=True)
        self._devices.add(storage.device)
        return room.untyped_storage()

    def wait(self) -> None:
        """Return when the copies are there."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
