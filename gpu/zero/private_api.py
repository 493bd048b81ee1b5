"""Wrap the private and undocumented DeepSpeed APIs that this project uses.

``tests/gpu/test_deepspeed_api.py`` checks these APIs in the installed release. If a DeepSpeed
upgrade changes them, only this module needs to be updated.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.private import GuardedPackage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

PACKAGE = GuardedPackage("deepspeed", "0.19.8")
_FEATURE = "strategy: zero1, zero2 and zero3"

# -- process-wide state ----------------------------------------------------------------------------------


def disable_shared_memory_collectives(deepspeed: Any) -> None:
    """Prevent DeepSpeed from compiling its C++ collectives for CPU ranks.

    This saves a minute at startup. The function marks the op ``deepspeed_shm_comm`` as incompatible
    in ``deepspeed.ops``, so it must be called before ``deepspeed.init_distributed``.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def reset_parameter_numbering(deepspeed: Any) -> None:
    """Restart DeepSpeed's numbering of parameters and modules from 0.

    DeepSpeed never resets its counters. The numbers are part of swap file names, and ranks compare
    them. Without a reset, they would differ between the first and second run in a process, so that
    other processes could not resume the second run's checkpoints.
    """
    deepspeed.zero.Init.param_id = 0
    offload = deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0


def has_communicator(deepspeed: Any) -> bool:
    """Return whether DeepSpeed was started and has a communication backend."""
    return deepspeed.comm.comm.cdb is not None


def drop_communicator(deepspeed: Any) -> None:
    """Drop DeepSpeed's communication backend.

    DeepSpeed then creates a new one when it is initialized again.
    """
    deepspeed.comm.comm.cdb = None


def release_cached_models(deepspeed: Any) -> None:
    """Drop references to models from stage 3's global caches, to free the models' memory."""
    zero = deepspeed.runtime.zero
    # If a release of DeepSpeed does not have these attributes, this only leaks memory, so the run must not
    # fail at its end.
    with suppress(AttributeError, KeyError):
        zero.parameter_offload.FWD_MODULE_STACK.clear()
        # All instances share the cache of this method, which keeps them and their modules in memory.
        coordinator = zero.partitioned_param_coordinator.PartitionedParameterCoordinator
        cached = coordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


# -- the engine ------------------------------------------------------------------------------------------


def get_basic_optimizer(engine: Any) -> Any:
    """Return the optimizer that was passed to ``deepspeed.initialize``."""
    return engine.basic_optimizer


def set_step_count(engine: Any, steps: int) -> None:
    """Set DeepSpeed's step count, from which it derives the name of its folder in a checkpoint."""
    engine.global_steps = steps


def set_sample_count(engine: Any, global_batch_size: int) -> None:
    """Set DeepSpeed's sample count to the number of steps times the global batch size.

    DeepSpeed's count is wrong: each part of a context-parallel sequence counts as a sample, and only
    the current launch is counted.
    """
    engine.global_samples = engine.global_steps * global_batch_size


def set_clipping_norm(zero_optimizer: Any, max_norm: float) -> None:
    """Set the maximum gradient norm for clipping in DeepSpeed. 0 disables clipping."""
    zero_optimizer.clip_grad = max_norm


def get_dynamic_loss_scaler(zero_optimizer: Any) -> Any:
    """Return DeepSpeed's dynamic loss scaler, or None if the loss scale is fixed, as in bf16 and fp32."""
    scaler = zero_optimizer.loss_scaler
    return scaler if scaler.dynamic else None


def is_scale_exhausted(error: Exception) -> bool:
    """Return whether a DeepSpeed error means that gradients overflow at the lowest loss scale."""
    return "loss scale already at minimum" in str(error)


def replace_file_saver(engine: Any, save_file: Any) -> bool:
    """Make DeepSpeed call ``save_file(state_dict, path)`` for each checkpoint file.

    Returns:
        Whether DeepSpeed's configuration requests ``torch.save``'s zip format.
    """
    engine.checkpoint_engine.save = save_file
    return bool(engine.checkpoint_engine.zipfile_serialization)


# -- stages 1 and 2 --------------------------------------------------------------------------------------


class FlatGroup(NamedTuple):
    """Parameter group of ZeRO-1 or 2, whose parameters are views of one flat tensor.

    The parameters have the compute dtype.
    """

    parameters: list[Any]
    """Parameters of the group, which are views of ``flat_tensor``."""
    flat_tensor: Tensor
    """Flat tensor with all parameters of the group and padding."""


def list_flat_groups(zero_optimizer: Any) -> list[FlatGroup]:
    """List the parameter groups of ZeRO-1 or 2, with their flat tensors."""
    groups = zip(zero_optimizer.bit16_groups, zero_optimizer.bit16_groups_flat, strict=True)
    return [FlatGroup(parameters, flat_tensor) for parameters, flat_tensor in groups]


