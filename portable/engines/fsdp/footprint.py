"""Estimate the memory and traffic per device under DDP and FSDP2, for the planner.

The estimates are computed from the shapes of the model. ``tests/gpu/test_footprint.py`` checks that
the sizes of parameters, gradients and optimizer state match real engines exactly. See
docs/planning.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portable.engines.communication_volume import compute_internode_bytes, sum_elements
from portable.engines.fsdp.checks import check_fused_backward_on_ranks
from portable.errors import UserError
from portable.planner.memory_model import COMPUTE_BYTES, Cluster, Footprint, Traffic, compute_muon_update_cost
from portable.planner.optimizer_memory import FP32_BYTES, MASTER_BYTES, compute_optimizer_state_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig
    from portable.planner.parameter_inventory import ModelInventory, ParameterEntry

HYBRID_STRATEGIES = ("hybrid_shard", "hybrid_shard_zero2")
"""Strategies that shard within groups of ranks and replicate across the groups."""
STRATEGIES_KEPT_AFTER_FORWARD = ("shard_grad_op", "hybrid_shard_zero2")
"""Strategies that keep gathered parameters between the forward and the backward pass."""


def compute_shard_group_size(config: RunConfig, world_size: int, local_world_size: int) -> int:
    """Compute the number of ranks over which one copy of the parameters is sharded.

    With hybrid strategies, this is ``fsdp.shard_group_size``, by default the number of ranks of a
    node. Otherwise, it is the world size, even for ``no_shard``, which does not use the result. A
    group of tensor-parallel ranks counts as one rank.

    Args:
        config: Config of the run.
        world_size: Number of ranks of the run.
        local_world_size: Number of ranks on this node.

    Raises:
        UserError: If the group size does not divide the world size, or if the number of
            expert-parallel ranks does not divide the group size.
    """
    world_size //= config.tensor_parallel_size
    local_world_size //= config.tensor_parallel_size
    size = world_size
    if config.strategy in HYBRID_STRATEGIES:
        size = config.fsdp.shard_group_size or max(1, local_world_size)
    check_expert_groups(config, size)
    if world_size % size:
        fitting = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        tensor_parallel_size = config.tensor_parallel_size
        ranks = (
            "ranks"
            if tensor_parallel_size == 1
            else f"groups of {tensor_parallel_size} tensor-parallel ranks"
        )
        raise UserError(
            f"fsdp.shard_group_size: the number of {ranks} ({world_size}) is not a multiple of {size}; "
            f"use one of {', '.join(fitting)}"
        )
    return size


class PassMemory(NamedTuple):
    """Memory occupied by gathered parameters, unreduced gradients and buffers during a backward pass.

    Each field is the number of bytes at one point of the pass.
    """

    before_layers: int
    """Before the pass reaches the transformer layers."""
    in_layers: int
    """In the transformer layers."""
    at_end: int
    """At the end of the pass, when few activations remain."""


def check_expert_groups(config: RunConfig, shard_group_size: int) -> None:
    """Check that the ranks of a sharding group can be divided into expert-parallel groups.

    Args:
        config: Config of the run.
        shard_group_size: Number of ranks over which one copy of the parameters is sharded.

    Raises:
        UserError: If ``shard_group_size`` is not a multiple of ``expert_parallel_size``.
    """
    size = config.expert_parallel_size
    if shard_group_size % size:
        if shard_group_size == 1:
            raise UserError(
                f"expert_parallel_size: each copy of the parameters is on a single rank, which cannot be "
                f"divided into groups of {size}; shard each copy over a multiple of {size} ranks, or set "
                "expert_parallel_size to 1"
            )
        raise UserError(
            f"expert_parallel_size: the {shard_group_size} ranks that shard one copy of the parameters "
            f"cannot be divided evenly into groups of {size}; use a divisor of {shard_group_size}, or "
            "another number of ranks"
        )


def choose_expert_shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Choose the dimension along which FSDP2 shards a stack of experts.

    Args:
        shape: Shape of the stack on an expert-parallel rank, ``[experts, ...]``.
        ranks: Number of ranks over which the stack is sharded.

    Returns:
        1 if the stack has fewer experts than ranks and dimension 1 is a multiple of ``ranks``.
        Otherwise 0.
    """
    return int(shape[0] < ranks and shape[1] % ranks == 0)


