"""Find devices by name, and parse memory sizes."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from portable.converters.similar_names import format_name_suggestion
from portable.errors import UserError
from portable.planner.device import NOT_MEASURED, Device
from portable.registry import BACKENDS, DEFAULT_PLANNED_BACKEND, load_backend_package


def build_generic_device(backend: str) -> Device:
    """Build a placeholder for a device of unknown type.

    Most properties are copied from a typical device of the backend. The link speed is unknown, and
    the model FLOPs utilization is an assumption. The caller must replace the memory size.

    Args:
        backend: Name of the backend, or ``auto``.
    """
    package = load_backend_package(DEFAULT_PLANNED_BACKEND if backend == "auto" else backend)
    return replace(
        find_device(package.typical_device), name="device", reached=NOT_MEASURED, link_bytes_per_second=None
    )


def list_known_devices() -> dict[str, Device]:
    """Return the device types of all backends, keyed by name.

    The result contains aliases such as ``a100``, but not the CPU. See :func:`find_device` for the
    CPU.
    """
    return {device.name: device for name in BACKENDS for device in load_backend_package(name).list_devices()}


_MAKERS = re.compile("^(nvidia-|amd-|google-)?(tpu-|geforce-|instinct-)?(tesla-|rtx-?)?")
_VARIANTS = re.compile(r"-?(sxm\d?|hbm\de?|oam|pcie)(?=-|$)")
"""Pattern of the card variant in a device name from a driver, such as ``-pcie``.

The variant is removed from the name if no known device has the complete name.
"""
_SIZE = re.compile(r"-?(\d+)gb$")
_SIZE_OF_HOST = ("gh200", "gb200")
"""Devices whose names from the driver contain the size of the CPU memory, such as ``GH200 480GB``."""
_SAME_SIZE = 0.15
"""Maximum relative difference between the memory size in a name and the memory size of a known device."""
_APPLE = re.compile("(apple-)?m[1-9](-?(pro|max|ultra))?|mps")


def find_device(name: str, flag: str = "--device") -> Device:
    """Find a device type by a name that people or drivers use, such as ``RTX 4090`` or ``v5litepod``.

    Args:
        name: Name of the device, ignoring case, with or without the manufacturer. If it ends with a
            memory size, such as ``80GB``, the device must have about this size. The size in names
            of GH200 and GB200 is ignored, because it is the size of the CPU memory. ``cpu`` for the
            CPU of this machine.
        flag: Option or setting that contains the name, used in error messages.

    Raises:
        UserError: If no device has this name. The message suggests a similar name or lists all names.
    """
    devices_by_name = list_known_devices()
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key == "cpu":
        return _build_cpu_device()
    short = _MAKERS.sub("", key)
    plain = _VARIANTS.sub("", short)
    without_suffix = plain.removesuffix("gb").removesuffix("-generation")
    for candidate in (key, short, plain, without_suffix, re.sub("-?lite(pod)?", "e", short)):
        if candidate in devices_by_name:
            return devices_by_name[candidate]
    size, without_size = _SIZE.search(plain), _SIZE.sub("", plain)
    if size is not None and without_size in devices_by_name:
        device = devices_by_name[without_size]
        ratio = int(size[1][:9]) * 10**9 / device.memory_bytes
        if without_size in _SIZE_OF_HOST or abs(ratio - 1) < _SAME_SIZE:
            return device
    if _APPLE.fullmatch(key):
        raise UserError(f"{flag}: no backend supports Apple GPUs; use cpu to train on the CPU")
    hint = format_name_suggestion(plain, devices_by_name) or f"; use one of {', '.join(devices_by_name)}, cpu"
    other = " (for other devices, use --device-memory 80GB instead)" if flag == "--device" else ""
    raise UserError(f"{flag}: unknown device {name!r}{hint}{other}")


class DeviceAndCount(NamedTuple):
    """Device type and number of devices."""

    device: Device
    num_devices: int


def parse_devices(text: str) -> DeviceAndCount:
    """Parse a device with an optional number of devices, such as ``h100:8``.

    On the CPU, the number is the number of ranks. The ranks share the memory of this machine, so
    the memory of the returned device is the machine's memory divided by the number of ranks.

    Returns:
        The device and the number of devices, by default 1.

    Raises:
        UserError: If no device has this name, or if the count is not a positive number.
    """
    name, _, digits = text.partition(":")
    if digits and not re.fullmatch(r"0*[1-9]\d{0,5}", digits):
        raise UserError(
            f"--device: {text}: the count is not an integer from 1 to 999999; use NAME:COUNT, such as h100:8"
        )
    device, count = find_device(name, f"--device: {text}"), int(digits or 1)
    # Divide the memory, because ranks on the CPU share the memory of the machine.
    if device.backends == ("cpu",):
        device = device.with_memory(device.memory_bytes // count)
    return DeviceAndCount(device, count)


def _build_cpu_device() -> Device:
    """Build a device for the CPU of this machine.

    Its memory is the memory of the machine, or the container's memory limit if the limit is lower.
    The limit is read from ``/sys/fs/cgroup/memory.max`` (cgroup v2).
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else ""
    bf16 = load_backend_package("cpu").choose_default_precision(in_rank=False) == "bf16"
    return Device("cpu", ("cpu",), min(memory, int(text)) if text.isdecimal() else memory, bf16, 1)


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def load_rental_device_names() -> dict[str, Any]:
    """Load the device names that rental tools, such as SkyPilot, use.

    Returns:
        A dict for each device, keyed by device name. The dict maps a tool to the tool's name for
        the device. A missing tool uses the device name in capitals. For ``hf``, the value is a dict
        that maps the number of devices to a name. The dict of a TPU contains properties such as
        ``type`` and ``host`` instead.

        The result also has the key ``topologies``. It contains the topologies of TPU slices, keyed
        by their number of axes, and then by the number of chips.
    """
    text = files("portable").joinpath("configs", "machines", "names.yaml").read_text("utf-8")
    entries: dict[object, Any] = yaml.safe_load(text)
    return {str(name): value for name, value in entries.items()}


def parse_bytes(text: str, flag: str) -> int:
    """Parse a memory size such as ``80GB``, ``79.6GiB``, or a number of bytes.

    ``80GB`` and ``80G`` are 80 * 1000**3 bytes, and ``80GiB`` is 80 * 1024**3 bytes. Units from
    kilobytes to terabytes are supported, in uppercase or lowercase.

    Args:
        text: Text to parse.
        flag: Option that contains the text, used in error messages.

    Returns:
        The number of bytes.

    Raises:
        UserError: If the text is not a memory size, or if the size is 0.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise UserError(
            f"{flag}: {text!r} is not a memory size; use a size such as 80GB or 79.6GiB, or a number of bytes"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])
