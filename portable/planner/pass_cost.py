"""Description of a forward and backward pass, and its memory.

:mod:`portable.planner.activations` runs the passes and requires torch. This module does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config import RunConfig

ComputeMode = Literal["plain", "autocast", "cast"]
"""Mode in which the compute dtype is reached. ``plain``: the compute dtype is fp32. ``autocast``: autocast
keeps a copy of each weight. ``cast``: the parameters themselves have the compute dtype, as in FSDP2 and
DeepSpeed.
"""


class Peak(NamedTuple):
    """Peak number of bytes on a device."""

    work_bytes: int
    """Size of saved activations and temporary tensors of the backward pass, including the logits and the
    loss.
    """
    copy_bytes: int
    """Size of the copies of weights that autocast creates."""

    @property
    def total_bytes(self) -> int:
        """Sum of both sizes."""
        return self.work_bytes + self.copy_bytes


@dataclass(frozen=True)
class Activations:
    """Peaks of the two parts of a pass."""

    before_layers: Peak
    """Peak of the forward pass, and of the backward pass until the first layer has gradients."""
    in_layers: Peak
    """Peak of the backward pass after the first layer has gradients."""
    failure: str | None = None
    """Reason why the model could not be run, for the user. In this case, the peaks are an estimate. None if
    the model was run.
    """

    @property
    def total_bytes(self) -> int:
        """Larger total of both peaks."""
        return max(self.before_layers.total_bytes, self.in_layers.total_bytes)


ResultKind = Literal["written", "product", "computed", "rows", "saved"]
"""Treatment of the result of an operation by a compiler. ``written``: the result is in memory. ``product``:
like ``written``, but if a single elementwise operation reads the result, the result of that operation is in
memory instead. ``computed``: the result requires no memory, because each reader computes it. ``rows``: like
``computed``, after a reduction of values in memory. ``saved``: written for a backward loop.
"""


class ResultRule(Protocol):
    """Function that returns how a compiler treats the result of an operation of torch."""

    def __call__(self, operation: str, *, elementwise: bool) -> ResultKind:
        """Return how the compiler treats the result of an operation.

        Args:
            operation: Name of the operation, such as ``mm`` or ``_to_copy``.
            elementwise: Whether the operation is elementwise.
        """
        ...


@dataclass(frozen=True)
class CompilerModel:
    """Properties of a compiler that determine the memory of a pass."""

    classify_result: ResultRule
    """Function that takes the name of an operation, such as ``mm`` or ``_to_copy``, and returns a
    `ResultKind`.
    """
    loops_over_layers: bool = False
    """Whether layers run in a loop. In this case, tensors that autograd saves in a layer are written to
    memory.
    """
    attention_rows: int | None = None
    """Number of rows of attention scores in memory at the same time, recomputed in the backward pass.

    None means all rows.
    """
    context_parallel_size: int = 1
    """Number of context-parallel devices. Each device computes the attention of complete sequences with its
    share of the heads.
    """
    prepare_model: Callable[[Any], None] | None = None
    """Function that modifies a model's modules in place, in the same way as the engine.

    None if the engine does not.
    """


@dataclass(frozen=True)
class PassRequest:
    """Pass to run, with all values that its memory depends on."""

    micro_batch: int
    """Number of sequences in a micro-batch."""
    seq_len: int
    """Number of tokens of a sequence on one device."""
    target_seq_len: int
    """Length of the labels and, in an encoder-decoder model, of the decoder's input."""
    task: str
    """Value of ``model.task``."""
    packed: bool | Literal["documents"]
    """Value of ``data.packing``."""
    compute: ComputeMode
    """Mode in which the compute dtype is reached."""
    precision: str
    """``fp32``, ``bf16``, or ``fp16``."""
    recompute: str
    """Value of ``memory.activation_checkpointing``."""
    on_gpu: bool
    """Whether autocast follows the rules of CUDA.

    They compute more operations in fp32 than the rules of the CPU.
    """
    loss_chunk_tokens: int | Literal["auto"]
    """Number of tokens whose loss is computed at a time, or 0 for all tokens. See
    ``memory.loss_chunk_tokens``.
    """
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks."""
    compiler: CompilerModel | None = None
    """Compiler of the pass. None if the pass is not compiled.

    A compiled pass has no fused attention kernel.
    """
    compiled: bool = False
    """Whether inductor compiles each layer, and chooses the tensors that are kept for the backward pass."""

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
        """Return the pass of a run.

        Args:
            config: Config of the run.
            micro_batch: Number of samples in a micro-batch.
            compute: Mode in which the engine reaches the compute dtype.
            on_gpu: Whether autocast follows the rules of CUDA.
            compiler: Compiler of the pass. None if the pass is not compiled.
        """
        precision = "fp32" if config.precision == "tf32" else config.precision
        in_parts = not (compiler or config.strategy.startswith("zero"))
        if in_parts and config.train.loss is not None:
            # Imported here, because it imports torch.
            from portable.model.training_loss import LOGITS, build_training_loss

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
            # If a layer is recomputed, inductor does not choose the tensors that are kept.
            config.compile and compiler is None and config.memory.activation_checkpointing == "none",
        )
