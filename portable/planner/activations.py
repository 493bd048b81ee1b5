"""Measure activation memory: the memory of a training pass in addition to parameters and gradients.

The model runs on fake tensors, which have shapes, dtypes, and storages, but no memory. All
allocations are counted during the run. The result is therefore valid for any architecture,
attention kernel, autocast, recomputation, and loss.

To save time, only copies of the model with few layers are run. For each layer type, one copy has
one more layer of this type. The difference in memory is the memory per layer, from which the memory
of the complete model is computed.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from portable.model.activation_checkpointing import enable_activation_checkpointing
from portable.model.activation_offloading import offload_activations
from portable.model.chunked_loss import install_chunked_head
from portable.model.context_parallel_support import repeat_key_heads
from portable.model.image_features import select_tower_arguments
from portable.model.layers import (
    LayerKinds,
    copy_with_only_layers,
    find_transformer_layers,
    group_layers_by_kind,
)
from portable.model.loss import compute_summed_cross_entropy
from portable.model.parameters import replace_by_fake_tensors
from portable.model.tensor_parallel_plan import shrink_to_one_rank
from portable.planner.fused_memory import OperationTape
from portable.planner.pass_cost import Activations, Peak, TowerMemory
from portable.private import torch_internals
from portable.private.transformers_internals import skip_mask_value_checks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portable.batch import Batch
    from portable.model.chunked_loss import ChunkedHead
    from portable.planner.pass_cost import PassRequest

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL, _GRADIENT, _COPY, _WORK = range(4)
"""Types of storages: parameters and buffers, complete gradients, copies of weights in the compute dtype, and
all other storages. Only the last two types are activation memory.
"""


def measure_activations(model: nn.Module, request: PassRequest) -> Activations:
    """Measure the peak activation memory of a forward and backward pass on fake tensors.

    Parameters, buffers and accumulated gradients are not counted.

    First, the model runs with few layers of each type. Then, for each layer type, it runs with one
    more layer of this type. The differences are extrapolated to the actual number of layers.

    Args:
        model: Model on the meta device. It is not modified.
        request: Pass to run.

    Raises:
        Exception: Any error of the model. The usual cause is control flow that depends on tensor
            values, because fake tensors have no values.
    """
    kinds = group_layers_by_kind(model)
    # The phase before the first gradient should end when the backward pass enters the layers. If most
    # parameters of a layer are frozen, or if a graph returns all gradients, the first gradient is ready only
    # late in the backward pass of the layer. In this case, run at least two layers, so that the phase
    # contains a complete layer in each run.
    # With offloading, the memory on the device no longer grows from the fourth layer on.
    late = request.compiler is not None or request.compiled
    base = {
        kind: min(
            len(names),
            4 if request.offload_activations else 1 + (late or _is_mostly_frozen(model, names[0])),
        )
        for kind, names in kinds.items()
    }
    first, first_host_bytes = _measure_passes(model, request, kinds, base)
    peaks, host_bytes = list(first), first_host_bytes
    for kind, names in kinds.items():
        more = len(names) - base[kind]
        if more == 0:
            continue
        deeper, deeper_host_bytes = _measure_passes(model, request, kinds, {**base, kind: base[kind] + 1})
        host_bytes += more * (deeper_host_bytes - first_host_bytes)
        peaks = [
            Peak(
                *(
                    size + more * (after - before)
                    for size, before, after in zip(peak, shallow, deep, strict=True)
                )
            )
            for peak, shallow, deep in zip(peaks, first, deeper, strict=True)
        ]
    forward, head, layers = peaks
    before_layers = max(forward, head, key=lambda peak: peak.total_bytes)
    return Activations(before_layers, layers, host_bytes=host_bytes)


def _is_mostly_frozen(model: nn.Module, layer: str) -> bool:
    """Return whether some, but less than half, of the elements of a layer's parameters are trained.

    Args:
        model: Model that contains the layer.
        layer: Dotted name of the layer's module.
    """
    parameters = list(model.get_submodule(layer).parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return 0 < trained < sum(p.numel() for p in parameters) / 2


def _measure_passes(
    model: nn.Module, request: PassRequest, kinds: LayerKinds, counts: dict[Any, int]
) -> tuple[list[Peak], int]:
    """Run the pass with some of the model's layers, and measure the peak memory of three phases.

    Args:
        model: Model on the meta device. It is not modified.
        request: Pass to run.
        kinds: Names of the layers of each type, keyed by type.
        counts: Number of layers to run of each type, keyed by type.

    Returns:
        Peaks of the three phases, and the size of the offloaded activations in bytes. The phases are
        the forward pass, the backward pass until the first gradient of a layer's parameter is complete,
        and the rest of the backward pass.
    """
    layer_names = {name for kind, names in kinds.items() for name in names[: counts[kind]]}
    small = copy_with_only_layers(model, layer_names)
    dtype = TORCH_DTYPES[request.precision]
    # Install the head before the parameters become fake tensors, because the installation tests the model on
    # the meta device.
    chunked = install_chunked_head(small, request.loss_chunk_tokens)
    shrink_to_one_rank(small, request.tensor_parallel_size)
    if chunked is not None:
        chunked.max_chunks = 2  # two chunks have the same peak as hundreds
    with torch_internals.create_fake_tensor_mode(allow_non_fake_inputs=True), ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # ignore warnings about fake tensors
        if request.compiler is not None and request.compiler.prepare_model is not None:
            request.compiler.prepare_model(small)
        replace_by_fake_tensors(small, dtype if request.compute == "cast" else None)
        if request.recompute != "none":
            enable_activation_checkpointing(small, request.recompute)
        copier = UnstoredCopier()
        if request.offload_activations:
            offload_activations(small, request.recompute, copier)
        small.train()
        batch = build_fake_batch(small, request)
        if request.compiled:
            _replace_layers_by_graphs(small)
            _compute_loss(small, batch, chunked, request).backward()  # traces the graphs
            small.zero_grad()
        watch = (
            LiveStorageTracker(small) if request.compiler is None else OperationTape(small, request.compiler)
        )
        stack.enter_context(torch_internals.intercept_operations(watch.run_operation))
        if request.compiler is not None:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if (rows := request.compiler.attention_rows) is not None:
                stack.callback(
                    torch_internals.wrap_attention(functools.partial(_make_chunked_attention, rows))
                )
            if (parts := request.compiler.context_parallel_size) > 1:
                stack.callback(
                    torch_internals.wrap_attention(functools.partial(_make_context_parallel_attention, parts))
                )
        with skip_mask_value_checks():
            loss = _compute_loss(small, batch, chunked, request)
            watch.end_phase()
            inside = [p for _, layer in find_transformer_layers(small) for p in layer.parameters()]
            seen: list[torch.Tensor] = []

            def record_gradient(parameter: torch.Tensor) -> None:
                if not seen:
                    watch.end_phase()
                seen.append(parameter)

            for parameter in inside:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(record_gradient)
            loss.backward()
        watch.end_phase()
        peaks = watch.get_peaks()
        return [*peaks[:2], peaks[-1]], copier.host_bytes


class UnstoredCopier:
    """Copier for activation offloading that stores no values and only counts the copied bytes.

    Attributes:
        host_bytes: Size of all copies to the host, in bytes.
    """

    def __init__(self) -> None:
        self.host_bytes = 0

    def copy_to_host(self, tensor: torch.Tensor) -> Any:
        """Count the bytes of a tensor instead of copying it, and return a description of the tensor.

        The description consists of the shape, the strides and the dtype.
        """
        self.host_bytes += tensor.numel() * tensor.element_size()
        return tensor.shape, tensor.stride(), tensor.dtype

    def copy_to_device(self, copies: list[Any]) -> list[torch.Tensor]:
        """Allocate a tensor for each result of :meth:`copy_to_host`, as a copy to the device would.

        The values of the tensors are undefined, because :meth:`copy_to_host` does not store any
        values.
        """
        return [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in copies]

    def record_copies(self) -> None:
        """Do nothing, because there are no copies to wait for."""

    def wait_for_copies(self, event: None) -> None:
        """Do nothing, because there are no copies to wait for."""


def _compute_loss(
    model: nn.Module, batch: Batch, head: ChunkedHead | None, request: PassRequest
) -> torch.Tensor:
    """Run the forward pass, and return the summed loss of a micro-batch.

    Args:
        model: Model with fake tensors.
        batch: Micro-batch of fake tensors.
        head: Output head that computes the loss in chunks. None to compute all logits at once.
        request: Request that specifies the precision and the type of autocast.
    """
    with ExitStack() as stack:
        stack.enter_context(skip_mask_value_checks())
        if request.compute == "autocast":
            dtype = TORCH_DTYPES[request.precision]
            if request.on_gpu:
                stack.enter_context(_CudaAutocast(dtype))
            stack.enter_context(torch.autocast("cpu", dtype))
        return compute_summed_cross_entropy(model, batch, head)


class _OriginalLayer(nn.Module):
    """Module that always calls a layer's original forward method, even after the method is replaced.

    Args:
        layer: Layer whose ``forward`` has not been replaced yet.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.forward = layer.forward


