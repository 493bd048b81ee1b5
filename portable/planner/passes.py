"""What a forward and backward pass is asked for, and what it takes: the terms of the plan.

The passes themselves are in :mod:`portable.planner.activations`, which needs torch; a plan whose passes are
known does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from portable.config import RunConfig

Compute = Literal["plain", "autocast", "cast"]
"""How a compute type comes about: none but fp32; by autocast, which keeps a copy of each weight; or by
parameters that are in that type themselves, as FSDP2 and DeepSpeed have them."""


@dataclass(frozen=True)
class Peak:
    """Bytes on one device when they are the most."""

    work: int
    """Kept for the backward pass, and what it works with; logits and loss included."""
    copies: int
    """Of weights, in the compute type of autocast."""

    @property
    def total(self) -> int:
        return self.work + self.copies


@dataclass(frozen=True)
class Activations:
    """The peaks of the parts of a pass."""

    before: Peak
    """In the forward pass, and in the backward pass until the first layer has gradients."""
    in_layers: Peak
    """From there on."""
    failure: str | None = None
    """Why the model could not be run, where these are a guess."""

    @property
    def total(self) -> int:
        return max(self.before.total, self.in_layers.total)


@dataclass(frozen=True)
class Request:
    """What is to be run: all that decides over a model's peaks."""

    micro_batch: int
    seq_len: int
    task: str
    packed: bool
    compute: Compute
    precision: str
    """fp32, bf16 or fp16."""
    recompute: str
    on_gpu: bool
    """Whether autocast chooses types as on CUDA, which takes fp32 for more operations than on a CPU."""
    loss_chunk_tokens: int | Literal["auto"]
    """The loss of how many tokens is computed at a time; 0: of all. See ``memory.loss_chunk_tokens``."""
    compiled: bool = False
    """Whether XLA compiles it: without kernels of their own for attention, whose scores are there in full."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        *,
        micro_batch: int,
        compute: Compute,
        on_gpu: bool,
        compiled: bool = False,
    ) -> Request:
        """For a run of ``config``."""
        precision = "fp32" if config.precision == "tf32" else config.precision
        in_parts = not (compiled or config.strategy.startswith("zero"))
        return cls(
            micro_batch,
            config.data.longest,
            config.model.task,
            config.data.packing,
            "plain" if precision == "fp32" else compute,
            precision,
            "full" if config.xla.xla_fsdp_grad_ckpt else config.memory.activation_checkpointing,
            on_gpu,
            config.memory.loss_chunk_tokens if in_parts else 0,
            compiled,
        )
