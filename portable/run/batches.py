"""Build the data loaders of a run. The training loader can start from any sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

from portable.data.samples.loader import EvalLoader, TrainLoader
from portable.terminal import shows_run_progress_bars

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portable.batch import Batch
    from portable.data.samples.base import Samples
    from portable.data.samples.loader import BatchIterator
    from portable.run.stages import PreparedRun

BAR_DELAY = 1.0
"""Delay in seconds after which an evaluation shows its progress bar."""


def build_train_loader(prepared: PreparedRun, first_sample: int) -> TrainLoader:
    """Build the loader for this rank's training micro-batches.

    Args:
        prepared: The run.
        first_sample: Index of the first sample, in the order of the run. Greater than 0 if the run
            resumes.
    """
    plan = prepared.batch_plan
    return TrainLoader(
        prepared.data.train,
        seed=prepared.config.seed,
        position=first_sample,
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        rank=plan.rank,
        world_size=plan.world_size,
        sequence_part=plan.sequence_part,
        num_workers=prepared.config.data.num_workers,
        pin_memory=_needs_pinned_memory(prepared),
    )


def build_eval_loader(prepared: PreparedRun, samples: Samples) -> EvalLoader:
    """Build the loader for this rank's micro-batches of one evaluation.

    Args:
        prepared: The run. Its ``train.eval_batches`` is the maximum number of global batches. If it
            is None, all samples are used.
        samples: Samples of one evaluation source.
    """
    plan, limit = prepared.batch_plan, prepared.config.train.eval_batches
    return EvalLoader(
        samples,
        batch_size=plan.micro_batch_size,
        rank=plan.rank,
        world_size=plan.world_size,
        sequence_part=plan.sequence_part,
        pin_memory=_needs_pinned_memory(prepared),
        # The limit counts global batches, so that every world size evaluates the same samples.
        max_samples=None if limit is None else limit * plan.global_batch_size,
    )


def show_evaluation_progress(batches: BatchIterator, num_batches: int, *, is_shown: bool) -> Iterable[Batch]:
    """Iterate over the batches of an evaluation with a progress bar.

    Args:
        batches: Batches of this rank.
        num_batches: Number of batches.
        is_shown: Whether this rank shows the bar. No rank shows it if stderr is not a terminal, or
            if the run is quiet. The bar appears after ``BAR_DELAY`` seconds.
    """
    return tqdm(
        batches,
        total=num_batches,
        unit="batch",
        desc="evaluating",
        leave=False,
        delay=BAR_DELAY,
        dynamic_ncols=True,
        disable=not is_shown or not shows_run_progress_bars(),
    )


def _needs_pinned_memory(prepared: PreparedRun) -> bool:
    return prepared.backend.device.type != "cpu"