def gather_compute_copies(zero_optimizer: Any) -> None:
    """Update the parameters in the compute dtype from the fp32 master weights.

    Each rank casts its master weights, and an all-gather collects them in the parameters that the
    forward pass uses. All ranks must call this function.
    """
    zero_optimizer.update_lp_params()


# -- stage 3 ---------------------------------------------------------------------------------------------


def partition_parameter(context: Any, parameter: nn.Parameter) -> None:
    """Partition a parameter over the ranks in place, so that this rank only keeps its shard.

    Args:
        context: Instance of ``deepspeed.zero.Init``.
        parameter: Complete parameter on the device.
    """
    context._convert_to_zero_parameters([parameter])


def is_partitioned(tensor: Any) -> bool:
    """Return whether a tensor is a parameter that ZeRO stage 3 has partitioned."""
    return hasattr(tensor, "ds_tensor")


def get_full_num_elements(parameter: Any) -> int:
    """Return the total number of elements in a partitioned parameter, without padding."""
    return int(parameter.ds_numel)


def get_full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a partitioned parameter after gathering."""
    return tuple(parameter.ds_shape)


@contextmanager
@PACKAGE.explain_missing_names(_FEATURE)
def open_parameter_shard(parameter: Any) -> Iterator[Tensor]:
    """Open this rank's shard of a parameter in the compute dtype, for use in a ``with`` statement.

    The shard is not part of the fp32 master weights. If it is on NVMe, it is read on entry and
    written back on exit.

    Yields:
        The flat shard, including padding. The caller may overwrite its values.
    """
    swapped = parameter.ds_tensor.status.name == "NOT_AVAILABLE"
    if swapped:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    data: Tensor = parameter.ds_tensor.data
    yield data
    if swapped:
        parameter.nvme_swapper.swap_out_and_release([parameter])


def get_shard_num_elements(parameter: Any) -> int:
    """Return the number of elements in each rank's shard of a partitioned parameter.

    The number is the same on all ranks, because the last shards are padded.
    """
    return int(parameter.ds_tensor.ds_numel)


def drop_secondary_shard(parameter: Any) -> None:
    """Drop the secondary shard of a frozen parameter whose values have changed.

    If ``zero_hpz_partition_size`` is set, ZeRO++ keeps a second copy of each parameter within each
    node. A secondary shard is a rank's part of this copy. The shard of a frozen parameter would
    remain outdated, because the optimizer step only refreshes trained parameters.
    """
    parameter.ds_secondary_tensor = None


def drop_secondary_shards(zero_optimizer: Any) -> None:
    """Drop the secondary shards of all trained parameters.

    This is necessary after the parameters have changed. Otherwise, the next forward pass would use
    outdated values. See :func:`drop_secondary_shard`, which also explains secondary shards.
    """
    zero_optimizer.invalidate_secondary_tensor()


def get_sub_groups(zero_optimizer: Any) -> list[list[Any]]:
    """Return the sub-groups of parameters, which ZeRO stage 3 updates one after the other."""
    groups: list[list[Any]] = zero_optimizer.fp16_groups
    return groups


def is_sub_group_swapped(zero_optimizer: Any, sub_group: int) -> bool:
    """Return whether a sub-group's master weights and optimizer state are on NVMe."""
    return bool(zero_optimizer._swappable_optimizer_subgroup(sub_group))


def swap_in_sub_group(zero_optimizer: Any, sub_group: int) -> None:
    """Read a sub-group's master weights and optimizer state from NVMe."""
    zero_optimizer._optimizer_states_and_gradient_swap_in(sub_group)


def swap_out_sub_group(zero_optimizer: Any, sub_group: int) -> None:
    """Write a sub-group's master weights and optimizer state back to NVMe."""
    zero_optimizer._optimizer_states_and_gradient_swap_out(sub_group)


def get_master_weights(zero_optimizer: Any, sub_group: int) -> Tensor:
    """Return this rank's flat fp32 master weights of a sub-group."""
    weights: Tensor = zero_optimizer.fp32_partitioned_groups_flat[sub_group]
    return weights


def update_compute_copies(zero_optimizer: Any, sub_group: int) -> None:
    """Cast a sub-group's fp32 master weights to the compute dtype, and store the result.

    The result goes to this rank's shards of the parameters, in memory or on NVMe. The master
    weights must be in memory. Gathered copies of the parameters are not updated. See
    :func:`gather_persistent_parameters`.
    """
    zero_optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)


def gather_persistent_parameters(zero_optimizer: Any) -> None:
    """Release all gathered parameters, and gather the small parameters again from their shards.

    Small parameters have at most ``stage3_param_persistence_threshold`` elements, and stay gathered
    between steps. All ranks must call this function.
    """
    zero_optimizer._partition_all_parameters()
    if zero_optimizer.persistent_parameters:
        zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)


