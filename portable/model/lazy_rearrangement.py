"""Lazy tensors whose elements come from other tensors, for example a stack of expert weights.

:func:`trace_element_moves` runs a weight conversion once on the meta device and records its
operations. Afterwards, any slice of a result can be read, and only the source elements that are
needed for the slice are loaded.
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
    """Error raised if the results of a conversion cannot be read lazily.

    This is the case if the conversion uses an operation that changes values or is not supported, or
    if a tensor of the conversion is not computed from its source tensors.
    """


def trace_element_moves(
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]], sources: Sequence[LazyTensor]
) -> dict[str, LazyTensor]:
    """Trace a conversion that only moves elements, so that its results can be read lazily.

    Args:
        convert: Function that computes the results, keyed by name, from a list of tensors. It
            is called once, with meta tensors that have the shapes of ``sources``.
        sources: Tensors to convert.

    Returns:
        Lazy results, with the keys that ``convert`` returns.

    Raises:
        NotTraceableError: If the conversion uses an operation that changes values or is not
            supported, or if a tensor of the conversion is not computed from ``sources``.
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
    """Trace of a conversion that only moves elements between tensors.

    The trace stores a reader for each source of the conversion and for each result of an operation.
    A reader is a function that returns a slice of its tensor. It loads only the source elements
    that it needs for the slice. If the conversion changes shapes, as ``view`` does, the reader may
    load more elements than the slice contains.
    """

    def __init__(self) -> None:
        self._readers: dict[
            int, tuple[Tensor, ReadSlice]
        ] = {}  # keyed by id; the tensor is kept so that its id is not reused

    def add_reader(self, tensor: Tensor, reader: ReadSlice) -> None:
        self._readers[id(tensor)] = (tensor, reader)

    def get_reader(self, tensor: Tensor) -> ReadSlice:
        if id(tensor) not in self._readers:
            raise NotTraceableError("a converted tensor is not computed from the stored tensors")
        return self._readers[id(tensor)][1]

    def trace_operation(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run an operation on meta tensors, and record how to read slices of its results.

        Args:
            operation: ATen operation.
            arguments: Positional arguments. The first is a tensor or a list of tensors.
            keywords: Keyword arguments. Only ``memory_format`` is supported.

        Returns:
            The result of the operation, on the meta device.

        Raises:
            NotTraceableError: If the operation is not in :data:`_READER_BUILDERS`, if its arguments
                are not supported, or if an input tensor is not computed from the source tensors of
                the conversion.
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
    """Build a reader for the result of ``torch.stack``, and return it in a list.

    A reader is a function that reads a slice of a result. To read a slice, this reader reads only
    the input tensors that overlap the slice.

    All functions in :data:`_READER_BUILDERS` have the same form. They receive the input tensors,
    the shapes of the results, and the other arguments of the operation. They return a list of
    readers, one for each result of the operation.
    """
    dim %= len(shapes[0])

    def read(index: Index) -> Tensor:
        rest = (*index[:dim], *index[dim + 1 :])
        return torch.stack([source.read_slice(rest) for source in sources[index[dim]]], dim)

    return [read]


def _build_cat_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], dim: int = 0
) -> list[ReadSlice]:
    """Return a list with a single reader, which reads slices of the result of ``torch.cat``.

    The reader reads only the source tensors that overlap the requested slice. The result is a list,
    because some operations, such as ``torch.split``, have several results.
    """
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
    """Return a list with a single reader, which reads slices of ``torch.permute(source, order)``.

    ``source`` is the only tensor in ``sources``.
    """
    (source,) = sources
    order = [dim % len(source.shape) for dim in order]

    def read(index: Index) -> Tensor:
        inner = sorted(zip(order, index, strict=True), key=lambda entry: entry[0])
        return source.read_slice(tuple(dim_slice for _, dim_slice in inner)).permute(order)

    return [read]


def _build_transpose_readers(
    sources: list[LazyTensor], shapes: object, first: int, second: int
) -> list[ReadSlice]:
    """Build a reader for the result of ``torch.transpose``, and return it in a list.

    The operation swaps the dimensions ``first`` and ``second`` of the source. ``shapes`` is not
    used. Every builder returns a list, because some operations have several results.
    """
    order = list(range(len(sources[0].shape)))
    order[first], order[second] = order[second], order[first]
    return _build_permute_readers(sources, shapes, order)


def _read_narrowed(source: LazyTensor, dim: int, offset: int, index: Index) -> Tensor:
    """Read a slice of ``source.narrow(dim, offset, ...)``.

    Args:
        source: The tensor before narrowing.
        dim: Narrowed dimension.
        offset: Index along ``dim`` in ``source`` at which the narrowed tensor begins.
        index: Slices to read, one per dimension. They are relative to the narrowed tensor.
    """
    shifted = slice(index[dim].start + offset, index[dim].stop + offset)
    return source.read_slice((*index[:dim], shifted, *index[dim + 1 :]))


def _build_split_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], _: object, dim: int = 0
) -> list[ReadSlice]:
    """Return one reader for each result of ``torch.split`` along ``dim``.

    ``shapes`` contains the shapes of the results, which determine where each result begins.
    """
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
    """Return a list with a single reader, which reads from a slice of the input tensor.

    The slice contains the elements ``start:stop`` of the input tensor along ``dim``. The reader is
    a function that reads any part of this slice. ``sources`` must contain exactly one tensor. The
    argument and the return value are lists, because all functions that build readers have the same
    interface.

    Raises:
        NotTraceableError: If ``step`` is not 1.
    """
    (source,) = sources
    dim %= len(source.shape)
    if step != 1:
        raise NotTraceableError("the conversion uses a slice with a step other than 1")
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
    """Return a list with a single reader, which reads slices of the result of ``torch.select``.

    The operation is ``torch.select(source, dim, position)``, where ``source`` is the only tensor in
    ``sources``.
    """
    (source,) = sources
    dim, position = dim % len(source.shape), position % source.shape[dim]

    def read(index: Index) -> Tensor:
        return source.read_slice((*index[:dim], slice(position, position + 1), *index[dim:])).squeeze(dim)

    return [read]


def _build_unbind_readers(
    sources: list[LazyTensor], shapes: list[tuple[int, ...]], dim: int = 0
) -> list[ReadSlice]:
    """Build one reader for each result of ``torch.unbind(source, dim)``.

    The source is the only tensor in ``sources``. A reader is a function that reads a slice of a
    result.
    """
    return [_build_select_readers(sources, None, dim, position)[0] for position in range(len(shapes))]


def _build_identity_readers(sources: list[LazyTensor], *_: object) -> list[ReadSlice]:
    """Return the reader of the input tensor, in a list.

    This function is used for operations that do not move elements, such as ``clone``. The reader, a
    function that reads a slice of a tensor, then applies to the result as well.
    """
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
"""Functions that build the readers for the results of an operation, keyed by the name of the operation."""
