"""The slices of TPU chips that libtpu compiles for: their names, their devices, and a chip's memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.errors import UserError
from portable.tpu.libtpu_flags import OURS, VARIABLE, add_missing_flags

if TYPE_CHECKING:
    from portable.tpu.compile.libtpu import Topology, Value

GIB = 2**30
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


@dataclass(frozen=True)
class Chips:
    """What slices of one generation have in common. The runtime makes one device of each chip."""

    slices: tuple[str, ...]
    """Those that are let, ascending: https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm"""
    hbm: int
    """Bytes that a program may fill, by the refusals of libtpu 0.0.21. A newer libtpu tells it."""
    options: tuple[tuple[str, Value], ...] = ()
    flags: tuple[str, ...] = ()
    """What torch_xla adds to LIBTPU_INIT_ARGS for this generation."""

    @property
    def axes(self) -> int:
        return self.slices[0].count("x") + 1


_ASYNC = ("xla_enable_async_all_gather=true", "xla_enable_async_collective_permute=true")

GENERATIONS: dict[str, Chips] = {
    # torch_xla makes one device of a v4 chip's two cores by TPU_MEGACORE.
    "v4": Chips(_CUBES, int(31.75 * GIB), (("chip_config_name", "megacore_dense"),)),
    "v5e": Chips(_FLAT, int(15.75 * GIB), flags=_ASYNC),
    "v5p": Chips((*_CUBES, "16x16x16", "16x16x24"), int(95.74 * GIB), flags=_ASYNC),
    "v6e": Chips(_FLAT, int(31.25 * GIB)),
}
# torch_xla sets these in every process that drives TPUs; `tests/tpu/test_compile.py` compares.
_FLAGS = (
    "xla_tpu_use_enhanced_launch_barrier=false",
    "xla_latency_hiding_scheduler_rerun=1",
    "xla_tpu_prefer_async_allgather_to_allreduce=true",
    "xla_tpu_enable_flash_attention=false",
)


@dataclass(frozen=True)
class TpuSlice:
    """One slice: ``v5e`` with ``4x4`` chips."""

    generation: str
    chips: str

    @property
    def name(self) -> str:
        """libtpu's name for it."""
        return f"{self.generation}:{self.chips}"

    @property
    def devices(self) -> int:
        return math.prod(_parse_sides(self.chips))

    @property
    def options(self) -> dict[str, Value]:
        """What libtpu must be told besides the name."""
        options = dict(GENERATIONS[self.generation].options)
        sides = [*_parse_sides(self.chips), 1, 1][:3]
        if math.prod(sides) < 4:  # libtpu assumes hosts of 2x2 chips
            options["chips_per_host_bounds"] = sides
        return options

    def get_hbm_bytes(self, topology: Topology) -> int:
        """Bytes of a device's memory that a program may fill."""
        limit = topology.read_attributes(topology.device_ids[0]).get("device_memory_bytes_limit")
        return limit if isinstance(limit, int) else GENERATIONS[self.generation].hbm

    def build_environment(self, base: dict[str, str]) -> dict[str, str]:
        """The variables with which libtpu compiles as in a run under torch_xla, and asks no metadata server.

        Args:
            base: the caller's variables; flags in LIBTPU_INIT_ARGS stay.
        """
        flags = (*OURS, *_FLAGS, *GENERATIONS[self.generation].flags)
        settings = {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it opens no chip, and so needs no lock
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        return {**base, **settings, VARIABLE: add_missing_flags(base.get(VARIABLE, ""), flags)}


def find_slice(device: str | None, devices: int, topology: str | None) -> TpuSlice:
    """The slice of ``devices`` chips.

    Args:
        device: the generation, as ``--device`` has it; None if it was not named.
        devices: how many.
        topology: the chips along each axis, ``4x4``; None: the usual slice of that many.

    Raises:
        UserError: there is none.
    """
    if device is None or device not in GENERATIONS:
        raise UserError(f"--compile: needs --device {', '.join(GENERATIONS)}, not {device or 'none'}")
    generation = GENERATIONS[device]
    if topology is None:
        sizes = {math.prod(_parse_sides(chips)): chips for chips in generation.slices}
        if devices not in sizes:
            nearest = sorted(sorted(sizes, key=lambda size: abs(size - devices))[:2])
            raise UserError(
                f"--devices: no slice of {device} has {devices} chips; the nearest have "
                f"{' and '.join(map(str, nearest))}"
            )
        return TpuSlice(device, sizes[devices])
    axes = "x".join("ABC"[: generation.axes])
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})" + f"{{{generation.axes - 1}}}", topology):
        raise UserError(
            f"--topology: {topology!r} does not name the chips of a {device} slice as {axes}; "
            f"known are {', '.join(generation.slices)}"
        )
    tpu_slice = TpuSlice(device, topology)
    if tpu_slice.devices != devices:
        raise UserError(f"--topology: {topology} has {tpu_slice.devices} chips, but --devices is {devices}")
    return tpu_slice


def _parse_sides(chips: str) -> list[int]:
    return [int(side) for side in chips.split("x")]
