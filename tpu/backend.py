"""The machine as torch_xla sees it: one process a host, all devices of the run as one under SPMD."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from portable.errors import require, unsupported
from portable.paths import default_cache_dir
from portable.ranks.collectives import any_rank, gather_text
from portable.ranks.process_memory import host_memory
from tpu import devices, graphs, runtime
from tpu.checks import unusable
from tpu.engine import XlaEngine
from tpu.graphs import Graphs
from tpu.layout import Layout
from tpu.runtime import torch_xla, xla, xr
from tpu.transformers_patches import let_models_be_traced, let_tokens_be_counted, use_fixed_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from portable.backend import Backend, Batch, Engine
    from portable.config import RunConfig

HOST_TIMEOUT = datetime.timedelta(minutes=30)  # a host may compile for long while another waits


def local_devices(name: str) -> int:
    """Ranks that this machine can hold: one process drives all devices of a host."""
    return 1


def create(name: str) -> Backend:
    """The backend of this process; the runtime finds the other hosts of a slice by itself."""
    return XlaBackend(name)


def memory_advice(config: RunConfig) -> str:
    """What host memory goes to beside a TPU: the loader's workers and, on a CPU, the run itself."""
    return "to take less, set data.num_workers or train.micro_batch_size lower"


class XlaBackend:
    """All devices of all hosts; this process is the one of its host."""

    def __init__(self, name: str) -> None:
        require(
            "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1",
            "backend: xla runs one process a host, which finds the others by itself; start portable-train "
            "on every host without a launcher",
        )
        self.name = name
        self.one_program = True
        runtime.start()
        self.rank = int(xr.process_index())
        self.world_size = int(xr.process_count())
        self.device = torch.device("xla:0")
        self._layout: Layout | None = None
        let_models_be_traced()
        let_tokens_be_counted()

    @property
    def devices_per_rank(self) -> int:
        return int(xr.addressable_runtime_device_count())

    def adopt(self, config: RunConfig, ranks: int) -> RunConfig:
        return config  # a DeepSpeed JSON lies idle here, so that one file serves all backends

    def check(self, config: RunConfig) -> None:
        unsupported(unusable(config))
        require(
            config.xla.compilation_cache in ("auto", "none") or runtime.on_tpu(),
            "xla.compilation_cache: graphs for virtual devices cannot be read back; set it to none",
        )
        Layout(config, self.world_size * self.devices_per_rank)

    def notes(self, config: RunConfig) -> list[str]:
        idle = config.deepspeed.config is not None
        return ["deepspeed.config has no effect on backend xla, where DeepSpeed does not run"] if idle else []

    def start(self) -> None:
        if self.world_size > 1:
            # For what hosts tell each other without the devices: flags, counts, where checkpoints lie.
            import torch_xla.distributed.xla_backend  # noqa: F401  (makes xla:// known)

            dist.init_process_group("gloo", init_method="xla://", timeout=HOST_TIMEOUT)
        if self.rank == 0 and not runtime.on_tpu():
            print(
                f"xla: no TPU here; running on {self.devices_per_rank} virtual devices of the CPU "
                "(CPU_NUM_DEVICES sets their number), for trying things out",
                file=sys.stderr,
            )

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def resolve_precision(self, precision: str) -> str:
        if precision != "auto":
            return precision
        return "bf16" if runtime.on_tpu() else "fp32"

    def prepare(self, model: nn.Module, config: RunConfig) -> Engine:
        # A TPU would otherwise multiply fp32 in one pass of bf16, also where a bf16 model asks for fp32.
        xla._xla_set_mat_mul_precision("highest")
        if (folder := _compilation_cache(config.xla.compilation_cache)) is not None:
            runtime.keep_graphs(folder)
        use_fixed_shapes(model)
        self._layout = Layout(config, self.world_size * self.devices_per_rank)
        return XlaEngine(model, config, self._layout, Graphs(self._warn))

    def _warn(self, line: str) -> None:
        if self.rank == 0:
            print(f"warning: {line}", file=sys.stderr)

    def fits(
        self, build: Callable[[], nn.Module], config: RunConfig, steps: Callable[[Engine], None]
    ) -> bool | None:
        return None

    def ran_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

    def leave(self) -> None:
        """Nothing: what fits cannot be tried here, so that nothing starts after it."""

    def record_memory(self) -> None:
        """Nothing: :meth:`check` has refused it."""

    def dump_memory(self, path: Path) -> None:
        """Nothing: :meth:`check` has refused it."""

    def dump_collectives(self, folder: Path) -> None:
        """Nothing: they are operations of a compiled program."""

    def seed(self, value: int) -> None:
        xla._xla_set_rng_seed(value, str(self.device))

    def place(self, batch: Batch) -> Batch:
        assert self._layout is not None  # a model was prepared
        return {name: self._layout.place_batch(tensor) for name, tensor in batch.items()}

    def total(self, count: int) -> Tensor:
        if self.world_size > 1:
            summed = torch.tensor(count)
            dist.all_reduce(summed)
            count = int(summed)
        assert self._layout is not None  # a model was prepared
        return self._layout.whole(torch.tensor(count))

    def sum(self, value: Tensor) -> Tensor:
        return value  # it is the sum over all devices of all hosts already

    def read(self, values: Sequence[Tensor]) -> list[float]:
        return [float(value) for value in xla._xla_get_cpu_tensors(list(values))]

    def any(self, flag: bool) -> bool:
        return any_rank(flag)

    def gather(self, text: str) -> list[str]:
        return gather_text(text)

    def barrier(self) -> None:
        self.any(False)

    def memory(self) -> tuple[int, int]:
        if not runtime.on_tpu():
            return host_memory()
        info = _memory_info()
        return info["bytes_used"], info.get("peak_bytes_used", info["bytes_used"])

    def driver_memory(self) -> tuple[int, int] | None:
        if not runtime.on_tpu():
            return None
        info = _memory_info()
        return info["bytes_used"], info["bytes_limit"]

    def shape_multiple(self, precision: str) -> int | None:
        return None  # the compiler pads, and which sizes it likes is not written down

    def peak_flops(self, precision: str) -> float | None:
        if not runtime.on_tpu():
            return None
        kind = devices.accelerator_type()
        return None if kind is None else devices.peak_flops(kind, precision)

    def figures(self) -> dict[str, float]:
        return graphs.counted()


def _compilation_cache(setting: str) -> Path | None:
    if setting == "auto":
        return default_cache_dir() / "xla" if runtime.on_tpu() else None
    return None if setting == "none" else Path(setting)


def _memory_info() -> dict[str, int]:
    # A device of this host: on a pod, the first process need not have the first device.
    info = torch_xla.core.xla_model.get_memory_info(str(xla._xla_real_devices()[0]))
    return {name: int(count) for name, count in info.items()}
