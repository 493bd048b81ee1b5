"""Build a model on the meta device, read its parameter sizes, and measure its activation memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from portable.adapters.assemble import check_parallel_support
from portable.errors import UserError, to_one_line
from portable.model.context_parallel_support import count_attention_heads
from portable.model.expert_exchange import find_expert_modules, list_expert_factors
from portable.model.flops import compute_flops_per_token, count_parameters, get_experts_per_token
from portable.model.layers import find_transformer_layers
from portable.model.parameter_groups import assign_parameter_groups
from portable.model.parameters import get_checkpointed_tensors, list_embedding_weights
from portable.model.tensor_parallel_plan import map_sharded_dims
from portable.planner.memory_model import COMPUTE_BYTES
from portable.planner.parameter_inventory import ModelInventory, ParameterEntry
from portable.planner.pass_cost import Activations, Peak, TowerMemory
from portable.registry import load_backend_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.config.sections import TrainConfig
    from portable.planner.memory_model import Cluster
    from portable.planner.pass_cost import PassRequest


class ContextParallelTraffic(NamedTuple):
    """Number of bytes that a context-parallel rank sends in a micro-batch.

    Attributes:
        sent_bytes: Number of bytes that the rank sends to all other ranks of its group.
        sent_between_nodes: Number of these bytes that are sent to ranks on other nodes.
    """

    sent_bytes: float
    sent_between_nodes: float


class MetaModel:
    """Model on the meta device, with the quantities that the planner computes from it.

    Examples of these quantities are parameter counts, FLOPs per token, and activation sizes. The
    attribute ``inventory`` contains the parameters. If the strategy cannot split the model into
    FSDP units, the error message is stored in ``inventory.unit_error``. The constructor does not
    raise the error, because other strategies may not need units.

    Args:
        model: Model on the meta device. It is not modified.
        config: Config of the run. Its backend must not be ``auto``.
        image_columns: Batch columns with the images of the sample that needs the most memory, keyed
            by name. None if the samples have no images.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RunConfig,
        image_columns: Batch | None = None,
    ) -> None:
        sharing = config.tensor_parallel_size
        try:
            self.inventory = build_inventory(
                model,
                config.train,
                load_backend_package(config.backend).load_footprint().find_gathered_units(model, config),
                sharing=sharing,
            )
        except UserError as error:  # Store the error, because only some strategies gather units.
            self.inventory = replace(
                build_inventory(model, config.train, sharing=sharing), unit_error=str(error)
            )
        self.flops_per_token = compute_flops_per_token(model, model.config, config.data.seq_len)
        """Number of FLOPs per token in the forward and backward pass, without recomputation."""
        self._model = model
        self._image_columns = image_columns
        self._cached_activations: dict[PassRequest, Activations] = {}
        self._cached_towers: dict[tuple[str, str, str], TowerMemory] = {}

    @cached_property
    def flops_per_image_token(self) -> float:
        """Number of FLOPs of the image tower per image token, in the forward and backward pass.

        0 if the samples have no images, or if the tower cannot be run on fake tensors.
        """
        from portable.model.image_features import compute_flops_per_feature

        return (
            0.0
            if self._image_columns is None
            else compute_flops_per_feature(self._model, self._image_columns)
        )

    def check_parallel_sizes(self, config: RunConfig) -> None:
        """Check the context-, tensor- and expert-parallel sizes of a config against the model.

        Raises:
            UserError: If the model does not support a size.
        """
        check_parallel_support(self._model, config)

    def compute_context_parallel_traffic(self, config: RunConfig, cluster: Cluster) -> ContextParallelTraffic:
        """Compute the number of bytes that a context-parallel rank sends in a micro-batch.

        In each attention layer, a rank sends its share of the queries, keys, values, and results to the
        other ranks of its group. This happens in the forward pass, in the backward pass for the gradients,
        and once more if the layer is recomputed. Returns zeros without context parallelism.

        Args:
            config: Config of the run. ``train.micro_batch_size`` must not be ``auto``.
            cluster: Devices of the run.
        """
        parts, data, micro = config.context_parallel_size, config.data, config.train.micro_batch_size
        if parts == 1:
            return ContextParallelTraffic(0.0, 0.0)
        text = self._model.config.get_text_config()
        heads, keys = count_attention_heads(self._model)
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        query, value = getattr(text, "qk_head_dim", head), getattr(text, "v_head_dim", head)
        # Use at least `parts` key heads, because key heads are replicated until each rank has one.
        width = text.num_hidden_layers * (heads + max(keys, parts)) * (query + value)
        assert micro != "auto"
        tokens = micro * data.sequences_per_sample * data.max_sequence_length // parts
        passes = 2 if config.memory.activation_checkpointing == "none" else 3
        share = passes * width * tokens * COMPUTE_BYTES[config.precision] / parts
        return ContextParallelTraffic(share * (parts - 1), share * max(0, parts - cluster.per_node))

    def measure_activations(self, request: PassRequest) -> Activations:
        """Measure the peak memory of a pass. Results are cached.

        If the samples have images, the result includes the memory of the image tower.

        If the model cannot be run on fake tensors, for example because its control flow depends on values,
        the peak is estimated with a formula, and ``failure`` is set in the result.

        Args:
            request: Pass to run.
        """
        if request not in self._cached_activations:
            activations = self._measure_without_images(request)
            if self._image_columns is not None:
                tower = self._measure_image_tower(self._image_columns, request)
                activations = activations.add_tower(tower, request.micro_batch)
            self._cached_activations[request] = activations
        return self._cached_activations[request]

    def _measure_without_images(self, request: PassRequest) -> Activations:
        """Measure or estimate the peak memory of a pass that does not run an image tower.

        If the measurement of a pass with ``compiled`` fails, the pass is measured without
        compilation. The memory is estimated only if the measurement without compilation fails as
        well.
        """
        from portable.planner.activations import measure_activations

        try:
            return measure_activations(self._model, request)
        except Exception as error:
            # Measure without compilation, because the graph cannot be traced or has breaks.
            if request.compiled:
                return self._measure_without_images(replace(request, compiled=False))
            why = f"{type(error).__name__}: {to_one_line(error)}"
            return _estimate_activations(self.inventory, request, why)

    def _measure_image_tower(self, columns: Batch, request: PassRequest) -> TowerMemory:
        """Measure or estimate the memory of the image tower for one sample. Results are cached.

        The memory is estimated if the tower cannot be run. The estimated peak is 10 times the size
        of the images in the processor's output, because a layer of a vision transformer stores
        about 10 activation values for each input value. The estimated memory after the forward pass
        is twice the size of the images.
        """
        from portable.planner.activations import measure_image_tower

        key = (request.compute, request.precision, request.recompute)
        if key not in self._cached_towers:
            try:
                self._cached_towers[key] = measure_image_tower(self._model, request, columns)
            except Exception as error:
                size = sum(values.nbytes for values in columns.values())
                why = f"vision tower: {type(error).__name__}: {to_one_line(error)}"
                self._cached_towers[key] = TowerMemory(Peak(10 * size, 0), Peak(2 * size, 0), why)
        return self._cached_towers[key]


