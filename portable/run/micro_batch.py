"""Search for the largest micro-batch that fits, and suggest remedies after an out-of-memory error.

The search implements ``train.micro_batch_size: auto``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from portable.batch_plan import compute_batch_plan_of_rank
from portable.checkpoint.store import open_checkpoints
from portable.checkpoint.trainer_state import TrainerState
from portable.data.samples.loader import slice_sequence_part
from portable.errors import UserError
from portable.loop import train_step
from portable.registry import load_backend_package

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from portable.backend import Backend, Engine
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import AnyPath
    from portable.data.samples.base import Samples
    from portable.output.existing_run import ExistingRun
    from portable.planner.plan import Planner
    from portable.registry import World
    from portable.run.stages import PreparedRun

_SETTINGS_THAT_AFFECT_MEMORY = (
    "backend",
    "strategy",
    "context_parallel_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "precision",
    "fp8",
    "compile",
    "model",
    "adapter",
    "memory",
    "fsdp",
    "deepspeed",
    "xla",
    "train.master_dtype",
    "train.fused_backward",
    "train.dropout",
)
"""Sections and settings that must be unchanged to reuse the micro-batch size of a previous launch."""
FIRST_GUESS = 4
"""Micro-batch size to try first if the planner has no estimate.

Also the size that ``auto`` uses on backends that cannot recover from an out-of-memory error.
"""


def list_divisors(number: int) -> list[int]:
    """List all divisors of ``number`` in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def find_largest_fitting(
    sizes: Sequence[int], fits: Callable[[int], bool], first_guess: int = FIRST_GUESS
) -> int | None:
    """Find the largest of ``sizes`` that fits, with few trials.

    Starts at ``first_guess``. If it fits, tries larger sizes with increasing strides until one does not
    fit. Then bisects between the largest known size that fits and the smallest known size that does
    not.

    Args:
        sizes: Sizes in ascending order. If a size does not fit, larger sizes do not fit either.
        fits: Function that tries a size, and returns whether it fits.
        first_guess: Estimate. The search begins with the largest size up to this number.

    Returns:
        The size, or None if no size fits.
    """
    largest_fitting_index, smallest_failing_index = (
        -1,
        len(sizes),
    )  # indices of sizes known to fit and not to fit
    index = max((i for i, size in enumerate(sizes) if size <= first_guess), default=0)
    stride = 1
    while smallest_failing_index - largest_fitting_index > 1:
        if fits(sizes[index]):
            largest_fitting_index = index
        else:
            smallest_failing_index = index
        if smallest_failing_index == len(sizes):
            index = min(largest_fitting_index + stride, smallest_failing_index - 1)
            stride *= 2
        else:
            index = (largest_fitting_index + smallest_failing_index) // 2
    return None if largest_fitting_index < 0 else sizes[largest_fitting_index]


@dataclass(frozen=True)
class MicroBatchSearch:
    """Inputs of a search for a micro-batch size.

    The inputs do not include a model, because each trial builds a new model.

    Attributes:
        backend: Backend, which must not be connected to the other ranks during the search.
        config: Config of the run.
        model_config: Config of the model.
        samples: Training samples. Except for image tensors, all samples have the same shape.
        world: Ranks and devices of the launch.
    """

    backend: Backend
    config: RunConfig
    model_config: PretrainedConfig
    samples: Samples
    world: World

    def build_meta_model(self) -> PreTrainedModel:
        """Build a new model on the meta device."""
        from portable.adapters.adapter import build_training_model

        return build_training_model(self.model_config, self.config)


def build_micro_batch_search(prepared: PreparedRun) -> MicroBatchSearch:
    """Collect the inputs of a micro-batch search from a run.

    The result does not reference the run's model, so the model can be freed before the search.
    """
    return MicroBatchSearch(
        prepared.backend, prepared.config, prepared.model_config, prepared.data.train, prepared.resolved.world
    )


