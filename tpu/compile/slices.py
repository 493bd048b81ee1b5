"""Define the TPU slices that libtpu compiles for: their names, devices, and memory per chip."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.errors import UserError
from portable.tpu.libtpu_flags import ADDED_LIBTPU_FLAGS, LIBTPU_FLAGS_VARIABLE, add_missing_libtpu_flags

if TYPE_CHECKING:
    from portable.tpu.compile.libtpu import OptionValue, TpuTopology

GIB = 2**30
_SQUARE_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE_SHAPES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


@dataclass(frozen=True)
class SliceFamily:
    """Slice shapes and compiler options of a TPU generation with one device per chip.

    Attributes:
        slice_shapes: Shapes that Google Cloud offers, in ascending order:
            https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm
        usable_hbm_bytes: Number of bytes of device memory that a program can use, taken from error
            messages of libtpu 0.0.21. Only used with older libtpu releases, which do not report the
            limit.
        topology_options: Options for libtpu's topology.
        libtpu_flags: Flags that torch_xla adds to LIBTPU_INIT_ARGS for this generation.
    """

    slice_shapes: tuple[str, ...]
    usable_hbm_bytes: int
    topology_options: tuple[tuple[str, OptionValue], ...] = ()
    libtpu_flags: tuple[str, ...] = ()

    @property
    def num_axes(self) -> int:
        """Number of axes in the shapes of this generation's TPU slices, such as 3 for ``4x4x8``."""
        return self.slice_shapes[0].count("x") + 1


_ASYNC_FLAGS = ("xla_enable_async_all_gather=true", "xla_enable_async_collective_permute=true")

SLICE_FAMILIES: dict[str, SliceFamily] = {
    # torch_xla sets TPU_MEGACORE, which combines the two cores of a v4 chip into one device.
    "v4": SliceFamily(_CUBE_SHAPES, int(31.75 * GIB), (("chip_config_name", "megacore_dense"),)),
    "v5e": SliceFamily(_SQUARE_SHAPES, int(15.75 * GIB), libtpu_flags=_ASYNC_FLAGS),
    "v5p": SliceFamily((*_CUBE_SHAPES, "16x16x16", "16x16x24"), int(95.74 * GIB), libtpu_flags=_ASYNC_FLAGS),
    "v6e": SliceFamily(_SQUARE_SHAPES, int(31.25 * GIB)),
}
# torch_xla sets these flags in every process that uses a TPU. `tests/tpu/test_compile.py` checks that the two
# lists are equal.
_TORCH_XLA_FLAGS = (
    "xla_tpu_use_enhanced_launch_barrier=false",
    "xla_latency_hiding_scheduler_rerun=1",
    "xla_tpu_prefer_async_allgather_to_allreduce=true",
    "xla_tpu_enable_flash_attention=false",
)


@dataclass(frozen=True)
class TpuSlice:
    """One TPU slice, such as ``v5e`` with ``4x4`` chips.

    Attributes:
        generation: Name of the generation.
        chip_shape: Number of chips along each axis, joined by ``x``.
    """

    generation: str
    chip_shape: str

    @property
    def libtpu_name(self) -> str:
        """Libtpu's name for the slice, such as ``v5e:4x4``."""
        return f"{self.generation}:{self.chip_shape}"

    @property
    def num_devices(self) -> int:
        """Number of devices in the slice."""
        return math.prod(_parse_chip_shape(self.chip_shape))

    @property
    def topology_options(self) -> dict[str, OptionValue]:
        """Options that libtpu requires for the slice's topology, in addition to ``libtpu_name``."""
        options = dict(SLICE_FAMILIES[self.generation].topology_options)
        sides = [*_parse_chip_shape(self.chip_shape), 1, 1][:3]
        if math.prod(sides) < 4:  # libtpu assumes hosts of 2x2 chips
            options["chips_per_host_bounds"] = sides
        return options

    def get_hbm_bytes(self, topology: TpuTopology) -> int:
        """Return the memory per device that is available to a program, in bytes."""
        limit = topology.read_device_attributes(topology.device_ids[0]).get("device_memory_bytes_limit")
        return limit if isinstance(limit, int) else SLICE_FAMILIES[self.generation].usable_hbm_bytes

    def build_compiler_environment(self, base_environment: dict[str, str]) -> dict[str, str]:
        """Build the environment variables with which libtpu compiles as in a torch_xla run.

        These variables also prevent libtpu from querying a metadata server.

        Args:
            base_environment: Environment variables of the caller. The flags in LIBTPU_INIT_ARGS are
                kept.

        Returns:
            All environment variables for the compiler process.
        """
        flags = (*ADDED_LIBTPU_FLAGS, *_TORCH_XLA_FLAGS, *SLICE_FAMILIES[self.generation].libtpu_flags)
        settings = {
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened, so no lock is needed
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        return {
            **base_environment,
            **settings,
            LIBTPU_FLAGS_VARIABLE: add_missing_libtpu_flags(
                base_environment.get(LIBTPU_FLAGS_VARIABLE, ""), flags
            ),
        }


def select_tpu_slice(device: str | None, num_devices: int, topology: str | None) -> TpuSlice:
    """Select a TPU slice by generation and number of chips.

    Args:
        device: Generation name from ``--device``. None if the flag is not set.
        num_devices: Number of chips.
        topology: Number of chips along each axis from ``--topology``, such as ``4x4``. It may be a
            shape that Google Cloud does not offer. None to use the shape that Google Cloud offers
            for this number of chips.

    Raises:
        UserError: If the generation is missing or unknown. Without ``topology``, also if Google
            Cloud offers no slice with this number of chips. With ``topology``, also if it has the
            wrong number of axes for the generation, or a different number of chips.
    """
    if device is None or device not in SLICE_FAMILIES:
        problem = f"{device} is not a TPU that --compile supports" if device else "--compile needs a TPU"
        raise UserError(f"--device: {problem}; use one of {', '.join(SLICE_FAMILIES)}")
    generation = SLICE_FAMILIES[device]
    if topology is None:
        sizes = {math.prod(_parse_chip_shape(chips)): chips for chips in generation.slice_shapes}
        if num_devices not in sizes:
            nearest = sorted(sorted(sizes, key=lambda size: abs(size - num_devices))[:2])
            raise UserError(
                f"--devices: no slice of {device} has {num_devices} chips; use "
                f"{' or '.join(map(str, nearest))}"
            )
        return TpuSlice(device, sizes[num_devices])
    axes = "x".join("ABC"[: generation.num_axes])
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})" + f"{{{generation.num_axes - 1}}}", topology):
        raise UserError(
            f"--topology: {topology!r} does not have the form {axes} of a {device} slice; use one of "
            f"{', '.join(generation.slice_shapes)}"
        )
    tpu_slice = TpuSlice(device, topology)
    if tpu_slice.num_devices != num_devices:
        raise UserError(
            f"--topology: the number of chips in {topology} is {tpu_slice.num_devices}, but --devices is "
            f"{num_devices}; change one of the two"
        )
    return tpu_slice


def _parse_chip_shape(chip_shape: str) -> list[int]:
    return [int(side) for side in chip_shape.split("x")]
