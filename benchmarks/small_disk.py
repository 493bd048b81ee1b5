"""Create a small disk that can be filled and freed: an ext4 file system in a file, on a loop device."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MEGABYTES = 96
_BALLAST = ".ballast"


class SmallDisk:
    """Small mounted file system that no other program uses.

    Args:
        path: Mount point.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / _BALLAST

    def fill(self, *, leave: int) -> None:
        """Allocate a file that occupies all free bytes on the disk except ``leave``."""
        self.free()
        status = os.statvfs(self.path)
        left = status.f_bavail * status.f_frsize - leave
        with self._ballast.open("wb") as file:
            # If an allocation fails, try a smaller one, because the run may write at the same time.
            size, step = 0, max(left, status.f_frsize)
            while step >= status.f_frsize:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                except OSError:
                    step //= 2
                else:
                    size += step
                    if size >= left:
                        break

    def free(self) -> None:
        """Free the space that :meth:`fill` has allocated."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(scratch: Path) -> Iterator[SmallDisk | None]:
    """Mount a 96 MiB disk below ``scratch`` within this context.

    Yields:
        The disk, or None if the user is not allowed to mount it.
    """
    image, path = scratch / "disk.img", scratch / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(_MEGABYTES << 20)
    made = _runs("mkfs.ext4", "-q", "-m", "0", str(image)) and _runs(
        "mount", "-o", "loop", str(image), str(path)
    )
    try:
        yield SmallDisk(path) if made else None
    finally:
        if made:
            _runs("umount", str(path)) or _runs("umount", "--lazy", str(path))
        image.unlink()


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
