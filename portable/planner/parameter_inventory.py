"""Data classes for a model's parameters and the other model properties that a plan needs.

:func:`portable.planner.meta_model.build_inventory` builds them from a model on the meta device.
Importing this module does not import torch. The backends' ``footprint`` modules, which compute the
memory that a run needs, can therefore import it quickly.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from portable.planner.optimizer_memory import compute_optimizer_state_bytes

if TYPE_CHECKING:
    from portable.config.sections import TrainConfig
    from portable.optim.optimizers import OptimizerGroup


@dataclass(frozen=True)
class ParameterEntry:
    """Properties of a model parameter. A tied parameter has a single entry."""

    name: str
    """Name of the parameter. For a tied parameter, the first of its names."""
    shape: tuple[int, ...]
    group: OptimizerGroup | None
    """Optimizer group of the parameter. None if the parameter is frozen."""
    is_embedding: bool
    """Whether the parameter is an embedding table."""
    is_output_head: bool
    """Whether the parameter is the matrix of the output head."""
    layer_index: int | None
    """Index of the transformer layer that contains the parameter. None if no layer contains it."""
    unit_index: int | None
    """Index of the innermost FSDP unit that contains the parameter. None if no unit contains it."""
    itemsize: int = 4
    """Size in bytes of an element of the parameter and of its gradient under FSDP2, DDP, and XLA."""
    sharded_dim: int | None = None
    """Dimension along which tensor-parallel ranks split the parameter. None if each rank has the complete
    parameter.
    """
    expert_dim: int | None = None
    """Dimension along which expert-parallel ranks split the parameter, if it is a stack of experts or
    a LoRA factor of experts. None for other parameters."""

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of the parameter, computed from its shape."""
        return math.prod(self.shape)

    @property
    def is_trained(self) -> bool:
        """Whether the parameter is trained. False if it is frozen."""
        return self.group is not None

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates the parameter."""
        return self.group is not None and self.group.uses_muon


@dataclass(frozen=True)
class ModelInventory:
    """Parameters of a model, and the other model properties that a plan needs."""

    architecture: str
    """Name of the transformers class, such as ``LlamaForCausalLM``."""
    weights: tuple[ParameterEntry, ...]
    state_bytes: int
    """Size of the weights and persistent buffers in a checkpoint, in bytes."""
    hidden_size: int
    num_layers: int
    """Number of layers that a token passes through. Layers that share parameters count several times."""
    vocab_size: int
    num_parameters: int
    """Number of parameters before quantization.

    It may exceed ``num_elements``, because an element of a quantized weight can store several parameters.
    """
    experts_per_token: int = 0
    """Number of experts that process a token in each layer of a mixture. 0 if the model has no experts."""
    num_mixture_layers: int = 0
    """Number of layers with stacked experts."""
    unit_error: str | None = None
    """Error message that explains why FSDP cannot split the model into units. None if FSDP can split it."""

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(w.num_elements for w in self.weights)

    @cached_property
    def trained_weights(self) -> tuple[ParameterEntry, ...]:
        """Parameters that are not frozen."""
        return tuple(w for w in self.weights if w.is_trained)

    def shard_for_tensor_parallel(self, ranks: int) -> ModelInventory:
        """Return the inventory of one tensor-parallel rank, in which sharded parameters are smaller.

        Only the shapes in ``weights`` change. Other fields, such as ``state_bytes`` and
        ``num_parameters``, still describe the complete model.

        Args:
            ranks: Number of tensor-parallel ranks. If it is 1, this object itself is returned.
        """

        def cut_weight(weight: ParameterEntry) -> ParameterEntry:
            shape = [
                size // ranks if dim == weight.sharded_dim else size for dim, size in enumerate(weight.shape)
            ]
            return replace(weight, shape=tuple(shape))

        return self if ranks == 1 else replace(self, weights=tuple(map(cut_weight, self.weights)))

    def shard_for_expert_parallel(self, ranks: int) -> ModelInventory:
        """Return the inventory of one rank, with the experts divided among ``ranks`` ranks.

        Only the shapes in ``weights`` change. Other fields, such as ``state_bytes`` and
        ``num_parameters``, still describe the complete model. Returns this object itself if
        ``ranks`` is 1.
        """
        if ranks == 1:
            return self

        def cut_weight(weight: ParameterEntry) -> ParameterEntry:
            shape = [
                size // ranks if dim == weight.expert_dim else size for dim, size in enumerate(weight.shape)
            ]
            return replace(weight, shape=tuple(shape))

        return replace(self, weights=tuple(map(cut_weight, self.weights)))

    def count_elements_by_part(
        self, part: Literal["layer", "unit"], *, only_trained: bool = False
    ) -> list[int]:
        """Count the parameter elements in each transformer layer or each FSDP unit.

        Args:
            part: ``layer`` to count per transformer layer, or ``unit`` to count per FSDP unit.
            only_trained: Whether to count only the elements of trained parameters.

        Returns:
            A list of counts, in no particular order. Layers or units without parameters are omitted.
        """
        counts: Counter[int] = Counter()
        for weight in self.trained_weights if only_trained else self.weights:
            index = weight.layer_index if part == "layer" else weight.unit_index
            if index is not None:
                counts[index] += weight.num_elements
        return list(counts.values())

    def compute_checkpoint_bytes(self, train: TrainConfig) -> int:
        """Compute the size of a checkpoint's tensors in bytes: weights and optimizer state."""
        return self.state_bytes + self.compute_optimizer_state_bytes(train)

    def compute_optimizer_state_bytes(self, train: TrainConfig) -> int:
        """Compute the total size of the optimizer state before sharding, in bytes.

        All trained parameters are included.
        """
        return sum(
            compute_optimizer_state_bytes(
                train,
                w.shape,
                w.shape[0] if w.shape else 1,
                keeps_fp32_moments=w.is_embedding,
                uses_muon=w.uses_muon,
            )
            for w in self.trained_weights
        )
