"""Open the files of other ranks only when their values are read.

This applies if a run with ZeRO stage 1, 2 or 3 resumes with the same world size, and used only data
parallelism. Otherwise, including runs with BF16_Optimizer, the files of all ranks are opened.

A rank reads its own file of optimizer states. In stages 1 and 2, it also reads the only file of
model states, which is the file of rank 0. In stage 3, it reads its own file of model states, and
the file of rank 0 if a tensor may be tied. The files of all ranks have the same structure, so the
names, dtypes and shapes in the other files are derived from this rank's files. When another file is
opened, its structure is compared with the expected one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import DamagedCheckpointError
from portable.converters.formats.deepspeed.rank_files import (
    ModelFile,
    OptimFile,
    check_equal_records,
    read_model_file,
    read_optim_file,
)
from portable.converters.tensors.dtypes import get_itemsize
from portable.converters.tensors.tensor import View, compute_row_major_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.converters.storage.byte_sources import UnverifiedSpans
    from portable.converters.storage.folder import CheckpointFolder

F = TypeVar("F", ModelFile, OptimFile)
NestedKey = tuple[Any, ...]
"""Keys and indices that lead to a value in nested dicts and lists."""


class DeferredTensor(StoredTensor):
    """Contiguous tensor in another rank's file, which is opened when the tensor is first read.

    Args:
        like: Tensor with the same key in this rank's file. It provides the dtype. `storage` and
            `offset` are also copied, but do not locate the elements in the other file. Use
            `to_byte_view` to read the elements.
        shape: Shape of the tensor.
        load: Function that opens the file and returns the tensor.
    """

    __slots__ = ("_source",)

    def __init__(self, like: StoredTensor, shape: tuple[int, ...], load: Callable[[], StoredTensor]) -> None:
        self.storage, self.offset, self.dtype = like.storage, like.offset, like.dtype
        self.shape = shape
        self.strides = compute_row_major_strides(shape, 1)
        self._source = _DeferredSource(self, load)

    def to_byte_view(self) -> View:
        """Convert the tensor to a view whose offset and strides are in bytes."""
        return View(self._source, 0, compute_row_major_strides(self.shape, get_itemsize(self.dtype)))


class _DeferredSource:
    """Bytes of a `DeferredTensor`, whose file is opened on the first read.

    The first read also checks that the tensor in the file has the expected dtype and shape.
    """

    def __init__(self, expected: DeferredTensor, load: Callable[[], StoredTensor]) -> None:
        self.nbytes = prod(expected.shape) * get_itemsize(expected.dtype)
        self._type = expected.dtype, expected.shape
        self._load = load

    def read_into(self, buffer: memoryview, offset: int, unverified_spans: UnverifiedSpans) -> None:
        tensor = self._load()
        if (tensor.dtype, tensor.shape) != self._type or not tensor.is_contiguous:
            dtype, shape = self._type
            raise DamagedCheckpointError(
                f"a tensor has the dtype {tensor.dtype} and the shape {list(tensor.shape)} on one rank, but "
                f"the dtype {dtype} and the shape {list(shape)} on another rank"
            )
        view = tensor.to_byte_view()
        view.source.read_into(buffer, view.offset + offset, unverified_spans)


class _LazyRankFile(Generic[F]):
    """File of another rank that is read once, when its first tensor is needed.

    Args:
        read: Function that reads the file.
        template: File of the same kind from this rank. If the rank-independent records of the two files
            differ, they belong to different runs, which is an error.
    """

    def __init__(self, read: Callable[[], F], template: F) -> None:
        self._read: Callable[[], F] = read
        self._template: F = template
        self._lock = Lock()
        self._content: Any = None

    def get_tensor(self, path: NestedKey) -> StoredTensor:
        """Return the tensor at a path in the file.

        The first call reads the file, and checks that it belongs to the same run as the template,
        which is the file of this rank.

        Args:
            path: Keys and indices that lead to the tensor in the content of the file.

        Raises:
            CheckpointError: If the two files belong to different runs, or if the path does not lead
                to a tensor.
        """
        with self._lock:
            if self._content is None:
                file = self._read()
                for record, value in file.get_rank_independent_records().items():
                    check_equal_records(
                        file.location, record, value, self._template.get_rank_independent_records()[record]
                    )
                self._content = file.state if isinstance(file, OptimFile) else file.frozen_fragments
        value = self._content
        for key in path:
            try:
                value = value[key]
            except (LookupError, TypeError):
                raise DamagedCheckpointError(
                    f"{self._template.location}: contains {key!r}, which is missing from the file of another "
                    "rank"
                ) from None
        if not isinstance(value, StoredTensor):
            raise DamagedCheckpointError(
                f"{self._template.location}: {path[-1]!r} is a tensor, but is not a tensor in the file of "
                "another rank"
            )
        return value


class SliceLengths(NamedTuple):
    """Sizes of two ranks' slices of the same parameter group in ZeRO stage 1 or 2.

    Attributes:
        used: Number of elements in this rank's slice, without padding.
        other_used: Number of elements in the other rank's slice, without padding.
        padded: Number of elements in each slice, including padding.
    """

    used: int
    other_used: int
    padded: int


def build_deferred_optim_file(
    folder: CheckpointFolder, name: str, template: OptimFile, slice_lengths: Sequence[SliceLengths] | None
) -> OptimFile:
    """Build the optimizer states of another rank without opening the file of that rank.

    The structure, the numbers and the 0-d tensors are copied from this rank's file. The other file
    is opened when one of its tensors is first read. Only then does an error occur if the two files
    belong to different runs.

    Args:
        folder: Folder of the files.
        name: Name of the other rank's file.
        template: File of this rank.
        slice_lengths: Lengths of the two ranks' slices in ZeRO stages 1 and 2, with one entry per
            parameter group. None in stage 3, because the slices of all ranks have the same length.

    Returns:
        An `OptimFile` whose tensors with at least one dimension are `DeferredTensor`s. In stages 1
        and 2, `group_paddings` is computed for the other rank, and `param_slice_mappings` is
        omitted.
    """
    file = _LazyRankFile(partial(read_optim_file, folder, name), template)

    def replace_tensors(value: Any, path: NestedKey) -> Any:
        if isinstance(value, dict):
            return {key: replace_tensors(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(replace_tensors(item, (*path, index)) for index, item in enumerate(value))
        # Numbers, including 0-d tensors, are equal on all ranks.
        if not isinstance(value, StoredTensor) or not value.shape:
            return value
        shape = value.shape
        if slice_lengths is not None:
            group = next((key for key in path[1:] if type(key) is int and key < len(slice_lengths)), 0)
            used, other_used, size = slice_lengths[group]
            shape = (other_used,) if shape == (used,) and used < size else shape
            shape = (other_used,) if path[0] == MASTERS else shape
        return DeferredTensor(value, shape, partial(file.get_tensor, path))

    state = {key: replace_tensors(value, (key,)) for key, value in template.state.items()}
    if slice_lengths is not None:
        state["group_paddings"] = [size - other_used for _, other_used, size in slice_lengths]
        state.pop("param_slice_mappings", None)
    return replace(template, location=str(folder.path / name), state=state)


MASTERS = "single_partition_of_fp32_groups"
"""Key of the fp32 masters of stages 1 and 2. They are stored without padding."""


def build_deferred_model_file(folder: CheckpointFolder, name: str, template: ModelFile) -> ModelFile:
    """Build the model states of another rank without opening the file of that rank.

    The structure is copied from this rank's file. The other file is opened when one of its tensors
    is first read.

    Args:
        folder: Folder of the files.
        name: Name of the other rank's file.
        template: File of this rank.

    Returns:
        A `ModelFile` whose only tensors are the other rank's parts of the frozen parameters, as
        `DeferredTensor`s. The names and shapes in the other attributes are from this rank's file.
    """
    file = _LazyRankFile(partial(read_model_file, folder, name), template)
    fragments: dict[str, StoredTensor] = {
        key: DeferredTensor(value, value.shape, partial(file.get_tensor, (key,)))
        for key, value in template.frozen_fragments.items()
    }
    return replace(
        template,
        location=str(folder.path / name),
        module={},
        content={},
        group_shapes=None,
        frozen_fragments=fragments,
    )
