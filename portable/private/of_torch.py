"""Every private or undocumented name of torch, and all that is replaced in it, as one small function each."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from portable.private import Package

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor

_torch = Package("torch", "2.15.0")

# -- tensors -----------------------------------------------------------------------------------------------


@_torch.needed_for("optimizer and offload under strategy full_shard")
def sharded_like(tensor: DTensor, part: Tensor, shape: Sequence[int] | None = None) -> DTensor:
    """A DTensor placed like ``tensor``, around ``part``, which may be on another device than the mesh.

    ``DTensor.from_local`` would move ``part`` to the devices of the mesh.

    Args:
        tensor: whose placement is taken.
        part: this rank's shard.
        shape: of the whole; None for that of ``tensor``.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = tensor._spec
    if shape is not None:
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, part.dtype)
        spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


@_torch.needed_for("checkpoints under strategy full_shard")
def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank's shard covers."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


@_torch.needed_for("checkpoints and portable-plan")
def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that is the same for all Python objects of one storage."""
    return int(storage._cdata)


@_torch.needed_for("train.loss and train.callbacks")
def changes(tensor: Tensor) -> int:
    """What rises with each change of ``tensor`` in place. A host number: no sync."""
    return tensor._version


@_torch.needed_for("xla.scan_layers")
def root_and_replay(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """What ``tensor`` is a view of, and what makes the same view of another; itself and None if no view."""
    if not tensor._is_view():
        return tensor, None
    root, replay = tensor._base, tensor._view_func  # type: ignore[attr-defined]
    assert root is not None
    return root, replay


@_torch.needed_for("portable-plan")
def is_fake(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one of :func:`fake_tensors`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


@_torch.needed_for("portable-plan")
def fake_tensors() -> Any:
    """A context in which tensors have shapes and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def tree_leaves(tree: Any) -> list[Any]:
    """The values in nested lists, tuples and dicts."""
    return tree_flatten(tree)[0]


@_torch.needed_for("nested inputs and outputs of layers")
def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The values in nested lists, tuples and dicts, and their structure."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


@_torch.needed_for("nested inputs and outputs of layers")
def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """As :func:`tree_flatten`, each value with its place."""
    from torch.utils import _pytree

    return _pytree.tree_flatten_with_path(tree)


@_torch.needed_for("nested inputs and outputs of layers")
def tree_unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """The inverse of :func:`tree_flatten`."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


# -- operations --------------------------------------------------------------------------------------------


@contextmanager
@_torch.needed_for("portable-plan and --check-waits")
def every_operation(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Within this context, do ``call(operation, arguments, keywords)`` in place of each operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(func, args, kwargs or {})

    with Mode():  # type: ignore[no-untyped-call]
        yield


@_torch.needed_for("portable-plan, --check-waits and memory.activation_checkpointing selective")
def aten(name: str) -> Any:
    """ATen's operation ``name`` whose name begins with an underscore, given without it."""
    return getattr(torch.ops.aten, f"_{name}").default


@_torch.needed_for("portable-plan --compile")
def changes_its_inputs(operation: Any) -> bool:
    """Whether an operation writes to a tensor that it gets."""
    return bool(operation._schema.is_mutable)


@_torch.needed_for("train.optimizer: sgd")
def fused_sgd_(
    parameters: list[Tensor], gradients: list[Tensor], moments: list[Tensor], **settings: Any
) -> None:
    """Update ``parameters`` in one kernel."""
    torch._fused_sgd_(parameters, gradients, moments, **settings)


@_torch.needed_for("precision: fp16")
def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all ``tensors`` in place, in one kernel where the device has one."""
    torch._foreach_mul_(tensors, factor)


@_torch.needed_for("train.optimizer")
def masks_its_steps(optimizer: Any) -> bool:
    """Whether an optimizer skips a step by itself where a gradient is not finite."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def replace_attention(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Wrap ``scaled_dot_product_attention``; calling the result undoes it."""
    functional: Any = torch.nn.functional
    whole = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = wrap(whole)
    return partial(setattr, functional, "scaled_dot_product_attention", whole)


