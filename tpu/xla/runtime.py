"""Import and start torch_xla, on a TPU if there is one, otherwise on virtual CPU devices.

Import torch_xla only through this module, because the first import reads environment variables that
this module sets.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING, Any

from portable.errors import UserError, to_one_line
from portable.tpu import device_specs as devices
from portable.tpu.libtpu_flags import ADDED_LIBTPU_FLAGS, LIBTPU_FLAGS_VARIABLE, add_missing_libtpu_flags
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from pathlib import Path

INSTALL_COMMAND = "pip install 'portable-trainer[xla]' (on a TPU VM: 'portable-trainer[tpu]')"


def _import_torch_xla() -> Any:
    """Set the environment variables that torch_xla reads, and import torch_xla.

    ``PJRT_DEVICE`` is set to ``TPU`` or ``CPU`` if it is not set. If its value is ``TPU``, the
    flags in ``ADDED_LIBTPU_FLAGS`` are added to ``LIBTPU_INIT_ARGS``, except flags that are already
    set.

    Raises:
        UserError: If torch_xla is missing, has a different minor release than torch, or cannot be
            imported.
    """
    try:
        torch_version, torch_xla_version = metadata.version("torch"), metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        raise UserError(
            f"backend: xla needs the package torch_xla; install the package with: {INSTALL_COMMAND}"
        ) from None
    if _get_minor_release(torch_version) != _get_minor_release(torch_xla_version):
        raise UserError(
            f"backend: xla needs torch and torch_xla of the same release, not torch {torch_version} and "
            f"torch_xla {torch_xla_version}; install matching releases with: {INSTALL_COMMAND}"
        )
    os.environ.setdefault("PJRT_DEVICE", "TPU" if devices.is_tpu_selected() else "CPU")
    if os.environ["PJRT_DEVICE"] == "TPU":
        os.environ[LIBTPU_FLAGS_VARIABLE] = add_missing_libtpu_flags(
            os.environ.get(LIBTPU_FLAGS_VARIABLE, ""), ADDED_LIBTPU_FLAGS
        )
    try:
        import torch_xla
        import torch_xla.core.xla_builder
        import torch_xla.debug.metrics
        import torch_xla.distributed.spmd.xla_sharding
        import torch_xla.runtime
    except ImportError as error:
        reason = f"torch_xla cannot be imported ({to_one_line(error)})"
        raise UserError(
            f"backend: xla: {reason}; install matching releases with: {INSTALL_COMMAND}"
        ) from error
    return torch_xla


def _get_minor_release(version: str) -> list[str]:
    return version.split(".")[:2]


torch_xla: Any = _import_torch_xla()
xr: Any = torch_xla.runtime
xb: Any = torch_xla.core.xla_builder
xs: Any = torch_xla.distributed.spmd.xla_sharding
xla_metrics: Any = torch_xla.debug.metrics


def start_xla_runtime() -> None:
    """Start the runtime in SPMD mode. Does nothing if it is already running.

    Raises:
        UserError: If the runtime cannot use the devices selected by ``PJRT_DEVICE``.
    """
    try:
        if not xr.is_spmd():
            xr.use_spmd()
        xr.addressable_runtime_device_count()
    except (OSError, RuntimeError) as error:
        kind = os.environ["PJRT_DEVICE"]
        raise UserError(
            f"backend: xla cannot use {kind} devices ({to_one_line(error)}); for a TPU, run: pip install "
            "'portable-trainer[tpu]'"
        ) from error


def count_hosts() -> int:
    """Return the number of hosts in the slice. Each host runs one process."""
    return int(xr.process_count())


def count_local_devices() -> int:
    """Return the number of devices that this process controls."""
    return int(xr.addressable_runtime_device_count())


def enable_graph_cache(folder: Path) -> None:
    """Cache compiled graphs in ``folder``. Call this function before the first compilation.

    Does nothing if a cache is already enabled in this process.
    """
    if not xla.caches_graphs():
        folder.mkdir(parents=True, exist_ok=True)
        xr.initialize_cache(str(folder))


def is_on_tpu() -> bool:
    """Return whether the runtime uses TPUs instead of virtual CPU devices."""
    return str(xr.device_type()) == "TPU"
