"""Functions that use private APIs of torch, and patches of some torch functions."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.private import GuardedPackage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_torch = GuardedPackage("torch", "2.15.0")

# -- tensors -----------------------------------------------------------------------------------------------


@_torch.explain_missing_names("optimizer and offload under strategy full_shard")
def build_dtensor_like(
    tensor: DTensor, local_shard: Tensor, global_shape: Sequence[int] | None = None
) -> DTensor:
    """Build a DTensor from a local shard on any device, with the mesh and placements of ``tensor``.

    ``DTensor.from_local`` cannot be used, because it moves the shard to the device type of the mesh.

    Args:
        tensor: DTensor that provides the mesh and placements.
        local_shard: Shard of this rank.
        global_shape: Global shape. None for the shape of ``tensor``.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = tensor._spec
    if global_shape is not None:
        stride = torch.empty(global_shape, device="meta").stride()
        meta = TensorMeta(torch.Size(global_shape), stride, local_shard.dtype)
        spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(local_shard, spec, requires_grad=False)


@_torch.explain_missing_names("checkpoints under strategy full_shard")
def compute_shard_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Compute the slices of the global tensor that this rank's shard covers, one for each dimension.

    If a dimension is interleaved (see :func:`build_interleaved_placement`), the elements of the
    shard are not contiguous. The slice then has the start and the size of the shard, but not
    exactly its elements. :func:`portable.optim.local_shards.list_shard_blocks` computes the actual
    parts.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


@_torch.explain_missing_names("adapter.target_parameters with expert_parallel_size")
def build_interleaved_placement(dim: int, num_blocks: int) -> Placement:
    """Build a placement that divides a dimension into blocks, and shards each block over the ranks.

    The shard of a rank is the concatenation of its parts of all blocks.

    Args:
        dim: The sharded dimension.
        num_blocks: Number of blocks. The size of a block must be a multiple of the number of ranks.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=num_blocks)


@_torch.explain_missing_names("checkpoints under strategy full_shard")
def count_interleaved_blocks(tensor: DTensor) -> int:
    """Return the number of interleaved blocks of a tensor, or 1 if it is not interleaved.

    :func:`build_interleaved_placement` describes the blocks. Only the placement on the last axis of
    the device mesh is checked, because FSDP2's placements on other axes are not interleaved.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = tensor.placements[-1]
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


build_storage_prefix = _torch.wrap_private_function(
    "torch.distributed.checkpoint.filesystem:_StoragePrefix", "checkpoints under strategy full_shard"
)
"""Build the ``storage_data`` of a DCP save plan, which sets the prefix of the written files' names."""
get_storage_id = _torch.wrap_private_attribute("_cdata", "checkpoints and portable-plan")
"""Return an integer that identifies a storage. It is equal for all Python objects of the same storage."""
get_tensor_version: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place changes of a tensor, without a host-device sync.

