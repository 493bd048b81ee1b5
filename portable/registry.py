"""Registry of the backends, with a :class:`BackendPackage` record for each backend.

Commands use the record before a backend object exists, for example to find out whether this machine has the
devices, to count the ranks to start, to reject unsupported settings, or to plan the memory. The module of a
record does not import an accelerator library, so every command can use all records. To add a backend, write
its package and add an entry to :data:`BACKENDS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from portable.config.derived_defaults import ZERO_STRATEGIES
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.config.rules import SettingProblem
    from portable.planner.compiled_graph import CompiledRun
    from portable.planner.device import Device
    from portable.planner.memory_model import FootprintModule


class RecordLocation(NamedTuple):
    """Module and variable that contain the :class:`BackendPackage` record of a backend."""

    module: str
    attribute: str
    """Name of the variable in ``module``."""


BACKENDS: dict[str, RecordLocation] = {
    "cpu": RecordLocation("portable.engines.package", "CPU"),
    "cuda": RecordLocation("portable.gpu.package", "CUDA"),
    "xla": RecordLocation("portable.tpu.xla.package", "XLA"),
    "tpu": RecordLocation("portable.tpu.torchtpu.package", "TPU"),
}
"""Location of each backend's record, keyed by the backend's name.

``backend: auto`` chooses the last of the backends whose devices this machine has.
"""


FSDP_STRATEGIES = ("no_shard", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
"""Values of ``strategy`` that the engine for DDP and FSDP2 implements."""
ENGINE_PACKAGES = dict.fromkeys(FSDP_STRATEGIES, "portable.engines.fsdp") | dict.fromkeys(
    ZERO_STRATEGIES, "portable.gpu.zero"
)
"""Package of the engine that implements a ``strategy`` with torch.distributed, keyed by the strategy."""

DEFAULT_PLANNED_BACKEND = "cuda"
"""Backend that ``portable-plan`` assumes if neither the config nor ``--device`` determines it."""


@dataclass(frozen=True)
class World:
    """Number of ranks and devices of a launch."""

    ranks: int
    devices_per_rank: int = 1

    @property
    def devices(self) -> int:
        """Total number of devices of all ranks."""
        return self.ranks * self.devices_per_rank


@dataclass(frozen=True)
class CompileTarget:
    """Devices to compile the graphs of a run for, and options of the compilation.

    Attributes:
        device: Name of the device in :meth:`BackendPackage.list_devices`, or None if only its memory is
            known.
        num_devices: Number of devices.
        topology: Topology of the devices, such as ``4x4``. None if the usual topology is used.
        min_listed_elements: Size in elements from which on the report lists the results of operations as
            large values. 0 to list no values.
        stops_after_memory_report: Whether to stop before code generation, because it takes most of the time.
    """

    device: str | None
    num_devices: int
    topology: str | None
    min_listed_elements: int
    stops_after_memory_report: bool


class BackendPackage(Protocol):
    """Record of a backend: its properties before a :class:`portable.backend.Backend` exists."""

    name: str
    """Name of the backend in :data:`BACKENDS`."""
    extra: str | None
    """Extra of the pip package ``portable-trainer`` that installs the backend's requirements.

    None if the backend has no further requirements.
    """
    typical_device: str
    """Name of the device whose properties a plan uses if the user specifies only the memory of a device."""
    runs_cuda: bool
    """Whether models run with CUDA's kernels and autocast rules, which determine the activation memory."""
    runs_zero: bool
    """Whether DeepSpeed supports the backend."""

    def is_available(self) -> bool:
        """Return whether this machine has the devices, so that ``backend: auto`` may choose the backend."""

    def count_local_ranks(self) -> int:
        """Return the default number of ranks to start on this machine.

        Most backends start one rank per device. The default is 1 on a CPU, and also on XLA, because one rank
        drives all devices of a host.
        """

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError if ``ranks`` ranks cannot run on this machine, for example for lack of devices."""

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        """Return the environment variables to set before ranks are started on this machine.

        Args:
            ranks: Number of ranks on this machine.

        Returns:
            The values, keyed by the name of the variable.
        """

    def get_world(self, ranks: int) -> World:
        """Return the numbers of ranks and devices of the launch that this process starts or belongs to.

        Args:
            ranks: Number of ranks that this process starts. 1 if the process is a rank itself, because the
                number of ranks is then read from the environment or from the runtime.
        """

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return the precision for ``precision: auto``.

        Args:
            in_rank: Whether this process is a rank.

        Returns:
            The precision. None if it depends on the device and this process is not a rank, because only ranks
            may open the device.
        """

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        """Yield the settings that the backend and its engines do not support.

        See :func:`portable.checks.check_config`, which calls this method.

        Args:
            config: Config of the run.
            late: Whether all defaults of the config have been resolved. If so, also check the settings that
                can only be checked in a resolved config.
        """

    def adopt_engine_file(self, config: RunConfig, world: World) -> RunConfig:
        """Replace defaults by the values in the engine's own config file, such as a DeepSpeed JSON.

        Args:
            config: Config of the run.
            world: Numbers of ranks and devices of the launch.

        Returns:
            The config with the values. ``config`` itself if it does not name such a file.

        Raises:
            UserError: If the file contradicts the config.
        """

    def check_config(self, config: RunConfig, world: World) -> None:
        """Raise UserError if a setting does not work on this machine. Called before any rank starts.

        Args:
            config: Config of the run.
            world: Numbers of ranks and devices of the launch.
        """

    def build_notes(self, config: RunConfig) -> list[str]:
        """Return notes for the user about unexpected effects of settings on this backend, one line each."""

    def iter_memory_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        """Yield changes to ``config`` that reduce the device memory. Changes that cost little come first.

        Args:
            config: Config of the run.
            ranks: Number of ranks of the launch.

        Yields:
            A setting with its new value, such as ``memory.activation_checkpointing full``.
        """

    def get_host_memory_advice(self, config: RunConfig) -> str:
        """Return one sentence that names the settings to change if the memory of the host runs out."""

    def load_footprint(self) -> FootprintModule:
        """Import and return the module that computes the memory of a run for the planner.

        The import does not load an accelerator library.
        """

    def list_devices(self) -> tuple[Device, ...]:
        """Return the types of devices of this backend that ``portable-plan --device`` accepts."""

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        """Compile every graph of a run with the device's compiler. This machine does not need the device.

        Args:
            config: Config of the run, resolved as for a plan.
            target: Devices to compile for, and options of the compilation.

        Returns:
            The statistics of the graphs from the compiler, including problems such as too little memory.

        Raises:
            UserError: If the compiler or the topology is not available, or if a graph does not compile.
        """

    def create_backend(self) -> Backend:
        """Create the backend of this process. Reads the rank and the world size from the environment."""