def _replace_layers_by_graphs(model: nn.Module) -> None:
    """Replace each layer's forward method by the graphs that inductor would compile for it.

    The forward graph saves the same activations as under inductor, because torch's partitioner
    chooses them in both cases. Only one layer of each type is traced, and all layers of the type
    share its graphs. The first forward pass traces the graphs, so the caller must run a pass before
    the pass that it measures.

    Args:
        model: Model with fake tensors. Modified in place.
    """
    for names in group_layers_by_kind(model).values():
        layers = [_OriginalLayer(model.get_submodule(name)) for name in names]
        graphs = torch_internals.trace_partitioned_graphs(functools.partial(functional_call, layers[0]))
        for original in layers:
            state = dict(original.named_parameters()) | dict(original.named_buffers())
            original.layer.forward = functools.partial(_call_graphs, graphs, state)


def _call_graphs(graphs: Any, state: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a layer through its traced graphs, instead of the code of its module.

    This function replaces the layer's forward method. See :func:`_replace_layers_by_graphs`.

    Args:
        graphs: Callable that runs the forward and backward graphs that inductor would compile.
        state: Parameters and buffers of the layer, keyed by name.
        args: Positional arguments of the layer's forward method.
        kwargs: Keyword arguments of the layer's forward method.
    """
    return graphs(state, args, kwargs)


def measure_image_tower(model: nn.Module, request: PassRequest, columns: Batch) -> TowerMemory:
    """Measure the memory of an image tower's forward pass by running it on fake tensors.

    Only tensors that depend on parameters are fake. The other tensors, such as the sizes of the
    images, have values, because the control flow of a tower depends on these sizes.

    Args:
        model: Model on the meta device. It is not modified.
        request: Pass of the complete model. Its precision, autocast and recomputation also apply to
            the tower.
        columns: Batch columns with the images of one sample, keyed by name. Other columns are
            ignored.

    Returns:
        Peak memory during the forward pass, and memory that is still in use after it. Both include
        the images, but not the parameters and buffers.

    Raises:
        Exception: Any error that the model raises.
    """
    tower: Any = copy.deepcopy(model)
    images = select_tower_arguments(tower, columns)
    with torch_internals.create_fake_tensor_mode(allow_non_fake_inputs=True), ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # ignore warnings about fake tensors
        replace_by_fake_tensors(tower, TORCH_DTYPES[request.precision] if request.compute == "cast" else None)
        if request.recompute != "none":
            enable_activation_checkpointing(tower, request.recompute)
        tower.train()
        watch = LiveStorageTracker(tower)
        watch.track_inputs(images.values())
        stack.enter_context(torch_internals.intercept_operations(watch.run_operation))
        stack.enter_context(torch_internals.compute_real_tensors())
        if request.compute == "autocast":
            stack.enter_context(torch.autocast("cpu", TORCH_DTYPES[request.precision]))
        features = tower.get_image_features(**images)
        remaining = watch.live_memory
        watch.end_phase()
        del features
    (peak,) = watch.get_peaks()
    return TowerMemory(peak, remaining)


def build_fake_batch(model: nn.Module, request: PassRequest) -> Batch:
    """Build a micro-batch of placeholder values with the shapes of a run's text batches.

    Columns for images and ``document_lengths`` are omitted. Packed documents have ``position_ids``
    only on a GPU or with a compiler. In a fake tensor mode, the tensors are fake tensors.

    Args:
        model: Model that receives the batch. Not used.
        request: Request that specifies the sizes, the task, and the packing.
    """
    shape = (request.micro_batch, request.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(request.micro_batch, request.target_seq_len, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": targets}
    if not request.packed:
        batch["attention_mask"] = torch.ones(shape, dtype=torch.int64)
    # Except on a CPU, position ids lead to a mask that separates the documents. On a CPU, attention runs on
    # one document at a time without a mask. This needs the most memory if a document fills its sample.
    if request.packed == "documents" and (request.on_gpu or request.compiler):
        batch["position_ids"] = torch.zeros(shape, dtype=torch.int64)
    if request.task == "seq2seq-lm":
        batch["decoder_input_ids"] = torch.zeros_like(targets)
    if request.task == "sequence-classification":
        batch["labels"] = torch.zeros(request.micro_batch, dtype=torch.int64)
    return batch


class LiveStorageTracker:
    """Tracker of the memory that a pass uses, and of the peak memory in each phase.

    The caller passes :meth:`run_operation` to
    :func:`portable.private.torch_internals.intercept_operations`. Storages are then counted from
    the operation that creates them until they are freed. A phase, such as the forward pass, ends
    when the caller calls :meth:`end_phase`.

    Args:
        model: Model that is run. Its parameters and buffers are not counted. The gradient of a
            parameter is counted only until autograd has accumulated it into ``grad``. For this, the
            constructor registers a hook on each trained parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kinds: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._live: Counter[int] = Counter()
        self._peak = Peak(0, 0)
        self._peaks: list[Peak] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self._track_storage(tensor, _MODEL)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._mark_complete_gradient)

    def track_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to track tensors that exist before the first operation, such as the input images.

        Their memory is then counted like the memory of operation results. A storage that several
        tensors share is counted once.
        """
        for tensor in tensors:
            self._track_storage(tensor, _WORK)

    def end_phase(self) -> None:
        """Record the peak memory of the current phase, and begin the next phase."""
        self._peaks.append(self._peak)
        self._peak = self.live_memory

    @property
    def live_memory(self) -> Peak:
        """Sizes of all live storages, excluding parameters, buffers, and accumulated gradients."""
        return Peak(self._live[_WORK], self._live[_COPY])

    def get_peaks(self) -> list[Peak]:
        """Return the peak memory of each completed phase."""
        return self._peaks

    def run_operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation, and add the memory of its results to the memory in use.

        A result that shares its storage with a tracked tensor, such as a view, is not counted
        again. A conversion of a parameter or buffer to another dtype, as under autocast, is counted
        in :attr:`Peak.copy_bytes`. All other results are counted in :attr:`Peak.work_bytes`.

        Args:
            func: Torch operation to run.
            args: Positional arguments of the operation.
            kwargs: Keyword arguments of the operation.

        Returns:
            The results of the operation.
        """
        if func is _GROUPED and args[0].dtype != torch.bfloat16:
            results = _run_grouped_mm(func, args, kwargs)
        else:
            results = func(*args, **kwargs)
        kind = _WORK
        if func is _TO_COPY and self._get_storage_kind(args[0]) == _MODEL:
            kind = _COPY
        for result in (
            [results] if isinstance(results, torch.Tensor) else torch_internals.tree_leaves(results)
        ):
            if isinstance(result, torch.Tensor):
                self._track_storage(result, kind)
        if self._peak.total_bytes < self.live_memory.total_bytes:
            self._peak = self.live_memory
        return results

    def _get_storage_kind(self, tensor: torch.Tensor) -> int | None:
        """Return the type of a tensor's storage, or None if the storage is not tracked.

        The type is ``_MODEL``, ``_GRADIENT``, ``_COPY`` or ``_WORK``.
        """
        return self._kinds.get(torch_internals.get_storage_id(tensor.untyped_storage()))

    def _track_storage(self, tensor: torch.Tensor, kind: int) -> None:
        """Add a tensor's storage to the memory in use, until the storage is freed.

        Does nothing if the storage is already tracked.

        Args:
            tensor: Fake tensor.
            kind: Category to which the memory belongs, such as ``_WORK`` for activations and
                temporary tensors.
        """
        storage = tensor.untyped_storage()
        key, size = torch_internals.get_storage_id(storage), storage.nbytes()
        if key in self._kinds:
            return

        def forget(_: Any) -> None:
            self._live[self._kinds.pop(key)] -= size
            del self._references[key]

        self._kinds[key] = kind
        self._references[key] = weakref.ref(storage, forget)
        self._live[kind] += size

    def _mark_complete_gradient(self, parameter: torch.Tensor) -> None:
        """Stop counting a parameter's gradient as activation memory.

        This hook runs after autograd has accumulated the gradient into ``grad``. Before, the
        gradient is part of :attr:`live_memory`, like any other tensor of the backward pass.
        """
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        key = torch_internals.get_storage_id(storage)
        if self._kinds.get(key) in (_WORK, _COPY):
            self._live[self._kinds[key]] -= storage.nbytes()
            self._kinds[key] = _GRADIENT
            self._live[_GRADIENT] += storage.nbytes()