def build_inventory(
    module: nn.Module, train: TrainConfig, units: Sequence[nn.Module] = (), *, sharing: int = 1
) -> ModelInventory:
    """Build the inventory of a transformers model, which lists its parameters and sizes as plain data.

    Args:
        module: Model on any device.
        train: Settings that determine the trained parameters and the parameter groups.
        units: Modules whose parameters FSDP gathers together, with outer modules before inner modules.
        sharing: Number of tensor-parallel ranks. It determines the ``sharded_dim`` of each
            parameter. All shapes and sizes remain unsharded.
    """
    model = cast("PreTrainedModel", module)
    layers = [layer for _, layer in find_transformer_layers(model)]
    # Iterate over the layers in reverse order, because a parameter that several layers share belongs to the
    # first layer. A parameter in nested units belongs to the innermost unit, because later units overwrite
    # earlier ones.
    layer_of = {id(p): i for i, layer in reversed(list(enumerate(layers))) for p in layer.parameters()}
    unit_of = {id(p): i for i, unit in enumerate(units) for p in unit.parameters()}
    groups = assign_parameter_groups(model, train)
    cut = map_sharded_dims(model, sharing)
    expert_modules = find_expert_modules(model)
    expert_dims = {id(factor): dim for factor, dim in list_expert_factors(model).items()}
    for module in expert_modules.values():
        expert_dims |= {id(stack): 0 for stack in module.parameters(recurse=False)}
    tables = {id(parameter) for parameter in list_embedding_weights(model)}
    head: Any = model.get_output_embeddings()
    weights = tuple(
        ParameterEntry(
            name,
            tuple(parameter.shape),
            group=groups.get(name),
            is_embedding=id(parameter) in tables,
            is_output_head=head is not None and parameter is head.weight,
            layer_index=layer_of.get(id(parameter)),
            unit_index=unit_of.get(id(parameter)),
            itemsize=parameter.itemsize,
            sharded_dim=cut.get(name),
            expert_dim=expert_dims.get(id(parameter)),
        )
        for name, parameter in model.named_parameters()
    )
    text = model.config.get_text_config()
    return ModelInventory(
        architecture=type(model).__name__,
        weights=weights,
        state_bytes=sum(t.numel() * t.element_size() for t in get_checkpointed_tensors(model).values()),
        hidden_size=int(getattr(text, "hidden_size", 1024)),
        num_layers=int(getattr(text, "num_hidden_layers", len(layers))),
        vocab_size=int(getattr(text, "vocab_size", 0)),
        num_parameters=count_parameters(model),
        experts_per_token=(get_experts_per_token(text) or 1) if expert_modules else 0,
        num_mixture_layers=len(expert_modules),
    )


def _estimate_activations(model: ModelInventory, request: PassRequest, failure: str) -> Activations:
    """Estimate the activation memory with a formula, for a model that cannot be run on fake tensors.

    The formula counts 34 bytes per token, layer, and hidden unit in 16-bit precision, or 2 bytes if
    the layer is recomputed. The numbers are from Korthikanti et al., 2022, "Reducing Activation
    Recomputation in Large Transformer Models". Attention scores are not counted. The formula then
    adds:

    * the activations of one layer during its backward pass,
    * three copies of the logits in fp32,
    * under autocast, a 16-bit copy of all fp32 weights.

    Args:
        model: Inventory of the model.
        request: Pass to estimate.
        failure: Reason why the model cannot be run. Stored in the result, to be shown to the user.
    """
    tokens = request.micro_batch * max(request.seq_len, request.target_seq_len)
    width = 2 if request.compute == "plain" else 1
    a_layer = 34 * tokens * model.hidden_size * width
    recomputed = 2 * tokens * model.hidden_size * width
    saved_bytes = model.num_layers * (recomputed if request.recompute == "full" else a_layer)
    logits = 12 * tokens * model.vocab_size
    fp32_elements = sum(weight.num_elements for weight in model.weights if weight.itemsize > 2)
    copies = 2 * fp32_elements if request.compute == "autocast" else 0
    peak = Peak(saved_bytes + a_layer + logits, copies)
    return Activations(peak, peak, failure)
