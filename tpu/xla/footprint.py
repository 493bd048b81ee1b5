"""Memory and communication of SPMD training on XLA, computed from the shapes of a model.

``tests/tpu/test_footprint.py`` compares the computed sizes of the parameters and the optimizer
state with the shards of a run on virtual CPU devices. ``tests/tpu/test_planned_steps.py``
compares the computed memory of training steps with the memory that a TPU compiler reported for
them. The computed values are only valid for TPUs, because XLA's CPU compiler writes more
temporary values.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.checks import check_config
from portable.planner.memory_model import COMPUTE_BYTES, Cluster, Footprint, StrategySetting, Traffic
from portable.planner.optimizer_memory import FP32_BYTES, compute_optimizer_state_bytes
from portable.planner.pass_cost import CompilerModel
from portable.tpu.xla.checks import STRATEGIES_GATHERED_ONCE
from portable.tpu.xla.sharding import HYBRID_STRATEGIES, LANES, ShardingRules, is_head_gradient_transposed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from portable.config import RunConfig
    from portable.planner.parameter_inventory import ModelInventory
    from portable.planner.pass_cost import ResultKind


def resolve_config(config: RunConfig, cluster: Cluster) -> RunConfig:
    """Check that XLA supports a config, and return the config unchanged.

    Backends that run DeepSpeed replace defaults with values from a DeepSpeed JSON. XLA does not
    have such a file. This function is part of the interface
    :class:`portable.planner.memory_model.FootprintModule`.

    Raises:
        UserError: If XLA does not support the config.
    """
    check_config(config.replaced({"backend": "xla"}), is_resolved=True)
    return config


def iter_settings(config: RunConfig, cluster: Cluster) -> Iterator[StrategySetting]:
    """Yield the values of ``strategy`` that the planner compares for this backend.

    The hybrid strategies are included if the cluster has several nodes with equally many devices.
    No setting includes offloading, because this backend does not support it. For the arguments, see
    :meth:`portable.planner.memory_model.FootprintModule.iter_settings`.
    """
    strategies = ["no_shard", "shard_grad_op", "full_shard"]
    if cluster.nodes > 1 and cluster.devices % cluster.per_node == 0:
        strategies += ["hybrid_shard_zero2", "hybrid_shard"]
    yield from map(StrategySetting, strategies)


def find_gathered_units(model: nn.Module, config: RunConfig) -> list[nn.Module]:
    """Return an empty list, because the compiler chooses the parameters to gather.

    See :class:`portable.planner.memory_model.FootprintModule`.
    """
    return []


OVERLAPPED_SCATTER_GROUPS = range(8, 33)
"""Group sizes for which the compiler splits the matrix product that computes a gradient into
pieces, and sends one piece after the other.
"""
# Matrix products. The compiler applies the elementwise operations that follow before it writes their results.
_PRODUCT_OPERATIONS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "_grouped_mm"}
# Reductions whose results are as large as their operand. The compiler stores the small sums of the rows, and
# reads the operand again to compute the results.
_ROW_REDUCTIONS = {
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
}
# Operations that only move or create elements. Dropout computes its random numbers from positions. The
# gradient of an embedding table is summed in shards, which `compute_footprint` counts.
_DATA_MOVEMENT_OPERATIONS = {
    "_to_copy",
    "arange",
    "bernoulli_",
    "cat",
    "copy_",
    "embedding_dense_backward",
    "empty",
    "empty_like",
    "expand",
    "fill_",
    "full",
    "full_like",
    "new_zeros",
    "nll_loss_backward",
    "ones",
    "ones_like",
    "repeat",
    "scalar_tensor",
    "slice_backward",
    "tril",
    "triu",
    "zero_",
    "zeros",
    "zeros_like",
}


def classify_result(operation: str, *, elementwise: bool) -> ResultKind:
    """Classify how a TPU compiler stores the result of an operation.

    See :mod:`portable.planner.pass_cost` for the classes.

    Args:
        operation: Name of the ATen operation.
        elementwise: Whether the operation is elementwise.
    """
    if operation in _PRODUCT_OPERATIONS:
        return "product"
    if operation in _ROW_REDUCTIONS:
        return "rows"
    return "computed" if elementwise or operation in _DATA_MOVEMENT_OPERATIONS else "written"


def compute_every_expert_in(model: Any) -> None:
    """Make each mixture-of-experts layer compute all experts for every token, as the XLA engine does."""
    from portable.tpu.xla.fixed_shapes import use_fixed_shape_experts  # imports torch

    use_fixed_shape_experts(model, lambda tensor: tensor)


class _WeightTotals(NamedTuple):
    """Totals over all weights: memory per device in bytes, and numbers of communicated elements.

    A pass is the forward and backward pass of one micro-batch.

    Attributes:
        parameter_bytes: Size of the parameter shards.
        gradient_bytes: Size of the fp32 gradient shards.
        moment_bytes: Size of the optimizer state shards.
        sharded_trained_elements: Number of elements that are trained and sharded.
        gathered_elements: Number of elements that are gathered in a pass. An element that is
            gathered again for the backward pass counts twice.
        scattered_elements: Number of gradient elements that are reduce-scattered in a pass.
        copy_bytes: Size of the temporary copies of shards. A parameter is copied if it is cast to
            the compute dtype, or if it is gathered again for the backward pass. A tied embedding
            table and its optimizer state are copied if the update changes their layout.
    """

    parameter_bytes: int
    gradient_bytes: int
    moment_bytes: int
    sharded_trained_elements: int
    gathered_elements: int
    scattered_elements: int
    copy_bytes: int


def _sum_weights(
    model: ModelInventory, config: RunConfig, rules: ShardingRules, group: int, *, keeps_gathered: bool
) -> _WeightTotals:
    """Sum up memory and traffic over all weights.

    Memory is in bytes per device. Traffic is in elements of the unsharded weights. An embedding
    table is neither gathered nor reduce-scattered, except if it is also the output head.

    Args:
        model: Inventory of the model's weights.
        config: Config of the run.
        rules: Rules that choose the sharded dim of each weight.
        group: Number of devices over which one copy of the parameters is sharded.
        keeps_gathered: Whether gathered parameters are kept from the forward to the backward pass.
    """
    compute = COMPUTE_BYTES.get(config.precision, FP32_BYTES)
    parameters = gradients = moments = learning = gathers = scattered = copied = 0
    for weight in model.weights:
        shape = list(weight.shape)
        dim = rules.choose_shard_dim(weight.name, shape)
        if dim is not None:
            learning += weight.num_elements * weight.is_trained
            if weight.is_output_head or not weight.is_embedding:
                gathers += weight.num_elements * (1 if keeps_gathered or weight.layer_index is None else 2)
                scattered += weight.num_elements * weight.is_trained
            shape[dim] //= group
        size = weight.num_elements // group if dim is not None else weight.num_elements
        parameters += weight.itemsize * size
        # A cast creates a copy. Weights that are not cast are copied by the barriers that make the compiler
        # gather them again.
        is_gathered_again = (
            weight.is_trained and not keeps_gathered and (weight.is_output_head or not weight.is_embedding)
        )
        if compute != weight.itemsize or is_gathered_again:
            copied += compute * size
        if weight.is_trained:
            gradients += FP32_BYTES * size
            first = shape[0] if shape else 1
            moment_size = compute_optimizer_state_bytes(
                config.train, shape, first, keeps_fp32_moments=True, uses_muon=weight.uses_muon
            )
            moments += moment_size
            tied = weight.is_embedding and weight.is_output_head and dim == 1
            if tied and shape[1] % LANES and not is_head_gradient_transposed(shape[1], group):
                # The state is stored transposed, which takes less memory, but the gradient is not. The update
                # therefore copies the state to the layout of the gradient.
                copied += (FP32_BYTES * size + moment_size) * -(-shape[1] // LANES) * LANES // shape[1]
    # There is one replicated vector of step counts. It has an entry even for parameters whose rule does not
    # count steps.
    uncounted = [w for w in model.trained_weights if w.uses_muon or config.train.optimizer == "sgd"]
    moments += FP32_BYTES * len(uncounted)
    return _WeightTotals(parameters, gradients, moments, learning, gathers, scattered, copied)


def compute_footprint(model: ModelInventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """Compute the device memory and the communication of a run with this engine.

    See :meth:`portable.planner.memory_model.FootprintModule.compute_footprint` for the arguments.
    """
    group = cluster.devices
    if config.strategy in HYBRID_STRATEGIES:
        group = config.fsdp.shard_group_size or min(cluster.per_node, cluster.devices)
    rules = ShardingRules(config, group)
    compute = COMPUTE_BYTES.get(config.precision, FP32_BYTES)
    gathers_once = config.strategy in STRATEGIES_GATHERED_ONCE
    # The compiler keeps gathered parameters for the backward pass. Recomputation and loops prevent this, so
    # that only the parameters of the running layer are gathered. Embedding tables are never gathered, except
    # for the head's table.
    keeps_gathered = gathers_once or not (
        config.memory.activation_checkpointing == "full" or config.xla.scan_layers
    )
    totals = _sum_weights(model, config, rules, group, keeps_gathered=keeps_gathered)
    gradients = totals.gradient_bytes
    layers = model.count_elements_by_part("layer")
    outside_elements = model.num_elements - sum(layers)
    running_bytes = compute * (sum(layers) if keeps_gathered else max(layers, default=0))
    outside_elements -= sum(w.num_elements for w in model.weights if w.is_embedding and not w.is_output_head)
    gathered = compute * (outside_elements + (sum(layers) if keeps_gathered else 0))
    # The unsharded gradient of the head, which the pass contains, reuses the memory of the gathered matrix.
    # This matrix is only needed for the gradients of the layers. If the gradient is scattered during the
    # product, only the pieces of two neighbors exist.
    head_elements = sum(
        w.num_elements
        for w in model.trained_weights
        if w.is_output_head and rules.choose_shard_dim(w.name, w.shape) is not None
    )
    pieces = 2 if group in OVERLAPPED_SCATTER_GROUPS else 0
    gathered -= compute * head_elements * (group - pieces) // group
    in_layers = running_bytes
    # If the complete step is one graph, gradients stay in the compute dtype, in which they are reduced.
    num_batch_shards = cluster.devices // config.context_parallel_size
    is_single_graph = config.train.global_batch_size == config.train.micro_batch_size * num_batch_shards
    if is_single_graph:
        in_layers += gradients * compute // FP32_BYTES
    sent_share, num_replicas = (group - 1) / group, cluster.devices // group
    orthogonalization = _compute_orthogonalization_cost(model, compute, group)
    per_pass = (totals.gathered_elements + totals.scattered_elements) * compute * sent_share
    unsharded_elements = sum(w.num_elements for w in model.trained_weights) - totals.sharded_trained_elements
    summed = 2 * compute * unsharded_elements * (cluster.devices - 1) / cluster.devices
    internode_bytes = (
        2 * gradients * (num_replicas - 1) / num_replicas if config.strategy in HYBRID_STRATEGIES else 0.0
    )
    if config.strategy == "no_shard" or group == 1:
        gathered, in_layers = 0, in_layers - running_bytes
    if group == cluster.devices and cluster.nodes > 1:
        internode_bytes = (per_pass + summed) * (cluster.nodes - 1) / cluster.nodes / cluster.per_node
    return Footprint(
        parameters=totals.parameter_bytes,
        gradients=0 if is_single_graph else gradients,
        optimizer=totals.moment_bytes,
        compute="cast",
        compiler=CompilerModel(
            classify_result,
            bool(config.xla.scan_layers),
            config.xla.attention_rows,
            config.context_parallel_size,
            compute_every_expert_in,
        ),
        gathered=gathered + totals.copy_bytes,
        in_layers=in_layers + totals.copy_bytes,
        # The state is updated in place.
        in_update=orthogonalization.memory_bytes
        + (gradients * compute // FP32_BYTES if is_single_graph else 0),
        links=Traffic(per_pass=per_pass + summed, per_step=orthogonalization.sent_bytes),
        network=Traffic(per_pass=internode_bytes),
    )


class _OrthogonalizationCost(NamedTuple):
    """Cost of Muon's update on one device: additional memory and sent data, both in bytes."""

    memory_bytes: int
    sent_bytes: float


def _compute_orthogonalization_cost(
    model: ModelInventory, compute: int, group: int
) -> _OrthogonalizationCost:
    """Compute the memory and communication of Muon's update. Both are 0 for other optimizers.

    Muon orthogonalizes complete matrices by matrix products. Matrices with the same shape are
    distributed over the devices. Each device holds its share of the matrices, together with the
    intermediate results of the products.

    Args:
        model: Inventory of the model, with the shapes of its weights.
        compute: Bytes per element in the compute dtype.
        group: Number of devices over which the parameters are sharded.
    """
    matrices_by_shape: Counter[tuple[int, ...]] = Counter()
    for weight in model.trained_weights:
        if weight.uses_muon:
            matrices_by_shape[weight.shape[-2:]] += math.prod(weight.shape[:-2])
    max_elements = max(
        (
            -(-count // group) * (5 * math.prod(shape) + 2 * min(shape) ** 2)
            for shape, count in matrices_by_shape.items()
        ),
        default=0,
    )
    total_elements = sum(count * math.prod(shape) for shape, count in matrices_by_shape.items())
    return _OrthogonalizationCost(
        compute * max_elements, 2 * compute * total_elements * (group - 1) / group**2
    )
