"""List of the backends, each with one record.

A record contains the facts that are needed before a backend exists: whether this machine has its devices, how
many ranks it starts, which settings it rejects, and the memory model for plans. The module of a record
imports no accelerator library, so every command can use all records. To add a backend, write its package and
add an entry to :data:`BACKENDS`.
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
    """Location of a backend's record."""

    module: str
    attribute: str
    """Name of the record in its module."""


BACKENDS: dict[str, RecordLocation] = {
    "cpu": RecordLocation("portable.engines.package", "CPU"),
    "cuda": RecordLocation("portable.gpu.package", "CUDA"),
    "xla": RecordLocation("portable.tpu.xla.package", "XLA"),
    "tpu": RecordLocation("portable.tpu.torchtpu.package", "TPU"),
}
"""Location of each backend's record, keyed by the backend's name. ``auto`` prefers later backends."""


FSDP_STRATEGIES = ("no_shard", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
"""Values of ``strategy`` that DDP and FSDP2 implement."""
ENGINE_PACKAGES = dict.fromkeys(FSDP_STRATEGIES, "portable.engines.fsdp") | dict.fromkeys(
    ZERO_STRATEGIES, "portable.gpu.zero"
)
"""Package of the engine that trains under each ``strategy`` on torch.distributed."""

DEFAULT_PLANNED_BACKEND = "cuda"
"""Backend that ``portable-plan`` assumes if neither the config nor ``--device`` determines it."""


@dataclass(frozen=True)
class World:
    """Ranks and devices of a launch."""

    ranks: int
    devices_per_rank: int = 1

    @property
    def devices(self) -> int:
        """Number of devices of all ranks."""
        return self.ranks * self.devices_per_rank


@dataclass(frozen=True)
class CompileTarget:
    """Devices to compile the graphs of a run for, and options of the compilation.

    Attributes:
        device: Name of the device in :meth:`BackendPackage.list_devices`, or None if only its memory is
            known.
        num_devices: Number of devices.
        topology: Topology of the devices, such as ``4x4``. None if the usual topology is used.
        min_listed_elements: Minimum number of elements of the values to list. 0 to list no values.
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
    """Extra of this distribution that installs the backend's requirements, or None if there are none."""
    typical_device: str
    """Name of the device that a plan assumes if only the memory is given."""
    runs_cuda: bool
    """Whether models run with CUDA kernels and CUDA's autocast rules. Activation memory depends on them."""
    runs_zero: bool
    """Whether DeepSpeed supports the backend."""

    def is_available(self) -> bool:
        """Return whether this machine has the devices, so that ``backend: auto`` may choose the backend."""

    def count_local_ranks(self) -> int:
        """Return the default number of ranks on this machine: one per device or per host, and 1 on a CPU."""

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError if this machine cannot start ``ranks`` ranks."""

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        """Return environment variables that all ranks of this machine need before they start.

        Args:
            ranks: Number of ranks on this machine.

        Returns:
            The values, keyed by variable.
        """

    def get_world(self, ranks: int) -> World:
        """Return the ranks and devices of the launch that this process starts or has joined.

        Args:
            ranks: Number of ranks that this process starts, or 1 if it is a rank itself.
        """

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return the precision for ``precision: auto``.

        Args:
            in_rank: Whether this process is a rank.

        Returns:
            The precision, or None if only a rank may open the device to choose it.
        """

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        """Yield the settings that the backend and its engines do not support.

        See :func:`portable.checks.check_config`.

        Args:
            config: Config of the run.
            late: Whether the config is resolved, including the values that depend on the model.
        """

    def adopt_engine_file(self, config: RunConfig, world: World) -> RunConfig:
        """Replace defaults by the values in a file of an engine, such as a DeepSpeed JSON.

        Args:
            config: Config of the run.
            world: Ranks and devices of the launch.

        Returns:
            The config with the values. Unchanged if it names no such file.

        Raises:
            UserError: If the file contradicts the config.
        """

    def check_config(self, config: RunConfig, world: World) -> None:
        """Raise UserError if a setting does not work on this machine. Called before any rank starts."""

    def build_notes(self, config: RunConfig) -> list[str]:
        """Build notes about unexpected effects of the config under this backend, one line each."""

    def iter_memory_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        """Yield settings that need less device memory than ``config``, the cheapest first.

        Args:
            config: Config of the run.
            ranks: Number of ranks of the launch.

        Yields:
            A setting with its value, such as ``memory.activation_checkpointing full``.
        """

    def get_host_memory_advice(self, config: RunConfig) -> str:
        """Return one sentence about the settings to change if host memory runs out."""

    def load_footprint(self) -> FootprintModule:
        """Import the module that computes the memory of a run for the planner.

        Imports no accelerator library.
        """

    def list_devices(self) -> tuple[Device, ...]:
        """List the devices of this backend that ``--device`` of a plan can name."""

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        """Compile every graph of a run with the device's compiler, on a machine without the device.

        Args:
            config: Config of the run, resolved as for a plan.
            target: Devices, and what to report.

        Returns:
            The report of the compiler.

        Raises:
            UserError: If the compiler or the topology is not available, or if a graph does not compile.
        """

    def create_backend(self) -> Backend:
        """Create the backend of this process. The rank and the world size are read from the environment."""


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
    """Import a module of the engine behind a strategy.

    Args:
        strategy: The strategy.
        module_name: Name of the module, such as ``engine``.

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
    """Replace ``auto`` by the last of :data:`BACKENDS` that is available. Returns other names unchanged."""
    if name != "auto":
        return name
    return next(
        candidate for candidate in reversed(BACKENDS) if load_backend_package(candidate).is_available()
    )


def create_backend(name: str) -> Backend:
    """Create the backend of this process.

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
