"""Package descriptions of backends that use torch.distributed.

This module contains the base class of these descriptions, and the description of the CPU backend.

A package description (:class:`portable.registry.BackendPackage`) provides information about a
backend without creating it, for example to detect devices or to plan the memory. Descriptions are
used whenever a config is resolved, even by commands that need neither torch nor DeepSpeed. This
module therefore imports neither of them at module level.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Description of a backend that uses torch.distributed, for one device type.

    Each rank uses one device. Runs train with DDP or FSDP2, or with DeepSpeed ZeRO if ``runs_zero``
    is True. The engines access a device only through this class and ``torch.accelerator``. To add a
    device type, subclass this class and add an entry to :data:`portable.registry.BACKENDS`. See
    :class:`portable.registry.BackendPackage` for the methods.

    Attributes:
        name: Name of the backend.
        extra: Name of this project's pip extra that installs the dependencies of the backend. None
            if no extra is needed.
        typical_device: Name of the device that a memory plan assumes if only the memory size is
            given.
        runs_cuda: Whether models run with CUDA's kernels and autocast rules.
        runs_zero: Whether DeepSpeed supports the device.
        default_compile_backend: Default value of the setting ``compile_backend`` for this device.
    """

    name: str
    extra: str | None = None
    typical_device: str = "h100"
    runs_cuda: bool = False
    runs_zero: bool = True
    default_compile_backend: str = "inductor"

    def get_world(self, ranks: int) -> World:
        """Return the size of the launch: its number of ranks, each of which has one device.

        The number of ranks is the larger of ``ranks`` and ``WORLD_SIZE``, an environment variable
        that the launcher sets.

        Args:
            ranks: Number of ranks that this process starts, or 1 if it is itself a rank.
        """
        return World(max(ranks, int(os.environ.get("WORLD_SIZE", "1"))))

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        """Return an empty dict, because the launcher's variables are sufficient."""
        return {}

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        """Yield a problem for each setting that the device or the engine does not support.

        Args:
            config: Config of the run.
            late: Whether all defaults of the config have been resolved. If so, settings that can
                only be checked in a resolved config are checked as well. With a ZeRO strategy,
                these checks run the code of a custom optimizer.

        Raises:
            UserError: If the package of the strategy's engine is not installed.
        """
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
        """Apply the run's DeepSpeed JSON to all settings that the user has not set.

        The setting ``deepspeed.config`` is the path of this JSON.

        Returns:
            The updated config. It is ``config`` itself if the config has no DeepSpeed JSON, or if
            the device does not run ZeRO.

        Raises:
            UserError: If the JSON is invalid, or contradicts a setting that the user has set. Also if
                DeepSpeed, which is needed to read the JSON, is not available.
        """
        if config.deepspeed.config is None or not self.runs_zero:
            return config
        adopted: RunConfig = import_engine_module(ZERO_STRATEGIES[0], "engine").apply_deepspeed_json(
            config, self.name, world.ranks
        )
        return adopted

    def check_config(self, config: RunConfig, world: World) -> None:
        """Check that this machine and this number of ranks support the settings of a run.

        If the strategy is a ZeRO stage, C++ ops that DeepSpeed needs are compiled. This takes
        minutes once per machine.

        Raises:
            UserError: In the following cases:

                - The attention kernel needs a package that is not installed.
                - The compiler of ``torch.compile`` is not available, or the strategy does not
                  support ``compile_mode``.
                - DeepSpeed or one of its ops is not available, or does not support a setting.
                - The ranks cannot be divided into sharding groups or expert-parallel groups.
                - ``train.fused_backward`` is set, and a step has several micro-batches.
                - ``train.fused_backward`` is set, there are several ranks, and the strategy or the
                  optimizer does not support this combination.
        """
        from portable.engines.fsdp.checks import check_gradients_complete_in_one_pass
        from portable.engines.fsdp.footprint import compute_shard_group_size

        attention = config.model.attention
        if attention not in ("sdpa", "eager", "flex_attention"):
            flash_package = _FLASH_PACKAGES.get(attention)
            packages = "kernels" if flash_package is None else f"{flash_package} or kernels"
            require(
                _is_installed("kernels") or (flash_package is not None and _has_distribution(flash_package)),
                f"model.attention: {attention} needs the package {packages}; run: pip install kernels, or "
                "set model.attention to sdpa",
            )
        if config.compile:
            from portable.engines import compiling

            compiling.check_compile_settings(config, world.ranks, self.default_compile_backend)
        if config.strategy in ZERO_STRATEGIES:
            import_engine_module(config.strategy, "engine").check_deepspeed(config, self.name)
        check_gradients_complete_in_one_pass(config, world.ranks)
        # Without a launcher, this process starts all ranks on this node.
        compute_shard_group_size(config, world.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", world.ranks)))

    def build_notes(self, config: RunConfig) -> list[str]:
        """Return notes about the DeepSpeed JSON of a run, one line per note.

        Empty if ``deepspeed.config`` is unset. If the device does not run ZeRO, the JSON is not
        read, and the only note is that the JSON has no effect.

        Raises:
            UserError: If DeepSpeed, which is needed to read the JSON, is not available, or if the
                JSON is invalid.
        """
        if config.deepspeed.config is None:
            return []
        if not self.runs_zero:
            return [f"deepspeed.config: has no effect, because DeepSpeed does not run on backend {self.name}"]
        zero_notes: list[str] = import_engine_module(ZERO_STRATEGIES[0], "engine").build_deepspeed_notes(
            config, self.name
        )
        return zero_notes

    def iter_memory_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        """Yield settings that reduce device memory usage, such as ``strategy zero3``.

        The settings are roughly sorted by cost, such as lost speed or a changed result, with a low cost
        first. The costs are listed in docs/strategies.md.

        Args:
            config: Config of the run.
            ranks: Number of ranks of the launch.
        """
        from portable.engines.memory_advice import iter_device_memory_remedies

        is_supported = partial(_is_supported, config, ranks)
        return iter_device_memory_remedies(config, ranks, is_supported, has_host_copies=self.runs_cuda)

    def get_host_memory_advice(self, config: RunConfig) -> str:
        """Return advice for an error message: which settings to change to reduce host memory."""
        from portable.engines.memory_advice import format_host_memory_advice

        return format_host_memory_advice(
            config, has_device_memory=self.name != "cpu", runs_zero=self.runs_zero
        )

    def load_footprint(self) -> FootprintModule:
        """Import and return the module with which the planner estimates memory and communication.

        The module covers the engines of this backend. It does not import torch.
        """
        from portable.engines import footprint

        return footprint

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        """Raise UserError, because this backend cannot compile graphs without the device."""
        raise UserError(
            f"--compile: backend {self.name} has no compiler that works without the device; specify a TPU "
            "with --device"
        )

    def create_backend(self) -> Backend:
        """Create the backend of this process.

        Calls :meth:`open_device`, but does not join the process group. See
        :meth:`portable.backend.Backend.start`.
        """
        from portable.engines.backend import TorchBackend

        return TorchBackend(self)


def _is_supported(config: RunConfig, ranks: int, changes: dict[str, Any]) -> bool:
    """Return whether a config is valid after some settings are changed.

    The check includes whether ``train.fused_backward`` works with this number of ranks.

    Args:
        config: Config of the run.
        ranks: Number of ranks.
        changes: New values, keyed by setting.
    """
    from portable.checks import is_valid_with
    from portable.engines.fsdp.checks import check_gradients_complete_in_one_pass

    if not is_valid_with(config, changes):
        return False
    try:
        check_gradients_complete_in_one_pass(config.replaced(changes), ranks)
    except UserError:
        return False
    return True


_FLASH_PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Distribution that contains each attention kernel. If it is not installed, transformers downloads the kernel
from the Hub.
"""


class CpuPackage(TorchPackage):
    """Description of the backend ``cpu``, whose ranks run on the CPU and communicate through gloo."""

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
                f"--nproc: {ranks} ranks are too many for this machine (CPU cores: {cores}); use at most "
                f"{_RANKS_PER_CORE * cores} ranks"
            )

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return ``bf16`` if the CPU has instructions for it, otherwise ``fp32``."""
        return "bf16" if _has_bf16_instructions() else "fp32"

    def list_devices(self) -> tuple[Device, ...]:
        """Return an empty tuple, because the planner has no specifications of CPUs."""
        return ()

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        """Return the CPU device, and limit torch's number of threads to this rank's share of the cores."""
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
        """Return a context that lowers this process's memory limits, or None if there are none.

        See :func:`portable.engines.memory_trial.limit_host_memory`. The arguments are ignored.
        """
        from portable.engines import memory_trial

        return memory_trial.limit_host_memory() if memory_trial.has_host_memory_limit() else None


def _has_bf16_instructions() -> bool:
    """Return whether the CPU has instructions for bf16 matrix products (AVX512-BF16 or AMX).

    Without such instructions, bf16 is slower than fp32.
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
    except ValueError:  # raised if the package is imported but has no __spec__
        return False


def _has_distribution(name: str) -> bool:
    """Return whether a distribution is installed.

    A module name is not sufficient, because versions 2 and 4 of flash attention have the same module
    name.
    """
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


CPU = CpuPackage("cpu")
