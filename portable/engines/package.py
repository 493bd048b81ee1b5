"""What the devices of torch.distributed have in common, and the record of backend ``cpu``.

A record (:class:`portable.registry.BackendPackage`) imports neither torch nor DeepSpeed at module level: the
checks read it whenever a config is resolved.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from portable.config.derived_defaults import ZERO_STRATEGIES
from portable.config.rules import uses_zero_strategy
from portable.engines.torch_device import TorchDevice
from portable.errors import UserError, require
from portable.registry import BackendPackage, World, import_engine_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from portable.backend import Backend, MemoryUsage
    from portable.config import RunConfig
    from portable.config.rules import SettingProblem
    from portable.planner.compiled_graph import CompiledRun
    from portable.planner.device import Device
    from portable.planner.memory_model import FootprintModule
    from portable.registry import CompileTarget

_RANKS_PER_CORE = 4


@dataclass(frozen=True)
class TorchPackage(TorchDevice, BackendPackage):
    """A kind of device that torch.distributed links, one a rank: DDP and FSDP2 run on it, and maybe ZeRO.

    The record is all that the engines know of a device besides what ``torch.accelerator`` says of any. To add
    a device, derive a class and add it to :data:`portable.registry.BACKENDS`.
    """

    name: str
    extra: str | None = None
    typical_device: str = "h100"
    runs_cuda: bool = False
    runs_zero: bool = True
    default_compile_backend: str = "inductor"
    """What the default of ``compile_backend`` means on it."""

    def get_world(self, ranks: int) -> World:
        return World(max(ranks, int(os.environ.get("WORLD_SIZE", "1"))))

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        return {}

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        from portable.checks.backends import check_cuda_only_settings, check_strategy_without_zero

        checks = import_engine_module(config.strategy, "checks")
        if not self.runs_zero:
            yield from check_strategy_without_zero(config)
        if uses_zero_strategy(config):
            yield from checks.find_problems(config, late=late, has_cuda=self.runs_cuda)
        if not self.runs_cuda:
            yield from check_cuda_only_settings(config, is_resolved=late)
        if late and not uses_zero_strategy(config):
            yield from checks.check_memory(config)
            yield from checks.check_fsdp(config)

    def adopt_engine_file(self, config: RunConfig, world: World) -> RunConfig:
        if config.deepspeed.config is None or not self.runs_zero:
            return config
        adopted: RunConfig = import_engine_module(ZERO_STRATEGIES[0], "engine").apply_deepspeed_json(
            config, self.name, world.ranks
        )
        return adopted

    def check_config(self, config: RunConfig, world: World) -> None:
        from portable.engines.fsdp.sharding import compute_shard_group_size

        attention = config.model.attention
        if attention not in ("sdpa", "eager", "flex_attention"):
            flash_package = _FLASH_PACKAGES.get(attention)
            require(
                _is_installed("kernels")
                or (flash_package is not None and _is_installed(flash_package.replace("-", "_"))),
                f"model.attention: {attention} needs the package "
                f"{f'{flash_package} or ' if flash_package else ''}kernels, which is not installed (pip "
                "install kernels); use sdpa",
            )
        if config.compile:
            from portable.engines import compiling

            compiling.check_compile_settings(config, world.ranks, self.default_compile_backend)
        if config.strategy in ZERO_STRATEGIES:
            import_engine_module(config.strategy, "engine").check_deepspeed(config, self.name)
        # The ranks that this process will start are all on this node.
        compute_shard_group_size(config, world.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", world.ranks)))

    def build_notes(self, config: RunConfig) -> list[str]:
        if config.deepspeed.config is None:
            return []
        if not self.runs_zero:
            return [f"deepspeed.config has no effect: DeepSpeed does not run on backend {self.name}"]
        zero_notes: list[str] = import_engine_module(ZERO_STRATEGIES[0], "engine").build_deepspeed_notes(
            config, self.name
        )
        return zero_notes

    def iter_memory_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        memory = config.memory
        sharded = "zero3" if config.strategy in ZERO_STRATEGIES else "full_shard"
        if memory.activation_checkpointing != "full":
            yield "memory.activation_checkpointing full"
        if memory.loss_chunk_tokens == 0:
            yield "memory.loss_chunk_tokens auto"
        if config.strategy != sharded and ranks > 1:
            yield f"strategy {sharded}"
        if memory.offload_optimizer == "none" and memory.offload_params == "none":
            strategy = " with full_shard" if config.strategy == "no_shard" else ""
            yield f"memory.offload_optimizer cpu{strategy}"
        if memory.offload_params == "none":
            yield "memory.offload_params cpu" + ("" if config.strategy == sharded else f" with {sharded}")

    def get_host_memory_advice(self, config: RunConfig) -> str:
        from portable.engines.memory_advice import format_host_memory_advice

        return format_host_memory_advice(config)

    def load_footprint(self) -> FootprintModule:
        from portable.engines import footprint

        return footprint

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        raise UserError(
            f"--compile: backend {self.name} has no compiler that works without its device; name a TPU with "
            "--device"
        )

    def create_backend(self) -> Backend:
        from portable.engines.backend import TorchBackend

        return TorchBackend(self)


_FLASH_PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-interface",
    "flash_attention_4": "flash-attn",
}
"""The packages of kernels; transformers takes the hub's kernel without them."""


class CpuPackage(TorchPackage):
    """CPU ranks with gloo."""

    def is_available(self) -> bool:
        return True

    def count_local_ranks(self) -> int:
        return 1

    def check_ranks(self, ranks: int) -> None:
        cores = os.cpu_count() or 1
        if ranks > _RANKS_PER_CORE * cores:
            raise UserError(
                f"--nproc: {ranks} ranks on {cores} cores would only wait for each other; "
                f"use at most {_RANKS_PER_CORE * cores}"
            )

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        return "bf16" if _has_bf16_instructions() else "fp32"

    def list_devices(self) -> tuple[Device, ...]:
        return ()

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        import torch

        if local_world_size > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
        return torch.device("cpu")

    def make_current(self, device: torch.device) -> None:
        pass

    def measure_memory(self, device: torch.device) -> MemoryUsage:
        from portable.backend import measure_host_memory

        return measure_host_memory()

    def build_memory_limit(
        self, device: torch.device, world_size: int
    ) -> AbstractContextManager[None] | None:
        from portable.engines import memory_trial

        return memory_trial.limit_host_memory() if memory_trial.has_host_memory_limit() else None


def _has_bf16_instructions() -> bool:
    """Whether the CPU has instructions for bf16 products (AVX512-BF16 or AMX); without them bf16 is slow."""
    import torch

    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # imported, and without a description of itself
        return False


CPU = CpuPackage("cpu")
