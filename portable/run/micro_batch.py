"""Search for the largest micro-batch that fits, and suggest remedies after an out-of-memory error.

The search implements ``train.micro_batch_size: auto``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
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
    "precision",
    "compile",
    "model",
    "adapter",
    "memory",
    "fsdp",
    "deepspeed",
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

    They do not include a model, because each trial builds a new one.

    Attributes:
        backend: Backend, which must not be connected to the other ranks during the search.
        config: Config of the run.
        model_config: Config of the model.
        samples: Training samples, which all have the same shape.
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
    """Collect the inputs of a micro-batch search from a run. The result does not reference its model."""
    return MicroBatchSearch(
        prepared.backend, prepared.config, prepared.model_config, prepared.data.train, prepared.resolved.world
    )


def list_micro_batch_sizes(config: RunConfig, world: World) -> list[int]:
    """List the micro-batch sizes that the global batch allows, in ascending order.

    A group consists of ranks that process the same samples, such as tensor-parallel ranks. The global
    batch is divided among the groups. If all groups get equally many samples, the sizes are the
    divisors of that number. Otherwise, they are the divisors of the global batch that do not exceed the
    largest share of a group.

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
    """Read the micro-batch size of this run's latest launch, so that ``auto`` need not search again.

    Args:
        config: Config of this launch.
        existing: The run that the output folder contains.
        output_place: Folder or URL of ``output_dir``.
        world: Ranks and devices of this launch.

    Returns:
        The size. None if the run has no checkpoint, if the number of ranks or a setting that affects
        memory has changed, or if the global batch does not allow the size.
    """
    earlier, latest = existing.config, open_checkpoints(output_place).find_latest()
    if earlier is None or latest is None:
        return None
    is_comparable = all(
        getattr(earlier, name) == getattr(config, name) for name in _SETTINGS_THAT_AFFECT_MEMORY
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
        The size. If the backend cannot recover from an out-of-memory error, nothing is tried, and the
        result is the largest size up to :data:`FIRST_GUESS`.

    Raises:
        UserError: If not even one sequence fits.
    """
    config, world = search.config, search.world
    # Compiled layers need no more memory than others, and each size would be another compilation.
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
            "train.micro_batch_size: not even one sequence at a time fits into the memory of the device; "
            f"use {describe_memory_remedies(config, world)}"
        )
    return largest_size


def _take_trial_steps(engine: Engine, search: MicroBatchSearch, plan: BatchPlan, size: int) -> None:
    """Run a step that creates the optimizer state, then one with micro-batches of ``size`` sequences.

    If the run accumulates gradients, the second step has two micro-batches, so that gradients already
    occupy memory during the second forward pass.

    Args:
        engine: Engine of the trial.
        search: Config, data and backend of the run.
        plan: Batch plan of this rank for micro-batches of one sequence.
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

    Returns :data:`FIRST_GUESS` if no candidate fits, or if the planner raises a UserError.
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
    """Return the minimum of the sizes that all ranks have found. A collective call.

    Args:
        size_of_rank: Size that this rank has found.
        config: Config of the run.
        world: Ranks and devices of the launch.
        backend: Backend of this rank.
    """
    return next(
        size for size in list_micro_batch_sizes(config, world) if backend.reduce_any(size_of_rank == size)
    )


def describe_memory_remedies(config: RunConfig, world: World) -> str:
    """Describe changes to ``config`` that reduce device memory, cheapest first.

    Args:
        config: Config of the run.
        world: Ranks and devices of the launch.
    """
    settings = load_backend_package(config.backend).iter_memory_remedies(config, world.ranks)
    return ", ".join(settings) or "more devices"


def describe_fitting_settings(search: MicroBatchSearch, failed_sequences: int) -> str:
    """Suggest settings that fit into device memory, after an out-of-memory error.

    The suggestions are the largest smaller micro-batch that ran in a trial, settings that save memory,
    and the planner's best option.

    Args:
        search: Config, data and backend of the run.
        failed_sequences: Number of sequences per micro-batch on each device that did not fit.
    """
    try:
        fitting = (
            f"{find_largest_micro_batch(search, below_size=failed_sequences)} fits; set "
            "train.micro_batch_size to this number, or"
        )
    except Exception:  # the device may be in any state, but the settings to change are known
        fitting = "no smaller number is known to fit;"
    text = f"{fitting} use {describe_memory_remedies(search.config, search.world)}"
    try:
        from portable.planner.this_machine import describe_best_fit

        planned = describe_best_fit(_build_planner(search))
    except UserError:
        planned = None
    return text if planned is None else f"{text}; by plan, this fits: {planned}"