_GROUPED, _TO_COPY = (
    torch_internals.get_private_aten_operation("grouped_mm"),
    torch_internals.get_private_aten_operation("to_copy"),
)


def _run_grouped_mm(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Compute a grouped matrix product of fake tensors in a dtype other than bfloat16.

    torch's fake implementation supports only bfloat16.
    """
    product = func(
        *(a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args),
        **kwargs,
    )
    return torch.empty_like(product, dtype=args[0].dtype)


def _make_chunked_attention(chunk_rows: int, attention: Any) -> Any:
    """Create an attention function with the peak memory of a computation in chunks.

    The function is only used to measure memory. It imitates a compiled loop that computes the
    scores of ``chunk_rows`` query tokens per iteration. Like that loop, it recomputes the scores in
    the backward pass. To save time, it computes only the first two chunks. More chunks would not
    increase the peak memory, because the loop reuses the memory of the scores. For all other query
    tokens, the function only creates results of the correct shape.

    Args:
        chunk_rows: Number of query tokens whose scores exist at the same time.
        attention: Attention function to call for each chunk.
    """

    def attend_by_rows(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any
    ) -> Any:
        parts: list[Any] = []
        for chunk in query[:, :, : 2 * chunk_rows].split(chunk_rows, dim=2):
            mask = attn_mask
            if mask is not None and mask.shape[2] > 1:
                mask = mask[:, :, : chunk.shape[2]]
            attend = functools.partial(attention, **options)
            parts.append(checkpoint(attend, chunk, key, value, mask, *rest, use_reentrant=False))
        # Further rows only need memory for their results, because a loop reuses the memory of the scores.
        parts.append(query[:, :, 2 * chunk_rows :] @ query.new_zeros(query.shape[-1], value.shape[-1]))
        return torch.cat(parts, dim=2)

    return attend_by_rows


def _make_context_parallel_attention(num_ranks: int, attention: Any) -> Any:
    """Create an attention function that simulates the memory usage of a context-parallel rank.

    Outside of attention, a rank has all heads, but only its part of each sequence. For attention,
    the ranks exchange data, so that each rank has the complete sequences, but only a fraction of
    the heads. The created function simulates this exchange by reshaping the tensors of a single
    process.

    Args:
        num_ranks: Number of context-parallel ranks.
        attention: Attention function to call.
    """

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any) -> Any:
        key, value = repeat_key_heads(num_ranks, key), repeat_key_heads(num_ranks, value)
        batch, heads, tokens, _ = query.shape
        tokens *= num_ranks
        gathered = [t.reshape(batch, -1, tokens, t.shape[-1]) for t in (query, key, value)]
        if attn_mask is not None:
            attn_mask = attn_mask[:, :, :1, :1].expand(-1, -1, tokens, tokens)
        output = attention(*gathered, attn_mask, *rest, **options)
        return output.reshape(batch, heads, -1, output.shape[-1])

    return attend


class _CudaAutocast(TorchFunctionMode):
    """Torch function mode that casts to fp32 before operations that CUDA's autocast runs in fp32.

    The planner measures memory with fake tensors on the CPU. The CPU's autocast runs fewer
    operations in fp32 than CUDA's autocast. This mode therefore casts the positional arguments of
    the operations in ``_IN_FP32``. It has no effect while the CPU's autocast is disabled.

    Args:
        dtype: Dtype of autocast, such as bf16. Only arguments with this dtype are cast.
    """

    _IN_FP32 = ("layer_norm", "softmax", "log_softmax", "group_norm", "softplus", "cumsum", "norm")

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self._IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(
                a.float() if isinstance(a, torch.Tensor) and a.dtype == self._dtype else a for a in args
            )
        return func(*args, **kwargs)
