"""Data classes that describe a forward and backward pass and its measured memory.

This module does not import torch. Use :mod:`portable.planner.activations` to run the passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config import RunConfig

ComputeMode = Literal["plain", "autocast", "cast"]
"""Mechanism by which an engine computes in the compute dtype.

``plain``: The compute dtype is fp32, so nothing is converted. ``autocast``: ``torch.autocast`` converts the
fp32 weights, and keeps a copy of each weight. ``cast``: The parameters have the compute dtype during the
pass, as in FSDP2 and DeepSpeed.
"""


class Peak(NamedTuple):
    """Peak of the activation memory on a device, in bytes."""

    work_bytes: int
    """Size of the saved activations and the temporary tensors, including the logits and the loss."""
    copy_bytes: int
    """Size of the copies of weights that autocast creates."""

    @property
    def total_bytes(self) -> int:
        """Sum of ``work_bytes`` and ``copy_bytes``."""
        return self.work_bytes + self.copy_bytes


@dataclass(frozen=True)
class Activations:
    """Peak activation memory in the two phases of a forward and backward pass.

    The first phase is the forward pass and the start of the backward pass. It ends when the first
    gradient of a layer's parameter is complete. The second phase is the rest of the backward pass.
    The peaks are separate, because engines keep different amounts of gathered parameters in memory
    in the two phases.
    """

    before_layers: Peak
    """Peak of the forward pass, and of the backward pass until any layer has gradients."""
    in_layers: Peak
    """Peak of the backward pass after a layer has gradients."""
    failure: str | None = None
    """Reason why the model could not be run, in which case the peaks are estimated with a formula.

    None if the peaks were measured.
    """
    host_bytes: int = 0
    """Size of the activations that are offloaded to host memory."""

    @property
    def total_bytes(self) -> int:
        """Larger of the two peaks ``before_layers`` and ``in_layers``, in bytes."""
        return max(self.before_layers.total_bytes, self.in_layers.total_bytes)

    def add_tower(self, tower: TowerMemory, num_samples: int) -> Activations:
        """Return the peak activation memory of a pass that also runs an image tower.

        The tower runs first, on the images of ``num_samples`` samples. Each sample is assumed to
        need the memory in ``tower``, but all samples share the copies of weights. The memory that
        the tower keeps is added to the peaks of both phases, :attr:`before_layers` and
        :attr:`in_layers`. The tower's own peak only affects :attr:`before_layers`, which is at
        least this peak.
        """
        before, layers = (
            Peak(
                peak.work_bytes + num_samples * tower.kept.work_bytes,
                peak.copy_bytes + tower.kept.copy_bytes,
            )
            for peak in (self.before_layers, self.in_layers)
        )
        in_tower = Peak(num_samples * tower.peak.work_bytes, tower.peak.copy_bytes)
        return Activations(
            max(before, in_tower, key=lambda peak: peak.total_bytes),
            layers,
            self.failure or tower.failure,
            self.host_bytes,
        )


class TowerMemory(NamedTuple):
    """Memory of an image tower for the images of one sample."""

    peak: Peak
    """Peak in the forward pass of the tower."""
    kept: Peak
    """Memory in use after this pass: the images, their features, and the activations and copies of weights
    that the backward pass needs if a part of the tower is trained.
    """
    failure: str | None = None
    """Reason why the tower could not be run, in which case the sizes are estimated with a formula."""


ResultKind = Literal["written", "product", "computed", "rows", "saved"]
"""Treatment of the result of an operation by a compiler that fuses operations.

