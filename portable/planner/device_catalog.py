"""Devices by name: their memory, and the rates that the speed of a step is reckoned with."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portable.config.suggest import did_you_mean
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARE_KEPT_FREE = 0.1
"""By a plan: activations are planned to about a tenth."""
SHARE_NOT_SEARCHED = 0.03
"""By the search for a micro-batch, which measures."""
KEPT_FOR_COLLECTIVES = 1 << 30
"""Left to what an allocator has no part in, or cannot use: its own fragments; the buffers of collectives."""


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are a data sheet's, in bytes or floating-point operations a second."""

    name: str
    backend: str
    """The backend that drives it."""
    memory: int
    """Bytes."""
    flops: Mapping[str, float]
    """Dense peak by precision."""
    link: float
    """To other devices of its node or slice, each way."""
    network: float
    """To other nodes, each way: its share of the node's."""
    host_link: float
    """To host memory, each way."""
    per_node: int
    """Devices of a node, or of the largest slice."""

    def usable(self, devices: int) -> int:
        """Bytes that a run on so many devices can fill."""
        kept = int(self.memory * SHARE_KEPT_FREE)
        return self.memory - kept - (KEPT_FOR_COLLECTIVES if devices > 1 and self.backend == "cuda" else 0)

    def with_memory(self, memory: int) -> Device:
        """The same with so many bytes."""
        return replace(self, memory=memory)


def unnamed(backend: str) -> Device:
    """A device of which nothing but the memory is known; its rates are those of a common one."""
    common = named("v5e" if backend == "xla" else "h100")
    return replace(common, name="device")


def known_devices() -> dict[str, Device]:
    """All devices that the rooms know, by name."""
    rooms: list[Any] = [importlib.import_module(room) for room in ("gpu.devices", "tpu.devices")]
    return {device.name: device for room in rooms for device in room.accelerators()}


def named(name: str) -> Device:
    """The device called ``name``.

    Raises:
        UserError: for one that is not known, with those that are.
    """
    known = known_devices()
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    for candidate in (key, key.removeprefix("nvidia-"), key.removesuffix("gb"), key.replace("litepod", "e")):
        if candidate in known:
            return known[candidate]
    hint = did_you_mean(key, known) or f"; known are {', '.join(known)}"
    raise UserError(f"--device: unknown device {name!r}{hint}; or give its memory with --device-memory 80GB")


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of a size such as ``80GB``, ``79.6GiB`` or a plain number.

    Raises:
        UserError: for anything else, naming ``flag``.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", text)
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise UserError(f"{flag}: {text!r} is no memory size; write it as 80GB, 79.6GiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])
