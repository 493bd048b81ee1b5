"""The backends that there are, each as one record that its package offers.

A record answers what has to be known before a backend exists: whether this machine has its devices, how many
ranks it holds, which settings it refuses, what a plan needs. A record's module imports no accelerator
library, so that every command may ask every record. To add a backend, write its package and add one entry to
:data:`BACKENDS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from portable.config.derived_defaults import ZERO
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.config.rules import SettingProblem
    from portable.planner.compiled_graph import Compiled
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


FSDP = ("no_shard", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")
ENGINES = dict.fromkeys(FSDP, "portable.engines.fsdp") | dict.fromkeys(ZERO, "portable.gpu.zero")
"""The package of the engine on torch.distributed that trains under each ``strategy``."""

PLANNED_FOR_AUTO = "cuda"
"""Which backend ``portable-plan`` assumes where neither the config nor ``--device`` says."""


@dataclass(frozen=True)
class World:
    """The ranks and devices of a launch."""

    ranks: int
    devices_per_rank: int = 1

    @property
    def devices(self) -> int:
        return self.ranks * self.devices_per_rank


@dataclass(frozen=True)
class CompileTarget:
    """What a run's graphs are compiled for.

    Attributes:
        device: its name, as :meth:`BackendPackage.list_devices` has it; None if only its memory is known.
        devices: how many.
        topology: how they are connected, such as ``4x4``; None for the usual way.
        large: elements from which a value is listed; 0 for none.
        only_memory: end before code is made, which takes most of the time.
    """

    device: str | None
    devices: int
    topology: str | None
    large: int
    only_memory: bool


class BackendPackage(Protocol):
    """What a backend's package says before there is a :class:`portable.backend.Backend`."""

    name: str
    extra: str | None
    """The extra of this distribution that installs what the backend needs; None: nothing more is needed."""
    typical_device: str
    """The device that a plan assumes where only the memory is given."""
    runs_cuda: bool
    """Whether models run with CUDA's kernels and autocast rules, which activations depend on."""
    runs_zero: bool
    """Whether DeepSpeed runs on it."""

    def is_here(self) -> bool:
        """Whether this machine has the devices, so that ``backend: auto`` may choose them."""

    def count_local_ranks(self) -> int:
        """The ranks that this machine holds: one a device, or one a host; 1 on CPU."""

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError where this machine cannot start that many ranks."""

    def launch_environment(self, ranks: int) -> dict[str, str]:
        """Variables that ``ranks`` ranks on this machine must share, set before they start."""

    def get_world(self, ranks: int) -> World:
        """The launch that this process starts with ``ranks`` ranks, or has joined."""

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """What ``precision: auto`` means; None where only a rank may open the device to find out.

        Args:
            in_rank: whether this process is a rank.
        """

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        """Yield the settings that the backend and its engines do not support.

        See :func:`portable.checks.check`.
        """

    def adopt(self, config: RunConfig, world: World) -> RunConfig:
        """Replace defaults by what a file in an engine's own format (a DeepSpeed JSON) says.

        Raises:
            UserError: where that file contradicts the config.
        """

    def check(self, config: RunConfig, world: World) -> None:
        """Raise UserError for a setting that cannot run on this machine, before any rank starts."""

    def build_notes(self, config: RunConfig) -> list[str]:
        """What a user may not expect of this config on this backend, one line each."""

    def iter_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        """Settings that need less device memory than ``config``, the cheapest first."""

    def get_host_memory_advice(self, config: RunConfig) -> str:
        """Which settings to change where host memory runs out, in one sentence."""

    def load_footprint(self) -> FootprintModule:
        """What the planner asks; its module imports no accelerator library."""

    def list_devices(self) -> tuple[Device, ...]:
        """The devices of this backend that a plan knows by name."""

    def compile(self, config: RunConfig, target: CompileTarget) -> Compiled:
        """Compile every graph of a run with the device's own compiler, on a machine without the device.

        Args:
            config: of the run, resolved as for a plan.
            target: the devices, and what to report.

        Raises:
            UserError: there is no such compiler or slice, or a graph does not compile.
        """

    def create(self) -> Backend:
        """The backend of this process; rank and world size come from the environment."""


def load_backend_package(name: str) -> BackendPackage:
    """The record of a backend.

    Raises:
        UserError: if the backend's package is not installed.
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


def import_engine_part(strategy: str, part: str) -> Any:
    """Import a module of the engine behind a strategy.

    Args:
        strategy: The strategy.
        part: Name of the module, such as ``engine``.

    Raises:
        UserError: If the package of the engine is not installed.
    """
    package = ENGINES[strategy]
    try:
        return importlib.import_module(f"{package}.{part}")
    except ModuleNotFoundError as error:
        if error.name not in (package, package.partition(".")[0]):
            raise
        others = ", ".join(name for name, engine in ENGINES.items() if engine != package)
        raise UserError(f"strategy: {strategy} is not part of this version; use one of {others}") from error


def resolve_backend(name: str) -> str:
    """The backend that ``auto`` stands for on this machine; any other name comes back as it is."""
    if name != "auto":
        return name
    return next(candidate for candidate in reversed(BACKENDS) if load_backend_package(candidate).is_here())


def create_backend(name: str) -> Backend:
    """The backend of this process.

    Raises:
        UserError: if a library that it needs is not installed, with the command that installs it.
    """
    package = load_backend_package(name)
    try:
        return package.create()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "portable":
            raise
        install = f"; install it with: pip install 'portable-trainer[{package.extra}]'"
        remedy = install if package.extra else ""
        raise UserError(f"backend: {name} needs the package {error.name}{remedy}") from error
