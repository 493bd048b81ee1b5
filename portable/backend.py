"""Interfaces between the training loop and an accelerator.

A :class:`Backend` represents the machine: it starts the process group or the runtime, moves batches to the
device, reduces values across ranks, and prepares a model. :meth:`Backend.build_engine` returns an
:class:`Engine`: the sharded model together with its optimizer. The training loop (:mod:`portable.loop`) only
uses these two protocols, so it contains no accelerator-specific code. :mod:`portable.registry` lists the
available backends.

A *rank* is one process of the run, and the *world size* is the number of ranks. Each rank drives one device.
On XLA, a rank drives all devices of its host as if they were a single device. The *global batch* contains all
sequences of one optimizer step across all ranks. A *micro-batch* contains the sequences that a rank processes
in one forward pass.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.converters import Checkpoint
    from portable.model.loss import MicroBatchMeasure, StepSums, TrainingObjective
    from portable.model.weight_sources import ReadableTensor
    from portable.optim.non_finite_updates import UpdateHealth


class SaveHandle(Protocol):
    """Handle for waiting until a checkpoint has been written. :meth:`Engine.save_shards` returns it."""

    def is_done(self) -> bool:
        """Return whether this rank's files have been written.

        On rank 0, return whether the files of all ranks have been written.
        """

    def wait(self) -> None:
        """Block until :meth:`is_done` returns True.

        Raises:
            BaseException: If writing failed. This is the original exception.
        """


class Engine(Protocol):
    """Sharded model together with its optimizer. :meth:`Backend.build_engine` creates it."""

    model: nn.Module
    """The transformers model, with its original parameter names."""

    objective: TrainingObjective
    """Training objective: the loss, its weights, and the values to log."""

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Fill this rank's shards of parameters and persistent buffers.

        Args:
            weights: Full tensors, keyed by parameter or buffer name. Parameters and buffers that are not in
                the mapping keep their values.
        """

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the model weights and the optimizer state. Each rank reads only its own shards.

        Args:
            checkpoint: Checkpoint whose tensors have the names of the model's parameters.

        Raises:
            CheckpointError: If the checkpoint does not fit the model or is damaged.
        """

    def save_shards(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write this rank's shards in the strategy's native format. Must be called on all ranks.

        Args:
            folder: Existing folder on this rank's host. Ranks can share a folder or each have their own.
            background: Whether to return as soon as the state has been copied to host memory and write the
                files while training continues.

        Returns:
            A handle to wait for the files.
        """

    def begin_step(self, learning_rate: float) -> None:
        """Prepare a step. Must be called before the first :meth:`accumulate_gradients` of the step.

        With ``train.fused_backward``, the learning rate is already needed for the backward pass,
        because this pass updates the parameters.

        Args:
            learning_rate: Learning rate for this step.
        """

    def accumulate_gradients(
        self,
        batch: Batch,
        global_weight: Tensor,
        *,
        is_last_micro_batch: bool,
        with_token_metrics: bool = False,
    ) -> StepSums:
        """Run the forward and backward pass of one micro-batch. Does not trigger a host-device sync.

        Args:
            batch: Micro-batch on the device, from :meth:`Backend.copy_to_device`.
            global_weight: Divisor of the summed loss: the number of target tokens in the global batch, or
                the sum of their weights if ``train.loss`` uses weights. Device scalar from
                :meth:`Backend.sum_host_numbers`.
            is_last_micro_batch: Whether this is the last micro-batch before :meth:`take_optimizer_step`. If
                so, the gradients are reduced across ranks.
            with_token_metrics: Whether to also compute token accuracy and entropy.

        Returns:
            This micro-batch's contributions to the global mean loss and to the logged values, on the
            device.
        """

    def take_optimizer_step(self, learning_rate: float, max_grad_norm: float, loss: Tensor) -> Tensor:
        """Clip the gradients, take an optimizer step, and zero the gradients.

        Does not trigger a host-device sync.

        If the loss or the gradient norm is not finite, all ranks skip the update, which leaves the
        weights, moments, and step counts bitwise unchanged. ``train.on_non_finite`` limits the
        number of consecutive skipped updates: with ``stop``, the limit is 1. Once the limit is
        reached, all further updates are also skipped, until the host reads the counters
        (:meth:`read_update_health`) and stops the run.

        Args:
            learning_rate: Learning rate for this step.
            max_grad_norm: Maximum global gradient norm for gradient clipping. 0 disables clipping.
            loss: Global loss of this step, a device scalar. Used only to decide whether to skip the
                update.

        Returns:
            The global gradient norm before clipping, an fp32 device scalar.
        """

    def read_update_health(self) -> UpdateHealth:
        """Read the counters of skipped updates from the device.

        Triggers a host-device sync, so only call it when logging.

        Raises:
            RunError: If updates were skipped for a reason that training cannot recover from. For
                example, fp16 gradients overflow even at the lowest loss scale.
        """

    def find_nonfinite_gradients(self) -> list[str]:
        """Find the parameters whose accumulated gradient is not finite.

        Each rank checks its own shards. Must be called on all ranks, before :meth:`take_optimizer_step`.
        Triggers a host-device sync.

        Returns:
            The names of the parameters, in model order.
        """

    def find_nonfinite_state(self) -> list[str]:
        """Find the trained parameters with a weight or optimizer value that is not finite.

        Each rank checks its own shards. Triggers a host-device sync, so only call it before saving.

        Returns:
            The names of the parameters.
        """

    def evaluate_batch(
        self, batch: Batch, metric_accumulator: MicroBatchMeasure, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the forward pass of one evaluation micro-batch and accumulate its metrics.

        Does not trigger a host-device sync.

        Args:
            batch: Micro-batch on the device, from :meth:`Backend.copy_to_device`.
            metric_accumulator: Function that computes further metrics to accumulate, in addition to the
                summed ``loss``.
            totals: Totals over this rank's previous micro-batches. Empty for the first micro-batch.

        Returns:
            The new totals, keyed by metric name: int64 or float64 tensors on the device. On XLA, the totals
            are already summed over all ranks.
        """

    def swap_ema_weights(self) -> None:
        """Swap the weights with their exponential moving average (``train.ema``). A second call swaps back.

        May trigger a host-device sync, so only call it before and after an evaluation.
        """

    def generate(
        self, prompt: Tensor, *, max_new_tokens: int, seed: int, image_columns: Batch | None = None
    ) -> Tensor:
        """Sample a continuation of a prompt. Must be called on all ranks.

        Args:
            prompt: Token ids, an int64 tensor of shape ``[1, length]``.
            max_new_tokens: Maximum number of tokens to generate.
            seed: Random seed for sampling.
            image_columns: Additional model inputs for the images in the prompt, keyed by name. None if
                there are no images.

        Returns:
            Token ids of the prompt and its continuation, an int64 tensor of shape ``[1, length + added]``
            on the host.
        """


class DriverMemory(NamedTuple):
    """Memory usage of a device, as reported by its driver."""

    used_bytes: int
    """Memory in use, including the memory of libraries and other processes."""
    total_bytes: int
    """Total memory of the device."""


class MemoryUsage(NamedTuple):
    """Memory that this process uses on its device, or in host memory if the device is a CPU."""

    current_bytes: int
    """Memory in use now."""
    peak_bytes: int
    """Peak memory usage so far."""


class Diagnostics:
    """Debugging hooks that a backend overrides if its device supports them.

    Training does not depend on these hooks. In this base class, they do nothing.
    """

    def record_memory(self) -> None:
        """Start recording the history of device memory allocations for :meth:`dump_memory`."""

    def dump_memory(self, path: Path) -> None:
        """Write the allocation history and a snapshot of device memory to a file.

        Args:
            path: File to write, in the format of the device vendor's memory viewer.
        """

    def dump_collectives(self, folder: Path) -> None:
        """Write a trace of this rank's most recent collective operations, to debug a hang.

        Writes nothing if the backend does not record collectives.

        Args:
            folder: Existing folder. Each rank writes its own file.
        """

    def query_driver_memory(self) -> DriverMemory | None:
        """Query the device driver for the memory of this rank's device.

        Returns:
            The memory in use and the total memory. None if there is no driver to query.
        """
        return None


class Backend(Protocol):
    """Interface to the device of this process and to the other ranks.

    On XLA, a process drives all devices of its host.
    """

    name: str
    """Name of the backend in :data:`portable.registry.BACKENDS`, such as ``cuda``."""
    rank: int
    """Rank of this process."""
    world_size: int
    """Number of ranks."""
    device: torch.device
    """Device of this rank."""
    one_program: bool
    """Whether all ranks run a single program on one logical batch (SPMD) and need the same random seed."""
    diagnostics: Diagnostics
    """Debugging hooks."""

    @property
    def devices_per_rank(self) -> int:
        """Number of devices driven by this rank."""

    def start(self) -> None:
        """Select the device if necessary, and join the process group if there are several ranks."""

    def stop(self) -> None:
        """Destroy the process group."""

    def build_engine(self, model: nn.Module, config: RunConfig) -> Engine:
        """Shard a model and build its optimizer.

        Args:
            model: Model on the meta device.
            config: Config of the run.

        Returns:
            The engine. Its weights are still uninitialized.
        """

    def run_memory_trial(
        self,
        build_meta_model: Callable[[], nn.Module],
        config: RunConfig,
        take_steps: Callable[[Engine], None],
    ) -> bool | None:
        """Run training steps on a temporary engine to check whether they fit in device memory.

        The temporary engine allocates the same memory as the run's engine, but the values that it computes
        are meaningless. The engine does not call any collectives of the run's process group, so an
        out-of-memory error on one rank does not hang the other ranks. The engine is freed before this
        method returns. Must be called before :meth:`start` or after :meth:`abandon_process_group`.

        Args:
            build_meta_model: Function that builds the model on the meta device.
            config: Config of the run.
            take_steps: Function that takes training steps with the given engine.

        Returns:
            Whether the steps fit. None, without running any steps, if this backend cannot recover from an
            out-of-memory error.
        """

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` is an out-of-memory error of the device."""

    def abandon_process_group(self) -> None:
        """Stop using the process group without closing its connections.

        Closing the connections would make collectives on the other ranks fail.
        """

    def seed_device_generator(self, value: int) -> None:
        """Seed the random number generator that dropout uses on this rank's device.

        Does not trigger a host-device sync.
        """

    def copy_to_device(self, batch: Batch) -> Batch:
        """Copy a micro-batch to the device. Does not trigger a host-device sync."""

    def sum_host_numbers(self, count: float, *, stop: bool = False) -> Tensor:
        """Sum the numbers of all ranks, and return the sum as a scalar on the device.

        Ranks that count the same tokens, such as the ranks of a tensor-parallel group, must pass the
        same number. It is added only once. Does not trigger a host-device sync.

        Args:
            count: Number to add from this rank's host, for example its number of target tokens.
            stop: Whether this rank requests that the run stops. The same collective passes the
                request to all ranks, and :meth:`is_stop_requested` returns the result.

        Returns:
            An int64 scalar if ``count`` is an integer, otherwise a floating-point scalar.
        """

    def is_stop_requested(self, requested_by_rank: bool) -> bool:
        """Return whether any rank requested a stop in the latest call of :meth:`sum_host_numbers`.

        A rank requests a stop by passing ``stop=True`` to :meth:`sum_host_numbers`. The result is
        the same on all ranks. The host may block until the device has finished the work queued
        before that call. The device stays busy if the caller has queued more work since then.

        Args:
            requested_by_rank: Whether this rank requests a stop now. If there is only one rank,
                this value is returned. Otherwise, it is ignored.
        """

    def sum_tensor_over_ranks(self, value: Tensor) -> Tensor:
        """Sum a small device tensor over all ranks. Does not trigger a host-device sync."""

    def read_to_host(self, values: Sequence[Tensor]) -> list[float]:
        """Copy device tensors to the host. This is the only host-device sync in the training loop.

        Returns:
            The values of all tensors, flattened and concatenated in the given order.
        """

    def reduce_any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank. Must be called on all ranks.

        The hosts exchange the flags without a host-device sync. The latency grows with the logarithm of the
        number of ranks, so do not call this method in every step.
        """

    def gather_text(self, text: str) -> list[str]:
        """Gather ``text`` from all ranks, ordered by rank. Must be called on all ranks.

        The hosts exchange the strings without using the device.
        """

    def barrier(self) -> None:
        """Block until all ranks have reached the barrier."""

    def measure_memory(self) -> MemoryUsage:
        """Return the current and peak memory usage of this rank's device, in bytes.

        On a CPU, this is the resident memory of the process.
        """

    def get_shape_multiple(self, precision: str) -> int | None:
        """Return a number that matrix dimensions should be divisible by for full speed.

        Args:
            precision: Precision of the matrix products, such as ``bf16``.

        Returns:
            The number. None if the device handles all matrix sizes equally well.
        """

    def get_peak_flops(self, precision: str) -> float | None:
        """Return the peak dense FLOP/s of one device, according to its data sheet.

        Args:
            precision: Precision of the matrix products, such as ``bf16``.

        Returns:
            The peak, or None if it is unknown.
        """

    def get_metrics(self) -> dict[str, float]:
        """Return additional backend metrics for ``metrics.jsonl``, keyed by name."""


def measure_host_memory() -> MemoryUsage:
    """Return the current and peak resident memory of this process, in bytes.

    On systems without ``/proc``, such as macOS, the current value is also the peak.
    """
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return MemoryUsage(current_bytes=now, peak_bytes=peak)
