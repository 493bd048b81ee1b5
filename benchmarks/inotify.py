"""Watch files and folders for events (Linux, inotify(7))."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CREATED, RENAMED = 0x100, 0x80  # IN_CREATE, IN_MOVED_TO
READ, OPENED = 0x1, 0x20  # IN_ACCESS, IN_OPEN
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Context manager that watches folders and files, and yields events in them.

    Args:
        mask: Bit mask of the event types.
    """

    def __init__(self, mask: int = CREATED | RENAMED) -> None:
        self._mask = mask
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._folders: dict[int, Path] = {}

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def add(self, folder: Path) -> None:
        """Add a folder or file to the watch. Does nothing if the path no longer exists."""
        number = _libc.inotify_add_watch(self._fd, os.fsencode(folder), self._mask)
        if number >= 0:
            self._folders[number] = folder

    def events(self, going_on: Callable[[], bool], seconds: float) -> Iterator[tuple[int, Path]]:
        """Yield the bit mask and the path of each event, waiting for new events.

        Args:
            going_on: Function that returns whether to continue waiting. It is called after each event, and
                at least every 50 ms.
            seconds: Number of seconds after which the iterator ends.
        """
        end = time.monotonic() + seconds
        poll = select.poll()  # select.select does not support file descriptors above 1023
        poll.register(self._fd, select.POLLIN)
        while time.monotonic() < end and going_on():
            if not poll.poll(50):  # milliseconds
                continue
            yield from self._read()

    def drain(self) -> Iterator[tuple[int, Path]]:
        """Yield the bit mask and the path of each pending event, without waiting."""
        while select.select([self._fd], [], [], 0)[0]:
            yield from self._read()

    def _read(self) -> Iterator[tuple[int, Path]]:
        data = os.read(self._fd, 1 << 16)
        position = 0
        while position < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size
            name = data[position : position + length].rstrip(b"\0")
            position += length
            if number in self._folders:
                yield mask & self._mask, self._folders[number] / os.fsdecode(name)
