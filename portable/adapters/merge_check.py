"""Check before the first step that an adapter can be merged into its base after the last."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from converters import Checkpoint, CheckpointError, Tensor, find_adapter
from converters.adapters.merging import check_base
from converters.storage.bytes import Memory
from portable.errors import UserError
from portable.temporary_folder import scratch_folder

if TYPE_CHECKING:
    from portable.adapters.adapter import Adapter


def check_merge(adapter: Adapter) -> None:
    """Find everything that the adapter changes in the files of its base, from names and shapes.

    Raises:
        UserError: The base lacks a parameter, or stores it in a form that cannot be changed.
    """
    if adapter.base is None:
        return
    with scratch_folder("portable-adapter") as folder:
        adapter.write_config(folder)
        tensors = {
            name: Tensor.contiguous(name, "F32", shape, _Unread(4 * prod(shape)))
            for name, shape in adapter.file_shapes.items()
        }
        try:
            found = find_adapter(Checkpoint(format="adapter", root=folder, tensors=tensors, ties=False))
            if found is not None:
                check_base(found, adapter.base)
        except CheckpointError as error:
            # The adapter is not written yet, so its temporary folder means nothing to the user.
            reason = str(error).replace(str(folder), "the adapter")
            raise UserError(f"checkpoint.export: {reason}") from error


class _Unread(Memory):
    """The bytes of a tensor that is never read, because only its shape matters."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(b"")
        self.nbytes = nbytes
