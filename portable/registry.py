"""Registry of the backends. Each backend has a package description (:class:`BackendPackage`).

Commands use the descriptions before a backend object exists, for example to detect devices, count
the ranks to start, reject unsupported settings, or plan the memory. Every command can import all
descriptions on any machine, because their modules do not import accelerator libraries. To add a
backend, write its package and add an entry to :data:`BACKENDS`.
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
    """Module and variable from which a backend's :class:`BackendPackage` object is imported."""

    module: str
    attribute: str
    """Name of the variable in ``module``."""


BACKENDS: dict[str, RecordLocation] = {
    "cpu": RecordLocation("portable.engines.package", "CPU"),
    "cuda": RecordLocation("portable.gpu.package", "CUDA"),
    "xla": RecordLocation("portable.tpu.xla.package", "XLA"),
    "tpu": RecordLocation("portable.tpu.torchtpu.package", "TPU"),
}
"""Location of each backend's package description, keyed by the backend's name.

``backend: auto`` chooses the last entry whose devices this machine has.
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
    """Size of a launch: the number of ranks, and the number of devices per rank."""

    ranks: int
    devices_per_rank: int = 1

    @property
    def devices(self) -> int:
        """Total number of devices across all ranks."""
        return self.ranks * self.devices_per_rank


@dataclass(frozen=True)
class CompileTarget:
    """Devices for which the graphs of a run are compiled, and options of the compilation.

    Attributes:
        device: Name of the device in :meth:`BackendPackage.list_devices`, or None if only its
            memory is known.
        num_devices: Number of devices.
        topology: Topology of the devices, such as ``4x4``. None for the usual topology.
        min_listed_elements: Minimum number of elements of a large value. The report lists every
            operation result with at least this many elements. 0 to list none.
        stops_after_memory_report: Whether to stop before code generation, which takes most of the
            time.
    """

    device: str | None
    num_devices: int
    topology: str | None
    min_listed_elements: int
    stops_after_memory_report: bool


class BackendPackage(Protocol):
    """Description of a backend, used before its :class:`portable.backend.Backend` exists.

    For example, commands use it to detect devices and to plan the memory. Each backend package
    defines one object with this interface.
    """

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
        """Return whether this machine has devices of this backend.

        The setting ``backend: auto`` only chooses a backend for which this method returns True.
        """

    def count_local_ranks(self) -> int:
        """Return the default number of ranks to start on this machine.

        Most backends start one rank per device. The CPU backend starts a single rank, and so does XLA,
        because one rank drives all devices of a host.
        """

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError if this machine cannot run ``ranks`` ranks, for example if devices are missing."""

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        """Return the environment variables to set before ranks are started on this machine.

        Args:
            ranks: Number of ranks on this machine.

        Returns:
            The values, keyed by the name of the variable.
        """

    def get_world(self, ranks: int) -> World:
        """Return the size of the launch: its number of ranks, and its number of devices per rank.

        Args:
            ranks: Number of ranks that this process will start. Pass 1 if this process is itself a
                rank. In this case, the size of the launch is read from the environment or the
                runtime.
        """

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return the precision to use for ``precision: auto``.

        Args:
            in_rank: Whether this process is a rank.

        Returns:
            The precision. None if it depends on the device and this process is not a rank, because only
            ranks may open the device.
        """

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        """Yield a problem for each setting that the backend and its engines do not support.

        Called by :func:`portable.checks.check_config`.

        Args:
            config: Config of the run.
            late: Whether all defaults of the config have been resolved. If so, also check the settings that
                can only be checked in a resolved config.
        """

    def adopt_engine_file(self, config: RunConfig, world: World) -> RunConfig:
        """Replace defaults with the values from the engine's own config file, such as a DeepSpeed JSON.

        Args:
            config: Config of the run.
            world: Numbers of ranks and devices of the launch.

        Returns:
            The updated config. ``config`` itself if it does not name an engine file.

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
        """Return one-line notes for the user about settings with unexpected effects on this backend."""

    def iter_memory_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        """Yield changes to ``config`` that reduce device memory, cheapest first.

        Args:
            config: Config of the run.
            ranks: Number of ranks of the launch.

        Yields:
            A setting with its new value, such as ``memory.activation_checkpointing full``.
        """

    def get_host_memory_advice(self, config: RunConfig) -> str:
        """Return one sentence that names the settings to change if the host runs out of memory."""

    def load_footprint(self) -> FootprintModule:
        """Import and return the module that estimates the memory of a run for the planner.

        The import does not load an accelerator library.
        """

    def list_devices(self) -> tuple[Device, ...]:
        """Return this backend's device types that ``portable-plan --device`` accepts."""

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        """Compile every graph of a run for the target devices, which this machine need not have.

        Args:
            config: Config of the run, in which ``portable-plan`` has resolved ``auto`` settings.
            target: Devices to compile for, and options of the compilation.

        Returns:
            The compiler's statistics about the graphs, and problems such as too little memory.

        Raises:
            UserError: If the compiler or the topology is not available, or if a graph does not
                compile.
        """

    def create_backend(self) -> Backend:
        """Create the backend of this process. Reads the rank and the world size from the environment."""


def load_backend_package(name: str) -> BackendPackage:
    """Import the module that defines a backend's package description, and return the description.

    Args:
        name: Name of the backend in :data:`BACKENDS`.

    Raises:
        UserError: If the package of the backend is not installed.
    """
    module, attribute = BACKENDS[name]
    try:
        package: BackendPackage = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
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
        if not f"{package}.".startswith(f"{error.name}."):
            raise
        others = ", ".join(name for name, engine in ENGINE_PACKAGES.items() if engine != package)
        raise UserError(f"strategy: {strategy} is not part of this version; use one of {others}") from error


def resolve_backend_name(name: str) -> str:
    """Resolve ``auto`` to the last backend in :data:`BACKENDS` that is available on this machine.

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
        UserError: If a library that the backend needs is not installed, or if this machine has no
            device for this rank.
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
