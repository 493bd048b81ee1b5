"""Base class of the backend records for torch.distributed, and the record of backend ``cpu``.

A record (:class:`portable.registry.BackendPackage`) describes a backend. This module does not
import torch or DeepSpeed at module level, because records are read whenever a config is resolved,
even by commands that need neither package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
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
    """Backend record of a device type that runs DDP and FSDP2 on torch.distributed, one device per rank.

    The engines access a device only through this record and ``torch.accelerator``. To add a device,
    subclass this class and add the subclass to :data:`portable.registry.BACKENDS`. See
    :class:`portable.registry.BackendPackage` for the methods.

    Attributes:
        name: Name of the backend.
        extra: Extra of this distribution that installs the packages of the backend. None if no extra is
            needed.
        typical_device: Device that a memory plan assumes if only the memory size is given.
        runs_cuda: Whether models run with CUDA's kernels and autocast rules.
        runs_zero: Whether DeepSpeed supports the device.
        default_compile_backend: Default of the setting ``compile_backend`` on this device.
    """

    name: str
    extra: str | None = None
    typical_device: str = "h100"
    runs_cuda: bool = False
    runs_zero: bool = True
    default_compile_backend: str = "inductor"

    def get_world(self, ranks: int) -> World:
        """Return the world size of a run: ``ranks``, or ``WORLD_SIZE`` of the launcher if it is larger."""
        return World(max(ranks, int(os.environ.get("WORLD_SIZE", "1"))))

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        """Return an empty dict, because the launcher's variables are sufficient."""
        return {}

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        """Yield the settings that the device or the engine of ``config.strategy`` does not support."""
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
        """Replace default settings with the values in the DeepSpeed JSON ``deepspeed.config``.

        Returns:
            The updated config, or ``config`` itself if it has no DeepSpeed JSON or the device does not run
            ZeRO.
        """
        if config.deepspeed.config is None or not self.runs_zero:
            return config
        adopted: RunConfig = import_engine_module(ZERO_STRATEGIES[0], "engine").apply_deepspeed_json(
            config, self.name, world.ranks
        )
        return adopted

    def check_config(self, config: RunConfig, world: World) -> None:
        """Check on this machine that the packages and settings that a run needs are available.

        Raises:
            UserError: If the package of the attention kernel, the compiler, or DeepSpeed is not available, if
                the ranks cannot be divided into sharding groups, or if ``train.fused_backward`` is set and a
                step has several micro-batches.
        """
        from portable.engines.fsdp.checks import check_gradients_complete_in_one_pass
        from portable.engines.fsdp.sharding import compute_shard_group_size

        attention = config.model.attention
        if attention not in ("sdpa", "eager", "flex_attention"):
            flash_package = _FLASH_PACKAGES.get(attention)
            packages = (
                "kernels, which is not"
                if flash_package is None
                else f"{flash_package} or kernels, but neither is"
            )
            require(
                _is_installed("kernels") or (flash_package is not None and _has_distribution(flash_package)),
                f"model.attention: {attention} needs the package {packages} installed; run: pip install "
                "kernels, or set model.attention to sdpa",
            )
        if config.compile:
            from portable.engines import compiling

            compiling.check_compile_settings(config, world.ranks, self.default_compile_backend)
        if config.strategy in ZERO_STRATEGIES:
            import_engine_module(config.strategy, "engine").check_deepspeed(config, self.name)
        check_gradients_complete_in_one_pass(config, world.ranks)
        # If there is no launcher, this process starts all ranks on this node.
        compute_shard_group_size(config, world.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", world.ranks)))

    def build_notes(self, config: RunConfig) -> list[str]:
        """Return notes about the DeepSpeed JSON of a run, one line per note.

        Empty if ``deepspeed.config`` is unset.
        """
        if config.deepspeed.config is None:
            return []
        if not self.runs_zero:
            return [f"deepspeed.config has no effect: DeepSpeed does not run on backend {self.name}"]
        zero_notes: list[str] = import_engine_module(ZERO_STRATEGIES[0], "engine").build_deepspeed_notes(
            config, self.name
        )
        return zero_notes

    def iter_memory_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        """Yield settings that reduce device memory, such as ``strategy zero3``, the cheapest first."""
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
        """Return a sentence for an error message that lists settings that reduce host memory."""
        from portable.engines.memory_advice import format_host_memory_advice

        return format_host_memory_advice(config)

    def load_footprint(self) -> FootprintModule:
        """Import and return the module that computes the memory and traffic of the engines for the planner.

        The module does not import torch.
        """
        from portable.engines import footprint

        return footprint

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        """Raise UserError, because compiling for these devices requires the device itself."""
        raise UserError(
            f"--compile: backend {self.name} has no compiler that works without the device; specify a TPU "
            "with --device"
        )

    def create_backend(self) -> Backend:
        """Create the backend of this process."""
        from portable.engines.backend import TorchBackend

        return TorchBackend(self)


_FLASH_PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Distribution of each attention kernel. If it is missing, transformers downloads the kernel from the hub."""


class CpuPackage(TorchPackage):
    """Record of the backend ``cpu``: CPU ranks that communicate through gloo."""

    def is_available(self) -> bool:
        """Return whether the machine has a CPU, which is always True."""
        return True

    def count_local_ranks(self) -> int:
        """Return 1, the default number of ranks on a machine."""
        return 1

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError if there are more than four ranks per core."""
        cores = os.cpu_count() or 1
        if ranks > _RANKS_PER_CORE * cores:
            raise UserError(
                f"--nproc: {ranks} ranks on {cores} cores would only wait for each other; use at most "
                f"{_RANKS_PER_CORE * cores} ranks"
            )

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return ``bf16`` if the CPU has instructions for it, otherwise ``fp32``."""
        return "bf16" if _has_bf16_instructions() else "fp32"

    def list_devices(self) -> tuple[Device, ...]:
        """Return an empty tuple, because the planner has no data sheets of CPUs."""
        return ()

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        """Return the CPU device, and set torch's number of threads to this rank's share of the cores."""
        import torch

        if local_world_size > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
        return torch.device("cpu")

    def make_current(self, device: torch.device) -> None:
        """Do nothing, because there is only one CPU device."""

    def measure_memory(self, device: torch.device) -> MemoryUsage:
        """Return the current and peak resident memory of this process, in bytes."""
        from portable.backend import measure_host_memory

        return measure_host_memory()

    def build_memory_limit(
        self, device: torch.device, world_size: int
    ) -> AbstractContextManager[None] | None:
        """Return a context that limits host memory, or None if the process has no memory limit."""
        from portable.engines import memory_trial

        return memory_trial.limit_host_memory() if memory_trial.has_host_memory_limit() else None


def _has_bf16_instructions() -> bool:
    """Return whether the CPU has instructions for bf16 matrix products (AVX512-BF16 or AMX).

    Without these instructions, bf16 is slower than fp32.
    """
    import torch

    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # the package is imported and has no __spec__
        return False


def _has_distribution(name: str) -> bool:
    """Return whether a distribution is installed.

    The name of a module is not enough, because versions 2 and 4 of flash attention have the same module.
    """
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


CPU = CpuPackage("cpu")