``written``: The result is stored in memory. ``product``: Like ``written``, but if a single elementwise
operation reads the result, the result of that operation is stored instead. ``computed``: The result requires
no memory, because each operation that reads it recomputes it. ``rows``: Like ``computed``, but for an
operation that reduces rows, which is not fused into a matrix product. ``saved``: The result is stored until
the end of the backward loop over layers.
"""


class ResultRule(Protocol):
    """Protocol of a function that returns the :data:`ResultKind` of an operation's result.

    The kind defines whether a compiler, such as XLA, stores the result in memory, or recomputes it
    for each operation that reads it.
    """

    def __call__(self, operation: str, *, elementwise: bool) -> ResultKind:
        """Return how the compiler treats the result of an operation.

        Args:
            operation: Name of the ATen operation, such as ``mm`` or ``_to_copy``.
            elementwise: Whether torch tags the operation as pointwise.
        """
        ...


@dataclass(frozen=True)
class CompilerModel:
    """Properties of a compiler, such as XLA, that compiles the forward and backward pass of a model.

    The planner uses these properties to compute how much memory the compiled pass needs.
    """

    classify_result: ResultRule
    """Function that returns how the compiler treats the result of an operation."""
    loops_over_layers: bool = False
    """Whether the compiled pass runs the layers in a loop.

    If so, the tensors that autograd saves in a layer are stored in memory for the backward loop.
    """
    attention_rows: int | None = None
    """Number of query tokens whose attention scores are in memory at the same time.

    The scores are recomputed in the backward pass. None if the scores of all tokens are computed at once.
    """
    context_parallel_size: int = 1
    """Number of context-parallel devices.

    Each device computes the attention of complete sequences with its share of the heads.
    """
    prepare_model: Callable[[Any], None] | None = None
    """Function that modifies a model in place as the engine does before compilation.

    None if the engine does not modify the model.
    """


@dataclass(frozen=True)
class PassRequest:
    """Properties of a forward and backward pass that determine its memory use.

    The planner uses them to measure or estimate the activation memory, and to cache the result.
    """

    micro_batch: int
    """Number of sequences in a micro-batch."""
    seq_len: int
    """Number of tokens of a sequence on one device."""
    target_seq_len: int
    """Number of label tokens per sequence. In an encoder-decoder model, also the length of the
    decoder's input."""
    task: str
    """Value of ``model.task``."""
    packed: bool | Literal["documents"]
    """Value of ``data.packing``."""
    compute: ComputeMode
    """Mechanism by which the engine computes in the compute dtype."""
    precision: str
    """Compute dtype: ``fp32``, ``bf16``, or ``fp16``."""
    recompute: str
    """Value of ``memory.activation_checkpointing``."""
    on_gpu: bool
    """Whether autocast follows the rules of CUDA, which run more operations in fp32 than the CPU's rules."""
    loss_chunk_tokens: int | Literal["auto"]
    """Number of tokens whose loss is computed at a time, or 0 for all tokens. See
    ``memory.loss_chunk_tokens``.
    """
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks."""
    compiler: CompilerModel | None = None
    """Compiler that compiles the complete pass, such as XLA. None if there is no such compiler.

    With such a compiler, the pass has no fused attention kernel.
    """
    offload_activations: bool = False
    """Value of ``memory.offload_activations``."""
    compiled: bool = False
    """Whether inductor compiles each layer, and therefore chooses the tensors to save for backward."""

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
        """Build the description of the pass that a run executes for each micro-batch.

        ``loss_chunk_tokens`` is 0 under ZeRO, if ``compiler`` is set, and if ``train.loss`` needs
        the logits. In these cases, the logits of all tokens are computed at once. ``compiled`` is
        False with activation checkpointing, because inductor then does not choose the saved
        tensors.

        Args:
            config: Config of the run.
            micro_batch: Number of samples in a micro-batch.
            compute: Method by which the engine applies the compute dtype, such as autocast. Ignored
                if the compute dtype is fp32.
            on_gpu: Whether the backend runs CUDA, so that autocast follows CUDA's rules.
            compiler: Compiler that compiles the complete pass. None if the engine does not use one.

        Raises:
            UserError: If ``train.loss`` is not a valid loss for the run.
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
            config.memory.offload_activations,
            # With activation checkpointing, inductor does not choose the saved tensors, so measure eager
            # layers.
            config.compile and compiler is None and config.memory.activation_checkpointing == "none",
        )
