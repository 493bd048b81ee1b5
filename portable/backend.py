"""What differs between accelerators in training: two protocols. :mod:`portable.registry` has the backends.

A :class:`Backend` starts the process group or runtime, places batches, reduces numbers and prepares a model.
:meth:`Backend.prepare` returns an :class:`Engine`: the sharded model with its optimizer. The training loop
(:mod:`portable.loop`) uses only these two.

A *rank* is one process of the run; the *world size* is the number of ranks. A rank drives one device, or, on
XLA, all devices of its host as one. The *global batch* is the sequences of one optimizer step over all ranks;
a *micro-batch* is what a rank runs through the model at a time.
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
"""Keyword arguments of ``model.forward``, int64 ``[micro_batch, seq_len]``, and ``labels``: aligned with the
logits (already shifted), -100 where there is no target. A classifier's labels may be float32 with NaN
where there is no target."""


class SaveHandle(Protocol):
    """A checkpoint that is being written."""

    def done(self) -> bool:
        """Whether this rank's files are written; on rank 0, whether all ranks' are."""

    def wait(self) -> None:
        """Block until :meth:`done`; raise the error of a failed write."""


class Engine(Protocol):
    """A sharded model with its optimizer."""

    model: nn.Module
    """The transformers model itself, under its plain parameter names."""

    objective: Objective
    """Its loss."""

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Fill this rank's slices of the parameters and persistent buffers named in ``weights``."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Load weights and optimizer state; each rank reads only its own slices."""

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write this rank's shards into ``folder``, in the strategy's native format; all ranks call it.

        Args:
            folder: exists on this rank's host. Ranks may share it, or each have its own.
            background: return once the state is copied to host memory, and write during training.
        """

    def accumulate(self, batch: Batch, valid: Tensor, *, last: bool) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            batch: from :meth:`Backend.place`.
            valid: what the global batch weighs (its target tokens, unless ``train.loss`` says otherwise), a
                device scalar from :meth:`Backend.total`; divides the summed losses.
            last: whether the optimizer steps next, so gradients must be reduced now.

        Returns:
            this rank's share of the global mean loss, an fp32 device scalar (no host sync). If the loss has
            numbers to log, ``[1 + numbers]``: the loss, and its share of each.
        """

    def update(self, learning_rate: float, max_norm: float, loss: Tensor) -> Tensor:
        """Clip, step, zero. Skips an update whose loss or norm is not finite, on all ranks alike.

        A skipped update leaves weights, moments and step counts bit for bit unchanged. After as many skipped
        updates in a row as ``train.on_non_finite`` allows (stop: one), every later update is skipped too.

        Args:
            learning_rate: of this step.
            max_norm: bound of the global gradient norm; 0 does not clip.
            loss: the global loss of this step, a device scalar.

        Returns:
            the gradient norm before clipping, an fp32 device scalar (no host sync).
        """

    def health(self) -> Health:
        """Read the device's count of skipped updates. A host sync: call it when logging.

        Raises:
            RunError: where the engine knows a more exact cause (an fp16 loss scale at its minimum).
        """

    def nonfinite_gradients(self) -> list[str]:
        """Names of parameters whose accumulated gradient is not finite in this rank's shard, in model order.

        A host sync. All ranks call it, before :meth:`update`.
        """

    def evaluate(
        self, batch: Batch, measure: MetricAccumulator, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add up one micro-batch of an evaluation. No host sync.

        Args:
            batch: from :meth:`Backend.place`.
            measure: what to add up besides the summed ``loss``.
            totals: of this rank's earlier micro-batches; empty for the first.

        Returns:
            ``totals`` with this micro-batch, by name: int64 or float64 tensors on the device. On XLA they are
            those of all ranks.
        """

    def swap_ema_weights(self) -> None:
        """Exchange weights and their average (``train.ema``); again: back. No host sync."""

    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        """Continue ``prompt``, int64 ``[1, length]``; all ranks call it."""


class Diagnostics:
    """What a backend reports for debugging. Training does not depend on it; by default there is nothing."""

    def record_memory(self) -> None:
        """Record the history of device allocations from now on, for :meth:`dump_memory`."""

    def dump_memory(self, path: Path) -> None:
        """Write the history of allocations, and what is allocated now, as the device's own tools read it."""

    def dump_collectives(self, folder: Path) -> None:
        """Write the last collectives of this rank's device, where a record is kept."""

    def driver_memory(self) -> tuple[int, int] | None:
        """Bytes in use on this rank's device and its total, as the driver counts them; None: no driver.

        Includes what libraries and other processes hold.
        """
        return None


class Backend(Protocol):
    """The devices that this process drives, and its link to the other ranks."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    one_program: bool
    """Whether all ranks run one program on one logical batch (SPMD), so all need the same random numbers."""
    diagnostics: Diagnostics

    @property
    def devices_per_rank(self) -> int:
        """Devices that this rank drives."""

    def start(self) -> None:
        """Join the process group, or start the runtime."""

    def stop(self) -> None:
        """Destroy the process group."""

    def prepare(self, model: nn.Module, config: RunConfig) -> Engine:
        """Shard a model from the meta device and build its optimizer. The weights stay uninitialized."""

    def fits(
        self, build: Callable[[], nn.Module], config: RunConfig, steps: Callable[[Engine], None]
    ) -> bool | None:
        """Run ``steps`` with an engine like :meth:`prepare`'s; return whether it fits device memory.

        The engine uses no collective of the run, so an out-of-memory error blocks no other rank, and is freed
        afterwards. Its numbers are meaningless; its allocations are the run's. Call it before :meth:`start`
        or after :meth:`leave`.

        Args:
            build: makes the model on the meta device.
            config: of the run.
            steps: takes training steps with this backend and the engine.

        Returns:
            None, without a trial, where running out of memory cannot be caught.
        """

    def ran_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` is an out-of-memory error of the device."""

    def leave(self) -> None:
        """Stop using the process group without destroying it: closed connections would fail other ranks."""

    def seed(self, value: int) -> None:
        """Seed this rank's device generator (dropout). No host sync."""

    def place(self, batch: Batch) -> Batch:
        """Copy a micro-batch to the device. No host sync."""

    def total(self, count: float) -> Tensor:
        """Sum a host number over all ranks into a device scalar: int64, or a float if it is. No host sync."""

    def sum(self, value: Tensor) -> Tensor:
        """Sum a small device tensor over all ranks. No host sync."""

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Copy device tensors to the host, flattened and one after another.

        The only host sync of the training loop.
        """

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. A collective over the host: no device sync."""

    def gather(self, text: str) -> list[str]:
        """Every rank's ``text``, by rank. A collective over the host."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def memory(self) -> tuple[int, int]:
        """Bytes in use now and at the peak, on this rank's device (resident host memory on CPU)."""

    def shape_multiple(self, precision: str) -> int | None:
        """Elements that matrix sizes should be multiples of for full speed; None: no preference."""

    def peak_flops(self, precision: str) -> float | None:
        """Dense peak FLOP/s of one device in ``precision``, from its data sheet; None where unknown."""

    def metrics(self) -> dict[str, float]:
        """More metrics of this backend, by name, for ``metrics.jsonl``."""


def host_memory() -> tuple[int, int]:
    """Return the current and the peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return now, peak
