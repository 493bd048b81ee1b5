"""Compute where ZeRO places each parameter of a group in the ranks' flat buffers.

Stages 1 and 2 concatenate the parameters of a group, add padding, and give each rank an equal
slice. Stage 3 partitions each parameter separately: rank r has the elements [r * n, (r + 1) * n)
with n = ceil(numel / world size).

Stage 3 also divides each group into sub-groups, and updates them one after the other. If it
offloads to NVMe, a checkpoint contains copies of the swap files next to its rank files. A swap file
contains one rank's flat buffer of one sub-group. The buffer is padded to complete blocks. The file
has no checksum. Its name contains the indices of the first and last parameter of the sub-group, in
the order of the model.

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, deepspeed/utils/zero_to_fp32.py;
deepspeed/runtime/swap_tensor/optimizer_utils.py, `save_checkpoint` in deepspeed/runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.errors import DamagedCheckpointError
from portable.converters.limits import MAX_COUNT
from portable.converters.storage.byte_sources import ConcatenatedSources, SourceSlice
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import Box, Tensor, View, compute_row_major_strides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.containers.torchzip import StoredTensor
    from portable.converters.storage.byte_sources import ByteSource
    from portable.converters.storage.folder import CheckpointFolder

ParameterShapes = dict[str, tuple[int, ...]]
"""Shape of each parameter, in the order of a flat group."""

_SWAPPED = "offloaded_tensors"


@dataclass(frozen=True)
class FlatPiece:
    """One rank's piece of a flat buffer.

    Attributes:
        dtype: Safetensors dtype.
        numel: Number of elements in the piece.
        source: Bytes of exactly these elements.
    """

    dtype: str
    numel: int
    source: ByteSource


def to_flat_piece(stored: StoredTensor) -> FlatPiece:
    """Convert a contiguous flat tensor from a rank file to a `FlatPiece`."""
    view, numel = stored.to_byte_view(), prod(stored.shape)
    return FlatPiece(
        stored.dtype, numel, SourceSlice(view.source, view.offset, numel * get_itemsize(stored.dtype))
    )


Flat = Sequence[FlatPiece]
"""One flat buffer of a group, as a sequence of its pieces in rank order."""


def require_equal_dtypes(pieces: Flat, location: str) -> Flat:
    """Check that the pieces of all ranks have the same dtype, and return them unchanged.

    Raises:
        CheckpointError: If the dtypes of the pieces differ.
    """
    dtypes = {piece.dtype for piece in pieces}
    if len(dtypes) != 1:
        raise DamagedCheckpointError(
            f"{location}: the ranks store different element types ({' and '.join(sorted(dtypes))})"
        )
    return pieces


@dataclass(frozen=True)
class GroupOnRanks:
    """Parameter group together with the set of ranks that store its elements.

    Without expert parallelism, all ranks form one set.

    Attributes:
        group_index: Index of the group.
        ranks: Ranks, in the order of their parts in the flat buffer.
        complete_names: Names in the complete model, keyed by the parameters' names on these ranks.
    """

    group_index: int
    ranks: tuple[int, ...]
    complete_names: Mapping[str, str]


class Stage3GroupLayout:
    """Layout of one stage 3 sub-group. Every parameter is partitioned separately.

    Args:
        shapes: Shape of each parameter, keyed by name.
        world_size: Number of ranks.
        location: Path of the checkpoint, used in error messages.

    Attributes:
        rank_starts: Index of each parameter's first element in a rank's buffer, keyed by name.
        rank_numel: Number of elements in the buffer of a rank.
    """

    def __init__(self, shapes: ParameterShapes, world_size: int, location: str) -> None:
        self.shapes = shapes
        self.world_size = world_size
        self.location = location
        self.rank_starts: dict[str, int] = {}
        total = 0
        for name, shape in shapes.items():
            self.rank_starts[name] = total
            total += self.count_elements_per_rank(shape)
        self.rank_numel = total

    def count_elements_per_rank(self, shape: tuple[int, ...]) -> int:
        """Count how many elements of a parameter each rank has, including padding."""
        return -(-prod(shape) // self.world_size)

    def split_into_parameters(self, flat: Flat, suffix: str = "") -> dict[str, Tensor]:
        """Split a flat buffer into its parameters, which are read lazily.

        Args:
            flat: Pieces of all ranks.
            suffix: Suffix of the tensors' names in error messages, such as `.exp_avg`.

        Returns:
            Parameters, keyed by name without the suffix.

        Raises:
            CheckpointError: If the number of elements in a piece does not match the parameters.
        """
        for piece in flat:
            if piece.numel != self.rank_numel:
                raise DamagedCheckpointError(
                    f"{self.location}: a rank stores {piece.numel:,} elements of a parameter group, but the "
                    f"parameters of the group need {self.rank_numel:,} elements per rank"
                )
        dtype, width = flat[0].dtype, get_itemsize(flat[0].dtype)
        parts = [piece.source for piece in flat]
        tensors = {}
        for name, shape in self.shapes.items():
            view = partial(
                _build_joined_view,
                parts,
                self.rank_starts[name] * width,
                self.count_elements_per_rank(shape) * width,
                shape,
                width,
            )
            box = Box((0,) * len(shape), shape, view)
            tensors[name] = Tensor(name + suffix, dtype, shape, [box])
        return tensors


def _build_joined_view(
    parts: Sequence[ByteSource], base: int, nbytes: int, shape: tuple[int, ...], width: int
) -> View:
    """Build a view of a ZeRO stage 3 parameter by joining the slices of all ranks.

    Args:
        parts: Flat buffer of each rank, as bytes.
        base: Offset of the parameter's slice in each flat buffer, in bytes.
        nbytes: Size of the parameter's slice in each flat buffer, in bytes. The slices of the last
            ranks may contain padding, which follows the elements of the parameter.
        shape: Shape of the parameter.
        width: Element size in bytes.
    """
    return View(
        ConcatenatedSources([SourceSlice(part, base, nbytes) for part in parts]),
        0,
        compute_row_major_strides(shape, width),
    )


class Fragment(NamedTuple):
    """Part of a parameter that is stored in one rank's slice of the flat buffer.

    Attributes:
        start: Index of the part's first element in the slice.
        numel: Number of elements in the part.
    """

    start: int
    numel: int


class Stage12GroupLayout:
    """Layout of the flat buffer of one parameter group in ZeRO stages 1 and 2.

    DeepSpeed concatenates the parameters with alignment gaps, and divides the result into equal
    slices, one per rank.

    Args:
        shapes: Shape of each parameter, keyed by name.
        gaps: Number of unused alignment elements after each parameter.
        world_size: Number of ranks.
        slice_numel: Number of elements in the slice of each rank, including padding.
        location: Path of the checkpoint, used in error messages.

    Attributes:
        starts: Index of each parameter's first element in the group, keyed by name.
        used_numel: Number of elements of the group without the padding at its end.

    Raises:
        CheckpointError: If the slices are too short for the parameters.
    """

    def __init__(
        self, shapes: ParameterShapes, gaps: Sequence[int], world_size: int, slice_numel: int, location: str
    ) -> None:
        self.shapes = shapes
        self.world_size = world_size
        self.slice_numel = slice_numel
        self.gaps = gaps
        self.location = location
        self.starts: dict[str, int] = {}
        start = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            self.starts[name] = start
            start += prod(shape) + gap
        self.used_numel = start
        if start > slice_numel * world_size:
            raise DamagedCheckpointError(
                f"{location}: the ranks store {slice_numel * world_size:,} elements of a parameter group, "
                f"but the parameters of the group need {start:,}"
            )

    def count_unpadded_elements(self, rank: int) -> int:
        """Count the elements of a rank's slice, excluding the padding at the end of the group."""
        return max(0, min(self.slice_numel, self.used_numel - rank * self.slice_numel))

    def count_padding_elements(self, rank: int) -> int:
        """Count the padding elements in a rank's slice.

        The padding is at the end of the flat parameter group, so only the last slices contain
        padding. The alignment gaps between parameters are not counted.
        """
        return self.slice_numel - self.count_unpadded_elements(rank)

    def split_into_parameters(self, flat: Flat, suffix: str = "") -> dict[str, Tensor]:
        """Split a flat buffer into its parameters, which are read lazily.

        The padding at the end of the buffer may be stored or omitted.

        Args:
            flat: Pieces of all ranks.
            suffix: Text that is appended to the parameter names in error messages, such as
                `.exp_avg`.

        Returns:
            Parameters, keyed by name without the suffix.

        Raises:
            CheckpointError: If the lengths of the ranks' pieces match neither the padded nor the
                unpadded lengths that the layout prescribes.
        """
        unpadded_lengths = [self.count_unpadded_elements(rank) for rank in range(self.world_size)]
        lengths = [piece.numel for piece in flat]
        if lengths not in (unpadded_lengths, [self.slice_numel] * self.world_size):
            raise DamagedCheckpointError(
                f"{self.location}: the lengths of the ranks' slices of "
                f"{suffix.lstrip('.') or 'a parameter group'} do not match the shapes of the parameters"
            )
        dtype, width = flat[0].dtype, get_itemsize(flat[0].dtype)
        joined = ConcatenatedSources(
            [SourceSlice(piece.source, 0, n * width) for piece, n in zip(flat, unpadded_lengths, strict=True)]
        )
        return {
            name: Tensor.from_source(name + suffix, dtype, shape, joined, self.starts[name] * width)
            for name, shape in self.shapes.items()
        }

    def compute_fragments(self, rank: int) -> dict[str, Fragment]:
        """Compute which part of each parameter is in a rank's slice of the flat buffer.

        Returns:
            Parts, keyed by parameter name. Parameters outside the slice are omitted.
        """
        low, high = rank * self.slice_numel, (rank + 1) * self.slice_numel
        fragments = {}
        for name, start in self.starts.items():
            first, last = max(low, start), min(high, start + prod(self.shapes[name]))
            if first < last:
                fragments[name] = Fragment(first - low, last - first)
        return fragments


