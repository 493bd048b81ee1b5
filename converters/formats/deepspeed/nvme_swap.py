"""Groups that ZeRO-3 offloads to NVMe: a checkpoint copies the swap files beside its rank files.

A swap file holds one flat buffer of one sub-group of one rank, padded to whole blocks, with no checksum. Its
name has the numbers of the first and last parameter of the sub-group, counted in the model's order.

Source: deepspeed/runtime/swap_tensor/optimizer_utils.py, deepspeed/runtime/engine.py (`save_checkpoint`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from converters.formats.deepspeed.flat_layout import Piece
from converters.tensors.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.formats.deepspeed.flat_layout import WholeParameters
    from converters.storage.folder import Folder

FOLDER = "offloaded_tensors"
# A block is 1 KiB per writing thread; no run has this many.
_MAX_BLOCK = 1 << 20


class SwapFiles:
    """The swap files of one checkpoint; `order` lists the model's parameters, frozen ones included."""

    def __init__(self, folder: Folder, order: Sequence[str]) -> None:
        self.folder = folder
        self.numbers = {name: number for number, name in enumerate(order)}

    def piece(self, rank: int, layout: WholeParameters, dtype: str, state: str = "") -> Piece:
        """A rank's flat masters, or its flat optimizer state `state`.

        Raises:
            CheckpointError: the swap file is missing, or its size is not that of the sub-group.
        """
        names = list(layout.shapes)
        ends = [self.numbers.get(name) for name in (names[0], names[-1])]
        label = f"{state}-" if state else ""
        name = f"{FOLDER}/rank{rank:02d}/{label}{ends[0]}_{ends[1]}.tensor.swp"
        if None in ends or not (self.folder.path / name).is_file():
            raise CheckpointError(f"{self.folder.path / name}: missing; it holds values offloaded to NVMe")
        file = self.folder.file(name)
        nbytes = layout.length * itemsize(dtype)
        if not nbytes <= file.nbytes < nbytes + _MAX_BLOCK:
            raise CheckpointError(f"{file.path}: has {file.nbytes} bytes, its sub-group takes {nbytes}")
        return Piece(dtype, layout.length, file.span(0, nbytes, what="the swap file"))
