"""Backend based on torch.distributed, with one device per rank: a CPU or any torch accelerator."""

from __future__ import annotations

import datetime
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from portable.batch import attach_host_copy
from portable.engines.engine_interface import RankInfo, get_dist_backend
from portable.errors import RunError, UserError, to_one_line
from portable.private import torch_internals
from portable.ranks.collectives import gather_text, reduce_any
from portable.ranks.rendezvous import join_rendezvous
from portable.registry import import_engine_module
from portable.terminal import discard_native_stdout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from portable.backend import Engine, MemoryUsage
    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.engines.engine_interface import EngineWithMetrics
    from portable.engines.torch_device import TorchDevice

_DEVICES_WITH_EVENTS = ("cuda", "xpu")
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


class TorchBackend:
    """Backend that communicates through a torch.distributed process group.

    Implements :class:`portable.backend.Backend`. The constructor opens the device, and
    :meth:`start` joins the process group. The rank and the number of ranks are read from the
    environment variables that torchrun sets. If they are not set, the run has a single rank.

    Args:
        torch_device: Description of the device type that the ranks use.

    Raises:
        UserError: If this machine has no device for the rank.
    """

    def __init__(self, torch_device: TorchDevice) -> None:
        self.name = torch_device.name
        self._torch_device = torch_device
        self.one_program = False
        self._engine: EngineWithMetrics | None = None
        self._at_stop = ExitStack()
        self._detached_groups: list[Any] = []
        self._previous_fp32_products: tuple[str, bool] | None = None
        self._contributes_to_sums = True
        self._stop_requests = AsyncHostCopy()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.device = torch_device.open_device(self.local_rank, self.local_world_size)
        self.diagnostics = torch_device.build_diagnostics(self.device, self.rank, self.world_size)

    def start(self) -> None:
        """Select the device and, if there are several ranks, join the process group.

        Raises:
            UserError: If another program uses the rendezvous port.
            RunError: If the rendezvous fails.
        """
        self._torch_device.make_current(self.device)
        if self.world_size > 1:
            try:
                with discard_native_stdout():
                    rendezvous = join_rendezvous(COLLECTIVE_TIMEOUT)
                    dist.init_process_group(
                        get_dist_backend(self.device),
                        store=rendezvous.store,
                        rank=rendezvous.rank,
                        world_size=rendezvous.world_size,
                        timeout=COLLECTIVE_TIMEOUT,
                    )
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                raise _build_rendezvous_error(error) from error

    def stop(self) -> None:
        """Run the engine's cleanup, destroy the process group, and restore torch's fp32 settings."""
        if self._previous_fp32_products is not None:
            _set_fp32_matmul_precision(*self._previous_fp32_products)
            self._previous_fp32_products = None
        self._engine = None
        self._at_stop.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def build_engine(self, model: nn.Module, config: RunConfig) -> Engine:
        """Shard a model with the engine for ``config.strategy``, and build its optimizer.

        Must be called on all ranks. Also sets the precision of fp32 matrix products in this
        process: TF32 if ``config.precision`` is ``tf32``, otherwise full fp32. :meth:`stop`
        restores the previous precision. Before this call, :meth:`sum_host_numbers` and
        :meth:`sum_tensor_over_ranks` do not take tensor-parallel groups into account.

        Args:
            model: The model on the meta device.
            config: Config of the run.

        Returns:
            The engine. Its weights are still uninitialized.
        """
        if self._previous_fp32_products is None:
            self._previous_fp32_products = (
                torch.get_float32_matmul_precision(),
                torch.backends.cudnn.allow_tf32,
            )
        # Only one rank of each tensor-parallel group contributes, because its ranks compute the same losses
        # and counts.
        self._contributes_to_sums = self.rank % config.tensor_parallel_size == 0
        tf32 = config.precision == "tf32"
        _set_fp32_matmul_precision("high" if tf32 else "highest", tf32)
        self._engine = import_engine_module(config.strategy, "engine").build_engine(
            model, config, self._build_rank_info(self.rank), self._at_stop
        )
        return self._engine

    def _build_rank_info(self, rank: int) -> RankInfo:
        return RankInfo(self.device, rank, self.world_size, self.local_world_size)

    def run_memory_trial(
        self,
        build_meta_model: Callable[[], nn.Module],
        config: RunConfig,
        take_steps: Callable[[Engine], None],
    ) -> bool | None:
        """Run training steps on a temporary engine to check whether they fit in memory.

        If the run has several ranks, this process acts as rank 0 of a fake process group, so it
        does not communicate with the other ranks. Must be called before :meth:`start` or after
        :meth:`abandon_process_group`.

        Args:
            build_meta_model: Function that builds the model on the meta device.
            config: Config of the run.
            take_steps: Function that takes training steps with the given engine.

        Returns:
            Whether the steps fit. None, without running steps, if the device does not support a
            memory limit.
        """
        limit = self._torch_device.build_memory_limit(self.device, self.world_size)
        if limit is None:
            return None
        from portable.engines.memory_trial import run_memory_trial

        return run_memory_trial(build_meta_model, config, self._build_rank_info(0), limit, take_steps)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` means that the device or the host has run out of memory."""
        from portable.engines.memory_trial import is_out_of_memory

        return is_out_of_memory(error)

    def abandon_process_group(self) -> None:
        """Stop using the engine and the process groups, without closing their connections.

        Closing the connections would make collectives on the other ranks fail. References to the
        groups are therefore kept until the process exits. Also runs the engine's cleanup.
        Afterwards, :meth:`run_memory_trial` can be called.
        """
        self._engine = None
        self._detached_groups += torch_internals.detach_process_groups()
        self._at_stop.close()

    def seed_device_generator(self, value: int) -> None:
        """Seed the random number generators of the CPU and of this rank's device."""
        # Do not call torch.manual_seed, which also seeds all other device types and takes 0.2 ms.
        torch.default_generator.manual_seed(value)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(value)

    def copy_to_device(self, batch: Batch) -> Batch:
        """Copy a micro-batch to the device, asynchronously if its tensors are in pinned memory.

        On a CPU, returns ``batch`` itself. The copy of ``document_lengths`` keeps a reference to
        the original tensor, so that layers can read the lengths without a host-device sync.
        """
        if self.device.type == "cpu":
            return batch
        copied = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        if "document_lengths" in batch:  # recurrent layers read them on the host to process each document
            attach_host_copy(copied["document_lengths"], batch["document_lengths"])
        return copied

    @property
    def devices_per_rank(self) -> int:
        """Number of devices per rank. Always 1."""
        return 1

    def sum_host_numbers(self, count: float, *, stop: bool = False) -> Tensor:
        """Sum a number over all ranks, and share the ranks' stop requests in the same all-reduce.

        The all-reduce runs on the device and does not trigger a host-device sync. In each
        tensor-parallel group, only one rank contributes its number. In a single process, no
        collective is called and ``stop`` is ignored.

        Args:
            count: Number to add from this rank.
            stop: Whether this rank requests a stop. :meth:`is_stop_requested` returns whether any
                rank has requested one.

        Returns:
            The sum of the numbers as a device scalar, int64 if ``count`` is an int, otherwise
            float64.
        """
        # Fill the tensor on the device, because a copy from the host would trigger a sync.
        kind = torch.int64 if isinstance(count, int) else torch.float64
        count = count if self._contributes_to_sums else 0
        if self.world_size == 1:
            return torch.full((), count, dtype=kind, device=self.device)
        sums = torch.full((2,), count, dtype=kind, device=self.device)
        sums[1].fill_(int(stop))
        dist.all_reduce(sums)
        self._stop_requests.start_copy(sums[1])
        return sums[0]

    def is_stop_requested(self, requested_by_rank: bool) -> bool:
        """Return whether any rank requested a stop in the latest call of :meth:`sum_host_numbers`.

        The result is the same on all ranks. Waits for the all-reduce of that call.

        Args:
            requested_by_rank: Whether this rank requests a stop. If there is only one process, this
                value is returned. Otherwise it is ignored, because each rank has already passed its
                request to :meth:`sum_host_numbers`.
        """
        return requested_by_rank if self.world_size == 1 else self._stop_requests.wait_for_value() > 0

    def sum_tensor_over_ranks(self, value: Tensor) -> Tensor:
        """Sum a tensor over all ranks. In each tensor-parallel group, only one rank contributes.

        Returns:
            A new tensor, or ``value`` itself in a single process.
        """
        if self.world_size > 1:
            value = value.clone() if self._contributes_to_sums else torch.zeros_like(value)
            dist.all_reduce(value)
        return value

    def read_to_host(self, values: Sequence[Tensor]) -> list[float]:
        """Copy device tensors to the host with a single sync, and return a flat list of values.

        ``values`` must not be empty. All values are converted to float64.
        """
        numbers: list[float] = torch.cat([value.detach().double().reshape(-1) for value in values]).tolist()
        return numbers

    def reduce_any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank. A host collective that must be called on all ranks."""
        return reduce_any(flag)

    def gather_text(self, text: str) -> list[str]:
        """Gather ``text`` from all ranks, in rank order. Host collective that all ranks must call."""
        return gather_text(text)

    def barrier(self) -> None:
        """Block the host until all ranks have called this method. Does not wait for device work."""
        self.reduce_any(False)  # on the host, because dist.barrier would also wait for the GPU

    def measure_memory(self) -> MemoryUsage:
        """Return the current and peak memory usage of this rank's device, in bytes."""
        return self._torch_device.measure_memory(self.device)

    def get_shape_multiple(self, precision: str) -> int | None:
        """Return a number that matrix dimensions should be divisible by for full speed.

        None if the device handles all matrix sizes equally well.

        Args:
            precision: Value of ``precision`` in the config.
        """
        return self._torch_device.get_shape_multiple(self.device, precision)

    def get_peak_flops(self, precision: str) -> float | None:
        """Return the peak FLOP/s of this rank's device in the given precision. None if unknown.

        Args:
            precision: Value of ``precision`` in the config.
        """
        return self._torch_device.get_peak_flops(self.device, precision)

    def get_metrics(self) -> dict[str, float]:
        """Return the additional metrics of the engine, keyed by name. Empty before :meth:`build_engine`."""
        return {} if self._engine is None else self._engine.get_metrics()


class AsyncHostCopy:
    """Asynchronous copy of a device scalar to the host, which overlaps with other device work."""

    def __init__(self) -> None:
        self._copy = torch.zeros(())
        self._copy_event: torch.Event | None = None

    def start_copy(self, value: Tensor) -> None:
        """Start to copy ``value`` to the host, on the current stream of its device.

        Does not wait for the copy. If the device does not support events, :meth:`wait_for_value`
        makes the copy.
        """
        if value.device.type not in _DEVICES_WITH_EVENTS:
            self._copy = value  # `wait_for_value` copies it, without waiting for later work
            return
        if self._copy.dtype != value.dtype:
            # Use pinned memory, because otherwise the copy would not overlap with other work.
            self._copy = torch.zeros((), dtype=value.dtype, pin_memory=True)
        self._copy.copy_(value, non_blocking=True)
        self._copy_event = torch.Event(value.device)
        self._copy_event.record()

    def wait_for_value(self) -> float:
        """Wait for the copy that :meth:`start_copy` started last, and return the copied value.

        If the device supports events, does not wait for device work that was enqueued after the
        copy was started. For other devices, this method makes the copy, so it may wait for all work
        that was enqueued before the call.
        """
        if self._copy_event is not None:
            self._copy_event.synchronize()
        return float(self._copy)


def _set_fp32_matmul_precision(precision: str, tf32_convolutions: bool) -> None:
    """Set the precision of fp32 matrix products, and whether cuDNN may use TF32 in convolutions.

    Args:
        precision: Argument of ``torch.set_float32_matmul_precision``.
        tf32_convolutions: Whether cuDNN may use TF32.
    """
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32_convolutions


def _build_rendezvous_error(error: Exception) -> UserError | RunError:
    """Build the error to raise if this rank cannot join the process group.

    The message is for ranks that were started by an external launcher. It names ``MASTER_ADDR`` and
    ``MASTER_PORT``.

    Args:
        error: Exception of ``init_process_group`` or of the rendezvous.

    Returns:
        A UserError if the port is in use, otherwise a RunError.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if "EADDRINUSE" in str(error):
        return UserError(
            f"MASTER_PORT={port}: another program uses this port on {address}; set MASTER_PORT to a free "
            "port on all nodes (torchrun: --master-port)"
        )
    reason = to_one_line(str(error).splitlines()[0])
    return RunError(
        f"MASTER_ADDR={address}, MASTER_PORT={port}: the ranks could not connect to this address "
        f"({reason}); set MASTER_ADDR to the address of the node of rank 0, and start all ranks"
    )
