"""Interfaces between the training loop and an accelerator.

A :class:`Backend` is a machine: it starts the process group or the runtime, places batches on the device,
reduces numbers over ranks and prepares a model. :meth:`Backend.prepare` returns an :class:`Engine`, which is
the sharded model with its optimizer. The training loop (:mod:`portable.loop`) uses only these two protocols,
so it contains no code for a specific accelerator. :mod:`portable.registry` lists the backends.

A *rank* is one process of the run, and the *world size* is the number of ranks. A rank drives one device. On
XLA, a rank drives all devices of its host as if they were one device. The *global batch* consists of all
sequences of one optimizer step, over all ranks. A *micro-batch* consists of the sequences that a rank runs
through the model at once.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from converters import Checkpoint
    from portable.config import RunConfig
    from portable.model.loss import MetricAccumulator, Objective
    from portable.model.tensors import ReadableTensor
    from portable.optim.non_finite import Health

Batch = dict[str, torch.Tensor]
"""Keyword arguments of ``model.forward`` and the ``labels``, int64 tensors of shape ``[micro_batch,
seq_len]``.

The labels are already shifted, so they are aligned with the logits. They are -100 at positions without a
target. The labels of a classifier may be float32, with NaN at positions without a target.
"""


class SaveHandle(Protocol):
    """Handle of a checkpoint that is being written."""

    def done(self) -> bool:
        """Return whether the files of this rank are written.

        Rank 0 returns whether the files of all ranks are written.
        """

    def wait(self) -> None:
        """Block until :meth:`done` returns True.

        Raises:
            BaseException: The error of a failed write, as the writer raised it.
        """


class Engine(Protocol):
    """Sharded model with its optimizer."""

    model: nn.Module
    """The transformers model, with its original parameter names."""

    objective: Objective
    """The loss that the engine minimizes."""

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Fill this rank's shards of parameters and persistent buffers.

        Args:
            weights: Full tensors by parameter or buffer name. Names that are missing keep their values.
        """

    def load(self, checkpoint: Checkpoint) -> None:
        """Load model weights and optimizer state. Each rank reads only its own shards."""

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write this rank's shards in the native format of the strategy. All ranks must call this method.

        Args:
            folder: Existing folder on the host of this rank. Ranks may share one folder or have one each.
            background: Whether to return as soon as the state is copied to host memory, and to write the
                files while the training continues.

        Returns:
            A handle that reports when the files are written.
        """

    def accumulate(self, batch: Batch, valid: Tensor, *, last: bool) -> Tensor:
        """Run the forward and backward pass of one micro-batch. Does not sync the host.

        Args:
            batch: Micro-batch on the device, from :meth:`Backend.place`.
            valid: Number of target tokens of the global batch, or the sum of their weights if ``train.loss``
                defines weights. A device scalar from :meth:`Backend.total`, by which the summed loss is
                divided.
            last: Whether this is the last micro-batch before :meth:`update`, so that gradients have to be
                reduced over ranks now.

        Returns:
            The contribution of this micro-batch to the global mean loss, an fp32 device scalar. If the loss
            logs further values, the shape is ``[1 + numbers]``: first the loss, then the contribution to each
            value.
        """

    def update(self, learning_rate: float, max_norm: float, loss: Tensor) -> Tensor:
        """Clip the gradients, take an optimizer step and reset the gradients. Does not sync the host.

        If the loss or the gradient norm is not finite, all ranks skip the update. A skipped update leaves
        weights, moments and step counts unchanged to the bit. ``train.on_non_finite`` limits the number of
        consecutive skipped updates (``stop`` allows one). Once the limit is reached, every later update is
        skipped, too.

        Args:
            learning_rate: Learning rate of this step.
            max_norm: Upper bound of the global gradient norm. 0 disables clipping.
            loss: Global loss of this step, a device scalar.

        Returns:
            The global gradient norm before clipping, an fp32 device scalar.
        """

    def health(self) -> Health:
        """Read the counters of skipped updates from the device. Syncs the host, so call it only when logging.

        Raises:
            RunError: If updates failed for a cause that the engine can name, such as an fp16 loss scale at
                its minimum.
        """

    def nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters with a non-finite accumulated gradient, in model order.

        Each rank inspects its own shards. All ranks must call this method, before :meth:`update`. Syncs the
        host.
        """

    def evaluate(
        self, batch: Batch, measure: MetricAccumulator, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the forward pass of one evaluation micro-batch and accumulate its metrics.

        Does not sync the host.

        Args:
            batch: Micro-batch on the device, from :meth:`Backend.place`.
            measure: Function that computes the metrics to accumulate in addition to the summed ``loss``.
            totals: Totals over the previous micro-batches of this rank. Empty for the first micro-batch.

        Returns:
            The new totals by metric name, int64 or float64 tensors on the device. On XLA the totals are
            already summed over all ranks.
        """

    def swap_ema_weights(self) -> None:
        """Swap the weights with their exponential moving average (``train.ema``). Does not sync the host.

        A second call swaps them back.
        """

    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        """Sample a continuation of a prompt. All ranks must call this method.

        Args:
            prompt: Token ids, an int64 tensor of shape ``[1, length]``.
            max_new_tokens: Maximum number of tokens to generate.
            seed: Seed of the sampling.

        Returns:
            Token ids of the prompt and its continuation, an int64 tensor ``[1, length + added]`` on the host.
        """


class Diagnostics:
    """Debugging information of a backend.

    Training does not depend on this class, and its default methods do nothing.
    """

    def record_memory(self) -> None:
        """Start recording the history of device allocations, to be written by :meth:`dump_memory`."""

    def dump_memory(self, path: Path) -> None:
        """Write the history of device allocations and a snapshot, in the format of the device's own tools."""

    def dump_collectives(self, folder: Path) -> None:
        """Write the most recent collectives of this rank's device, if the device records them."""

    def driver_memory(self) -> tuple[int, int] | None:
        """Query the driver for the memory of this rank's device.

        Returns:
            Bytes in use and bytes in total. The first figure includes the memory of libraries and of other
            processes. None if the backend cannot query a driver.
        """
        return None


class Backend(Protocol):
    """The devices of this process and its connection to the other ranks."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    one_program: bool
    """Whether all ranks run one program on one logical batch (SPMD), so that all need the same random
    numbers."""
    diagnostics: Diagnostics

    @property
    def devices_per_rank(self) -> int:
        """Number of devices that this rank drives."""

    def start(self) -> None:
        """Join the process group, or start the runtime."""

    def stop(self) -> None:
        """Destroy the process group."""

    def prepare(self, model: nn.Module, config: RunConfig) -> Engine:
        """Shard a model and build its optimizer.

        Args:
            model: Model on the meta device.
            config: Config of the run.

        Returns:
            The engine. Its weights are not initialized yet.
        """

    def fits(
        self, build: Callable[[], nn.Module], config: RunConfig, steps: Callable[[Engine], None]
    ) -> bool | None:
        """Try training steps on a temporary engine, to find out whether they fit into device memory.

        The temporary engine allocates the same memory as the engine of the run, but computes meaningless
        values. It uses none of the run's collectives, so an out-of-memory error on one rank does not block
        other ranks. It is freed before this method returns. Call this method before :meth:`start` or after
        :meth:`leave`.

        Args:
            build: Function that builds the model on the meta device.
            config: Config of the run.
            steps: Function that takes training steps with this backend and the given engine.

        Returns:
            Whether the steps fit. None, without a trial, if this backend cannot catch out-of-memory errors.
        """

    def ran_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` is an out-of-memory error of the device."""

    def leave(self) -> None:
        """Stop using the process group, but keep its connections open.

        Closed connections would make the collectives of other ranks fail.
        """

    def seed(self, value: int) -> None:
        """Seed the random number generator of this rank's device, for dropout. Does not sync the host."""

    def place(self, batch: Batch) -> Batch:
        """Copy a micro-batch to the device. Does not sync the host."""

    def total(self, count: float) -> Tensor:
        """Sum a host number over all ranks into a device scalar. Does not sync the host.

        Returns:
            An int64 scalar if ``count`` is an integer, otherwise a floating-point scalar.
        """

    def sum(self, value: Tensor) -> Tensor:
        """Sum a small device tensor over all ranks. Does not sync the host."""

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Copy device tensors to the host. This is the only host sync of the training loop.

        Returns:
            The flattened values of all tensors, concatenated in the given order.
        """

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank. A host collective, which does not sync the device."""

    def gather(self, text: str) -> list[str]:
        """Return the ``text`` of every rank, ordered by rank. A host collective."""

    def barrier(self) -> None:
        """Block until all ranks have called this method."""

    def memory(self) -> tuple[int, int]:
        """Return the current and the peak memory use of this rank's device in bytes.

        The CPU backend returns the resident memory of the process.
        """

    def shape_multiple(self, precision: str) -> int | None:
        """Return the number of elements that matrix sizes should be multiples of to reach full speed.

        Returns None if the device runs all matrix sizes equally well.
        """

    def peak_flops(self, precision: str) -> float | None:
        """Return the peak dense FLOP/s of one device in ``precision``, from its data sheet.

        Returns None if the peak of the device is unknown.
        """

    def metrics(self) -> dict[str, float]:
        """Return further metrics of this backend by name, to be written to ``metrics.jsonl``."""


def host_memory() -> tuple[int, int]:
    """Return the current and the peak resident memory of this process in bytes."""
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return now, peak
