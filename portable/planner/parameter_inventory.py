"""Parameters of a model and other properties that a plan requires, as plain data.

:func:`portable.planner.meta_model.build_inventory` reads them from the model on the meta device. This module
does not import torch.
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
    """Parameter of a model. A tied parameter is listed once."""

    name: str
    """Name of the parameter. A tied parameter has the first of its names."""
    shape: tuple[int, ...]
    group: OptimizerGroup | None
    """Parameter group. None if the parameter is frozen."""
    is_embedding: bool
    """Whether the parameter is an embedding table."""
    is_output_head: bool
    """Whether the parameter is the matrix of the output head."""
    layer_index: int | None
    """Index of the transformer layer. None outside of the layers."""
    unit_index: int | None
    """Index of the innermost FSDP unit. None outside of the units."""
    itemsize: int = 4
    """Element size in bytes in FSDP2, DDP, and XLA. It is 4 if the parameter is trained."""
    sharded_dim: int | None = None
    """Dimension along which tensor-parallel ranks split the parameter. None if each rank has the complete
    parameter.
    """
    is_expert_stack: bool = False
    """Whether the parameter is a stack of experts, which expert-parallel ranks divide."""

    @cached_property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_trained(self) -> bool:
        """Whether the parameter is trained."""
        return self.group is not None

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates the parameter."""
        return self.group is not None and self.group.uses_muon


@dataclass(frozen=True)
class ModelInventory:
    """Parameters of a model, and other properties that a plan requires."""

    architecture: str
    weights: tuple[ParameterEntry, ...]
    state_bytes: int
    """Size of the weights and persistent buffers in a checkpoint, in bytes."""
    hidden_size: int
    num_layers: int
    """Number of layers that a token passes through. Layers that share parameters count several times."""
    vocab_size: int
    num_parameters: int
    """Number of parameters of the model. Quantized weights have fewer elements than parameters."""
    experts_per_token: int = 0
    """Number of experts that process a token in each layer of a mixture. 0 if the model has no experts."""
    unit_error: str | None = None
    """Error message that explains why FSDP cannot split the model into units. None if it can."""

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(w.num_elements for w in self.weights)

    @cached_property
    def trained_weights(self) -> tuple[ParameterEntry, ...]:
        """Parameters that are not frozen."""
        return tuple(w for w in self.weights if w.is_trained)

    def shard_for_tensor_parallel(self, ranks: int) -> ModelInventory:
        """Return the inventory of one tensor-parallel rank out of ``ranks``.

        Returns self if ``ranks`` is 1.
        """

        def cut_weight(weight: ParameterEntry) -> ParameterEntry:
            shape = [
                size // ranks if dim == weight.sharded_dim else size for dim, size in enumerate(weight.shape)
            ]
            return replace(weight, shape=tuple(shape))

        return self if ranks == 1 else replace(self, weights=tuple(map(cut_weight, self.weights)))

    def shard_for_expert_parallel(self, ranks: int) -> ModelInventory:
        """Return the inventory of one expert-parallel rank out of ``ranks``.

        Returns self if ``ranks`` is 1.
        """
        if ranks == 1:
            return self
        weights = (
            replace(w, shape=(w.shape[0] // ranks, *w.shape[1:])) if w.is_expert_stack else w
            for w in self.weights
        )
        return replace(self, weights=tuple(weights))

    def count_elements_by_part(
        self, part: Literal["layer", "unit"], *, only_trained: bool = False
    ) -> list[int]:
        """Count the elements of each transformer layer or FSDP unit.

        Args:
            part: ``layer`` or ``unit``.
            only_trained: Whether to count only trained elements.
        """
        counts: Counter[int] = Counter()
        for weight in self.trained_weights if only_trained else self.weights:
            index = weight.layer_index if part == "layer" else weight.unit_index
            if index is not None:
                counts[index] += weight.num_elements
        return list(counts.values())

    def compute_checkpoint_bytes(self, train: TrainConfig) -> int:
        """Compute the size of a checkpoint's tensors in bytes: fp32 weights and optimizer state."""
        return self.state_bytes + self.compute_optimizer_state_bytes(train)

    def compute_optimizer_state_bytes(self, train: TrainConfig) -> int:
        """Compute the size of the complete optimizer state."""
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
