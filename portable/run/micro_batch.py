"""What fits a device's memory: ``train.micro_batch_size: auto``, and what to do when memory has run out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from portable.batch_plan import build_batch_plan
from portable.checkpoint.store import open_checkpoints
from portable.checkpoint.trainer_state import TrainerState
from portable.data.samples.loader import slice_sequence
from portable.data.samples.order import EpochIndex
from portable.errors import UserError
from portable.loop import train_step
from portable.registry import load_backend_package

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from portable.backend import Backend, Engine
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import Place
    from portable.data.samples.base import Samples
    from portable.output.existing_run import ExistingRun
    from portable.registry import World
    from portable.run.stages import Prepared

_DECIDE_ON_MEMORY = (
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
FIRST_GUESS = 4
"""Micro-batch size at which the search begins if the planner has no estimate.

Also the size that ``auto`` uses on backends that cannot recover from an out-of-memory error.
"""


def list_divisors(number: int) -> list[int]:
    """List all divisors of ``number`` in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def find_largest_fitting(
    sizes: Sequence[int], fits: Callable[[int], bool], first: int = FIRST_GUESS
) -> int | None:
    """Find the largest of ``sizes`` that fits, with as few trials as possible.

    Tries ``first`` and then larger sizes at growing distances until a size does not fit. Then bisects.

    Args:
        sizes: Sizes in ascending order. If a size does not fit, no larger size may fit.
        fits: Function that tries a size, and returns whether it fits.
        first: First size to try.

    Returns:
        The size, or None if no size fits.
    """
    good, bad = -1, len(sizes)  # indices of sizes known to fit and not to fit
    index = max((i for i, size in enumerate(sizes) if size <= first), default=0)
    stride = 1
    while bad - good > 1:
        if fits(sizes[index]):
            good = index
        else:
            bad = index
        if bad == len(sizes):
            index = min(good + stride, bad - 1)
            stride *= 2
        else:
            index = (good + bad) // 2
    return None if good < 0 else sizes[good]


@dataclass(frozen=True)
class Search:
    """Everything that a search for a micro-batch size needs.

    Contains no model, because each trial builds its own.

    Attributes:
        backend: Backend that has not joined the other ranks yet, or that has left them.
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

    def build(self) -> PreTrainedModel:
        """Build a new model on the meta device."""
        from portable.adapters.adapter import build_training_model

        return build_training_model(self.model_config, self.config)


def build_search(prepared: Prepared) -> Search:
    """Build the search for the micro-batch size of a run. The result does not reference the run's model."""
    return Search(
        prepared.backend, prepared.config, prepared.model_config, prepared.data.train, prepared.resolved.world
    )


