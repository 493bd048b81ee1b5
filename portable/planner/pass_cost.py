"""What the planner asks about one forward and backward pass, and the answer.

:mod:`portable.planner.activations` runs the passes and needs torch. This module does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config import RunConfig

ComputeMode = Literal["plain", "autocast", "cast"]
"""How the compute dtype is reached. ``plain``: it is fp32. ``autocast``: autocast keeps a copy of each
weight. ``cast``: the parameters have the dtype themselves, as in FSDP2 and DeepSpeed."""


class Peak(NamedTuple):
    """Peak bytes on one device."""

    work_bytes: int
    """Saved activations and temporary tensors of the backward pass, logits and loss included."""
    copy_bytes: int
    """Copies of weights that autocast makes."""

    @property
    def total_bytes(self) -> int:
        return self.work_bytes + self.copy_bytes


@dataclass(frozen=True)
class Activations:
    """The peaks of a pass."""

    before_layers: Peak
    """Forward pass, and backward pass until the first layer has gradients."""
    in_layers: Peak
    """Backward pass from the first layer with gradients on."""
    failure: str | None = None
    """Why the model could not be run. The peaks are then an estimate by formula."""

    @property
    def total_bytes(self) -> int:
        return max(self.before_layers.total_bytes, self.in_layers.total_bytes)


ResultKind = Literal["written", "product", "computed", "rows", "saved"]
"""What a compiler does with the result of an operation. ``written``: it lies in memory. ``product``: so does
what elementwise operations make of it, in its place, if nothing else reads it. ``computed``: it takes no
memory, and is computed where it is read. ``rows``: the same, after a reduction of what is in memory.
``saved``: written, for a backward loop."""


class ResultRule(Protocol):
    """Tells what a compiler does with the result of an operation of torch (``mm``, ``_to_copy``)."""

    def __call__(self, operation: str, *, elementwise: bool) -> ResultKind: ...


@dataclass(frozen=True)
class CompilerModel:
    """How a compiler runs a pass."""

    classify_result: ResultRule
    loops_over_layers: bool = False
    """Whether layers run in a loop: what autograd saves of them is then written."""
    attention_rows: int | None = None
    """Rows of attention scores that exist at once, computed again in the backward pass; None for all."""
    context_parallel_size: int = 1
    """Devices that share a sequence, each of which attends over all of it with its share of the heads."""
    prepare_model: Callable[[Any], None] | None = None
    """Changes a model's modules as the engine does before it runs them."""


@dataclass(frozen=True)
class PassRequest:
    """A pass to run: everything that the peaks of a model depend on."""

    micro_batch: int
    seq_len: int
    target_seq_len: int
    """Of the labels: of a decoder's input, where there is an encoder."""
    task: str
    packed: bool | Literal["documents"]
    compute: ComputeMode
    precision: str
    """fp32, bf16 or fp16."""
    recompute: str
    on_gpu: bool
    """Whether autocast follows CUDA's rules, which keep more operations in fp32 than the CPU's."""
    loss_chunk_tokens: int | Literal["auto"]
    """Tokens whose loss is computed at a time; 0 for all. See ``memory.loss_chunk_tokens``."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    compiler: CompilerModel | None = None
    """What compiles it. There is no fused attention kernel then."""
    compiled: bool = False
    """Whether inductor compiles each layer, and chooses what is kept for the backward pass."""

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        *,
        micro_batch: int,
        compute: ComputeMode,
        on_gpu: bool,
        compiler: CompilerModel | None = None,
    ) -> PassRequest:
        """The pass that a run of ``config`` makes."""
        precision = "fp32" if config.precision == "tf32" else config.precision
        in_parts = not (compiler or config.strategy.startswith("zero"))
        if in_parts and config.train.loss is not None:
            from portable.model.training_loss import LOGITS, build_training_loss  # which needs torch

            loss = build_training_loss(config)
            in_parts = loss is not None and LOGITS not in loss.needs
        data, parts = config.data, config.context_parallel_size
        return cls(
            micro_batch * data.sequences_per_sample,
            data.seq_len // parts,
            (data.target_seq_len or data.seq_len) // parts,
            config.model.task,
            data.packing,
            "plain" if precision == "fp32" else compute,
            precision,
            config.memory.activation_checkpointing,
            on_gpu,
            config.memory.loss_chunk_tokens if in_parts else 0,
            config.tensor_parallel_size,
            compiler,
            # What recomputes a layer decides alone what is kept.
            config.compile and compiler is None and config.memory.activation_checkpointing == "none",
        )
