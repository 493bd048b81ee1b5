"""Write the shard file of a rank, in the training process or in a separate process.

Serializing a large state runs Python code for each tensor. In a thread, this code and the training loop take
turns with Python's global lock. A separate process needs only the bytes of the tensors, which a thread of the
training process sends without holding the lock. The process requests one tensor after the other, so the state
is never in memory twice.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from converters import item_checksums
from portable.errors import one_line
from portable.private import of_torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

_READ, _DONE, _FAILED = "read", "done", "failed"


@dataclass(frozen=True)
class WrittenItem:
    """Position of an item in the shard file, and its checksum.

    Attributes:
        index: DCP's index of the item.
        file: Name of the file.
        offset: Position in bytes.
        length: Size in bytes.
        checksum: CRC32, see `converters.item_checksums`.
    """

    index: MetadataIndex
    file: str
    offset: int
    length: int
    checksum: int


def write_items(
    folder: Path, rank: int, items: Sequence[WriteItem], planner: SavePlanner
) -> list[WrittenItem]:
    """Write and fsync the shard file of a rank.

    Args:
        folder: Existing folder.
        rank: The rank, for the name of the file.
        items: Items to write.
        planner: DCP's planner, which resolves the items.
    """
    plan = SavePlan(list(items), storage_data=of_torch.storage_prefix(f"__{rank}_"))
    results = FileSystemWriter(folder, sync_files=True).write_data(plan, planner).wait()
    stored = [result.storage_data for result in results]
    checksums = item_checksums(folder, [(info.relative_path, info.offset, info.length) for info in stored])
    return [
        WrittenItem(result.index, info.relative_path, info.offset, info.length, checksum)
        for result, info, checksum in zip(results, stored, checksums, strict=True)
    ]


class WriterProcess:
    """A process that writes shard files. It starts with the first file and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def write_items(
        self, folder: Path, rank: int, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WrittenItem]:
        """Write the shard file of a rank; see :func:`write_items`.

        Raises:
            OSError: If the file cannot be written, or if the process has ended.
        """
        try:
            if self.connection is None or (self._process is not None and self._process.poll() is not None):
                self.start()
            assert self.connection is not None
            self.connection.send((folder.absolute(), rank, list(items)))
            while True:
                kind, value = self.connection.recv()
                if kind == _DONE:
                    written: list[WrittenItem] = value
                    return written
                if kind == _FAILED:
                    raise OSError(value)
                self.connection.send_bytes(_get_bytes(planner.resolve_data(items[value])))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = None if self._process is None else self._process.wait()
            raise OSError(
                f"the process that writes checkpoints ended with code {code}, possibly for lack of memory"
            ) from None

    def start(self) -> None:
        """Start the process."""
        ours, theirs = Pipe()
        # Not as `-m`, because classes of a main module cannot be sent to another process.
        command = [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())]
        # The process needs no accelerator, and would allocate memory on it.
        hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
        environment = {**os.environ, **hidden, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.connection = ours

    def close(self) -> None:
        """End the process."""
        if self.connection is not None:
            self.connection.close()
        if self._process is not None:
            self._process.wait()
        self._process = self.connection = None


def _get_bytes(value: torch.Tensor | io.BytesIO) -> memoryview:
    if isinstance(value, io.BytesIO):
        return value.getbuffer()
    tensor = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(tensor.view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


class _RemotePlanner:
    """Resolves items with the bytes that the training process sends."""

    def __init__(self, connection: Connection, items: Sequence[WriteItem]) -> None:
        self._connection = connection
        self._numbers = {item.index: number for number, item in enumerate(items)}

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Ask for the bytes of an item."""
        self._connection.send((_READ, self._numbers[item.index]))
        content = self._connection.recv_bytes()
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(content)
        assert item.tensor_data is not None
        dtype, sizes = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
        if not content:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(bytearray(content), dtype=dtype).reshape(sizes)


def serve(connection: Connection) -> None:
    """Write shard files until the training process closes the connection."""
    while True:
        folder, rank, items = connection.recv()
        planner: Any = _RemotePlanner(connection, items)
        try:
            answer: tuple[str, Any] = _DONE, write_items(folder, rank, items, planner)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            answer = _FAILED, one_line(error)
        connection.send(answer)


def main() -> None:
    """Serve the connection that the command line names."""
    # The training process decides when to stop, also if a signal is sent to all processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])))
