"""The disk that ZeRO-Infinity swaps to: whether it can serve, and this run's folder on it."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError, one_line, require
from portable.formatting import human_bytes

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
"""DeepSpeed's ``aio`` settings for a local NVMe drive: a deep queue of large requests.

``python -m gpu.zero.aio`` finds what is best for a disk.
"""


def in_use(config: RunConfig) -> bool:
    """Whether anything goes to the disk."""
    return "nvme" in (config.memory.offload_optimizer, config.memory.offload_params)


def check(config: RunConfig, deepspeed: Any) -> None:
    """Raise UserError unless ``memory.nvme_path`` is a writable folder on a disk, and can be swapped to."""
    assert config.memory.nvme_path is not None  # the schema sees to it
    check_folder(Path(config.memory.nvme_path), _KEY)
    check_async_io(deepspeed)


def check_folder(path: Path, key: str) -> None:
    """Raise UserError, naming ``key``, unless ``path`` is a writable folder on a disk."""
    try:
        require(path.exists(), f"{key}: {path} does not exist; make the folder, or name another")
        require(path.is_dir(), f"{key}: {path} is not a folder")
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be written to ({one_line(error)})") from error
    kind = filesystem(path)
    require(
        kind not in _RAM_DISKS,
        f"{key}: {path} lies in memory ({kind}), where offloading saves nothing; name a folder on a disk",
    )


def check_async_io(deepspeed: Any) -> None:
    """Raise UserError where DeepSpeed's ``async_io`` cannot be built."""
    builder = deepspeed.ops.op_builder.AsyncIOBuilder()
    require(
        builder.is_compatible(verbose=False),
        "memory: offloading to nvme needs DeepSpeed's async_io, which cannot be built here; install the "
        "system's libaio (Debian: apt install libaio-dev) and a C++ compiler, or offload to cpu",
    )
    if os.environ.get("RANK", "0") == "0" and (lock := _lock_of_a_build()):
        print(
            "note: waiting for another process to build DeepSpeed's async_io; if none does, since it was "
            f"killed, remove {lock}",
            file=sys.stderr,
        )


def _lock_of_a_build() -> Path | None:
    """The file by which torch keeps others from building the op; who is killed while building leaves it."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory("async_io", verbose=False)) / "lock"
    return lock if lock.exists() else None


def check_room(config: RunConfig, needed: int) -> None:
    """Raise UserError if the disk has not the bytes ``needed`` that this machine's ranks will keep on it."""
    assert config.memory.nvme_path is not None
    free = shutil.disk_usage(config.memory.nvme_path).free
    require(
        free >= needed,
        f"{_KEY}: {config.memory.nvme_path} has {human_bytes(free)} left and this run swaps "
        f"{human_bytes(needed)} there; make room, or name another disk",
    )


def give_buffers_back(engine: Any) -> None:
    """After each forward pass without gradients, free the buffers that parameters are swapped through.

    DeepSpeed keeps what the backward pass would use next, which after an evaluation does not come, and reads
    ahead for it; the next pass would find no buffer free.

    Args:
        engine: of ZeRO-3, with parameters on a disk.
    """
    parameters: list[Any] = list(engine.module.parameters())
    swapper = parameters[0].nvme_swapper

    def give_back(*_: object) -> None:
        if torch.is_grad_enabled():
            return
        engine.optimizer.empty_partition_cache()
        swapper.synchronize_reads()
        held = swapper.param_id_to_buffer_id
        swapper.remove_partition_and_release_buffers([p for p in parameters if p.ds_id in held])

    engine.module.register_forward_hook(give_back)


def run_folder(config: RunConfig) -> Path:
    """This run's own folder under ``memory.nvme_path``, so that two runs can share the disk."""
    assert config.memory.nvme_path is not None
    digest = hashlib.sha256(os.fsencode(Path(config.output_dir).absolute())).hexdigest()[:12]
    return Path(config.memory.nvme_path) / f"portable-swap-{digest}"


def filesystem(path: Path) -> str:
    """The type of the file system that ``path`` lies on; empty where the system does not tell."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return ""
    found, longest = "", -1
    resolved = path.resolve()
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) > longest and resolved.is_relative_to(point):
            found, longest = kind, len(point)
    return found
