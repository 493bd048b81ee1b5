"""Backend on torch_xla. Each host runs one process, and SPMD presents all devices as one."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from portable.backend import Diagnostics, DriverMemory, MemoryUsage, measure_host_memory
from portable.errors import require
from portable.formatting import format_count
from portable.paths import get_default_cache_dir
from portable.ranks.collectives import gather_text, reduce_any, sum_over_ranks
from portable.terminal import print_status
from portable.tpu import device_specs as devices
from portable.tpu.xla import graphs, runtime
from portable.tpu.xla.dropout import use_positional_dropout
from portable.tpu.xla.engine import XlaEngine
from portable.tpu.xla.fixed_shapes import run_histc_on_device, use_fixed_shape_experts
from portable.tpu.xla.graphs import GraphRunner
from portable.tpu.xla.layout import MeshLayout
from portable.tpu.xla.runtime import torch_xla, xr
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from portable.backend import Engine
    from portable.batch import Batch
    from portable.config import RunConfig

HOST_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)  # one host may wait while another compiles


class XlaBackend:
    """Backend that uses all devices on all hosts. Implements :class:`portable.backend.Backend`.

    A rank is the process of one host. The constructor starts the XLA runtime in SPMD mode, and
    replaces ``aten::dropout`` and ``aten::histc`` for XLA tensors in this process.

    Args:
        name: Name of the backend.

    Raises:
        UserError: If a launcher has started several ranks, or if the runtime has no devices.
    """

    def __init__(self, name: str) -> None:
        require(
            "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1",
            "backend: xla runs one process per host and finds the other hosts itself; start portable-train "
            "on every host without a launcher",
        )
        self.name = name
        self.one_program = True
        runtime.start_xla_runtime()
        self.rank = int(xr.process_index())
        self.world_size = int(xr.process_count())
        self.device = torch.device("xla:0")
        self.diagnostics: Diagnostics = TpuDiagnostics()
        self._layout: MeshLayout  # set by prepare
        self._stop_requested = False
        run_histc_on_device()
        use_positional_dropout()

    @property
    def devices_per_rank(self) -> int:
        """Number of devices per rank. A host runs one rank, which controls all devices of the host."""
        return int(xr.addressable_runtime_device_count())

    def start(self) -> None:
        """Start the process group of the hosts, if there are several hosts.

        Without a TPU, rank 0 prints a note that the run uses virtual CPU devices.
        """
        if self.world_size > 1:
            # This import registers xla:// for collectives between hosts, which exchange flags, counts and
            # checkpoint paths.
            import torch_xla.distributed.xla_backend  # noqa: F401  (registers xla://)

            dist.init_process_group("gloo", init_method="xla://", timeout=HOST_COLLECTIVE_TIMEOUT)
        if self.rank == 0 and not runtime.is_on_tpu():
            devices = format_count(self.devices_per_rank, "virtual CPU device")
            print_status(
                f"xla: no TPU found; running on {devices}, which is only for tests (CPU_NUM_DEVICES "
                "sets the number)"
            )

    def stop(self) -> None:
        """Destroy the process group of the hosts."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def build_engine(self, model: nn.Module, config: RunConfig) -> Engine:
        """Place a model on the device mesh, and build its optimizer.

        This also enables the graph cache of ``xla.compilation_cache``, and replaces mixtures of
        experts in the model with an implementation that has fixed shapes. For the entire process,
        it sets the precision of fp32 matrix products to ``highest``. Pending operations of earlier
        runs are executed first.
        """
        # By default, a TPU multiplies fp32 tensors in one bf16 pass, even if a bf16 model casts to fp32
        # explicitly.
        xla.set_matmul_precision("highest")
        if (folder := _choose_compilation_cache(config.xla.compilation_cache)) is not None:
            runtime.enable_graph_cache(folder)
        self._layout = self._create_layout(config)
        # Execute pending operations of an earlier run in this process. Otherwise their results would be part
        # of the first graph, and only of this graph.
        self._layout.cut_graph(wait=True)
        use_fixed_shape_experts(model, self._layout.shard_along_tokens)
        return XlaEngine(model, config, self._layout, self._create_graph_runner())

    def _create_layout(self, config: RunConfig) -> MeshLayout:
        return MeshLayout(config, self.world_size * self.devices_per_rank)

    def _create_graph_runner(self) -> GraphRunner:
        return GraphRunner(self._print_warning)

    def _print_warning(self, line: str) -> None:
        if self.rank == 0:
            print_status(f"warning: {line}")

    def run_memory_trial(
        self,
        build_meta_model: Callable[[], nn.Module],
        config: RunConfig,
        take_steps: Callable[[Engine], None],
    ) -> bool | None:
        """Return None without running the trial, because XLA does not recover from out-of-memory errors."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` is an out-of-memory error from the runtime."""
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

    def abandon_process_group(self) -> None:
        """Do nothing.

        A process group is only abandoned before memory trials, and this backend does not run any.
        """

    def seed_device_generator(self, value: int) -> None:
        """Seed the random number generator of the devices."""
        xla.set_rng_seed(value, str(self.device))

    def copy_to_device(self, batch: Batch) -> Batch:
        """Copy this host's part of a micro-batch to its devices, and return the global micro-batch.

        Each returned tensor is one logical tensor over the devices of all hosts.
        """
        return {name: self._layout.place_batch_tensor(tensor) for name, tensor in batch.items()}

    def sum_host_numbers(self, count: float, *, stop: bool = False) -> Tensor:
        """Sum a number over the hosts, and replicate the sum to all devices.

        If there are several hosts, all of them must call this method. The same collective also
        exchanges their stop requests. After the call, :meth:`is_stop_requested` returns whether any
        host requested a stop. If there is a single host, ``stop`` is ignored.

        Args:
            count: Value from this host, such as its number of tokens. Hosts that share sequences
                must pass the same value. The sum includes this value only once.
            stop: Whether this host requests a stop.
        """
        if self.world_size > 1:
            # Sum over the hosts, because a sum on the devices could be read only after they have completed
            # the step.
            total, stops = sum_over_ranks([count, stop])
            self._stop_requested = stops > 0
            # Hosts that share a sequence have counted the same tokens, so count them only once.
            count = type(count)(total / max(1, self._layout.sequence // self.devices_per_rank))
        return self._layout.replicate(torch.tensor(count))

    def is_stop_requested(self, requested_by_rank: bool) -> bool:
        """Return whether any host has requested a stop.

        With several processes, the result is the answer of the latest :meth:`sum_host_numbers`
        call, in which the hosts exchange their requests.

        Args:
            requested_by_rank: Whether this process requests a stop. With a single process, this is
                the result. Otherwise, it is ignored.
        """
        return self._stop_requested if self.world_size > 1 else requested_by_rank

    def sum_tensor_over_ranks(self, value: Tensor) -> Tensor:
        """Return ``value`` unchanged, because SPMD has already summed it over all devices."""
        return value

    def read_to_host(self, values: Sequence[Tensor]) -> list[float]:
        """Execute pending operations, and return the values of all tensors as one flat list."""
        read = self._layout.read_to_cpu(values)
        return [float(number) for value in read for number in value.double().reshape(-1).tolist()]

    def reduce_any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any host."""
        return reduce_any(flag)

    def gather_text(self, text: str) -> list[str]:
        """Gather ``text`` from all hosts."""
        return gather_text(text)

    def barrier(self) -> None:
        """Block until all hosts have reached the barrier."""
        self.reduce_any(False)

    def measure_memory(self) -> MemoryUsage:
        """Return the current and peak memory of this host's first device in bytes.

        If the runtime does not report a peak, the current memory is also returned as the peak. With
        virtual devices, the result is the resident memory of the process.
        """
        if not runtime.is_on_tpu():
            return measure_host_memory()
        info = _read_device_memory_info()
        return MemoryUsage(info["bytes_used"], info.get("peak_bytes_used", info["bytes_used"]))

    def get_shape_multiple(self, precision: str) -> int | None:
        """Return None, because the compiler pads shapes according to undocumented rules."""
        return None

    def get_peak_flops(self, precision: str) -> float | None:
        """Return the peak FLOP/s per device, or None for virtual devices or an unknown peak."""
        if not runtime.is_on_tpu():
            return None
        return devices.get_peak_flops(devices.detect_accelerator_type(), precision)

    def get_metrics(self) -> dict[str, float]:
        """Return the number of compiled graphs, and the number of transfers from the devices."""
        return graphs.read_xla_counters()


class TpuDiagnostics(Diagnostics):
    """Memory counters of the TPU runtime. They are not available on virtual devices."""

    def query_driver_memory(self) -> DriverMemory | None:
        """Return the used and total memory of a device in bytes, or None for virtual devices."""
        if not runtime.is_on_tpu():
            return None
        info = _read_device_memory_info()
        return DriverMemory(info["bytes_used"], info["bytes_limit"])


def _choose_compilation_cache(setting: str) -> Path | None:
    if setting == "auto":
        return get_default_cache_dir() / "xla" if runtime.is_on_tpu() else None
    return None if setting == "none" else Path(setting)


def _read_device_memory_info() -> dict[str, int]:
    # On a pod, process 0 may not have device 0.
    info = torch_xla.core.xla_model.get_memory_info(str(xla.real_devices()[0]))
    return {name: int(count) for name, count in info.items()}
