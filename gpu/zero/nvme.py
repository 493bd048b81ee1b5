"""The disk that ZeRO-Infinity swaps to: checks, and this run's folder on it."""

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

AIO_DEFAULTS: dict[str, Any] = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
"""``aio`` for a local NVMe drive: a deep queue of large requests. ``ds_nvme_tune`` measures a disk."""


def is_swapping_to_disk(config: RunConfig) -> bool:
    """Whether the run swaps to disk."""
    return "nvme" in (config.memory.offload_optimizer, config.memory.offload_params)


def check_swapping(config: RunConfig, deepspeed: Any) -> None:
    """Check that this run can swap, and where to.

    Raises:
        UserError: unless DeepSpeed can swap the optimizer's state, ``memory.nvme_path`` is a writable folder
            on disk, and async_io can be built.
    """
    path = _get_nvme_folder(config)
    try:
        require(path.exists(), f"{_KEY}: {path} does not exist; create it, or name another folder")
        require(path.is_dir(), f"{_KEY}: {path} is not a folder; name a folder on a local disk")
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise UserError(
            f"{_KEY}: {path} is not writable ({to_one_line(error)}); name a writable folder"
        ) from error
    kind = find_filesystem_type(path)
    require(
        kind not in _RAM_DISKS,
        f"{_KEY}: {path} is in memory ({kind}), where offloading saves nothing; name a folder on a disk",
    )
    check_async_io(deepspeed)


def _get_nvme_folder(config: RunConfig) -> Path:
    path = config.memory.nvme_path
    if path is None:
        raise UserError(f"{_KEY}: not set; name a folder on a local disk to offload to")
    return Path(path)


def check_async_io(deepspeed: Any) -> None:
    """Raise UserError if DeepSpeed's ``async_io`` cannot be built."""
    builder = deepspeed.ops.op_builder.AsyncIOBuilder()
    require(
        builder.is_compatible(verbose=False),
        "memory: offloading to nvme needs DeepSpeed's async_io, which cannot be built here; install the "
        "system's libaio (Debian: apt install libaio-dev) and a C++ compiler, or offload to cpu",
    )
    wait_for_op_build(builder.name)


def check_free_space(config: RunConfig, required_bytes: int) -> None:
    """Raise UserError unless the disk has ``required_bytes`` free bytes, for the swap files of this node's ranks."""
    disk = _get_nvme_folder(config)
    free = shutil.disk_usage(disk).free
    require(
        free >= required_bytes,
        f"{_KEY}: {disk} has {format_bytes(free)} free and this run swaps {format_bytes(required_bytes)} "
        "there; free some space, or name another disk",
    )


def release_swap_buffers_after_forward(engine: Any) -> None:
    """Free the parameters' swap buffers after each forward pass without gradients.

    DeepSpeed keeps buffers, and reads ahead, for a backward pass. An evaluation has none, and the next pass
    would find no free buffer.

    Args:
        engine: DeepSpeed's, of stage 3 with parameters on NVMe.
    """
    parameters: list[Any] = list(engine.module.parameters())

    def release(*_: object) -> None:
        if not torch.is_grad_enabled():
            private_api.release_swap_buffers(engine.optimizer, parameters)

    engine.module.register_forward_hook(release)


def get_swap_folder(config: RunConfig) -> Path:
    """This run's own folder under ``memory.nvme_path``, so that runs can share a disk."""
    digest = hashlib.sha256(os.fsencode(Path(config.output_dir).absolute())).hexdigest()[:12]
    return _get_nvme_folder(config) / f"portable-swap-{digest}"


def find_filesystem_type(path: Path) -> str:
    """The file system type of ``path``; empty if the system does not report it."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return ""
    fs_type, longest = "", -1
    resolved = path.resolve()
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) > longest and resolved.is_relative_to(point):
            fs_type, longest = kind, len(point)
    return fs_type
