"""Specifications of TPU generations, and functions that detect the TPU of this host.

The specifications are constants, copied mostly from Google's documentation.
"""

from __future__ import annotations

import os
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from portable.planner.device import NOT_MEASURED, Device, ReachedUtilization

GIB = 2**30


@dataclass(frozen=True)
class TpuGeneration:
    """Specifications of a TPU generation. The runtime presents each chip as one or two devices.

    Attributes:
        bf16_teraflops: Dense bf16 peak per chip in TFLOP/s.
        hbm_bytes: High-bandwidth memory per chip in bytes.
        devices_per_chip: Number of devices that the runtime creates per chip: one per core, or one if
            two cores form a megacore.
        chips_per_slice: Number of chips in the largest slice.
        reached_mfu: Range of model FLOPs utilization in published runs.
        link_bytes_per_second: Total bandwidth of a chip's links in one direction, in bytes per second.
            None if unknown.
    """

    bf16_teraflops: float
    hbm_bytes: int
    devices_per_chip: int
    chips_per_slice: int
    reached_mfu: ReachedUtilization = NOT_MEASURED
    link_bytes_per_second: float | None = None


# A chip has two devices if it has two TensorCores and no megacore (torch_xla._internal.tpu, and
# https://docs.jax.dev/en/latest/_autosummary/jax.experimental.pallas.tpu.ChipVersion.html). The model FLOPs
# utilization is from src/maxtext/configs/tpu/*/README.md and docs/reference/models/tiering.md of
# AI-Hypercomputer/maxtext. The link bandwidth is half of the bidirectional bandwidth on the pages with the
# peaks.
TPU_GENERATIONS: dict[str, TpuGeneration] = {
    # https://github.com/jax-ml/jax/blob/main/jax/_src/pallas/mosaic/tpu_info.py (Google publishes no numbers)
    "v2": TpuGeneration(46.0, 16 * 10**9, 2, 512),
    # https://docs.cloud.google.com/tpu/docs/v3
    "v3": TpuGeneration(123.0, 32 * GIB, 2, 1024),
    # https://docs.cloud.google.com/tpu/docs/v4
    "v4": TpuGeneration(275.0, 32 * GIB, 1, 4096, ReachedUtilization((0.53, 0.59), "v4: MaxText"), 1.5e11),
    # https://docs.cloud.google.com/tpu/docs/v5e
    "v5e": TpuGeneration(197.0, 16 * GIB, 1, 256, ReachedUtilization((0.53, 0.67), "v5e: MaxText"), 2e11),
    # https://docs.cloud.google.com/tpu/docs/v5p
    "v5p": TpuGeneration(459.0, 95 * GIB, 1, 6144, ReachedUtilization((0.56, 0.70), "v5p: MaxText"), 6e11),
    # https://docs.cloud.google.com/tpu/docs/v6e
    "v6e": TpuGeneration(918.0, 32 * GIB, 1, 256, ReachedUtilization((0.38, 0.50), "v6e: MaxText"), 4e11),
    # https://docs.cloud.google.com/tpu/docs/tpu7x
    "tpu7x": TpuGeneration(2307.0, 192 * GIB, 2, 9216),
}

# bf16 passes per fp32 product at the highest precision: https://github.com/jax-ml/jax/issues/2161
FP32_PASSES = 6

# Metadata server of a TPU VM. torch_xla queries it as well (torch_xla._internal.tpu.get_tpu_env), but without
# a timeout.
METADATA = "http://169.254.169.254/computeMetadata/v1/instance/attributes/tpu-env"
METADATA_SECONDS = 2.0
# PCI ids of TPUs (torch_xla._internal.tpu). The names in /dev and the vendor are not specific to TPUs,
# because the network card of the VM is from Google as well.
PCI_DEVICES = Path("/sys/bus/pci/devices")
PCI_VENDOR = "0x1ae0"
PCI_KINDS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


