"""Activation memory of a forward or backward pass, for compilers that fuse operations, such as XLA.

Such a compiler does not store the result of a cheap operation. Each operation that reads the result
recomputes it. The set of stored results is therefore known only when the complete pass is known.
:class:`OperationTape` first records the operations of the pass. Then, :func:`compute_phase_peaks`
simulates which results the compiler writes to memory, as defined by the
:class:`portable.planner.pass_cost.CompilerModel` of the backend.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from portable.model.layers import find_transformer_layers
from portable.planner.pass_cost import Peak
from portable.private import torch_internals
from portable.private.torch_internals import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from portable.planner.pass_cost import CompilerModel, ResultKind

_MAX_RECOMPUTED_SIZES = 5
"""Maximum cost of recomputing a cheap result that several operations read.

The cost is the number of these operations plus a ratio: the total size of the stored values from
which the result is computed, divided by the size of the result. If the cost exceeds the maximum,
the result is written to memory. Otherwise, each operation that reads it recomputes it.
"""


@dataclass(frozen=True)
class RecordedValue:
    """Result of an operation, which the compiler may store in memory.

    A view is not recorded as a separate value, because it shares the storage of another value.
    """

    bytes: int
    """Size of the storage in bytes."""
    inputs: tuple[int, ...]
    """Indices of the recorded values that the operation reads."""
    result: ResultKind
    """Treatment of the result by the compiler. See :data:`portable.planner.pass_cost.ResultKind`."""


class OperationTape:
    """Recorder that observes the operations of a pass and computes the peak memory of each phase.

    It is used like :class:`portable.planner.activations.LiveStorageTracker`: the caller passes
    :meth:`run_operation` to :func:`portable.private.torch_internals.intercept_operations`, and each
    call of :meth:`end_phase` ends a phase.

    Args:
        model: Model with fake tensors. Its parameters and buffers are not counted. The gradient of
            a parameter is counted only during the operation that computes it, because gradients are
            not activation memory. The constructor changes the model in place: it registers hooks on
            the trained parameters, and wraps ``forward`` of the layers if the compiled pass loops
            over layers.
        compiler: Compiler that would run the pass.
    """

    def __init__(self, model: nn.Module, compiler: CompilerModel) -> None:
        self._compiler = compiler
        self._values: list[RecordedValue] = []
        # Index of the newest value in each storage. The model's own storages are not included.
        self._newest_values: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._transient_values: set[int] = set()
        self._phase_ends: list[int] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._remove_gradient)
        if compiler.loops_over_layers:
            for _, layer in find_transformer_layers(model):
                self._mark_saved_tensors(layer)

    def end_phase(self) -> None:
        """Record the end of the current phase, and begin the next phase."""
        self._phase_ends.append(len(self._values))

    def get_peaks(self) -> list[Peak]:
        """Compute the peak memory of each completed phase."""
        return [
            Peak(peak, 0)
            for peak in compute_phase_peaks(self._values, self._phase_ends, self._transient_values)
        ]

    def run_operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record its results.

        A view is not recorded. The result of an in-place operation is recorded as a new value,
        although it reuses a storage.

        Args:
            func: ATen operation.
            args: Positional arguments of the operation.
            kwargs: Keyword arguments of the operation.

        Returns:
            The results of the operation.
        """
        results = func(*args, **kwargs)
        storage_ids = [
            _get_storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        inputs = tuple(
            dict.fromkeys(self._newest_values[key] for key in storage_ids if key in self._newest_values)
        )
        name = func.overloadpacket.__name__
        kind = self._compiler.classify_result(name, elementwise=torch.Tag.pointwise in func.tags)
        for tensor in tree_leaves(results):
            if not isinstance(tensor, torch.Tensor):
                continue
            if (
                _get_storage_id(tensor) in storage_ids
                and not torch_internals.get_operation_schema(func).is_mutable
            ):
                continue  # The result is a view.
            self._values.append(RecordedValue(tensor.untyped_storage().nbytes(), inputs, kind))
            self._set_newest(tensor, len(self._values) - 1)
        return results

    def _set_newest(self, tensor: torch.Tensor, value: int) -> None:
        """Record which entry of ``_values`` a tensor's storage now contains.

        This overwrites an earlier record of the storage, for example after an in-place operation.
        The record is removed when the storage is freed.

        Args:
            tensor: Result of an operation.
            value: Index of the result in ``_values``.
        """
        storage = tensor.untyped_storage()
        key = torch_internals.get_storage_id(storage)
        if key not in self._references:

            def forget(_: Any) -> None:
                self._newest_values.pop(key, None)
                del self._references[key]

            self._references[key] = weakref.ref(storage, forget)
        self._newest_values[key] = value

    def _remove_gradient(self, parameter: torch.Tensor) -> None:
        """Mark a gradient as transient, because gradients are not activation memory.

        This hook runs after the gradient of ``parameter`` is accumulated. The memory of a transient
        value is counted only while the value is computed.
        """
        assert parameter.grad is not None
        value = self._newest_values.pop(_get_storage_id(parameter.grad), None)
        if value is not None:
            self._transient_values.add(value)

    def _mark_saved_tensors(self, layer: nn.Module) -> None:
        """Wrap a layer's ``forward`` so that all values that autograd saves in it count as stored.

        The memory estimate then keeps these values until the backward pass of all layers in the loop
        ends. A compiler that runs the layers in a loop has to store them, because the backward loop
        reads them. Without a loop, it could recompute some of them instead.
        """
        forward = layer.forward

        def save(tensor: torch.Tensor) -> torch.Tensor:
            value = self._newest_values.get(_get_storage_id(tensor))
            if value is not None:
                self._values[value] = replace(self._values[value], result="saved")
            return tensor

        def run_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                return forward(*args, **kwargs)

        layer.forward = run_forward


def _get_storage_id(tensor: torch.Tensor) -> int:
    """Return an integer that identifies the storage of a tensor while the storage exists."""
    key: int = torch_internals.get_storage_id(tensor.untyped_storage())
    return key


def compute_phase_peaks(
    values: Sequence[RecordedValue], phase_ends: Sequence[int], transient: set[int]
) -> list[int]:
    """Estimate which values a compiler writes to memory, and compute each phase's peak in bytes.

    First, matrix products are fused (see :func:`_fuse_elementwise_into_products`). Then, values of
    the kinds ``computed`` and ``rows`` are not written, but recomputed by each operation that reads
    them. If several operations read such a value and the cost of recomputation exceeds
    ``_MAX_RECOMPUTED_SIZES``, the value is written as well. Values of all other kinds are written.

    A written value occupies memory until its last use. An operation uses the value if it reads the
    value itself. It also uses the value if it reads another value that is recomputed from it.

    A compiled pass may run the layers in a loop. The backward loop then frees the values that
    autograd has saved in the layers only at its end. Therefore, all these values are kept until the
    last one is used.

    Args:
        values: Recorded values, in the order of computation.
        phase_ends: Number of recorded values at the end of each phase.
        transient: Indices of the values that only occupy memory while they are computed.
    """
    values = _fuse_elementwise_into_products(values)
    readers = [0] * len(values)
    for value in values:
        for behind in value.inputs:
            readers[behind] += 1
    # For each value: its own index if it is stored, otherwise the indices of the stored values that it is
    # recomputed from
    sources: list[frozenset[int]] = []
    # For each value: the index of the last value whose computation reads it
    last = list(range(len(values)))
    # For each value: the change of the live bytes when it is computed
    change = [0] * (len(values) + 1)
    for i, value in enumerate(values):
        needs = frozenset[int]().union(*(sources[j] for j in value.inputs))
        computed = value.result in ("computed", "rows")
        if computed and readers[i] > 1:
            taken = sum(values[j].bytes for j in needs)
            computed = taken <= (_MAX_RECOMPUTED_SIZES - readers[i]) * value.bytes
        if not computed:
            for j in needs:
                last[j] = i
        sources.append(needs if computed else frozenset((i,)))
    # Keep the saved values of all layers until the last one is read, because the backward loop frees them at
    # its end.
    end = max((last[i] for i, value in enumerate(values) if value.result == "saved"), default=0)
    for i, value in enumerate(values):
        if value.result == "saved":
            last[i] = end
    for i, value in enumerate(values):
        if sources[i] == {i}:
            change[i] += value.bytes
            change[(i if i in transient else last[i]) + 1] -= value.bytes
    phase_peaks, live, start = [], 0, 0
    for end in phase_ends:
        most = live
        for i in range(start, end):
            live += change[i]
            most = max(most, live)
        phase_peaks.append(most)
        start = end
    return phase_peaks


def _fuse_elementwise_into_products(values: Sequence[RecordedValue]) -> list[RecordedValue]:
    """Fuse matrix products with the elementwise operations that read them.

    A product is fused if a single operation reads it, this operation is elementwise, and its result
    is not larger than the product. The compiler then writes only the elementwise result to memory.
    A product is not fused if another product is computed between the product and the elementwise
    operation.

    Args:
        values: Recorded values, in the order of computation.

    Returns:
        Copy of the values, in which the field ``result`` differs for each fused pair. For the
        matrix product, it changes from ``product`` to ``computed``, because the product is not
        written to memory. For the elementwise result, it changes from ``computed`` to ``product``,
        because this result is written instead.
    """
    readers: list[list[int]] = [[] for _ in values]
    for i, value in enumerate(values):
        for behind in value.inputs:
            readers[behind].append(i)
    moved = list(values)
    for i, value in enumerate(values):
        if moved[i].result != "product" or len(readers[i]) != 1:
            continue
        reader = readers[i][0]
        if moved[reader].result != "computed" or moved[reader].bytes > value.bytes:
            continue
        # Do not fuse if another product lies in between, because the elementwise operation runs after that
        # product.
        if all(other.result != "product" for other in values[i + 1 : reader]):
            moved[i] = replace(moved[i], result="computed")
            moved[reader] = replace(moved[reader], result="product")
    return moved
