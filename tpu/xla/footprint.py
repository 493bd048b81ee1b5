"""Memory and traffic of SPMD on XLA, computed from a model's shapes.

``tests/tpu/test_footprint.py`` compares resident sizes with live shards, and temporary ones with what a TPU's
compiler has said of some steps. XLA's compiler for CPUs writes more of them: plans are for TPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.checks import check
from portable.planner.memory_model import COMPUTE_BYTES, Cluster, Footprint, StrategySetting, Traffic
from portable.planner.optimizer_memory import MASTER, compute_moment_bytes
from portable.planner.pass_cost import Compiler
from portable.tpu.xla.checks import GATHERED_ONCE
from portable.tpu.xla.sharding import HYBRID, LANES, ShardingRules, is_head_gradient_transposed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from portable.config import RunConfig
    from portable.planner.parameter_inventory import Inventory
    from portable.planner.pass_cost import Result


def adopt(config: RunConfig, cluster: Cluster) -> RunConfig:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    check(config.replaced({"backend": "xla"}), late=True)
    return config


def settings(config: RunConfig, cluster: Cluster) -> Iterator[StrategySetting]:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    strategies = ["no_shard", "shard_grad_op", "full_shard"]
    if cluster.nodes > 1 and cluster.devices % cluster.per_node == 0:
        strategies += ["hybrid_shard_zero2", "hybrid_shard"]
    yield from map(StrategySetting, strategies)


def units(model: nn.Module, config: RunConfig) -> list[nn.Module]:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    return []


SCATTERED_WHILE_MULTIPLYING = range(8, 33)
"""Groups for which the compiler splits the product that is a gradient, and sends piece after piece."""
# Products are written, with what elementwise operations make of them.
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "_grouped_mm"}
# Reductions whose results are as large as their operand: that is read again, with the small sums of its rows.
_ROWS = {
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
}
# Operations that only move elements or make them of nothing. Dropout makes its numbers of their positions.
# The gradient of a lookup table is added up in shards, which `footprint` counts.
_MOVES = {
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


def classify_result(operation: str, *, elementwise: bool) -> Result:
    """What a TPU's compiler does with a result; see :data:`portable.planner.pass_cost.Result`."""
    if operation in _PRODUCTS:
        return "product"
    if operation in _ROWS:
        return "rows"
    return "computed" if elementwise or operation in _MOVES else "written"


def use_every_expert(model: Any) -> None:
    """Make mixtures of experts compute every expert for every token, as the engine does."""
    from portable.tpu.xla.fixed_shapes import use_fixed_shapes  # which needs torch

    use_fixed_shapes(model, lambda tensor: tensor)


class _Sums(NamedTuple):
    """Of all weights: bytes on a device, and elements that are sent.

    Attributes:
        learning: elements that are trained and sharded.
        gathers, scattered: elements in a pass.
        copied: bytes of copies in the compute type, and of turned tables.
    """

    parameters: int
    gradients: int
    moments: int
    learning: int
    gathers: int
    scattered: int
    copied: int


