"""What fits a device's memory: ``train.micro_batch_size: auto``, and what to do when memory has run out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portable.loop import train_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from portable.backend import Backend, Engine
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig
    from portable.data import Samples

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


def smallest_of_all(sizes: Sequence[int], ours: int, backend: Backend) -> int:
    """The smallest ``ours`` of all ranks.

    Args:
        sizes: ascending; each rank's is among them.
        ours: this rank's.
        backend: that has joined the other ranks.
    """
    return next(size for size in sizes if backend.any(ours == size))


class Fitting:
    """Tries out micro-batches with the model, the optimizer and the samples of a run.

    Nothing of the run itself is touched: every try has a model and an engine of its own.

    Args:
        backend: that has not joined the other ranks yet, or has lost them.
        config: of the run.
        plan: of the run, with any micro-batch.
        build: the model on the meta device, a new one each time.
        samples: to train on; all of one shape.
    """

    def __init__(
        self,
        backend: Backend,
        config: RunConfig,
        plan: BatchPlan,
        build: Callable[[], nn.Module],
        samples: Samples,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self._build = build
        self._samples = samples
        # Compiled layers need no more memory than these, and are another compilation for every size.
        self._config = config.replaced({"train.micro_batch_size": 1, "compile": False})

    def largest(self, sizes: Sequence[int], *, guess: int, first: int = FIRST_GUESS) -> int | None:
        """The largest of ``sizes`` (sequences a device) that fits; None if not even the first does.

        Where the backend cannot tell, the largest up to ``guess``. It begins with ``first``.
        """

        def fits(size: int) -> bool:
            answer = self._fits(size)
            return size <= guess if answer is None else answer

        return largest_fitting(sizes, fits, first)

    def _fits(self, size: int) -> bool | None:
        return self._backend.fits(self._build, self._config, lambda engine: self._two_steps(engine, size))

    def _two_steps(self, engine: Engine, size: int) -> None:
        """One step that makes the optimizer's state, and one beside that state, with gradients kept."""
        for sequences, accumulated in ((1, 1), (size, 2 if size < self._plan.sequences_per_rank else 1)):
            batch = self._samples.batch([(0, i % len(self._samples)) for i in range(sequences)])
            share = sequences * accumulated
            train_step(
                self._backend,
                engine,
                iter([batch] * accumulated),
                plan=replace(
                    self._plan,
                    global_batch_size=share * self._plan.world_size,
                    micro_batch_size=sequences,
                ),
                first_sample=0,
                learning_rate=0.0,
                max_grad_norm=1.0,
            )


def remedies(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that need less memory than those of ``config``, which has them not in use yet."""
    memory = config.memory
    zero = config.strategy.startswith("zero")
    if memory.activation_checkpointing != "full":
        yield "memory.activation_checkpointing full"
    if config.backend == "xla":  # where nothing can be offloaded, and the compiler cuts up the loss
        return
    if memory.loss_chunk_tokens == 0:
        yield "memory.loss_chunk_tokens auto"
    sharded = "zero3" if zero else "full_shard"
    if config.strategy != sharded and world_size > 1:
        yield f"strategy {sharded}"
    if memory.offload_optimizer == "none" and memory.offload_params == "none":
        yield "memory.offload_optimizer cpu" + (" with full_shard" if config.strategy == "no_shard" else "")
    if memory.offload_params == "none":
        yield "memory.offload_params cpu" + ("" if config.strategy == sharded else f" with {sharded}")