# -- modules -----------------------------------------------------------------------------------------------


@_torch.needed_for("model")
def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The submodules of ``module`` by name, a dict to change."""
    return module._modules


@_torch.needed_for("adapter")
def with_children(module: Any, changed: dict[str, Any]) -> Any:
    """A copy of ``module`` that has other submodules and shares the rest."""
    made = copy.copy(module)
    made._modules = changed
    return made


@_torch.needed_for("data.packing: documents")
def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile`` was called."""
    return module._compiled_call_impl is not None


@contextmanager
def constructors_replaced(
    classes: Collection[type[nn.Module]], wrap: Callable[[Callable[..., None]], Callable[..., None]]
) -> Iterator[None]:
    """Within this context, wrap the constructor of each class, its inherited one if it has none."""
    kinds: list[Any] = list(classes)
    own = {kind: vars(kind).get("__init__") for kind in kinds}
    made = {kind: wrap(kind.__init__) for kind in kinds}
    try:
        for kind in kinds:
            kind.__init__ = made[kind]
        yield
    finally:
        for kind in kinds:
            if own[kind] is None:
                del kind.__init__
            else:
                kind.__init__ = own[kind]


# -- the compiler ------------------------------------------------------------------------------------------


@_torch.needed_for("compile: true")
def keep_compiling(recompile_limit: int) -> None:
    """Allow ``recompile_limit`` different layers; past the limit they would silently run uncompiled."""
    dynamo = torch._dynamo.config
    # A layer's number among its attributes is no reason to recompile. Importing torch_xla, which transformers
    # does where it is installed, turns automatic dynamic shapes off.
    dynamo.allow_unspec_int_on_nn_module = True
    dynamo.automatic_dynamic_shapes = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, recompile_limit)


@contextmanager
def no_compiler() -> Iterator[None]:
    """Within this context, ``torch.compile`` compiles nothing."""
    compiler: Any = torch.compile
    stand_in: Any = lambda function=None, **_: function or (lambda later: later)  # noqa: E731
    torch.compile = stand_in
    try:
        yield
    finally:
        torch.compile = compiler


@_torch.needed_for("ops of DeepSpeed")
def build_folder(op: str) -> str:
    """The folder in which torch builds a C++ extension."""
    from torch.utils.cpp_extension import _get_build_directory

    return _get_build_directory(op, verbose=False)


# -- the GPU's memory --------------------------------------------------------------------------------------


@_torch.needed_for("log.memory_snapshot")
def record_memory_history(entries: int) -> None:
    """Record up to ``entries`` allocations on the GPU."""
    torch.cuda.memory._record_memory_history(max_entries=entries)


@_torch.needed_for("log.memory_snapshot")
def dump_memory_snapshot(path: Path) -> None:
    """Write the recorded allocations as https://pytorch.org/memory_viz reads them."""
    torch.cuda.memory._dump_snapshot(str(path))


# -- process groups ----------------------------------------------------------------------------------------


@_torch.needed_for("NCCL's flight recorder")
def dump_nccl_trace() -> bytes:
    """The contents of NCCL's flight recorder: a pickle, as ``torchfrtrace`` reads it."""
    from torch._C import _distributed_c10d

    return bytes(_distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]


@_torch.needed_for("train.micro_batch_size: auto")
def detach_process_groups() -> list[Any]:
    """Let this process start a new default group; return the present groups, whose connections stay open.

    Keep the result: dropping a group closes its connections, and other ranks would fail.
    """
    world: Any = dist.distributed_c10d._world
    groups = list(world.pg_map)
    world.default_pg = None
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        known.clear()
    return groups


@_torch.needed_for("train.micro_batch_size: auto")
def start_fake_group(rank: int, world_size: int) -> None:
    """Start a process group whose collectives move nothing and never wait."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@_torch.needed_for("errors of other ranks")
def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()