There is no check for a missing name, so that the function is fast enough to be called in every step.
"""


class ViewOrigin(NamedTuple):
    """Base tensor of a view, and a function that recreates the view.

    Attributes:
        root: Base tensor of the view, or the tensor itself if it is not a view.
        replay: Function that applies the same view to another tensor. None if the tensor is not a view.
    """

    root: Tensor
    replay: Callable[[Tensor], Tensor] | None


@_torch.explain_missing_names("xla.scan_layers")
def find_view_origin(tensor: Tensor) -> ViewOrigin:
    """Find the base tensor of a view, and a function that recreates the view from a base tensor.

    If ``tensor`` is not a view, the result contains ``tensor`` itself and no function.
    """
    if not tensor._is_view():
        return ViewOrigin(tensor, None)
    root, replay = tensor._base, tensor._view_func  # type: ignore[attr-defined]
    assert root is not None
    return ViewOrigin(root, replay)


@contextmanager
@_torch.explain_missing_names("model.init: scratch")
def replace_truncated_normal(draw: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the implementation of ``torch.nn.init.trunc_normal_`` within this context.

    The function that is replaced is the private ``_no_grad_trunc_normal_``, which ``trunc_normal_``
    calls. The replacement is therefore also used by code that has imported ``trunc_normal_`` by
    name.

    Args:
        draw: Replacement. It is called with the original function, followed by the arguments of the
            call: ``tensor, mean, std, a, b, generator``.
    """
    module: Any = torch.nn.init
    name = "_no_grad_trunc_normal_"
    function = getattr(module, name)

    def trunc_normal(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        return draw(function, tensor, mean, std, a, b, generator)

    setattr(module, name, trunc_normal)
    try:
        yield
    finally:
        setattr(module, name, function)


create_fake_tensor_mode = _torch.wrap_private_function(
    "torch._subclasses.fake_tensor:FakeTensorMode", "portable-plan"
)
"""Create a fake tensor mode, a context in which tensors have shapes but no values."""
is_fake_tensor = _torch.wrap_private_function("torch._subclasses.fake_tensor:is_fake", "portable-plan")
"""Return whether a tensor is a fake tensor, which has no values."""
_TREES = "nested inputs and outputs of layers"
tree_leaves = _torch.wrap_private_function("torch.utils._pytree:tree_leaves", _TREES)
tree_flatten = _torch.wrap_private_function("torch.utils._pytree:tree_flatten", _TREES)
tree_flatten_with_path = _torch.wrap_private_function("torch.utils._pytree:tree_flatten_with_path", _TREES)
tree_unflatten = _torch.wrap_private_function("torch.utils._pytree:tree_unflatten", _TREES)

# -- operations --------------------------------------------------------------------------------------------


@contextmanager
@_torch.explain_missing_names("portable-plan")
def compute_real_tensors() -> Iterator[None]:
    """Run operations on real tensors even in fake tensor mode, unless an argument is a fake tensor.

    Within this context, the results of such operations have values. The control flow of a model may
    need these values. Operations without tensor arguments, such as ``torch.zeros``, also return
    real tensors.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if any(is_fake_tensor(leaf) for leaf in tree_leaves((args, kwargs))):
                return func(*args, **kwargs)
            with unset_fake_temporarily():
                return func(*args, **kwargs)

    with Mode():  # type: ignore[no-untyped-call]
        yield


@contextmanager
@_torch.explain_missing_names("portable-plan")
def intercept_operations(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Call ``call(operation, arguments, keywords)`` instead of each ATen operation within this context.

    Operations inside ``call`` are not intercepted.

    Args:
        call: Function that returns the result of the operation.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(func, args, kwargs or {})

    with Mode():  # type: ignore[no-untyped-call]
        yield


@_torch.explain_missing_names("portable-plan with compile")
def trace_partitioned_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs as the forward and backward graphs that inductor would compile.

    The first call traces the graphs. Later calls reuse the graphs, so the shapes of the arguments
    must not change. The graphs run operation by operation, without compilation. The forward graph
    saves the same values for the backward graph as it would under inductor. Therefore, the memory
    of the compiled function can be measured without compiling it.
    """
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    run: Any = boxed_nop
    graphs: Callable[..., Any] = aot_function(
        function,
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return graphs


@_torch.explain_missing_names("portable-plan and memory.activation_checkpointing selective")
def get_private_aten_operation(name: str) -> Any:
    """Return the default overload of a private ATen operation.

    Args:
        name: Name of the operation without its leading underscore.
    """
    return getattr(torch.ops.aten, f"_{name}").default


@_torch.explain_missing_names("memory.activation_checkpointing selective")
def exclude_profiler_from_selective_checkpoints() -> None:
    """Make selective activation checkpointing ignore profiler ranges.

    This allows the recomputation of a layer to open different profiler ranges than the forward
    pass. The ranges differ if the layer contains an FSDP unit.

    The function extends ``SAC_IGNORED_OPS``, torch's global set of ignored operations.
    """
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    ops = torch.ops.profiler
    SAC_IGNORED_OPS.update(
        {ops._record_function_enter_new.default, ops._record_function_exit._RecordFunction}
    )


get_operation_schema = _torch.wrap_private_attribute("_schema", "portable-plan --compile")
"""Return the schema of an ATen operation: its arguments, and which of them it changes in place."""
fused_sgd_ = _torch.wrap_private_function("torch:_fused_sgd_", "train.optimizer: sgd")
"""Update a list of parameters in place with the fused kernel of SGD."""
multiply_tensors_ = _torch.wrap_private_function("torch:_foreach_mul_", "precision: fp16")
"""Multiply a list of tensors in place by a scalar tensor, in one kernel if the device supports this."""
skips_non_finite_steps = _torch.wrap_private_attribute("_step_supports_amp_scaling", "train.optimizer", False)
"""Return whether an optimizer's ``step`` skips the update by itself if its attribute ``found_inf`` is 1."""


def wrap_attention(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` by a wrapped version in this process.

    Args:
        wrap: Function that wraps the original function.

    Returns:
        A function that restores the original function.
    """
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = wrap(original)
    return partial(setattr, functional, "scaled_dot_product_attention", original)


# -- modules -----------------------------------------------------------------------------------------------

get_submodules = _torch.wrap_private_attribute("_modules", "model")
"""Return the dict that a module uses for its submodules, keyed by name. Changing the dict changes the
module."""


@_torch.explain_missing_names("adapter")
def copy_with_submodules(module: Any, changed: dict[str, Any]) -> Any:
    """Create a shallow copy of a module that has the given submodules instead of its own.

    The copy shares all other attributes.

    Args:
        module: Module to copy.
        changed: All submodules of the copy, keyed by name.
    """
    module_copy = copy.copy(module)
    module_copy._modules = changed
    return module_copy


get_version = _torch.wrap_private_attribute("_version", "memory.offload_activations")
"""Return the number of times that a tensor has been changed in place."""
get_compiled_call = _torch.wrap_private_attribute("_compiled_call_impl", "data.packing: documents")
"""Return the function that ``module.compile`` created, or None if it was not called."""


# -- the compiler ------------------------------------------------------------------------------------------


@_torch.explain_missing_names("compile: true")
def raise_recompile_limit(recompile_limit: int) -> None:
    """Allow ``torch.compile`` to compile one function at least ``recompile_limit`` times.

    All layers of a class share one limit. Beyond the limit, torch would silently run further layers
    without compiling them.

    The function also turns on automatic dynamic shapes in torch's compiler. In addition, it turns
    on ``allow_unspec_int_on_nn_module``, so that layers with different indices can share a graph.
    """
    dynamo = torch._dynamo.config
    # Avoid one compilation per layer, because layers store their index as an attribute. Set automatic dynamic
    # shapes explicitly, because importing torch_xla turns them off, and transformers imports torch_xla if it
    # is installed.
    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.automatic_dynamic_shapes = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, recompile_limit)


@contextmanager
def disable_compiler() -> Iterator[None]:
    """Replace ``torch.compile`` within this context by a function that returns its argument unchanged."""
    compiler: Any = torch.compile
    stand_in: Any = lambda function=None, **_: function or (lambda later: later)  # noqa: E731
    torch.compile = stand_in
    try:
        yield
    finally:
        torch.compile = compiler


get_build_folder = _torch.wrap_private_function(
    "torch.utils.cpp_extension:_get_build_directory", "ops of DeepSpeed"
)
"""Return the folder in which torch builds a C++ extension."""

# -- the GPU's memory --------------------------------------------------------------------------------------

record_memory_history = _torch.wrap_private_function(
    "torch.cuda.memory:_record_memory_history", "log.memory_snapshot"
)
"""Start or stop recording the allocations on the GPU."""
dump_memory_snapshot = _torch.wrap_private_function("torch.cuda.memory:_dump_snapshot", "log.memory_snapshot")
"""Write the recorded allocations to a file for https://pytorch.org/memory_viz."""

# -- process groups ----------------------------------------------------------------------------------------

dump_nccl_trace = _torch.wrap_private_function(
    "torch._C._distributed_c10d:_dump_nccl_trace", "NCCL's flight recorder"
)
"""Return the contents of NCCL's flight recorder as bytes, a pickle that ``torchfrtrace`` reads."""


@_torch.explain_missing_names("data.num_workers")
def kill_data_workers(batches: Any) -> None:
    """Kill the workers of a ``DataLoader`` iterator, and stop its pin-memory thread.

    Use this function after one of the workers was killed, because torch would otherwise wait for all of
    them.

    Args:
        batches: Iterator of the ``DataLoader``.
    """
    for worker in getattr(batches, "_workers", ()):
        batches._shutdown = True
        worker.kill()
    if (pinning := getattr(batches, "_pin_memory_thread_done_event", None)) is not None:
        pinning.set()  # ends the thread that pins memory


@_torch.explain_missing_names("data.num_workers")
@contextmanager
def prefix_semaphores(prefix: str) -> Iterator[None]:
    """Use a prefix for the names of ``multiprocessing`` semaphores created in this context.

    The prefix replaces Python's default prefix ``/mp``, and must also begin with a slash.
    """
    from multiprocessing import process

    current: Any = process.current_process()
    settings: dict[str, Any] = current._config
    before = settings["semprefix"]
    settings["semprefix"] = prefix
    try:
        yield
    finally:
        settings["semprefix"] = before


@_torch.explain_missing_names("data.num_workers")
def unlink_semaphores(queues: list[Any]) -> None:
    """Unlink the semaphores of queues, so that no semaphore remains in the system if this process dies.

    The semaphores remain usable. Other processes need the names to open the queues, so call this
    function only after all processes have opened the queues.

    Args:
        queues: Queues of ``multiprocessing``.
    """
    from multiprocessing import util
    from multiprocessing.synchronize import SemLock

    locks = [lock for queue in queues for lock in (queue._rlock, queue._wlock, queue._sem)]
    names = {lock._semlock.name for lock in locks if lock is not None}
    registry: dict[Any, Any] = getattr(util, "_finalizer_registry", {})
    for finalizer in list(registry.values()):
        if finalizer._callback is getattr(SemLock, "_cleanup", None) and finalizer._args[0] in names:
            finalizer()  # otherwise it would run at exit and fail


@_torch.explain_missing_names("train.micro_batch_size: auto")
def detach_process_groups() -> list[Any]:
    """Detach this process from its process groups, so that it can start a new default group.

    Returns:
        The detached groups. Keep a reference to them. Freeing a group closes its connections, which
        would make the other ranks fail.
    """
    import torch.distributed as dist

    world: Any = dist.distributed_c10d._world
    groups = list(world.pg_map)
    world.default_pg = None
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.clear()
    return groups


@_torch.explain_missing_names("train.micro_batch_size: auto")
def start_fake_process_group(rank: int, world_size: int) -> None:
    """Start a process group whose collectives transfer nothing and never block."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


get_default_store = _torch.wrap_private_function(
    "torch.distributed.distributed_c10d:_get_default_store", "errors of other ranks"
)
"""Return the store of the default process group."""
