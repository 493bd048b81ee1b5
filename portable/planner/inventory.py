"""What there is to place of a model: its parameters, and the few numbers that a plan needs besides.

Taken from the model on the meta device by :func:`portable.planner.subject.inspect`. It is plain data, so that
it can be kept, and a plan be reckoned from it without torch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from portable.planner.memory_model import moment_bytes

if TYPE_CHECKING:
    from portable.config import TrainConfig


@dataclass(frozen=True)
class Weight:
    """A parameter, once however many names it has."""

    name: str
    """The first of them."""
    shape: tuple[int, ...]
    trained: bool
    decays: bool
    """Whether weight decay is for it."""
    table: bool
    """Whether tokens are looked up in it."""
    head: bool
    """Whether it is the output head's matrix."""
    layer: int | None
    """Which of the transformer layers has it; None: it lies outside them."""
    unit: int | None
    """Which unit of FSDP gathers it, the innermost; None: it lies outside them."""

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Inventory:
    """A model as far as a plan needs it."""

    architecture: str
    weights: tuple[Weight, ...]
    state_bytes: int
    """Of its weights and persistent buffers in a checkpoint."""
    hidden_size: int
    num_layers: int
    """That a token goes through: more than there are where layers share their parameters."""
    vocab_size: int
    products: float
    """Floating-point operations of matrix products, per trained token, forward and backward."""
    scores: float
    """Those of attention scores, per trained token and token of the sequence."""
    no_units: str | None = None
    """What keeps FSDP from making units of it, in a sentence for whoever set that."""

    @cached_property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(w.elements for w in self.weights)

    def sizes(self, part: Literal["layer", "unit"]) -> list[int]:
        """Elements of each transformer layer, or unit of FSDP."""
        found: Counter[int] = Counter()
        for weight in self.weights:
            index = weight.layer if part == "layer" else weight.unit
            if index is not None:
                found[index] += weight.elements
        return list(found.values())

    def flops_per_token(self, seq_len: int) -> float:
        """See :func:`portable.model.flops.flops_per_token`."""
        return self.products + self.scores * seq_len

    def checkpoint_bytes(self, train: TrainConfig) -> int:
        """Bytes of one checkpoint's tensors: fp32 weights, and the optimizer's state of what is trained."""
        return self.state_bytes + self.moment_bytes(train)

    def moment_bytes(self, train: TrainConfig) -> int:
        """Bytes of the optimizer's state, all of it."""
        return sum(
            moment_bytes(train, w.shape, w.shape[0] if w.shape else 1, exact=w.table)
            for w in self.weights
            if w.trained
        )
