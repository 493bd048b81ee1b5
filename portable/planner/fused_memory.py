"""Memory of a pass that a compiler runs with fused operations.

A compiler does not store cheap results, but computes them again for each operation that reads them. So these
results require no memory. First, the operations of the pass are recorded. Then, the memory at each point
follows from the results that the compiler writes to memory. The backend defines which results are written.
See :class:`portable.planner.pass_cost.CompilerModel`.
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
"""Limit for recomputing a result that several operations read.

The result is written to memory if the number of its readers, plus the ratio of its input size to its own
size, exceeds this limit. Otherwise, each reader recomputes it.
"""


@dataclass(frozen=True)
class RecordedValue:
    """Result of an operation. Views of the result are the same value."""

    bytes: int
    inputs: tuple[int, ...]
    """Indices of the values that this value is computed from."""
    result: ResultKind


class OperationTape:
    """Recorder for the operations of a pass on fake tensors.

    Args:
        model: Model that is run. Its parameters and buffers are not values of the pass, and neither are
            gradients after they are complete.
        compiler: Compiler of the pass.
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
        """End a phase, and begin the next phase with a separate peak."""
        self._phase_ends.append(len(self._values))

    def get_peaks(self) -> list[Peak]:
        """Compute the peak of each completed phase."""
        return [
            Peak(peak, 0)
            for peak in compute_phase_peaks(self._values, self._phase_ends, self._transient_values)
        ]

    def run_operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record its results.

        Args:
            func: Operation of torch.
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
        """Record that the storage of a tensor contains a new value."""
        storage = tensor.untyped_storage()
        key = torch_internals.get_storage_id(storage)
        if key not in self._references:

            def forget(_: Any) -> None:
                self._newest_values.pop(key, None)
                del self._references[key]

            self._references[key] = weakref.ref(storage, forget)
        self._newest_values[key] = value

    def _remove_gradient(self, parameter: torch.Tensor) -> None:
        """Count the value of a complete gradient as transient, because gradients are not part of the pass."""
        assert parameter.grad is not None
        value = self._newest_values.pop(_get_storage_id(parameter.grad), None)
        if value is not None:
            self._transient_values.add(value)

    def _mark_saved_tensors(self, layer: nn.Module) -> None:
        """Wrap the layer's ``forward`` to mark all values that autograd saves in it as written.

        The compiler runs the layers in a loop and passes these values to the backward loop.
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
    key: int = torch_internals.get_storage_id(tensor.untyped_storage())
    return key


def compute_phase_peaks(
    values: Sequence[RecordedValue], phase_ends: Sequence[int], transient: set[int]
) -> list[int]:
    """Compute the peak memory of each phase in bytes.

    Args:
        values: Values, in the order of computation.
        phase_ends: Number of values at the end of each phase.
        transient: Numbers of the values that only require memory while they are computed.
    """
    values = _fuse_elementwise_into_products(values)
    readers = [0] * len(values)
    for value in values:
        for behind in value.inputs:
            readers[behind] += 1
    # For each value, the written values that are necessary to compute it
    sources: list[frozenset[int]] = []
    last = list(range(len(values)))
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
    # A loop keeps the saved values of all layers until its end.
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
    """Move matrix products to the elementwise operations that consume them.

    If a single elementwise operation reads a product and its result is not larger, the compiler writes the
    result of the elementwise operation instead of the product.
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
        # otherwise, the operation runs later
        if all(other.result != "product" for other in values[i + 1 : reader]):
            moved[i] = replace(moved[i], result="computed")
            moved[reader] = replace(moved[reader], result="product")
    return moved
