"""Check before training that the adapter of a run can be merged into the base model."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from portable.converters import Checkpoint, CheckpointError, Tensor, find_adapter
from portable.converters.adapters.merging import check_mergeable_into
from portable.converters.storage.byte_sources import InMemorySource
from portable.errors import UserError
from portable.temporary_folder import create_scratch_folder

if TYPE_CHECKING:
    from portable.adapters.adapter import Adapter


def check_adapter_can_be_merged(adapter: Adapter) -> None:
    """Check that an adapter can be merged into the base model.

    Without this check before training, a run with ``checkpoint.export: merged`` would only fail at its
    end. The check uses names and shapes. It does nothing if the base model has random weights.

    Args:
        adapter: Adapter of the run.

    Raises:
        UserError: If the base model lacks a parameter that the adapter changes, or stores it in a
            format that cannot be changed.
    """
    if adapter.base_checkpoint is None:
        return
    with create_scratch_folder("portable-adapter") as folder:
        adapter.write_config(folder)
        tensors = {
            name: Tensor.from_source(name, "F32", shape, _UnreadableBytes(4 * prod(shape)))
            for name, shape in adapter.saved_shapes.items()
        }
        try:
            opened = find_adapter(Checkpoint(format="adapter", root=folder, tensors=tensors, ties=False))
            if opened is not None:
                check_mergeable_into(opened, adapter.base_checkpoint)
        except CheckpointError as error:
            # Hide the path of the temporary folder, which would confuse the user, who has not exported the
            # adapter yet.
            reason = str(error).replace(str(folder), "the adapter")
            raise UserError(f"checkpoint.export: {reason}") from error


class _UnreadableBytes(InMemorySource):
    """Placeholder for the bytes of a tensor whose values are never read.

    Args:
        nbytes: Size of the tensor in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(b"")
        self.nbytes = nbytes