def list_micro_batch_sizes(config: RunConfig, world: World) -> list[int]:
    """List the micro-batch sizes that the global batch allows, in ascending order."""
    total, groups = config.train.global_batch_size, max(1, world.devices // config.ranks_together)
    share = -(-total // groups)
    return (
        list_divisors(share)
        if total % groups == 0
        else [size for size in list_divisors(total) if size <= share]
    )


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    """Return a config with another micro-batch size."""
    return config.replaced({"train.micro_batch_size": size})


def get_previous_size(config: RunConfig, existing: ExistingRun, place: Place, world: World) -> int | None:
    """Read the micro-batch size that ``auto`` has chosen in an earlier launch of this run.

    Returns:
        The size. None if there was no earlier launch, or if settings that affect memory have changed.
    """
    earlier, latest = existing.config, open_checkpoints(place).find_latest()
    if earlier is None or latest is None:
        return None
    same = all(getattr(earlier, name) == getattr(config, name) for name in _DECIDE_ON_MEMORY)
    same = same and TrainerState.read(latest).world_size == world.ranks
    size = earlier.train.micro_batch_size
    return size if same and size != "auto" and size in list_micro_batch_sizes(config, world) else None


def find_largest_micro_batch(search: Search, *, below: int | None = None) -> int:
    """Find the largest micro-batch size that fits on this rank's device.

    Each trial builds its own model and engine, so the run itself is not changed.

    Args:
        search: What to search with.
        below: Limit that the size must stay below, or None.

    Returns:
        The size. If the backend cannot recover from an out-of-memory error, nothing is tried: the largest
        size up to :data:`FIRST_GUESS`.

    Raises:
        UserError: If not even one sequence fits.
    """
    config, world = search.config, search.world
    # Compiled layers need no more memory than others, and each size would be another compilation.
    trial = config.replaced({"train.micro_batch_size": 1, "compile": False})
    plan = build_batch_plan(trial, search.backend)  # raises if the global batch cannot be divided
    candidates = [size for size in list_micro_batch_sizes(config, world) if below is None or size < below]
    # If nothing can be tried, assume that small sizes fit, unless memory has already run out.
    guess = FIRST_GUESS if below is None else 0

    def try_size(size: int) -> bool:
        trying = partial(_take_two_steps, search=search, plan=plan, size=size)
        answer = search.backend.check_fit(search.build, trial, trying)
        return size <= guess if answer is None else answer

    largest_size = (
        find_largest_fitting(candidates, try_size, _find_planned_size(search, candidates))
        if candidates
        else None
    )
    if largest_size is None:
        raise UserError(
            "train.micro_batch_size: not even one sequence at a time fits the memory of the device; use "
            f"{describe_remedies(config, world)}"
        )
    return largest_size


def _take_two_steps(engine: Engine, search: Search, plan: BatchPlan, size: int) -> None:
    """Take a step that creates the optimizer state, and then a step with ``size`` sequences.

    The second step accumulates two micro-batches if the run does, because gradients are then kept between
    them.
    """
    samples = search.samples
    for sequences, accumulated in ((1, 1), (size, 2 if size < plan.sequences_per_rank else 1)):
        batch = samples.build_batch([EpochIndex(0, i % len(samples)) for i in range(sequences)])
        batch = slice_sequence(batch, plan.part)
        train_step(
            search.backend,
            engine,
            iter([batch] * accumulated),
            plan=replace(
                plan,
                global_batch_size=sequences * accumulated * plan.world_size,
                micro_batch_size=sequences,
            ),
            first_sample=0,
            learning_rate=0.0,
            max_grad_norm=1.0,
        )


def _find_planned_size(search: Search, candidates: Sequence[int]) -> int:
    """Return the largest candidate that fits according to the planner, at which the search begins."""
    try:
        from portable.planner.this_machine import build_local_planner

        planner = build_local_planner(search.config, search.build(), search.backend)
        return planner.find_largest_micro_batch(list(candidates)) or FIRST_GUESS
    except UserError:  # the search itself reports it
        return FIRST_GUESS


def find_smallest_over_ranks(ours: int, config: RunConfig, world: World, backend: Backend) -> int:
    """Return the smallest of the sizes that the ranks have found. A collective call.

    Args:
        ours: Size that this rank has found.
        config: Config of the run.
        world: Ranks and devices of the launch.
        backend: Backend of this rank.
    """
    return next(size for size in list_micro_batch_sizes(config, world) if backend.reduce_any(ours == size))


def describe_remedies(config: RunConfig, world: World) -> str:
    """Describe settings that need less device memory than the settings of ``config``."""
    settings = load_backend_package(config.backend).iter_remedies(config, world.ranks)
    return ", ".join(settings) or "more devices"


def describe_fitting_settings(search: Search, present: int) -> str:
    """Describe settings that fit, as measured and as planned, for an out-of-memory error.

    Args:
        search: What to search with.
        present: Sequences of a micro-batch on each device that did not fit.
    """
    try:
        fitting = f"{find_largest_micro_batch(search, below=present)} fits; set it to that, or"
    except Exception:  # the device may be in any state, but the settings to change are known
        fitting = "no smaller number was found to fit;"
    text = f"{fitting} use {describe_remedies(search.config, search.world)}"
    try:
        from portable.planner.this_machine import build_local_planner, describe_best_fit

        planned = describe_best_fit(build_local_planner(search.config, search.build(), search.backend))
    except UserError:
        planned = None
    return text if planned is None else f"{text}; by plan, this fits: {planned}"
