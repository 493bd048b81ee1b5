"""The backend on torch.distributed: one rank per GPU with NCCL, or CPU ranks with gloo."""

from __future__ import annotations

import datetime
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gpu import device_specs as devices
from gpu import memory_trial
from gpu.common import torch_private
from gpu.common.machine import Machine, transport
from gpu.strategies import engine_module
from portable.backend import Diagnostics
from portable.errors import RunError, UserError, one_line, require
from portable.ranks.collectives import any_rank, gather_text
from portable.ranks.process_memory import host_memory as memory_of_this_process
from portable.terminal import native_stdout_closed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from gpu.common.machine import MeasuredEngine
    from portable.backend import Batch, Engine
    from portable.config import RunConfig

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
# NCCL's flight recorder, on unless the user sets it. Older and newer torch name it differently.
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDED_COLLECTIVES = "2000"
_RECORDED_ALLOCATIONS = 200_000  # a few steps of a large model


class TorchBackend:
    """CPU or CUDA ranks in one torch.distributed process group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.one_program = False
        self._engine: MeasuredEngine | None = None
        self._at_stop = ExitStack()
        self._left_groups: list[Any] = []
        self._products_before: tuple[str, bool] | None = None
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.diagnostics = Diagnostics()
        if name == "cuda":
            require(torch.cuda.is_available(), devices.NO_GPU)
            self.device = torch.device("cuda", devices.index(self.local_rank, torch.cuda.device_count()))
            self.diagnostics = CudaDiagnostics(self.device, self.rank, self.world_size)
        else:
            self.device = torch.device("cpu")
            if self.local_world_size > 1:
                torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.local_world_size))

    def start(self) -> None:
        if self.name == "cuda":
            torch.cuda.set_device(self.device)
            for variable in _FLIGHT_RECORDER:
                os.environ.setdefault(variable, _RECORDED_COLLECTIVES)
        if self.world_size > 1:
            try:
                with native_stdout_closed():
                    dist.init_process_group(transport(self.device), timeout=COLLECTIVE_TIMEOUT)
            except dist.DistNetworkError as error:
                raise _not_met(error) from error

    def stop(self) -> None:
        if self._products_before is not None:
            _set_fp32_products(*self._products_before)
            self._products_before = None
        self._engine = None
        self._at_stop.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def prepare(self, model: nn.Module, config: RunConfig) -> Engine:
        if self._products_before is None:
            self._products_before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        tf32 = config.precision == "tf32"
        _set_fp32_products("high" if tf32 else "highest", tf32)
        self._engine = engine_module(config.strategy).prepare(
            model, config, self._machine(self.rank), self._at_stop
        )
        return self._engine

    def _machine(self, rank: int) -> Machine:
        return Machine(self.device, rank, self.world_size, self.local_world_size)

    def fits(
        self, build: Callable[[], nn.Module], config: RunConfig, steps: Callable[[Engine], None]
    ) -> bool | None:
        if not memory_trial.can_tell(self.device):
            return None
        return memory_trial.fits(build, config, self._machine(0), steps)

    def ran_out_of_memory(self, error: BaseException) -> bool:
        return memory_trial.ran_out_of_memory(error)

    def leave(self) -> None:
        self._engine = None
        self._left_groups += torch_private.detach_process_groups()
        self._at_stop.close()

    def seed(self, value: int) -> None:
        # torch.manual_seed also visits all other device types, which costs 0.2 ms per call.
        torch.default_generator.manual_seed(value)
        if self.name == "cuda":
            torch.cuda.manual_seed(value)

    def place(self, batch: Batch) -> Batch:
        if self.name == "cpu":
            return batch
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    @property
    def devices_per_rank(self) -> int:
        return 1

    def total(self, count: float) -> Tensor:
        # Filled on the device: a copy from the host would sync.
        kind = torch.int64 if isinstance(count, int) else torch.float64
        value = torch.full((), count, dtype=kind, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def sum(self, value: Tensor) -> Tensor:
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def read(self, values: Sequence[Tensor]) -> list[float]:
        numbers: list[float] = torch.cat([value.detach().double().reshape(-1) for value in values]).tolist()
        return numbers

    def any(self, flag: bool) -> bool:
        return any_rank(flag)

    def gather(self, text: str) -> list[str]:
        return gather_text(text)

    def barrier(self) -> None:
        self.any(False)  # over the host; dist.barrier would also wait for the GPU

    def memory(self) -> tuple[int, int]:
        if self.name == "cuda":
            return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        return memory_of_this_process()

    def shape_multiple(self, precision: str) -> int | None:
        if self.name != "cuda":
            return None
        return devices.shape_multiple(torch.cuda.get_device_capability(self.device), precision)

    def peak_flops(self, precision: str) -> float | None:
        if self.name != "cuda":
            return None
        return devices.peak_flops(torch.cuda.get_device_name(self.device), precision)

    def metrics(self) -> dict[str, float]:
        return {} if self._engine is None else self._engine.metrics()


def _set_fp32_products(precision: str, tf32_convolutions: bool) -> None:
    """Set how exact fp32 is. By default cuDNN's convolutions round to tf32, whatever matrix products do."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32_convolutions


def _not_met(error: dist.DistNetworkError) -> UserError | RunError:
    """Why the ranks of another launcher did not meet."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if "EADDRINUSE" in str(error):
        return UserError(
            f"MASTER_PORT={port}: another program uses this port of {address}; set a free one on all nodes "
            "(torchrun: --master-port)"
        )
    said = one_line(str(error).splitlines()[0])
    return RunError(
        f"MASTER_ADDR={address}, MASTER_PORT={port}: the ranks did not meet there ({said}); start all of "
        "them, with the address of the node of rank 0"
    )


class CudaDiagnostics(Diagnostics):
    """Memory history, driver counters and NCCL's flight recorder of one GPU."""

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        self._device = device
        self._rank = rank
        self._world_size = world_size

    def record_memory(self) -> None:
        torch_private.record_memory_history(_RECORDED_ALLOCATIONS)

    def dump_memory(self, path: Path) -> None:
        torch_private.dump_memory_snapshot(path)

    def dump_collectives(self, folder: Path) -> None:
        if self._world_size > 1:
            # torchfrtrace expects this name.
            (folder / f"nccl_trace_rank_{self._rank}").write_bytes(torch_private.dump_nccl_trace())

    def driver_memory(self) -> tuple[int, int] | None:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, total