def list_micro_batch_sizes(config: RunConfig, world: World) -> list[int]:
    """List the micro-batch sizes that the global batch size allows, in ascending order.

    A group consists of ranks that process the same samples, such as tensor-parallel ranks. Each
    group processes a share of the global batch. If all shares are equal, the sizes are the divisors
    of a share. Otherwise, the sizes are the divisors of the global batch size, up to the largest
    share.

    For example, a global batch size of 12 allows the sizes 1 and 3 on four groups, and the sizes 1,
    2 and 3 on five groups.

    Args:
        config: Config of the run.
        world: Ranks and devices of the launch.
    """
    total, groups = config.train.global_batch_size, max(1, world.devices // config.ranks_together)
    share = -(-total // groups)
    return (
        list_divisors(share)
        if total % groups == 0
        else [size for size in list_divisors(total) if size <= share]
    )


def replace_micro_batch_size(config: RunConfig, size: int) -> RunConfig:
    """Return a copy of ``config`` with ``train.micro_batch_size`` replaced."""
    return config.replaced({"train.micro_batch_size": size})


def read_previous_micro_batch_size(
    config: RunConfig, existing: ExistingRun, output_place: AnyPath, world: World
) -> int | None:
    """Read the micro-batch size of this run's latest launch, to avoid another search for it.

    This function is called if ``train.micro_batch_size`` is ``auto``.

    Args:
        config: Config of this launch.
        existing: The run that the output folder contains.
        output_place: Folder or URL of ``output_dir``.
        world: Ranks and devices of this launch.

    Returns:
        The size. None if the run has no checkpoint, if the number of ranks or a setting that
        affects memory has changed, or if :func:`list_micro_batch_sizes` does not contain the size.
    """
    earlier, latest = existing.config, open_checkpoints(output_place).find_latest()
    if earlier is None or latest is None:
        return None
    is_comparable = all(
        attrgetter(name)(earlier) == attrgetter(name)(config) for name in _SETTINGS_THAT_AFFECT_MEMORY
    )
    is_comparable = is_comparable and TrainerState.read(latest).world_size == world.ranks
    size = earlier.train.micro_batch_size
    return (
        size if is_comparable and size != "auto" and size in list_micro_batch_sizes(config, world) else None
    )


def find_largest_micro_batch(search: MicroBatchSearch, *, below_size: int | None = None) -> int:
    """Find the largest micro-batch size that fits on this rank's device.

    Each trial builds its own model and engine, so the run itself is not changed.

    Args:
        search: Config, data and backend of the run.
        below_size: Exclusive upper limit of the size. None for no limit.

    Returns:
        The size. Some backends cannot recover from an out-of-memory error, so they cannot try
        sizes. For such a backend, the result is :data:`FIRST_GUESS`, or the largest valid size
        below it.

    Raises:
        UserError: If not even one sequence fits, or if the global batch cannot be divided among the
            ranks. Also raised if sizes cannot be tried and ``below_size`` is set, because the
            device has already run out of memory.
    """
    config, world = search.config, search.world
    # Do not compile the trial models, because compiled layers do not need more memory, and each size would
    # require another compilation.
    trial = config.replaced({"train.micro_batch_size": 1, "compile": False})
    plan = compute_batch_plan_of_rank(trial, search.backend)  # raises if the global batch cannot be divided
    candidates = [
        size for size in list_micro_batch_sizes(config, world) if below_size is None or size < below_size
    ]
    # If nothing can be tried, assume that small sizes fit, unless memory has already run out.
    assumed_largest = FIRST_GUESS if below_size is None else 0

    def try_size(size: int) -> bool:
        take_steps = partial(_take_trial_steps, search=search, plan=plan, size=size)
        fits = search.backend.run_memory_trial(search.build_meta_model, trial, take_steps)
        return size <= assumed_largest if fits is None else fits

    largest_size = (
        find_largest_fitting(candidates, try_size, _estimate_first_guess(search, candidates))
        if candidates
        else None
    )
    if largest_size is None:
        raise UserError(
            "train.micro_batch_size: a micro-batch of one sequence does not fit into device memory; "
            f"use {describe_memory_remedies(config, world)}"
        )
    return largest_size


def _take_trial_steps(engine: Engine, search: MicroBatchSearch, plan: BatchPlan, size: int) -> None:
    """Run two training steps to test whether micro-batches of ``size`` sequences fit into memory.

    The first step processes one sequence and creates the optimizer state. The second step has a
    micro-batch of ``size`` sequences. If micro-batches of this size require gradient accumulation,
    the second step has two of them, so that gradients already occupy memory during the second
    forward pass.

    Args:
        engine: Engine of the trial.
        search: Config, data and backend of the run.
        plan: Batch plan of this rank for a micro-batch size of 1. Both steps use copies of it with
            their own batch sizes.
        size: Number of sequences in a micro-batch on each device.
    """
    samples = search.samples
    for sequences, accumulated in ((1, 1), (size, 2 if size < plan.max_sequences_per_rank else 1)):
        batch = samples.build_batch(samples.list_trial_samples(sequences))
        batch = slice_sequence_part(batch, plan.sequence_part)
        train_step(
            search.backend,
            engine,
            iter([batch] * accumulated),
            batch_plan=replace(
                plan,
                global_batch_size=sequences * accumulated * plan.world_size,
                micro_batch_size=sequences,
            ),
            first_sample=0,
            learning_rate=0.0,
            max_grad_norm=1.0,
        )


def _estimate_first_guess(search: MicroBatchSearch, candidates: Sequence[int]) -> int:
    """Return the largest candidate that fits according to the planner. The search tries it first.

    Returns :data:`FIRST_GUESS` if no candidate fits, if the memory of the device is unknown, or
    if the planner raises a UserError.
    """
    try:
        planner = _build_planner(search)
        return planner.find_largest_micro_batch(list(candidates)) or FIRST_GUESS
    except UserError:  # the search itself reports it
        return FIRST_GUESS


def _build_planner(search: MicroBatchSearch) -> Planner:
    """Build the planner of the run. With images, it plans for the sample with the most image tokens."""
    from portable.planner.this_machine import build_planner_for_backend

    images = None
    if search.config.data.images:
        images = search.samples.build_batch(search.samples.list_trial_samples(1))
    return build_planner_for_backend(
        search.config, search.build_meta_model(), search.backend, image_columns=images
    )


def agree_on_smallest_size(size_of_rank: int, config: RunConfig, world: World, backend: Backend) -> int:
    """Return the smallest of the micro-batch sizes that the ranks have found to fit.

    This is a collective operation: all ranks must call the function.

    Args:
        size_of_rank: Micro-batch size that fits on this rank's device.
        config: Config of the run.
        world: Ranks and devices of the launch.
        backend: Backend of this rank.
    """
    return next(
        size for size in list_micro_batch_sizes(config, world) if backend.reduce_any(size_of_rank == size)
    )


def describe_memory_remedies(config: RunConfig, world: World) -> str:
    """Describe changes to ``config`` that reduce device memory, cheapest first.

    The changes are separated by commas. If there are none, the text is ``more devices``.

    Args:
        config: Config of the run.
        world: Ranks and devices of the launch.
    """
    settings = load_backend_package(config.backend).iter_memory_remedies(config, world.ranks)
    return ", ".join(settings) or "more devices"


def describe_fitting_settings(search: MicroBatchSearch, failed_sequences: int) -> str:
    """Suggest settings that fit into device memory, after an out-of-memory error.

    There are up to three suggestions: a smaller micro-batch size, settings that save memory, and
    the planner's best option. The suggested micro-batch size is the largest size below
    ``failed_sequences`` for which a trial succeeds.

    Args:
        search: Config, data and backend of the run.
        failed_sequences: Micro-batch size that did not fit, in sequences per device.
    """
    try:
        fitting = (
            "set train.micro_batch_size to "
            f"{find_largest_micro_batch(search, below_size=failed_sequences)}, which fits, or"
        )
    except Exception:  # the device may be in any state, but the settings to change are known
        fitting = "no smaller micro-batch is known to fit;"
    text = f"{fitting} use {describe_memory_remedies(search.config, search.world)}"
    try:
        from portable.planner.this_machine import describe_best_fit

        planned = describe_best_fit(_build_planner(search))
    except UserError:
        planned = None
    return text if planned is None else f"{text}; by the plan, this fits: {planned}"
