"""Lazy tensors that rearrange the elements of other tensors, such as stacked experts.

:func:`trace_element_moves` runs a conversion once on the meta device and records its operations.
Afterwards, any slice of a result can be read, and only the source elements in the slice are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from portable.model.weight_sources import Index

    ReadSlice = Callable[[Index], Tensor]


@dataclass(frozen=True)
class LazyTensor:
    """Tensor whose slices are read on demand.

    Attributes:
        shape: Shape of the complete tensor.
        read_slice: Function that returns the elements at an index. The index consists of one slice per
            dimension, with a start and a stop but no step.
    """

    shape: tuple[int, ...]
    read_slice: ReadSlice


class NotTraceableError(Exception):
    """Error raised if a conversion uses an operation that changes values or is not supported."""


def trace_element_moves(
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]], sources: Sequence[LazyTensor]
) -> dict[str, LazyTensor]:
    """Trace a conversion that only moves elements, so that its results can be read lazily.

    Args:
        convert: Function that computes the results, keyed by name, from a list of tensors. It is called
            once, with meta tensors that have the shapes of ``sources``.
        sources: Tensors to convert.

    Returns:
        Lazy results, with the keys that ``convert`` returns.

    Raises:
        NotTraceableError: If the conversion uses an operation that changes values or is not supported.
    """
    trace = _MoveTrace()
    inputs = []
    for source in sources:
        tensor = torch.empty(source.shape, device="meta")
        trace.add_reader(tensor, source.read_slice)
        inputs.append(tensor)
    with torch_internals.intercept_operations(trace.trace_operation):
        results = convert(inputs)
    return {
        name: LazyTensor(tuple(result.shape), trace.get_reader(result)) for name, result in results.items()
    }


class _MoveTrace:
    """Trace of a conversion. For each tensor of the conversion, it stores a function that reads slices."""

    def __init__(self) -> None:
        self._readers: dict[
            int, tuple[Tensor, ReadSlice]
        ] = {}  # by id, with the tensor to keep the id in use

    def add_reader(self, tensor: Tensor, reader: ReadSlice) -> None:
        self._readers[id(tensor)] = (tensor, reader)

    def get_reader(self, tensor: Tensor) -> ReadSlice:
        if id(tensor) not in self._readers:
            raise NotTraceableError("a tensor is not computed from the sources")
        return self._readers[id(tensor)][1]

    def trace_operation(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run an operation on meta tensors, and record how to read slices of its results.

        Args:
            operation: ATen operation.
            arguments: Positional arguments. The first is a tensor or a list of tensors.
            keywords: Keyword arguments.

        Returns:
            The result of the operation, on the meta device.

        Raises:
            NotTraceableError: If the operation is not in :data:`_READER_BUILDERS`, or if its tensors are not
                computed from the sources.
        """
        make_readers = _READER_BUILDERS.get(str(operation).removeprefix("aten."))
        if make_readers is None or set(keywords) - {"memory_format"}:
            raise NotTraceableError(str(operation))
        results = operation(*arguments, **keywords)
        first, *others = arguments
        tensors = list(first) if isinstance(first, list | tuple) else [first]
        sources = [LazyTensor(tuple(tensor.shape), self.get_reader(tensor)) for tensor in tensors]
        outputs = list(results) if isinstance(results, list | tuple) else [results]
        shapes = [tuple(output.shape) for output in outputs]
        for output, reader in zip(outputs, make_readers(sources, shapes, *others), strict=True):
            self.add_reader(output, reader)
        return results


def _build_stack_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], dim: int = 0
) -> list[ReadSlice]:
    """Return one reader for the result of ``torch.stack``. It reads only the tensors in the slice.

    Like every function in :data:`_READER_BUILDERS`, it receives the input tensors, the shapes of the
    results, and the other arguments of the operation.
    """
    dim %= len(shapes[0])

    def read(index: Index) -> Tensor:
        rest = (*index[:dim], *index[dim + 1 :])
        return torch.stack([source.read_slice(rest) for source in sources[index[dim]]], dim)

    return [read]


def _build_cat_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], dim: int = 0
) -> list[ReadSlice]:
    """Return one reader for the result of ``torch.cat``. It reads only the tensors that overlap the slice."""
    dim %= len(shapes[0])

    def read(index: Index) -> Tensor:
        parts, start = [], 0
        for source in sources:
            size = source.shape[dim]
            first, last = max(index[dim].start - start, 0), min(index[dim].stop - start, size)
            if first < last:
                parts.append(source.read_slice((*index[:dim], slice(first, last), *index[dim + 1 :])))
            start += size
        return torch.cat(parts, dim)

    return [read]


def _build_permute_readers(sources: list[LazyTensor], _: object, order: list[int]) -> list[ReadSlice]:
    """Return one reader for the result of ``torch.permute`` with the dimensions ``order``."""
    (source,) = sources
    order = [dim % len(source.shape) for dim in order]

    def read(index: Index) -> Tensor:
        inner = sorted(zip(order, index, strict=True), key=lambda entry: entry[0])
        return source.read_slice(tuple(dim_slice for _, dim_slice in inner)).permute(order)

    return [read]


