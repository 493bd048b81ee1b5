"""The parameters of a model and the few other numbers that a plan needs, as plain data.

:func:`portable.planner.meta_model.build_inventory` reads them from the model on the meta device. This
module needs no torch.
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
    """A parameter. A tied parameter is listed once."""

    name: str
    """The first name, if it has several."""
    shape: tuple[int, ...]
    group: OptimizerGroup | None
    """Its parameter group; None if it is frozen."""
    is_embedding: bool
    """Whether it is an embedding table."""
    is_output_head: bool
    """Whether it is the output head's matrix."""
    layer_index: int | None
    """Index of its transformer layer; None outside the layers."""
    unit_index: int | None
    """Index of its innermost FSDP unit; None outside the units."""
    itemsize: int = 4
    """Bytes of an element as FSDP2, DDP and XLA keep it: 4 if it is trained."""
    sharded_dim: int | None = None
    """The dim along which ranks that share layers have a part of it; None: each has all of it."""

    @cached_property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_trained(self) -> bool:
        return self.group is not None

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates it as matrices."""
        return self.group is not None and self.group.uses_muon


@dataclass(frozen=True)
class ModelInventory:
    """What a plan needs to know of a model."""

    architecture: str
    weights: tuple[ParameterEntry, ...]
    state_bytes: int
    """Bytes of its weights and persistent buffers in a checkpoint."""
    hidden_size: int
    num_layers: int
    """Layers that a token passes through. Layers that share parameters count each time."""
    vocab_size: int
    num_parameters: int
    """Parameters that the weights stand for; quantized ones have fewer elements."""
    unit_error: str | None = None
    """Why FSDP cannot make units of this model, as a message for the user; None if it can."""

    @cached_property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(w.num_elements for w in self.weights)

    @cached_property
    def trained_weights(self) -> tuple[ParameterEntry, ...]:
        """The parameters that are not frozen."""
        return tuple(w for w in self.weights if w.is_trained)

    def shard_for_tensor_parallel(self, ranks: int) -> ModelInventory:
        """What a rank has of the model where so many share its layers."""

        def cut_weight(weight: ParameterEntry) -> ParameterEntry:
            shape = [
                size // ranks if dim == weight.sharded_dim else size for dim, size in enumerate(weight.shape)
            ]
            return replace(weight, shape=tuple(shape))

        return self if ranks == 1 else replace(self, weights=tuple(map(cut_weight, self.weights)))

    def count_elements_by_part(
        self, part: Literal["layer", "unit"], *, only_trained: bool = False
    ) -> list[int]:
        """Elements, or ``only_trained`` elements, of each transformer layer, or of each FSDP unit."""
        counts: Counter[int] = Counter()
        for weight in self.trained_weights if only_trained else self.weights:
            index = weight.layer_index if part == "layer" else weight.unit_index
            if index is not None:
                counts[index] += weight.num_elements
        return list(counts.values())

    def compute_checkpoint_bytes(self, train: TrainConfig) -> int:
        """Bytes of the tensors of one checkpoint: fp32 weights and optimizer state."""
        return self.state_bytes + self.compute_optimizer_state_bytes(train)

    def compute_optimizer_state_bytes(self, train: TrainConfig) -> int:
        """Bytes of the whole optimizer state."""
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