def list_accelerators() -> list[Device]:
    """List the TPU devices that the planner supports, one per TPU generation.

    Depending on the generation, the TPU runtime presents a chip as one device, or each of its two
    cores as a device. The memory, peak FLOP/s and link bandwidth of a device are therefore the
    chip's values divided by the number of devices per chip.
    """
    devices = []
    for name, kind in TPU_GENERATIONS.items():
        cores = kind.devices_per_chip
        peaks = {precision: get_peak_flops(name, precision) for precision in ("bf16", "fp32")}
        devices.append(
            Device(
                name,
                ("xla", "tpu"),
                kind.hbm_bytes // cores,
                bf16=True,
                devices_per_node=kind.chips_per_slice * cores,
                peak_flops_by_precision=tuple(
                    (precision, peak) for precision, peak in peaks.items() if peak is not None
                ),
                reached=kind.reached_mfu,
                link_bytes_per_second=None
                if kind.link_bytes_per_second is None
                else kind.link_bytes_per_second / cores,
            )
        )
    return devices


def find_tpu_generation(accelerator_type: str) -> TpuGeneration | None:
    """Find the TPU generation of an accelerator type such as ``v5litepod-16``, or return None if unknown."""
    name = accelerator_type.partition("-")[0]
    return TPU_GENERATIONS.get("v5e" if name == "v5litepod" else name)


def get_peak_flops(accelerator_type: str | None, precision: str) -> float | None:
    """Return the dense peak FLOP/s of one device of the TPU runtime.

    Such a device is a complete chip or one of its two cores. See :class:`TpuGeneration`.

    Args:
        accelerator_type: Accelerator type from :func:`detect_accelerator_type`. None if unknown.
        precision: Precision of the run, ``bf16`` or ``fp32``. The fp32 peak assumes XLA's matmul
            precision ``highest``, at which an fp32 product takes six bf16 passes.

    Returns:
        The peak in FLOP/s. None for an unknown accelerator type or other precisions.
    """
    generation = None if accelerator_type is None else find_tpu_generation(accelerator_type)
    passes = {"bf16": 1, "fp32": FP32_PASSES}.get(precision)
    if generation is None or passes is None:
        return None
    return generation.bf16_teraflops * 1e12 / generation.devices_per_chip / passes


def detect_accelerator_type() -> str | None:
    """Detect the accelerator type of this host, such as ``v5litepod-16``.

    Reads ``TPU_ACCELERATOR_TYPE``. If it is not set, the VM's metadata server is queried, unless
    ``TPU_SKIP_MDS_QUERY`` is set.

    Returns:
        The accelerator type. None if the runtime does not use a TPU, or if the type is unknown.
    """
    if not is_tpu_selected():
        return None
    env_value = os.environ.get("TPU_ACCELERATOR_TYPE")
    if env_value or os.environ.get("TPU_SKIP_MDS_QUERY"):
        return env_value
    # Connect to the address without a proxy, because the server is link-local.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(METADATA, headers={"Metadata-Flavor": "Google"})
    try:
        with opener.open(request, timeout=METADATA_SECONDS) as response:
            text = response.read().decode("utf-8", "replace")
    except OSError:
        return None
    line = re.search(r"^ACCELERATOR_TYPE: *['\"]?([\w-]+)", text, re.MULTILINE)
    return line[1] if line else None


def count_tpu_chips() -> int:
    """Count the TPU chips among the PCI devices of this host.

    If ``TPU_VISIBLE_DEVICES`` lists fewer devices, their number is returned.
    """
    visible = os.environ.get("TPU_VISIBLE_DEVICES")
    num_chips = sum(_is_tpu_device_folder(device) for device in PCI_DEVICES.glob("*"))
    return min(num_chips, len(visible.split(","))) if visible else num_chips


def is_tpu_selected() -> bool:
    """Return whether the runtime uses a TPU on this host.

    If ``PJRT_DEVICE`` is set, the result is True if its value is ``TPU``. Otherwise, the result is
    True if the host has a TPU among its PCI devices.
    """
    pjrt_device = os.environ.get("PJRT_DEVICE")
    if pjrt_device:
        return pjrt_device == "TPU"
    return any(_is_tpu_device_folder(device) for device in PCI_DEVICES.glob("*"))


def _is_tpu_device_folder(device_folder: Path) -> bool:
    try:
        vendor, kind = ((device_folder / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return False
    return vendor == PCI_VENDOR and kind in PCI_KINDS