def _build_transpose_readers(
    sources: list[LazyTensor], shapes: object, first: int, second: int
) -> list[ReadSlice]:
    """Return one reader for the result of transposing the dimensions ``first`` and ``second``."""
    order = list(range(len(sources[0].shape)))
    order[first], order[second] = order[second], order[first]
    return _build_permute_readers(sources, shapes, order)


def _read_narrowed(source: LazyTensor, dim: int, offset: int, index: Index) -> Tensor:
    """Read a slice of ``source.narrow(dim, offset, ...)``.

    Args:
        source: The tensor before narrowing.
        dim: Narrowed dimension.
        offset: Index in ``source`` of the first element along ``dim``.
        index: Slices of the narrowed tensor.
    """
    shifted = slice(index[dim].start + offset, index[dim].stop + offset)
    return source.read_slice((*index[:dim], shifted, *index[dim + 1 :]))


def _build_split_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], _: object, dim: int = 0
) -> list[ReadSlice]:
    """Return one reader for each result of ``torch.split`` along ``dim``. ``shapes`` contains the sizes."""
    dim %= len(shapes[0])
    offsets = [sum(shape[dim] for shape in shapes[:i]) for i in range(len(shapes))]
    return [partial(_read_narrowed, sources[0], dim, offset) for offset in offsets]


def _build_slice_readers(
    sources: list[LazyTensor],
    shapes: list[tuple[int, ...]],
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> list[ReadSlice]:
    """Return one reader for ``source[start:stop]`` along ``dim``.

    Raises:
        NotTraceableError: If ``step`` is not 1.
    """
    (source,) = sources
    dim %= len(source.shape)
    if step != 1:
        raise NotTraceableError("a slice has a step")
    return [partial(_read_narrowed, source, dim, slice(start, stop).indices(source.shape[dim])[0])]


def _build_view_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], *_: object
) -> list[ReadSlice]:
    """Return one reader for the result of ``view`` or another operation that only changes the shape.

    The reader slices the leading dimensions that both shapes have in common. For the other dimensions,
    it reads all elements, reshapes them, and then selects the slice.
    """
    (source,), (shape,) = sources, shapes
    num_equal_dims = 0
    while (
        num_equal_dims < min(len(shape), len(source.shape))
        and shape[num_equal_dims] == source.shape[num_equal_dims]
    ):
        num_equal_dims += 1

    def read(index: Index) -> Tensor:
        rest = tuple(slice(0, size) for size in source.shape[num_equal_dims:])
        part = source.read_slice((*index[:num_equal_dims], *rest))
        values = part.reshape(*part.shape[:num_equal_dims], *shape[num_equal_dims:])
        return values[(..., *index[num_equal_dims:])] if index[num_equal_dims:] else values  # type: ignore[index]

    return [read]


def _build_select_readers(sources: list[LazyTensor], _: object, dim: int, position: int) -> list[ReadSlice]:
    """Return one reader for the result of ``torch.select``, which drops ``dim`` at index ``position``."""
    (source,) = sources
    dim, position = dim % len(source.shape), position % source.shape[dim]

    def read(index: Index) -> Tensor:
        return source.read_slice((*index[:dim], slice(position, position + 1), *index[dim:])).squeeze(dim)

    return [read]


def _build_unbind_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], dim: int = 0
) -> list[ReadSlice]:
    """Return one reader for each result of ``torch.unbind`` along ``dim``."""
    return [_build_select_readers(sources, None, dim, position)[0] for position in range(len(shapes))]


def _build_identity_readers(sources: list[LazyTensor], *_: object) -> list[ReadSlice]:
    """Return the reader of the source, because operations such as ``clone`` do not move elements."""
    return [sources[0].read_slice]


_READER_BUILDERS: dict[str, Callable[..., list[ReadSlice]]] = {
    "stack.default": _build_stack_readers,
    "cat.default": _build_cat_readers,
    "permute.default": _build_permute_readers,
    "transpose.int": _build_transpose_readers,
    "t.default": lambda sources, shapes: _build_transpose_readers(sources, shapes, 0, 1),
    "split.Tensor": _build_split_readers,
    "split_with_sizes.default": _build_split_readers,
    "slice.Tensor": _build_slice_readers,
    "select.int": _build_select_readers,
    "unbind.int": _build_unbind_readers,
    "view.default": _build_view_readers,
    "_unsafe_view.default": _build_view_readers,
    "squeeze.dim": _build_view_readers,
    "unsqueeze.default": _build_view_readers,
    "clone.default": _build_identity_readers,
    "alias.default": _build_identity_readers,
    "detach.default": _build_identity_readers,
}
"""Functions that return readers for the results of an operation, by the names of the supported operations."""
