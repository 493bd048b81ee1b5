"""Do the masters belong to the model states beside them?

Below stage 3 the model states hold every weight in the type it computes in, and after each step that is the
master, rounded. A few values of every rank tell whether the files were saved together, in the right order.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.containers.torchzip import StoredTensor
from converters.errors import CheckpointError
from converters.storage.bytes import FileSpan, Slice
from converters.tensors.dtypes import numpy_dtype

if TYPE_CHECKING:
    from converters.formats.deepspeed.files import ModelFile
    from converters.formats.deepspeed.layout import EqualSlices, Flat, Piece
    from converters.storage.bytes import Source

# Of each rank: about so many parameters, and so many elements of each.
_FRAGMENTS = 16
_ELEMENTS = 64


def check_against_module(layout: EqualSlices, flat: Flat, model: ModelFile, *, zenflow: bool) -> int:
    """Compare shapes and a sample of values; returns how many were compared.

    Args:
        zenflow: masters run ahead of the weights, so that values say nothing.

    Raises:
        CheckpointError: another shape, another place in the flat buffer, or other values.
    """
    stored: dict[str, StoredTensor] = {}
    for name, shape in layout.shapes.items():
        value = model.module.get(name)
        if not isinstance(value, StoredTensor) or value.shape != shape:
            raise CheckpointError(f"{model.where}: {name!r} is not there in the recorded shape {list(shape)}")
        stored[name] = value
    _check_places(layout, stored, model.where)
    if zenflow:
        return 0
    compared = 0
    for rank in range(layout.world):
        fragments = list(layout.fragments(rank).items())
        every = max(1, len(fragments) // _FRAGMENTS)
        for name, (start, count) in fragments[::every]:
            within = rank * layout.slice + start - layout.starts[name]
            same = rounds_to(flat.pieces[rank], start, stored[name], count, within)
            if same is None:
                continue
            if not same:
                raise CheckpointError(
                    f"{model.where}: {name!r} is not what rank {rank}'s optimizer states hold; "
                    "files of two steps or runs, or damaged"
                )
            compared += 1
    return compared


def rounds_to(master: Piece, start: int, weight: StoredTensor, count: int, within: int = 0) -> bool | None:
    """Whether elements of a master, from `start`, round to those of a weight, from `within`.

    A sample of them, that is; None where they cannot be compared.
    """
    count = min(count, _ELEMENTS)
    if not _row_major(weight):
        return None
    ours = _peek(master.source, master.dtype, start, count)
    theirs = _peek(weight.view().source, weight.dtype, weight.offset + within, count)
    if ours is None or theirs is None:
        return None
    with np.errstate(all="ignore"):
        same = (ours.astype(theirs.dtype) == theirs) | ((ours != ours) & (theirs != theirs))
    return bool(same.all())


def _check_places(layout: EqualSlices, stored: dict[str, StoredTensor], where: str) -> None:
    """The weights are views of one flat buffer, laid out as the masters are (unless someone copied them)."""
    tensors = list(stored.values())
    if len(tensors) < 2 or len({tensor.storage.key for tensor in tensors}) != 1:
        return
    for name, tensor in stored.items():
        if tensor.offset - tensors[0].offset != layout.starts[name] - next(iter(layout.starts.values())):
            raise CheckpointError(
                f"{where}: {name!r} lies elsewhere in the flat buffer than param_shapes has it"
            )


def _row_major(tensor: StoredTensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return prod(tensor.shape) > 0


def _peek(source: Source, dtype: str, start: int, count: int) -> Any:
    """A few elements, read past the checksums: whatever is wrong with them is a reason to refuse."""
    kind = numpy_dtype(dtype)
    at = start * kind.itemsize
    while isinstance(source, Slice):
        at, source = at + source.offset, source.source
    if not isinstance(source, FileSpan) or kind.kind not in "fV":
        return None
    return np.frombuffer(source.file.read(source.offset + at, count * kind.itemsize), kind)