GroupLayout = Stage12GroupLayout | Stage3GroupLayout


def check_disjoint_bytes(pieces: Sequence[StoredTensor], location: str) -> None:
    """Check that the flat tensors of one file do not share bytes.

    Raises:
        CheckpointError: If two flat tensors overlap.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        width = get_itemsize(piece.dtype)
        if prod(piece.shape):
            start = piece.offset * width
            spans.setdefault(piece.storage.key, []).append((start, start + prod(piece.shape) * width))
    for byte_spans in spans.values():
        byte_spans.sort()
        for (_, stop), (start, _) in pairwise(byte_spans):
            if start < stop:
                raise DamagedCheckpointError(
                    f"{location}: damaged: the flat tensors of two parameter groups overlap"
                )


class SwapFiles:
    """NVMe swap files in a checkpoint.

    The name of a swap file contains the numbers of the first and last parameters of its sub-group.
    The number of a parameter is its index in `parameter_names`.

    Args:
        folder: Checkpoint folder.
        parameter_names: Names of the model's parameters in order, including frozen parameters.
    """

    def __init__(self, folder: CheckpointFolder, parameter_names: Sequence[str]) -> None:
        self.folder = folder
        self.parameter_numbers = {name: number for number, name in enumerate(parameter_names)}

    def open_flat_piece(
        self, rank: int, layout: Stage3GroupLayout, dtype: str, state_name: str = ""
    ) -> FlatPiece:
        """Open the swap file of a rank's master weights, or of one of their optimizer states.

        The file contains one flat buffer with the rank's parts of all parameters in a sub-group.
        The file may be padded at the end, by less than 1 MiB. The padding is ignored.

        Args:
            rank: Data-parallel rank.
            layout: Layout of the sub-group.
            dtype: Safetensors dtype of the values.
            state_name: Name of the optimizer state. Empty for the fp32 master weights.

        Raises:
            CheckpointError: If the swap file is missing, or if its size does not fit the sub-group.
        """
        names = list(layout.shapes)
        first_and_last = [self.parameter_numbers.get(name) for name in (names[0], names[-1])]
        state_prefix = f"{state_name}-" if state_name else ""
        name = f"{_SWAPPED}/rank{rank:02d}/{state_prefix}{first_and_last[0]}_{first_and_last[1]}.tensor.swp"
        if None in first_and_last or not (self.folder.path / name).is_file():
            raise DamagedCheckpointError(
                f"{self.folder.path / name}: the swap file with the values that were offloaded to NVMe is "
                "missing"
            )
        file = self.folder.get_file(name)
        nbytes = layout.rank_numel * get_itemsize(dtype)
        if not nbytes <= file.nbytes < nbytes + MAX_COUNT:
            raise DamagedCheckpointError(
                f"{file.path}: the swap file has {file.nbytes:,} bytes, but its parameters need {nbytes:,}"
            )
        return FlatPiece(dtype, layout.rank_numel, file.get_span(0, nbytes, description="the swap file"))
