"""What the planner asks about one forward and backward pass, and the answer.

:mod:`portable.planner.activations` runs the passes and needs torch. This module does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from portable.config import RunConfig

Compute = Literal["plain", "autocast", "cast"]
"""How the compute dtype is reached. ``plain``: it is fp32. ``autocast``: autocast keeps a copy of each
weight. ``cast``: the parameters have the dtype themselves, as in FSDP2 and DeepSpeed."""


@dataclass(frozen=True)
class Peak:
    """Peak bytes on one device."""

    work: int
    """Saved activations and temporary tensors of the backward pass, logits and loss included."""
    copies: int
    """Copies of weights that autocast makes."""

    @property
    def total(self) -> int:
        return self.work + self.copies


@dataclass(frozen=True)
class Activations:
    """The peaks of a pass."""

    before: Peak
    """Forward pass, and backward pass until the first layer has gradients."""
    in_layers: Peak
    """Backward pass from the first layer with gradients on."""
    failure: str | None = None
    """Why the model could not be run. The peaks are then an estimate by formula."""

    @property
    def total(self) -> int:
        return max(self.before.total, self.in_layers.total)


@dataclass(frozen=True)
class Request:
    """A pass to run: everything that the peaks of a model depend on."""

    micro_batch: int
    seq_len: int
    task: str
    packed: bool | Literal["documents"]
    compute: Compute
    precision: str
    """fp32, bf16 or fp16."""
    recompute: str
    on_gpu: bool
    """Whether autocast follows CUDA's rules, which keep more operations in fp32 than the CPU's."""
    loss_chunk_tokens: int | Literal["auto"]
    """Tokens whose loss is computed at a time; 0 for all. See ``memory.loss_chunk_tokens``."""
    compiled: bool = False
    """Whether XLA compiles it. There is no fused attention kernel then: the scores exist in full."""

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
        """The pass that a run of ``config`` makes."""
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
