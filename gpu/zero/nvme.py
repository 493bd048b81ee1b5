"""Check the disk that ZeRO-Infinity swaps to, choose a run's swap folder, and release swap buffers."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError, require, to_one_line
from portable.formatting import format_bytes
from portable.gpu.zero import private_api
from portable.gpu.zero.op_builds import wait_for_op_build

if TYPE_CHECKING:
    from portable.config import RunConfig

_RAM_DISKS = ("tmpfs", "ramfs", "devtmpfs")
_KEY = "memory.nvme_path"
_MOUNTS = Path("/proc/mounts")

AIO_DEFAULTS: dict[str, Any] = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
"""Default values of the section ``aio``: a deep queue of large requests, which suits a local NVMe
drive. DeepSpeed's tool ``ds_nvme_tune`` finds better values for a specific disk.
"""


def is_swapping_to_disk(config: RunConfig) -> bool:
    """Return whether a run swaps parameters or optimizer state to disk."""
    return "nvme" in (config.memory.offload_optimizer, config.memory.offload_params)


def check_swapping(config: RunConfig, deepspeed: Any) -> None:
    """Check that ``memory.nvme_path`` is a suitable folder, and that DeepSpeed can swap to it.

    Args:
        config: Config of a run that swaps to disk.
        deepspeed: The module ``deepspeed``.

    Raises:
        UserError: If ``memory.nvme_path`` is not a writable folder on a disk, or if DeepSpeed's op
            ``async_io`` cannot be built.
    """
    path = _get_nvme_folder(config)
    try:
        require(path.exists(), f"{_KEY}: {path} does not exist; create the folder, or use another folder")
        require(path.is_dir(), f"{_KEY}: {path} is not a folder; specify a folder on a local disk")
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise UserError(
            f"{_KEY}: {path} is not writable ({to_one_line(error)}); specify a writable folder"
        ) from error
    kind = find_filesystem_type(path)
    require(
        kind not in _RAM_DISKS,
        f"{_KEY}: {path} is in memory ({kind}), so offloading to this folder saves no memory; specify a "
        "folder on a disk",
    )
    check_async_io(deepspeed)


def _get_nvme_folder(config: RunConfig) -> Path:
    path = config.memory.nvme_path
    if path is None:
        raise UserError(f"{_KEY}: is not set; set {_KEY} to a folder on a local disk")
    return Path(path)


def check_async_io(deepspeed: Any) -> None:
    """Check that DeepSpeed's op ``async_io`` can be built on this machine.

    If another process is building the op, this function waits for that build.

    Raises:
        UserError: If the op cannot be built, for example because ``libaio`` is missing.
    """
    builder = deepspeed.ops.op_builder.AsyncIOBuilder()
    require(
        builder.is_compatible(verbose=False),
        "memory: offloading to nvme needs DeepSpeed's async_io, which cannot be built on this machine; "
        "install the system's libaio (Debian: apt install libaio-dev) and a C++ compiler, or offload to "
        "cpu",
    )
    wait_for_op_build(builder.name)


def check_free_space(config: RunConfig, required_bytes: int) -> None:
    """Check that the disk has enough space for the swap files of this node's ranks.

    Args:
        config: Config of the run, which contains ``memory.nvme_path``.
        required_bytes: Size of all swap files on this node in bytes.

    Raises:
        UserError: If the free space is smaller than ``required_bytes``.
    """
    disk = _get_nvme_folder(config)
    free = shutil.disk_usage(disk).free
    require(
        free >= required_bytes,
        f"{_KEY}: {disk} has {format_bytes(free)} free, but this run needs {format_bytes(required_bytes)} "
        "for swapping; free some space, or use another disk",
    )


def release_swap_buffers_after_forward(engine: Any) -> None:
    """Install a hook that frees the parameter swap buffers after each forward pass without gradients.

    After a forward pass, DeepSpeed keeps the buffers and prefetches parameters for a backward pass.
    Evaluation has no backward pass, so the next forward pass would not find a free buffer.

    Args:
        engine: Engine returned by ``deepspeed.initialize``, with stage 3 and parameters on NVMe.
    """
    parameters: list[Any] = list(engine.module.parameters())

    def release(*_: object) -> None:
        if not torch.is_grad_enabled():
            private_api.release_swap_buffers(engine.optimizer, parameters)

    engine.module.register_forward_hook(release)


def get_swap_folder(config: RunConfig) -> Path:
    """Return the path of this run's swap folder under ``memory.nvme_path``.

    The folder does not have to exist. Its name is derived from ``output_dir``, so that runs with
    different output folders can share a disk.
    """
    digest = hashlib.sha256(os.fsencode(Path(config.output_dir).absolute())).hexdigest()[:12]
    return _get_nvme_folder(config) / f"portable-swap-{digest}"


def find_filesystem_type(path: Path) -> str:
    """Return the file system type of a path, such as ``ext4``.

    The result is an empty string if ``/proc/mounts`` does not exist, as on macOS.
    """
    if not _MOUNTS.exists():
        return ""
    fs_type, longest = "", -1
    resolved = path.resolve()
    for line in _MOUNTS.read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        # A later mount at the same path hides an earlier one.
        if len(point) >= longest and resolved.is_relative_to(point):
            fs_type, longest = kind, len(point)
    return fs_type