def compute_replicated_footprint(model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Compute the memory and traffic per device under DDP (``no_shard``) or on a single device.

    Raises:
        UserError: If ``train.fused_backward`` is set and there are several devices. DDP does not
            support this combination.
    """
    gradients = MASTER_BYTES[config.train.master_dtype] * sum_elements(model.trained_weights)
    moments = model.compute_optimizer_state_bytes(config.train)
    if config.train.fused_backward:
        check_fused_backward_on_ranks(config, cluster.devices)
        gradients = FP32_BYTES * max((weight.num_elements for weight in model.trained_weights), default=0)
    on_host = config.memory.offload_optimizer == "cpu"
    sent_share = (cluster.devices - 1) / cluster.devices
    micro = config.train.micro_batch_size
    num_groups = max(1, cluster.devices // config.ranks_together)
    accumulates = micro == "auto" or config.train.global_batch_size > micro * num_groups
    # DDP's buckets stay allocated. If there are several micro-batches, the accumulated gradients need
    # additional memory.
    accumulated_bytes = gradients if cluster.devices > 1 and accumulates else 0
    compute = COMPUTE_BYTES[config.precision]
    in_update, sent = compute_muon_update_cost(model, compute, cluster.devices, replicated=True)
    sent += 2 * gradients * sent_share
    return Footprint(
        gathered=accumulated_bytes,
        in_layers=accumulated_bytes,
        parameters=sum(w.itemsize * w.num_elements for w in model.weights),
        gradients=gradients,
        optimizer=0 if on_host else moments,
        compute="autocast",
        host=2 * gradients + moments if on_host else 0,
        in_update=in_update,
        links=Traffic(per_step=sent),
        network=Traffic(per_step=compute_internode_bytes(sent, cluster)),
    )


def compute_sharded_footprint(model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Compute the memory and traffic per device under FSDP2.

    The result is for rank 0, which has the largest shards.

    Raises:
        UserError: If the FSDP units of the model could not be determined, if the devices cannot be
            divided into sharding groups and expert-parallel groups, or if ``train.fused_backward`` is
            set, and there are several devices and the optimizer is Adafactor.
    """
    tensor_parallel_size = config.tensor_parallel_size
    tensor_parallel_traffic = _compute_tensor_parallel_traffic(model, config)
    model = model.shard_for_tensor_parallel(tensor_parallel_size)
    group_size = compute_shard_group_size(config, cluster.devices, min(cluster.per_node, cluster.devices))
    if config.train.fused_backward:
        check_fused_backward_on_ranks(config, cluster.devices)
    expert_size = config.expert_parallel_size
    model = model.shard_for_expert_parallel(expert_size)
    expert_group_size = group_size // expert_size
    compute = COMPUTE_BYTES[config.precision]
    parameters = gradients = moments = 0
    for weight in model.weights:
        shape = weight.shape
        shards = group_size
        if expert_size > 1 and weight.expert_dim is not None:
            shards = expert_group_size
            if weight.expert_dim == 0 and choose_expert_shard_dim(shape, shards) == 1:
                shape = (shape[0] * shape[1], *shape[2:])
        rows = -(-shape[0] // shards) if shape else 1  # rank 0's shard along dim 0, padding included
        shard_elements = rows * (weight.num_elements // max(1, shape[0]) if shape else 1)
        parameters += weight.itemsize * shard_elements
        if weight.is_trained:
            gradients += MASTER_BYTES[config.train.master_dtype] * shard_elements
            moments += compute_optimizer_state_bytes(
                config.train, shape, rows, keeps_fp32_moments=weight.is_embedding, uses_muon=weight.uses_muon
            )
    gathered = _compute_pass_memory(model, config, expert_group_size, compute)
    exchange = _compute_expert_exchange(model, config)
    offload_params = config.memory.offload_params == "cpu"
    offload_optimizer = config.memory.offload_optimizer == "cpu" and not offload_params
    host = 0
    if offload_params:
        host = parameters + gradients + moments
        # Shards are copied from the host to the device to be gathered, and gradients from the device to the
        # host.
    elif offload_optimizer:
        host = 2 * gradients + moments
    gathers = 1 if config.strategy in STRATEGIES_KEPT_AFTER_FORWARD else 2
    num_replicas = cluster.devices // tensor_parallel_size // group_size
    layers = [w for w in model.weights if expert_size == 1 or w.expert_dim is None]
    per_pass = _compute_sharding_traffic(layers, gathers * compute, group_size)
    expert_pass = 0.0
    if expert_size > 1:
        # Experts are separate units within the layers, so recomputing a layer gathers them once more.
        is_recomputed = config.memory.activation_checkpointing != "none" and gathers == 2
        expert_pass = _compute_sharding_traffic(
            [w for w in model.weights if w.expert_dim is not None],
            (gathers + is_recomputed) * compute,
            expert_group_size,
        )
    # Gradient shards are all-reduced over the replicas.
    replica_reduce_bytes = 2 * gradients * (num_replicas - 1) / num_replicas
    network = replica_reduce_bytes
    if config.strategy not in HYBRID_STRATEGIES:
        expert_cluster = Cluster(
            cluster.devices // expert_size, max(1, min(cluster.per_node, cluster.devices) // expert_size)
        )
        network = compute_internode_bytes(per_pass, cluster)
        network += compute_internode_bytes(expert_pass, expert_cluster)
    network += exchange.sent_to_a_rank * max(0, expert_size - cluster.per_node)
    in_update, sent = compute_muon_update_cost(model, compute, group_size, replicated=False)
    internode_bytes = 0 if config.strategy in HYBRID_STRATEGIES else compute_internode_bytes(sent, cluster)
    return Footprint(
        parameters=0 if offload_params else parameters,
        # In a fused backward pass, only the gradients that are being reduced exist, and `gathered` includes
        # them.
        gradients=0 if offload_params or config.train.fused_backward else gradients,
        optimizer=0 if offload_params or offload_optimizer else moments,
        compute="cast",
        gathered=gathered.before_layers + exchange.buffers,
        in_layers=gathered.in_layers + exchange.buffers,
        at_end=gathered.at_end,
        in_update=in_update,
        host=host,
        links=Traffic(
            per_pass=per_pass
            + expert_pass
            + tensor_parallel_traffic.per_pass
            + exchange.sent_to_a_rank * (expert_size - 1),
            per_step=sent + tensor_parallel_traffic.per_step / group_size,
        ),
        network=Traffic(per_pass=network, per_step=internode_bytes),
    )


def _compute_sharding_traffic(
    weights: Sequence[ParameterEntry], gathered_bytes: int, group_size: int
) -> float:
    """Compute the bytes that a rank sends to gather parameters and to reduce gradients.

    The result is for one micro-batch, that is, for one forward and backward pass. Gradients are
    reduced in fp32.

    Args:
        weights: The parameters.
        gathered_bytes: Bytes to gather per parameter element in one micro-batch. This is the
            element size of the gathered dtype, times the number of gathers.
        group_size: Number of ranks over which the parameters are sharded.
    """
    trained = sum_elements(w for w in weights if w.is_trained)
    total = gathered_bytes * sum_elements(weights) + FP32_BYTES * trained
    return total * (group_size - 1) / group_size


class _ExpertExchange(NamedTuple):
    """Memory and traffic of the token exchange between expert-parallel ranks.

    Assumes that all experts receive the same number of tokens.
    """

    buffers: int
    """Bytes of the buffers for one layer's sent and received tokens."""
    sent_to_a_rank: float
    """Bytes that a rank sends per pass to each other rank of its group."""


def _compute_expert_exchange(model: ModelInventory, config: RunConfig) -> _ExpertExchange:
    """Compute the memory and traffic of the token exchange between expert-parallel ranks.

    Each rank sends tokens and results in the forward pass, and their gradients in the backward pass.
    With activation checkpointing, tokens and results are sent a second time.

    Args:
        model: Weights of the model.
        config: Config of the run.
    """
    size, data, micro = config.expert_parallel_size, config.data, config.train.micro_batch_size
    if size == 1:
        return _ExpertExchange(0, 0.0)
    assert micro != "auto"
    tokens = micro * data.sequences_per_sample * data.max_sequence_length // config.context_parallel_size
    layer_bytes = tokens * model.experts_per_token * model.hidden_size * COMPUTE_BYTES[config.precision]
    exchanges = 4 if config.memory.activation_checkpointing == "none" else 6
    return _ExpertExchange(2 * layer_bytes, exchanges * model.num_mixture_layers * layer_bytes / size)


def _compute_tensor_parallel_traffic(model: ModelInventory, config: RunConfig) -> Traffic:
    """Compute the bytes that a tensor-parallel rank sends per pass and per update.

    In a forward and backward pass, row-parallel layers all-reduce their outputs, and
    column-parallel layers all-reduce the gradients of their inputs. Before an update, the gradients
    of replicated parameters are all-reduced. The bytes per update assume complete gradients. FSDP
    shards the gradients over a group, so the caller divides these bytes by the number of ranks in
    the group.
    """
    ranks, data = config.tensor_parallel_size, config.data
    assert config.train.micro_batch_size != "auto"
    tokens = config.train.micro_batch_size * data.sequences_per_sample * data.max_sequence_length
    forward_passes = 2 if config.memory.activation_checkpointing == "full" else 1
    width = 0
    for weight in model.weights:
        if weight.sharded_dim is None or len(weight.shape) < 2:
            continue
        if len(weight.shape) == 3:  # one of the two stacks of the experts
            width += model.hidden_size * (1 + forward_passes) // 2
        else:
            width += weight.shape[1] if weight.sharded_dim == 0 else forward_passes * weight.shape[0]
    sent_share = 2 * (ranks - 1) / ranks
    replicated_elements = sum_elements(
        weight for weight in model.trained_weights if weight.sharded_dim is None
    )
    return Traffic(
        per_pass=sent_share * tokens * width * COMPUTE_BYTES[config.precision],
        per_step=sent_share * FP32_BYTES * replicated_elements,
    )


def _compute_pass_memory(
    model: ModelInventory, config: RunConfig, group_size: int, compute_bytes: int
) -> PassMemory:
    """Compute the memory of gathered parameters and unreduced gradients during a backward pass.

    While a unit runs, its parameters are gathered, and FSDP2 prefetches the parameters of the
    next unit. With a strategy in ``STRATEGIES_KEPT_AFTER_FORWARD``, the parameters of all
    units are gathered when the backward pass starts. The backward pass also allocates the
    unit's unsharded gradients, an fp32 copy of them, and the shard into which the copy is
    reduced. Parameters outside of units stay gathered, and their gradients are reduced only
    at the end of the pass. The gradients of the head are computed first, so they occupy
    memory during the complete pass.

    Args:
        model: Weights of the model or, with tensor parallelism, the shards of one
            tensor-parallel rank.
        config: Config of the run.
        group_size: Number of ranks over which one copy of the parameters is sharded.
        compute_bytes: Bytes per element in the compute dtype.

    Raises:
        UserError: If the FSDP units of the model could not be determined.
    """
    if model.unit_error is not None:
        raise UserError(model.unit_error)
    largest_unit_elements = max(model.count_elements_by_part("unit"), default=0)
    largest_trained_unit = max(model.count_elements_by_part("unit", only_trained=True), default=0)
    outside_elements = sum_elements(w for w in model.weights if w.unit_index is None)
    trained_outside_elements = sum_elements(w for w in model.trained_weights if w.unit_index is None)
    waiting_head_elements = sum_elements(
        w for w in model.trained_weights if w.is_output_head and w.unit_index is None
    )
    reduced_bytes_per_element = FP32_BYTES + FP32_BYTES / group_size
    in_units = (
        model.num_elements - outside_elements
        if config.strategy in STRATEGIES_KEPT_AFTER_FORWARD
        else 2 * largest_unit_elements
    )
    gathered_bytes = compute_bytes * (outside_elements + in_units)
    layers = (
        gathered_bytes
        + compute_bytes * (waiting_head_elements + largest_trained_unit)
        + reduced_bytes_per_element * largest_trained_unit
    )
    end_bytes = (
        compute_bytes * (outside_elements + trained_outside_elements)
        + reduced_bytes_per_element * trained_outside_elements
    )
    return PassMemory(int(gathered_bytes), int(layers), int(end_bytes))
