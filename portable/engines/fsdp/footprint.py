"""Memory and traffic of DDP and FSDP2, computed from a model's shapes.

``tests/gpu/test_footprint.py`` compares the resident sizes with live engines, to the byte. See
docs/planning.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portable.engines.communication_volume import compute_internode_bytes, count_elements
from portable.errors import UserError
from portable.planner.memory_model import COMPUTE_BYTES, Cluster, Footprint, Traffic, compute_muon_cost
from portable.planner.optimizer_memory import MASTER, compute_moment_bytes

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.planner.parameter_inventory import Inventory

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
KEPT_AFTER_FORWARD = ("shard_grad_op", "hybrid_shard_zero2")


class PassMemory(NamedTuple):
    """Bytes of gathered parameters, unreduced gradients and buffers at three points of a backward pass."""

    before_layers: int
    """Before the pass reaches the transformer layers."""
    in_layers: int
    at_end: int
    """At the end of the pass, when few activations are left."""


def compute_replicated_footprint(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Memory and traffic under ``no_shard``, or on one device."""
    gradients = MASTER * count_elements(model.trained)
    moments = model.compute_moment_bytes(config.train)
    on_host = config.memory.offload_optimizer == "cpu"
    share = (cluster.devices - 1) / cluster.devices
    micro = config.train.micro_batch_size
    several = micro == "auto" or config.train.global_batch_size > micro * cluster.devices
    # DDP's buckets are resident; accumulating micro-batches add gradients beside them.
    beside = gradients if cluster.devices > 1 and several else 0
    compute = COMPUTE_BYTES[config.precision]
    in_update, sent = compute_muon_cost(model, compute, cluster.devices, replicated=True)
    return Footprint(
        gathered=beside,
        in_layers=beside,
        parameters=sum(w.itemsize * w.elements for w in model.weights),
        gradients=gradients,
        optimizer=0 if on_host else moments,
        compute="autocast",
        host=2 * gradients + moments if on_host else 0,
        in_update=in_update,
        links=Traffic(per_step=2 * gradients * share + sent),
        network=Traffic(per_step=compute_internode_bytes(2 * gradients + sent, cluster)),
    )


def compute_sharded_footprint(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Memory and traffic under FSDP2."""
    together = config.tensor_parallel_size
    tensor_parallel_traffic = _compute_tensor_parallel_traffic(model, config)
    model = model.get_rank_share(together)
    group = cluster.devices // together
    if config.strategy in HYBRID:
        group = config.fsdp.shard_group_size or max(1, min(cluster.per_node, cluster.devices) // together)
    compute = COMPUTE_BYTES[config.precision]
    parameters = gradients = moments = 0
    for weight in model.weights:
        shape = weight.shape
        rows = -(-shape[0] // group) if shape else 1  # rank 0's shard along dim 0, padding included
        size = rows * (weight.elements // max(1, shape[0]) if shape else 1)
        parameters += weight.itemsize * size
        if weight.trained:
            gradients += MASTER * size
            moments += compute_moment_bytes(
                config.train, shape, rows, exact=weight.table, matrices=weight.matrices
            )
    gathered = _compute_gathered_bytes(model, config, group, compute)
    offload_params = config.memory.offload_params == "cpu"
    offload_optimizer = config.memory.offload_optimizer == "cpu" and not offload_params
    host = 0
    if offload_params:
        host = parameters + gradients + moments
        # Shards go through the device to be gathered, gradients through it to the host.
    elif offload_optimizer:
        host = 2 * gradients + moments
    gathers = 1 if config.strategy in KEPT_AFTER_FORWARD else 2
    share = (group - 1) / group
    copies = cluster.devices // together // group
    per_pass = (gathers * compute * model.elements + MASTER * count_elements(model.trained)) * share
    reduced = 2 * gradients * (copies - 1) / copies  # of a shard, across the replicas
    network = reduced if config.strategy in HYBRID else compute_internode_bytes(per_pass, cluster)
    in_update, sent = compute_muon_cost(model, compute, group, replicated=False)
    between = 0 if config.strategy in HYBRID else compute_internode_bytes(sent, cluster)
    return Footprint(
        parameters=0 if offload_params else parameters,
        gradients=0 if offload_params else gradients,
        optimizer=0 if offload_params or offload_optimizer else moments,
        compute="cast",
        gathered=gathered.before_layers,
        in_layers=gathered.in_layers,
        at_end=gathered.at_end,
        in_update=in_update,
        host=host,
        links=Traffic(
            per_pass=per_pass + tensor_parallel_traffic.per_pass,
            per_step=sent + tensor_parallel_traffic.per_step / group,
        ),
        network=Traffic(per_pass=network, per_step=between),
    )


def _compute_tensor_parallel_traffic(model: Inventory, config: RunConfig) -> Traffic:
    """Bytes that a rank of those that share layers sends in a pass, and in an update for what is whole.

    They sum what a matrix that is cut along its inputs gives, and the gradient of what one that is cut along
    its outputs gets.
    """
    ranks, data = config.tensor_parallel_size, config.data
    assert config.train.micro_batch_size != "auto"
    tokens = config.train.micro_batch_size * data.sequences * data.longest
    again = 2 if config.memory.activation_checkpointing == "full" else 1
    width = 0
    for weight in model.weights:
        if weight.cut is None or len(weight.shape) < 2:
            continue
        if len(weight.shape) == 3:  # experts: a pair of stacks
            width += model.hidden_size * (1 + again) // 2
        else:
            width += weight.shape[1] if weight.cut == 0 else again * weight.shape[0]
    share = 2 * (ranks - 1) / ranks
    replicated_elements = count_elements(weight for weight in model.trained if weight.cut is None)
    return Traffic(
        per_pass=share * tokens * width * COMPUTE_BYTES[config.precision],
        per_step=share * MASTER * replicated_elements,
    )


def _compute_gathered_bytes(model: Inventory, config: RunConfig, group: int, compute: int) -> PassMemory:
    """Bytes of gathered parameters and unreduced gradients: before the backward pass reaches a unit, in the
    units, and at the end.

    A running unit holds its own parameters and the next unit's; in the backward pass also its unsharded
    gradients, and an fp32 copy of them to reduce, of which a shard stays. Parameters outside units stay
    gathered; the head's gradients come first and wait for the others.
    """
    if model.no_units is not None:
        raise UserError(model.no_units)
    largest = max(model.count_part_elements("unit"), default=0)
    learning = max(model.count_part_elements("unit", trained=True), default=0)
    outside = count_elements(w for w in model.weights if w.unit is None)
    trained = count_elements(w for w in model.trained if w.unit is None)
    waiting = count_elements(w for w in model.trained if w.head and w.unit is None)
    reduced = MASTER + MASTER / group
    in_units = model.elements - outside if config.strategy in KEPT_AFTER_FORWARD else 2 * largest
    there = compute * (outside + in_units)
    layers = there + compute * (waiting + learning) + reduced * learning
    end = compute * (outside + trained) + reduced * trained
    return PassMemory(int(there), int(layers), int(end))
