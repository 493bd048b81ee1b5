"""Wrap the private torch_xla APIs that this package uses.

There are no public APIs for sharded transfers, seeds, barriers and graphs.
"""

from __future__ import annotations

from typing import Any

from portable.private import GuardedPackage

_torch_xla = GuardedPackage("torch_xla", "2.9.0")


class _XlaBinding:
    """Descriptor for a function in torch_xla's C++ bindings, which is looked up on each access.

    The access raises UserError if the installed torch_xla does not have the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @_torch_xla.explain_missing_names("backend: xla")
    def __get__(self, instance: object, owner: type) -> Any:
        import torch_xla

        bindings: Any = torch_xla._XLAC  # type: ignore[attr-defined, unused-ignore]
        return getattr(bindings, self._name)


class _XlaBindings:
    """Namespace for functions in torch_xla's C++ bindings.

    Use the instance :data:`xla`. For example, ``xla.wait`` is
    ``torch_xla._XLAC._xla_wait_device_ops``.
    """

    are_pending = _XlaBinding("_check_tensor_need_materialization")
    barrier_ = _XlaBinding("_xla_optimization_barrier_")
    caches_graphs = _XlaBinding("_xla_computation_cache_is_initialized")
    clear_pending = _XlaBinding("_clear_pending_irs")
    cpu_tensors = _XlaBinding("_xla_get_cpu_tensors")
    debug_info = _XlaBinding("_get_xla_tensor_debug_info")
    device_data = _XlaBinding("_get_tensors_xla_device_data_node")
    from_cpu_shards = _XlaBinding("_global_tensor_from_cpu_shards")
    graph_hash = _XlaBinding("_get_graph_hash")
    graph_text = _XlaBinding("_get_xla_tensors_text")
    local_shards = _XlaBinding("_get_local_shards")
    mark_sharding = _XlaBinding("_xla_mark_sharding")
    real_devices = _XlaBinding("_xla_real_devices")
    rng_seed = _XlaBinding("_xla_get_rng_seed")
    set_matmul_precision = _XlaBinding("_xla_set_mat_mul_precision")
    set_rng_seed = _XlaBinding("_xla_set_rng_seed")
    shard_places = _XlaBinding("_get_local_shard_replica_and_indices")
    sharding_of = _XlaBinding("_get_xla_sharding_spec")
    tensor_id = _XlaBinding("_xla_get_tensor_id")
    user_computation = _XlaBinding("_xla_user_computation")
    wait = _XlaBinding("_xla_wait_device_ops")


xla = _XlaBindings()


lowering_context = _torch_xla.wrap_private_function(
    "torch_xla:_XLAC.lowering.LoweringContext", "backend: xla"
)
"""Class that lowers tensors with pending operations to an HLO graph. The argument is the graph's name."""