def _sum_weights(
    model: Inventory, config: RunConfig, rules: ShardingRules, group: int, *, keeps_gathered: bool
) -> _Sums:
    compute = COMPUTE_BYTES.get(config.precision, MASTER)
    parameters = gradients = moments = learning = gathers = scattered = copied = 0
    for weight in model.weights:
        shape = list(weight.shape)
        dim = rules.choose_dim(weight.name, shape)
        if dim is not None:
            learning += weight.elements * weight.trained
            if weight.head or not weight.table:
                gathers += weight.elements * (1 if keeps_gathered or weight.layer is None else 2)
                scattered += weight.elements * weight.trained
            shape[dim] //= group
        size = weight.elements // group if dim is not None else weight.elements
        parameters += weight.itemsize * size
        # Casts are copies. What is not cast is copied by the barriers that make it be gathered again.
        again = weight.trained and not keeps_gathered and (weight.head or not weight.table)
        if compute != weight.itemsize or again:
            copied += compute * size
        if weight.trained:
            gradients += MASTER * size
            first = shape[0] if shape else 1
            moment_size = compute_moment_bytes(
                config.train, shape, first, exact=True, matrices=weight.matrices
            )
            moments += moment_size
            tied = weight.table and weight.head and dim == 1
            if tied and shape[1] % LANES and not is_head_gradient_transposed(shape[1], group):
                # Its state lies transposed, which takes less. Its gradient does not: the update copies it.
                copied += (MASTER * size + moment_size) * -(-shape[1] // LANES) * LANES // shape[1]
    # One replicated vector of step counts, also of parameters whose rule has none.
    uncounted = [w for w in model.trained if w.matrices or config.train.optimizer == "sgd"]
    moments += MASTER * len(uncounted)
    return _Sums(parameters, gradients, moments, learning, gathers, scattered, copied)


def footprint(model: Inventory, config: RunConfig, cluster: Cluster) -> Footprint:
    """See :class:`portable.planner.memory_model.FootprintModule`."""
    group = cluster.devices
    if config.strategy in HYBRID:
        group = config.fsdp.shard_group_size or min(cluster.per_node, cluster.devices)
    rules = ShardingRules(config, group)
    compute = COMPUTE_BYTES.get(config.precision, MASTER)
    once = config.strategy in GATHERED_ONCE
    # The compiler keeps gathered parameters for the backward pass. With recomputation, barriers prevent
    # that, and so do loops: only the running layer's are there. Lookup tables are never gathered, except the
    # head's; of these, rows are sent.
    keeps_gathered = once or not (config.memory.activation_checkpointing == "full" or config.xla.scan_layers)
    sums = _sum_weights(model, config, rules, group, keeps_gathered=keeps_gathered)
    gradients = sums.gradients
    layers = model.count_part_elements("layer")
    outside = model.elements - sum(layers)
    running = compute * (sum(layers) if keeps_gathered else max(layers, default=0))
    outside -= sum(w.elements for w in model.weights if w.table and not w.head)
    gathered = compute * (outside + (sum(layers) if keeps_gathered else 0))
    # The whole gradient of the head, which the pass has, takes the place of its gathered matrix, which only
    # makes the gradients for the layers. If it is scattered meanwhile, there are pieces of two neighbors.
    head = sum(w.elements for w in model.trained if w.head and rules.choose_dim(w.name, w.shape) is not None)
    pieces = 2 if group in SCATTERED_WHILE_MULTIPLYING else 0
    gathered -= compute * head * (group - pieces) // group
    in_layers = running
    # In the graph of a whole step, gradients are kept as they are reduced: in the compute type.
    rows = cluster.devices // config.context_parallel_size
    whole_step = config.train.global_batch_size == config.train.micro_batch_size * rows
    if whole_step:
        in_layers += gradients * compute // MASTER
    share, copies = (group - 1) / group, cluster.devices // group
    orthogonalization = _compute_orthogonalization_cost(model, compute, group)
    per_pass = (sums.gathers + sums.scattered) * compute * share
    apart = sum(w.elements for w in model.trained) - sums.learning
    summed = 2 * compute * apart * (cluster.devices - 1) / cluster.devices
    between = 2 * gradients * (copies - 1) / copies if config.strategy in HYBRID else 0.0
    if config.strategy == "no_shard" or group == 1:
        gathered, in_layers = 0, in_layers - running
    if group == cluster.devices and cluster.nodes > 1:
        between = (per_pass + summed) * (cluster.nodes - 1) / cluster.nodes / cluster.per_node
    return Footprint(
        parameters=sums.parameters,
        gradients=0 if whole_step else gradients,
        optimizer=sums.moments,
        compute="cast",
        compiler=Compiler(
            classify_result,
            bool(config.xla.scan_layers),
            config.xla.attention_rows,
            config.context_parallel_size,
            use_every_expert,
        ),
        gathered=gathered + sums.copied,
        in_layers=in_layers + sums.copied,
        # The state is updated in place.
        in_update=orthogonalization.memory_bytes + (gradients * compute // MASTER if whole_step else 0),
        links=Traffic(per_pass=per_pass + summed, per_step=orthogonalization.sent_bytes),
        network=Traffic(per_pass=between),
    )


class _OrthogonalizationCost(NamedTuple):
    """Bytes that Muon's update takes in addition to its state, and bytes that a device sends in it."""

    memory_bytes: int
    sent_bytes: float


def _compute_orthogonalization_cost(model: Inventory, compute: int, group: int) -> _OrthogonalizationCost:
    """Bytes that Muon's update takes beside its state, and that a device sends in it; 0 for others.

    Matrices of one shape are spread over the devices, each of which has its share of them whole: operands and
    results of the products.
    """
    alike: Counter[tuple[int, ...]] = Counter()
    for weight in model.trained:
        if weight.matrices:
            alike[weight.shape[-2:]] += math.prod(weight.shape[:-2])
    most = max(
        (-(-count // group) * (5 * math.prod(shape) + 2 * min(shape) ** 2) for shape, count in alike.items()),
        default=0,
    )
    moved = sum(count * math.prod(shape) for shape, count in alike.items())
    return _OrthogonalizationCost(compute * most, 2 * compute * moved * (group - 1) / group**2)
