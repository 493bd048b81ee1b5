"""What fits a device's memory: ``train.micro_batch_size: auto``, and what to do when memory has run out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from portable.batch_plan import batch_plan
from portable.checkpoint.store import checkpoints_of
from portable.checkpoint.trainer_state import TrainerState
from portable.data.samples.loader import part_of
from portable.errors import UserError
from portable.loop import train_step
from portable.registry import backend_package

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
"""Where the search begins if the planner cannot tell; and what ``auto`` means where running out of memory
cannot be caught."""


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def largest_fitting(
    sizes: Sequence[int], fits: Callable[[int], bool], first: int = FIRST_GUESS
) -> int | None:
    """The largest of ``sizes`` that fits, or None; tries a few of them only.

    From ``first`` upwards in growing strides until one does not fit, then by bisection.

    Args:
        sizes: ascending; of which some first ones fit, and no later one.
        fits: tries one.
        first: a guess.
    """
    good, bad = -1, len(sizes)  # what is known to fit, and not to fit
    at = max((i for i, size in enumerate(sizes) if size <= first), default=0)
    stride = 1
    while bad - good > 1:
        if fits(sizes[at]):
            good = at
        else:
            bad = at
        if bad == len(sizes):
            at = min(good + stride, bad - 1)
            stride *= 2
        else:
            at = (good + bad) // 2
    return None if good < 0 else sizes[good]


@dataclass(frozen=True)
class Search:
    """What a search for a micro-batch needs. Holds no model: each try builds its own.

    Attributes:
        backend: that has not joined the other ranks yet, or has left them.
        config: of the run.
        model_config: of its model.
        samples: to train on, all of one shape.
        world: the ranks of the launch.
    """

    backend: Backend
    config: RunConfig
    model_config: PretrainedConfig
    samples: Samples
    world: World

    def build(self) -> PreTrainedModel:
        """A new model on the meta device."""
        from portable.adapters.adapter import training_model

        return training_model(self.model_config, self.config)


def search_of(prepared: Prepared) -> Search:
    """A search for the micro-batch of a run; does not keep its model alive."""
    return Search(
        prepared.backend, prepared.config, prepared.model_config, prepared.data.train, prepared.resolved.world
    )


def sizes(config: RunConfig, world: World) -> list[int]:
    """The micro-batch sizes that the global batch allows, ascending."""
    total, groups = config.train.global_batch_size, max(1, world.devices // config.ranks_together)
    share = -(-total // groups)
    return divisors(share) if total % groups == 0 else [size for size in divisors(total) if size <= share]


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    return config.replaced({"train.micro_batch_size": size})


def previous_size(config: RunConfig, existing: ExistingRun, place: Place, world: World) -> int | None:
    """What ``auto`` came to in the run that ``place`` holds; None where memory may decide otherwise now."""
    earlier, latest = existing.config, checkpoints_of(place).latest()
    if earlier is None or latest is None:
        return None
    same = all(getattr(earlier, name) == getattr(config, name) for name in _DECIDE_ON_MEMORY)
    same = same and TrainerState.read(latest).world_size == world.ranks
    size = earlier.train.micro_batch_size
    return size if same and size != "auto" and size in sizes(config, world) else None


def largest(search: Search, *, below: int | None = None) -> int:
    """Find the largest micro-batch that fits this rank's device.

    Nothing of the run itself is touched: every try has a model and an engine of its own.

    Args:
        search: what to try.
        below: only sizes under it.

    Raises:
        UserError: if not one sequence fits.
    """
    config, world = search.config, search.world
    # Compiled layers need no more memory than others, and each size would be another compilation.
    trial = config.replaced({"train.micro_batch_size": 1, "compile": False})
    plan = batch_plan(trial, search.backend)  # refuses a global batch that cannot be divided
    candidates = [size for size in sizes(config, world) if below is None or size < below]
    # Where nothing can be tried, guess; but not in answer to memory that has run out.
    guess = FIRST_GUESS if below is None else 0

    def fits(size: int) -> bool:
        trying = partial(_two_steps, search=search, plan=plan, size=size)
        answer = search.backend.fits(search.build, trial, trying)
        return size <= guess if answer is None else answer

    found = largest_fitting(candidates, fits, _planned(search, candidates)) if candidates else None
    if found is None:
        raise UserError(
            "train.micro_batch_size: not even one sequence at a time fits the memory of the device; use "
            f"{remedies(config, world)}"
        )
    return found


def _two_steps(engine: Engine, search: Search, plan: BatchPlan, size: int) -> None:
    """One step that makes the optimizer's state, and one beside that state, with gradients kept."""
    samples = search.samples
    for sequences, accumulated in ((1, 1), (size, 2 if size < plan.sequences_per_rank else 1)):
        batch = samples.batch([(0, i % len(samples)) for i in range(sequences)])
        batch = part_of(batch, plan.part)
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


def _planned(search: Search, candidates: Sequence[int]) -> int:
    """The largest candidate that fits by plan, where the search begins."""
    try:
        from portable.planner.this_machine import planner_here

        planner = planner_here(search.config, search.build(), search.backend)
        return planner.largest_micro_batch(list(candidates)) or FIRST_GUESS
    except UserError:  # the search itself reports it
        return FIRST_GUESS


def smallest_over_ranks(ours: int, config: RunConfig, world: World, backend: Backend) -> int:
    """The smallest ``ours`` of all ranks, which all call it."""
    return next(size for size in sizes(config, world) if backend.any(ours == size))


def remedies(config: RunConfig, world: World) -> str:
    """Settings that need less device memory than those of ``config``, in words."""
    found = backend_package(config.backend).remedies(config, world.ranks)
    return ", ".join(found) or "more devices"


def advice(search: Search, present: int) -> str:
    """What fits instead of ``present`` sequences a device, measured and by plan; for an error message."""
    try:
        fitting = f"{largest(search, below=present)} fits; set it to that, or"
    except Exception:  # whatever state the device is in: the settings to change can be named anyway
        fitting = "no smaller number was found to fit;"
    text = f"{fitting} use {remedies(search.config, search.world)}"
    try:
        from portable.planner.this_machine import planner_here, what_fits

        planned = what_fits(planner_here(search.config, search.build(), search.backend))
    except UserError:
        planned = None
    return text if planned is None else f"{text}; by plan, this fits: {planned}"