def load_backend_package(name: str) -> BackendPackage:
    """Import the record of a backend.

    Args:
        name: Name of the backend in :data:`BACKENDS`.

    Raises:
        UserError: If the package of the backend is not installed.
    """
    module, attribute = BACKENDS[name]
    try:
        package: BackendPackage = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise
        others = ", ".join(sorted(other for other, location in BACKENDS.items() if location.module != module))
        raise UserError(f"backend: {name} is not part of this version; use one of {others}") from error
    return package


def import_engine_module(strategy: str, module_name: str) -> Any:
    """Import a module from the package of the engine that implements a strategy.

    Args:
        strategy: Key of :data:`ENGINE_PACKAGES`.
        module_name: Name of a module in the engine's package, such as ``engine``.

    Raises:
        UserError: If the package of the engine is not installed.
    """
    package = ENGINE_PACKAGES[strategy]
    try:
        return importlib.import_module(f"{package}.{module_name}")
    except ModuleNotFoundError as error:
        if error.name not in (package, package.partition(".")[0]):
            raise
        others = ", ".join(name for name, engine in ENGINE_PACKAGES.items() if engine != package)
        raise UserError(f"strategy: {strategy} is not part of this version; use one of {others}") from error


def resolve_backend_name(name: str) -> str:
    """Replace ``auto`` by the last backend in :data:`BACKENDS` whose devices this machine has.

    Other names are returned unchanged.
    """
    if name != "auto":
        return name
    return next(
        candidate for candidate in reversed(BACKENDS) if load_backend_package(candidate).is_available()
    )


def create_backend(name: str) -> Backend:
    """Create the backend of this process.

    Args:
        name: Name of the backend in :data:`BACKENDS`.

    Raises:
        UserError: If a library that the backend needs is not installed.
    """
    package = load_backend_package(name)
    try:
        return package.create_backend()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "portable":
            raise
        install = f"; install it with: pip install 'portable-trainer[{package.extra}]'"
        remedy = install if package.extra else ""
        raise UserError(f"backend: {name} needs the package {error.name}{remedy}") from error
