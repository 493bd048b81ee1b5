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
"""Where the search begins if the planner cannot tell; and what ``auto`` means where running out of memory
cannot be caught."""


def list_divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def find_largest_fitting(
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
        from portable.adapters.adapter import build_training_model

        return build_training_model(self.model_config, self.config)


def build_search(prepared: Prepared) -> Search:
    """A search for the micro-batch of a run; does not keep its model alive."""
    return Search(
        prepared.backend, prepared.config, prepared.model_config, prepared.data.train, prepared.resolved.world
    )


def list_micro_batch_sizes(config: RunConfig, world: World) -> list[int]:
    """The micro-batch sizes that the global batch allows, ascending."""
    total, groups = config.train.global_batch_size, max(1, world.devices // config.ranks_together)
    share = -(-total // groups)
    return (
        list_divisors(share)
        if total % groups == 0
        else [size for size in list_divisors(total) if size <= share]
    )


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    return config.replaced({"train.micro_batch_size": size})


def get_previous_size(config: RunConfig, existing: ExistingRun, place: Place, world: World) -> int | None:
    """What ``auto`` came to in the run that ``place`` holds; None where memory may decide otherwise now."""
    earlier, latest = existing.config, open_checkpoints(place).find_latest()
    if earlier is None or latest is None:
        return None
    same = all(getattr(earlier, name) == getattr(config, name) for name in _DECIDE_ON_MEMORY)
    same = same and TrainerState.read(latest).world_size == world.ranks
    size = earlier.train.micro_batch_size
    return size if same and size != "auto" and size in list_micro_batch_sizes(config, world) else None


def find_largest_micro_batch(search: Search, *, below: int | None = None) -> int:
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
    plan = build_batch_plan(trial, search.backend)  # refuses a global batch that cannot be divided
    candidates = [size for size in list_micro_batch_sizes(config, world) if below is None or size < below]
    # Where nothing can be tried, guess; but not in answer to memory that has run out.
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
    """One step that makes the optimizer's state, and one beside that state, with gradients kept."""
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
    """The largest candidate that fits by plan, where the search begins."""
    try:
        from portable.planner.this_machine import build_local_planner

        planner = build_local_planner(search.config, search.build(), search.backend)
        return planner.find_largest_micro_batch(list(candidates)) or FIRST_GUESS
    except UserError:  # the search itself reports it
        return FIRST_GUESS


def find_smallest_over_ranks(ours: int, config: RunConfig, world: World, backend: Backend) -> int:
    """The smallest ``ours`` of all ranks, which all call it."""
    return next(size for size in list_micro_batch_sizes(config, world) if backend.reduce_any(ours == size))


def describe_remedies(config: RunConfig, world: World) -> str:
    """Settings that need less device memory than those of ``config``, in words."""
    settings = load_backend_package(config.backend).iter_remedies(config, world.ranks)
    return ", ".join(settings) or "more devices"


def describe_fitting_settings(search: Search, present: int) -> str:
    """What fits instead of ``present`` sequences a device, measured and by plan; for an error message."""
    try:
        fitting = f"{find_largest_micro_batch(search, below=present)} fits; set it to that, or"
    except Exception:  # whatever state the device is in: the settings to change can be named anyway
        fitting = "no smaller number was found to fit;"
    text = f"{fitting} use {describe_remedies(search.config, search.world)}"
    try:
        from portable.planner.this_machine import build_local_planner, describe_best_fit

        planned = describe_best_fit(build_local_planner(search.config, search.build(), search.backend))
    except UserError:
        planned = None
    return text if planned is None else f"{text}; by plan, this fits: {planned}"
