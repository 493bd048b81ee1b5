"""What a run will do, worked out before it starts."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.config.rules import largest_divisor
from portable.errors import UserError
from portable.model.build import looked_up_table, transformer_layers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config import RunConfig

MAX_STEPS = 1 << 53  # beyond, floating-point numbers skip whole numbers


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is cut over ranks and micro-batches.

    Rank ``r`` takes the ``r``-th of ``world_size`` equal, contiguous parts of each global batch, and goes
    through its part in ``accumulation_steps`` micro-batches, which its devices share.
    """

    global_batch_size: int
    micro_batch_size: int
    """Sequences that a rank takes at a time: ``train.micro_batch_size`` times its devices."""
    world_size: int
    rank: int
    seed: int
    one_program: bool = False
    """Whether all ranks draw the same random numbers; see ``Backend.one_program``."""

    @property
    def sequences_per_rank(self) -> int:
        return self.global_batch_size // self.world_size

    @property
    def accumulation_steps(self) -> int:
        return self.sequences_per_rank // self.micro_batch_size

    def dropout_seed(self, first_sample: int, micro_batch: int) -> int:
        """Seed of the randomness inside a micro-batch: keyed by the run and by the samples in it.

        A resumed run therefore repeats it without any saved generator state.
        """
        rank = 0 if self.one_program else self.rank
        sample = first_sample + rank * self.sequences_per_rank + micro_batch * self.micro_batch_size
        digest = hashlib.blake2b(f"{self.seed}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def plan_batches(
    config: RunConfig, *, world_size: int, rank: int, devices_per_rank: int = 1, one_program: bool = False
) -> BatchPlan:
    """Derive the accumulation from the global batch.

    A micro-batch size that was left at its default is lowered until it divides; one that was chosen must.

    Raises:
        UserError: if the global batch cannot be divided, with sizes that can.
    """
    total = config.train.global_batch_size
    devices = world_size * devices_per_rank
    unit = "rank" if devices_per_rank == 1 else "device"
    if total % devices:
        lower, upper = total - total % devices, total + -total % devices
        choices = " or ".join(str(n) for n in (lower, upper) if n)
        raise UserError(
            f"train.global_batch_size: {total} sequences cannot be divided among {devices} {unit}s; "
            f"set it to {choices}, or use another number of {unit}s"
        )
    share = total // devices
    micro = config.train.micro_batch_size
    assert micro != "auto"  # a backend has replaced or refused it
    fitting = largest_divisor(share, micro)
    if config.is_set("train.micro_batch_size") and fitting != micro:
        raise UserError(
            f"train.micro_batch_size: a {unit}'s share of the global batch is {share} sequences, which "
            f"micro-batches of {micro} do not divide; use {fitting} or another divisor of {share}"
        )
    micro_batch = fitting * devices_per_rank
    return BatchPlan(total, micro_batch, world_size, rank, config.seed, one_program)


def total_steps(config: RunConfig, samples: int) -> int:
    """The length of the schedule in optimizer steps: ``train.steps``, or what ``train.epochs`` come to.

    Raises:
        UserError: for more epochs than any run could go through.
    """
    if config.train.epochs is None:
        assert config.train.steps is not None  # the schema sees to it
        return config.train.steps
    steps = config.train.epochs * samples / config.train.global_batch_size
    if not steps <= MAX_STEPS:
        raise UserError(
            f"train.epochs: {config.train.epochs:g} epochs of {samples} samples are more steps than can be "
            "counted; lower it, or give train.steps"
        )
    return max(1, math.ceil(steps))


def parameter_count(model: nn.Module) -> int:
    """Parameters of the model, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())


def flops_per_token(model: PreTrainedModel, config: PretrainedConfig, seq_len: int) -> float:
    """Floating-point operations per trained token, forward and backward.

    The convention of the PaLM paper (appendix B): 6 for each weight that takes part in a matrix product,
    which leaves out looked-up embeddings but not a tied output head, plus 12 x layers x hidden size x
    sequence length for the attention scores. Of a mixture of experts, those that a token goes through count.
    Recomputation is not counted.
    """
    text = config.get_text_config()
    embedding = looked_up_table(model)
    head: Any = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    looked_up = 0 if embedding is None or tied else embedding.numel()
    layers = len(transformer_layers(model))
    hidden: int = getattr(text, "hidden_size", 0 if embedding is None else embedding.shape[1])
    weights = parameter_count(model) - looked_up - _idle_experts(model, text)
    return 6.0 * weights + 12.0 * layers * hidden * seq_len


def _idle_experts(model: nn.Module, text: PretrainedConfig) -> float:
    """Parameters of the experts that a token does not go through, on average over the layers."""
    chosen = getattr(text, "num_experts_per_tok", None)
    counts = (getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next((count for count in counts if count), None)
    if not chosen or not experts:
        return 0.0
    # transformers stacks a layer's experts, the first dim counts them.
    stacked = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.dim() > 1 and parameter.shape[0] == experts
    ]
    return sum(stacked) * (1.0 - float(chosen / experts))
