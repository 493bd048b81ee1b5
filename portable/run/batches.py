"""Batches of a prepared run: for training from any position, and for evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

from portable.batch import Batch
from portable.data.samples.loader import EvalLoader, TrainLoader
from portable.terminal import at_a_terminal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portable.data.samples.base import Samples
    from portable.ranks.watchdog import Watchdog
    from portable.reporting.metrics import Throughput
    from portable.run.stages import Prepared

BAR_DELAY = 1.0  # seconds that an evaluation takes before it shows a bar


def train_loader(prepared: Prepared, position: int) -> TrainLoader:
    """This rank's batches from sample ``position`` of the run's order on."""
    plan = prepared.plan
    return TrainLoader(
        prepared.data.train,
        seed=prepared.config.seed,
        position=position,
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        rank=plan.rank,
        world_size=plan.world_size,
        part=plan.part,
        num_workers=prepared.config.data.num_workers,
        pin_memory=_pins_memory(prepared),
    )


def eval_batches(prepared: Prepared, samples: Samples) -> Iterator[Batch]:
    """This rank's micro-batches of one evaluation."""
    plan, limit = prepared.plan, prepared.config.train.eval_batches
    loader = EvalLoader(
        samples,
        batch_size=plan.micro_batch_size,
        rank=plan.rank,
        world_size=plan.world_size,
        part=plan.part,
        pin_memory=_pins_memory(prepared),
        # In global batches, so that every world size evaluates the same samples.
        most=None if limit is None else limit * plan.global_batch_size,
    )
    yield from tqdm(
        loader,
        total=len(loader),
        unit="batch",
        desc="evaluating",
        leave=False,
        delay=BAR_DELAY,
        dynamic_ncols=True,
        disable=prepared.backend.rank != 0 or not at_a_terminal(),
    )


class WatchedBatches(Iterator[Batch]):
    """Iterator over batches that measures how long each is waited for, and restarts the watchdog.

    Args:
        batches: Batches of the training or of an evaluation.
        watchdog: Restarted by each batch, and stopped after the last batch.
        throughput: Receives the seconds of each wait.
    """

    def __init__(self, batches: Iterable[Batch], *, watchdog: Watchdog, throughput: Throughput) -> None:
        self._batches = iter(batches)
        self._watchdog = watchdog
        self._throughput = throughput
        self._is_first = True
        watchdog.restart(compiles=True)

    def __next__(self) -> Batch:
        begun = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._watchdog.rest()
            raise
        self._throughput.waiting += time.perf_counter() - begun
        self._watchdog.restart(compiles=self._is_first)
        self._is_first = False
        return batch


def _pins_memory(prepared: Prepared) -> bool:
    return prepared.backend.device.type != "cpu"
