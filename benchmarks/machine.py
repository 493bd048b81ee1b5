"""Describe the machine and the libraries used for a measurement."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIBRARIES = ("torch", "transformers", "accelerate", "numpy")


def describe_machine(device: torch.device, *more: str) -> dict[str, str]:
    """Describe the processor, the load, the GPU if ``device`` is one, and library versions.

    Args:
        device: Device of the measurement.
        *more: Additional packages whose versions are included if they are installed.

    Returns:
        Descriptions, keyed by name.
    """
    described = {
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes, at the start)",
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        described["gpu"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    for name in (*LIBRARIES, *more):
        with suppress(metadata.PackageNotFoundError):
            described[name] = metadata.version(name)
    return described


def print_machine(command: str, machine: Mapping[str, str]) -> None:
    """Print the header of a measurement: its command, and the result of :func:`describe_machine`."""
    lines = [f"{name:<13} {value}" for name, value in machine.items()]
    print("\n".join([f"$ {command}", *lines]), flush=True)


def command_line(module: str, argv: Sequence[str] | None) -> str:
    """Return a command line that repeats a benchmark, from ``argv`` or this process's arguments."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])


def cpu_model() -> str:
    """Return the processor name from ``/proc/cpuinfo``, or from Python if this file does not exist."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