def release_swap_buffers(zero_optimizer: Any, parameters: Sequence[Any]) -> None:
    """Wait for pending reads, and free the swap buffers that contain parameters.

    The parameters must be offloaded to NVMe. The function first releases all gathered parameters.

    Args:
        zero_optimizer: DeepSpeed's ZeRO optimizer.
        parameters: All parameters of the model.
    """
    zero_optimizer.empty_partition_cache()
    swapper = parameters[0].nvme_swapper
    swapper.synchronize_reads()
    buffer_ids = swapper.param_id_to_buffer_id
    swapper.remove_partition_and_release_buffers([p for p in parameters if p.ds_id in buffer_ids])


def wait_for_swapping(zero_optimizer: Any) -> None:
    """Wait for all pending reads and writes of swap files.

    Call this function before the engine is destroyed. The process would crash if DeepSpeed's I/O
    handles were freed during a read or write. Without swapping, this function does nothing.
    """
    states = getattr(zero_optimizer, "optimizer_swapper", None)
    if states is not None:
        states.flush_gradients()
    if getattr(zero_optimizer, "params_in_nvme_and_cpu", False):
        swapper = zero_optimizer.fp16_groups[0][0].nvme_swapper
        swapper.synchronize_reads()
        swapper.synchronize_writes()


# -- optimizers ------------------------------------------------------------------------------------------


def replay_cpu_adam_steps(optimizer: Any, steps: int, scratch_tensors: Sequence[Tensor]) -> None:
    """Run ``steps`` updates of DeepSpeedCPUAdam on scratch tensors. Does nothing for other optimizers.

    The optimizer's C++ code stores powers of the betas outside the optimizer state, and multiplies them
    by the betas in each step. These powers must be restored exactly when a run is resumed. Direct
    computation would round them differently. An update takes a few microseconds.

    Args:
        optimizer: Optimizer that was passed to ``deepspeed.initialize``.
        steps: Number of updates so far.
        scratch_tensors: Parameter, gradient and two moments with one element each. They are
            overwritten.
    """
    if not hasattr(optimizer, "ds_opt_adam"):
        return
    group = optimizer.param_groups[0]
    betas, eps, correct = group["betas"], group["eps"], group["bias_correction"]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, *betas, eps, 0.0, correct, *scratch_tensors
        )


# -- the configuration -----------------------------------------------------------------------------------


def get_config_models() -> dict[str, Any]:
    """Return DeepSpeed's pydantic models, keyed by configuration section.

    A nested dict contains the models for nested sections.
    """
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        **{name: field.annotation for name, field in DeepSpeedMonitorConfig.model_fields.items()},
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers": {"throughput": DeepSpeedThroughputTimerConfig},
    }


def list_type_params(type_name: str) -> set[str]:
    """List the parameters that a DeepSpeed optimizer or scheduler accepts.

    For ``adam`` and ``adamw``, the result also contains the parameters that select the
    implementation, such as ``torch_adam``.

    Args:
        type_name: Value of the key ``type`` in the section ``optimizer`` or ``scheduler``, such as
            ``adamw`` or ``WarmupLR``. The optimizers ``sgd``, ``adam`` and ``adamw``
            are supported, in lower case.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import lr_schedules
    from torch.optim import SGD, AdamW

    adams, switches = (AdamW, FusedAdam, DeepSpeedCPUAdam), {"torch_adam", "adam_w_mode"}
    classes = {"sgd": (SGD,), "adam": adams, "adamw": adams}.get(type_name) or (
        getattr(lr_schedules, type_name),
    )
    names = {name for cls in classes for name in inspect.signature(cls).parameters}
    more = switches if classes is adams else set()
    return names - {"params", "model_params", "optimizer", "deepspeed_adamw_kwargs"} | more


def find_removed_key_error(values: Mapping[str, Any]) -> Exception | None:
    """Return DeepSpeed's error for a removed key, or None if the values contain no such key.

    A removed key is a key that DeepSpeed accepted in earlier releases.

    Args:
        values: Values of a DeepSpeed JSON.
    """
    from deepspeed.runtime.config import DeepSpeedConfigError, _reject_removed_config_keys

    try:
        _reject_removed_config_keys(values)
    except DeepSpeedConfigError as error:
        removed: Exception = error
        return removed
    return None


def parse_deepspeed_config(values: dict[str, Any]) -> None:
    """Run DeepSpeed's parser on a configuration. The parsed result is discarded.

    The parser may raise any exception. If ``values`` is a ``RecordedSection``, it records the keys
    that the parser looks up.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(values)


def is_deepspeed_dtype(name: Any) -> bool:
    """Return whether DeepSpeed accepts ``name`` as a dtype name."""
    from deepspeed.runtime.config import DtypeEnum

    return isinstance(name, str) and name in DtypeEnum._value2member_map_


for _name, _member in list(globals().items()):
    if (
        inspect.isfunction(_member)
        and _member.__module__ == __name__
        and _name != open_parameter_shard.__name__
    ):
        globals()[_name] = PACKAGE.explain_missing_names(_FEATURE)(_member)
