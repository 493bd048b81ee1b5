"""Open the files of other ranks only when their values are read.

The files of all ranks have the same structure. A rank that resumes reads its own two files, and
derives the names, dtypes and shapes in other files from them. When another file is opened, its
structure is compared with the expected one. If the world size is unchanged, no other file is
opened.
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
    """Contiguous tensor in a file that is not open yet.

    Args:
        like: Tensor of another rank with the same dtype.
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
        """Convert the tensor to a view with offset and strides in bytes."""
        return View(self._source, 0, compute_row_major_strides(self.shape, get_itemsize(self.dtype)))


class _DeferredSource:
    """Bytes of a deferred tensor.

    The first read opens the file and checks the dtype and shape of the tensor.
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
                f"is {tensor.dtype} {list(tensor.shape)} on one rank, but {dtype} {list(shape)} on "
                "another rank"
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
        """Return the tensor at a path.

        Raises:
            CheckpointError: If the file does not have the structure of this rank's file.
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
                    f"{self._template.location}: the file of another rank does not contain {key!r}"
                ) from None
        if not isinstance(value, StoredTensor):
            raise DamagedCheckpointError(
                f"{self._template.location}: {path[-1]!r} is not a tensor in the file of another rank"
            )
        return value


class SliceLengths(NamedTuple):
    """Lengths of two ranks' slices of one parameter group in stages 1 and 2, in elements.

    Attributes:
        used: Elements of this rank's slice that belong to parameters.
        other_used: Elements of the other rank's slice that belong to parameters.
        padded: Elements of each slice, including padding.
    """

    used: int
    other_used: int
    padded: int


def build_deferred_optim_file(
    folder: CheckpointFolder, name: str, template: OptimFile, slice_lengths: Sequence[SliceLengths] | None
) -> OptimFile:
    """Describe the optimizer states of another rank, based on this rank's file.

    Both files have the same structure, so the other file is only opened when one of its tensors is
    read.

    Args:
        folder: Folder of the files.
        name: Name of the other rank's file.
        template: File of this rank.
        slice_lengths: Lengths of the slices of each group of stages 1 and 2. None in stage 3, because
            the slices of all ranks have the same length.

    Returns:
        The description, whose tensors are `DeferredTensor`s.
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
    """Describe the model states of another rank, based on this rank's file.

    The other file is only opened when one of its tensors is read.

    Args:
        folder: Folder of the files.
        name: Name of the other rank's file.
        template: File of this rank.

    Returns:
        The description. It contains only the frozen fragments, which are `DeferredTensor`s.
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
