"""Divide the global batch into micro-batches, and compute the number of steps of a run."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from portable.config.derived_defaults import find_largest_divisor
from portable.data.samples.order import compute_first_sample_of_rank, count_accumulation_steps
from portable.errors import UserError
from portable.formatting import format_count

if TYPE_CHECKING:
    from portable.backend import Backend
    from portable.config import RunConfig

MAX_STEPS = 1 << 53
"""Maximum number of steps. A float cannot represent all larger integers."""


class SequencePart(NamedTuple):
    """Part of each sequence that a rank processes under context parallelism."""

    part_index: int
    """Index of the part, from 0."""
    num_parts: int
    """Number of parts into which each sequence is divided. 1 if ranks process complete sequences."""


WHOLE_SEQUENCE = SequencePart(0, 1)


@dataclass(frozen=True)
class BatchPlan:
    """Plan that divides the global batch among ranks and into micro-batches.

    Each global batch is split into ``world_size`` contiguous parts. Rank ``r`` processes part ``r``
    in ``accumulation_steps`` micro-batches. A rank can drive several devices, which share each
    micro-batch.

    If the global batch cannot be divided evenly, the sizes of the parts differ by one sequence, and
    padding sequences without labels fill up the micro-batches. All ranks therefore call the same
    number of collectives. The mean loss stays exact, because the summed loss is divided by the
    number of tokens in the global batch.

    The ranks of a context-parallel or tensor-parallel group process the same sequences, so
    ``world_size`` and ``rank`` then count groups instead of ranks. If all ranks run a single
    program (``one_program``, as on XLA), the compiler splits sequences among devices. The batches
    of each rank then contain complete sequences.
    """

    global_batch_size: int
    """Number of sequences of an optimizer step over all ranks."""
    micro_batch_size: int
    """Number of sequences per rank and forward pass: ``train.micro_batch_size`` times ``groups_per_rank``."""
    world_size: int
    """Number of ranks, or of groups of ranks under context or tensor parallelism."""
    rank: int
    """Index of this rank, or of its group under context or tensor parallelism."""
    seed: int
    """Seed of the run."""
    one_program: bool = False
    """Whether all ranks draw the same random numbers. See ``Backend.one_program``."""
    sequence_part: SequencePart = WHOLE_SEQUENCE
    """Part of each sequence that this rank processes."""
    groups_per_rank: int = 1
    """Number of devices per rank. Under context or tensor parallelism, number of device groups per rank."""
    accumulation_steps: int = field(init=False)
    """Number of micro-batches of each rank in a step."""
    first_sequence_of_rank: int = field(init=False)
    """Index of this rank's first sequence in a global batch. 0 under ``one_program``."""

    def __post_init__(self) -> None:
        steps = count_accumulation_steps(self.global_batch_size, self.micro_batch_size, self.world_size)
        rank = 0 if self.one_program else self.rank
        object.__setattr__(self, "accumulation_steps", steps)
        first = compute_first_sample_of_rank(self.global_batch_size, rank, self.world_size)
        object.__setattr__(self, "first_sequence_of_rank", first)

    @property
    def max_sequences_per_rank(self) -> int:
        """Largest number of sequences per step on any rank, not counting padding sequences."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def padded_batch_size(self) -> int:
        """Number of sequences per step over all ranks, including padding sequences."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def compute_dropout_seed(self, first_sample: int, micro_batch: int) -> int:
        """Compute the dropout seed of a micro-batch.

        The dropout seed depends only on the seed of the run, on the index of the micro-batch's
        first sample, and on the part of each sequence that this rank processes. A resumed run
        therefore uses the same dropout seeds, although no generator state is saved.

        Args:
            first_sample: Index of the global batch's first sample, counted from the start of the
                run.
            micro_batch: Index of the micro-batch within the step on this rank.
        """
        sample = first_sample + self.first_sequence_of_rank + micro_batch * self.micro_batch_size
        part = f"/{self.sequence_part.part_index}" if self.sequence_part.part_index else ""
        digest = hashlib.blake2b(f"{self.seed}/{sample}{part}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def compute_batch_plan(
    config: RunConfig, *, world_size: int, rank: int, devices_per_rank: int = 1, one_program: bool = False
) -> BatchPlan:
    """Compute how to divide the global batch among ranks and into micro-batches.

    If the global batch can be divided evenly among the ranks, the micro-batch size must divide the
    number of sequences per rank. A default micro-batch size is lowered to a divisor if necessary. A
    micro-batch size that the user has set causes an error if it is not a divisor.

    If the global batch cannot be divided evenly, padding sequences fill up the last micro-batch of
    each rank. An uneven division is an error if ``one_program`` is True or if a rank has several
    devices.

    Args:
        config: Config of the run. ``train.micro_batch_size`` must not be ``auto``.
        world_size: Number of ranks.
        rank: Rank to compute the plan for.
        devices_per_rank: Number of devices of each rank.
        one_program: Whether all ranks run a single program. See ``Backend.one_program``.

    Raises:
        UserError: If there are more ranks than sequences, if the devices cannot be divided into
            groups of context-parallel or tensor-parallel devices, or if the global batch or the
            micro-batch size cannot be divided as required.
    """
    total, parts = config.train.global_batch_size, config.ranks_together
    key = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "context_parallel_size"
    unit = "device" if devices_per_rank > 1 else "rank"
    devices = world_size * devices_per_rank
    uneven = devices_per_rank % parts and parts % devices_per_rank
    if devices % parts or uneven:
        divided_units = (
            format_count(devices, unit) if devices % parts else f"the {devices_per_rank} devices of a host"
        )
        raise UserError(
            f"{key}: {divided_units} cannot be divided into groups of {parts}; "
            f"set {key} to a divisor of {devices_per_rank if uneven else devices}, or use another number of "
            f"{unit}s"
        )
    devices //= parts
    hosts = max(1, parts // devices_per_rank)  # hosts per context-parallel or tensor-parallel group
    world_size, (rank, part) = world_size // hosts, divmod(rank, hosts)
    groups = max(1, devices_per_rank // parts)
    sharer, sharers = unit, f"{unit}s"
    if parts > 1:
        sharer, sharers = f"group of {parts} {unit}s", f"groups of {parts} {unit}s"
    if total < devices or (total % devices and (one_program or devices_per_rank > 1)):
        lower, upper = total - total % devices, total + -total % devices
        choices = " or ".join(str(n) for n in (lower, upper) if n)
        raise UserError(
            f"train.global_batch_size: {format_count(total, 'sequence')} cannot be divided evenly among "
            f"{devices} {sharers}; set train.global_batch_size to {choices}, or use another number of {unit}s"
        )
    share = -(-total // devices)
    micro = config.train.micro_batch_size
    assert micro != "auto"  # "auto" has been replaced or rejected earlier
    is_set = config.is_set("train.micro_batch_size")
    fitting = find_largest_divisor(share, micro)
    if total % devices:
        # For a given number of micro-batches, the smallest size needs the fewest padding sequences.
        fitting = min(micro, share) if is_set else -(-share // -(-share // micro))
    elif is_set and fitting != micro:
        raise UserError(
            f"train.micro_batch_size: {micro} does not divide {share}, the number of sequences per "
            f"{sharer} in a global batch; use a divisor of {share}, such as {fitting}"
        )
    micro_batch = fitting * groups
    is_cut = not one_program and config.context_parallel_size > 1
    sequence_part = SequencePart(part, parts) if is_cut else WHOLE_SEQUENCE
    return BatchPlan(total, micro_batch, world_size, rank, config.seed, one_program, sequence_part, groups)


def describe_padding(plan: BatchPlan) -> str:
    """Describe the number of padding sequences per step, as a suffix for a sentence about the batch.

    Returns:
        Text such as `` (1 of the 8 is empty)``, or an empty string if there are no padding sequences.
    """
    padding = plan.padded_batch_size - plan.global_batch_size
    return (
        f" ({padding} of the {plan.padded_batch_size} {'is' if padding == 1 else 'are'} empty)"
        if padding
        else ""
    )


def compute_batch_plan_of_rank(config: RunConfig, backend: Backend) -> BatchPlan:
    """Compute the batch plan of the calling rank.

    Args:
        config: Config of the run.
        backend: Backend of this rank.

    Raises:
        UserError: If the global batch cannot be divided among the ranks.
    """
    return compute_batch_plan(
        config,
        world_size=backend.world_size,
        rank=backend.rank,
        devices_per_rank=backend.devices_per_rank,
        one_program=backend.one_program,
    )


def compute_total_steps(config: RunConfig, samples: int) -> int:
    """Compute the number of optimizer steps of a run from ``train.steps`` or ``train.epochs``.

    Args:
        config: Config of the run.
        samples: Number of samples per epoch. Only used if ``train.epochs`` is set.

    Returns:
        The number of steps, at least 1. An incomplete last step counts as a step.

    Raises:
        UserError: If the number of steps exceeds :data:`MAX_STEPS`.
    """
    if config.train.epochs is None:
        assert config.train.steps is not None  # the schema requires one of the two
        return config.train.steps
    steps = config.train.epochs * samples / config.train.global_batch_size
    if not steps <= MAX_STEPS:
        raise UserError(
            f"train.epochs: {config.train.epochs:g} epochs of {format_count(samples, 'sample')} need more "
            f"than the maximum of {MAX_STEPS:,} steps; lower train.epochs, or set train.steps instead"
        )
    return max(1, math.ceil(steps))
