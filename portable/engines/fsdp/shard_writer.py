"""Write a rank's shard file and the table that describes the items in this file.

Both are written in the training process or in a separate process. Serializing a large state runs
Python code for each tensor. In a thread, this code would compete with the training loop for the
global interpreter lock (GIL). Therefore, a separate process serializes and writes large files. A
thread of the training process sends it the bytes of the tensors through a pipe, mostly without
holding the GIL. The separate process requests a few megabytes at a time, so the state is never in
memory twice. The separate process also builds the table, because the thread would have to hold the
GIL for 35 us per tensor.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from portable.converters import read_item_checksums
from portable.converters.writers.dcp_tables import WrittenPiece, build_rank_table
from portable.errors import to_one_line
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from portable.converters.writers.dcp_tables import KeyEntry, RankTable

_READ, _DONE, _FAILED = "read", "done", "failed"
_BATCH_BYTES, _BATCH_ITEMS = 4 << 20, 64
"""Limits of a batch of items: it is sent when it contains this many bytes or this many items."""


class PlannedItem(NamedTuple):
    """Item of a DCP save plan: a tensor shard or another value that this rank writes."""

    item: WriteItem
    is_owned: bool
    """Whether ``.metadata`` refers to this item. If not, the item is a copy of another rank's item."""


class WrittenFile(NamedTuple):
    """Checksum and size of a written file."""

    crc32: int
    size_bytes: int


def write_shards(
    folder: Path,
    rank: int,
    items: Sequence[PlannedItem],
    keys: Sequence[KeyEntry],
    planner: SavePlanner,
) -> RankTable:
    """Write and fsync the shard file of a rank, and the table that describes its items.

    Args:
        folder: Existing folder.
        rank: Rank, which is part of the file names.
        items: Items to write.
        keys: All keys of the state dict, for the table.
        planner: DCP planner that provides the data of the items.

    Returns:
        The table, which is also written to a file.
    """
    plan = SavePlan(
        [item for item, _ in items], storage_data=torch_internals.build_storage_prefix(f"__{rank}_")
    )
    results = FileSystemWriter(folder, sync_files=True).write_data(plan, planner).wait()
    stored = [result.storage_data for result in results]
    checksums = read_item_checksums(
        folder, [(info.relative_path, info.offset, info.length) for info in stored]
    )
    facts = {
        item.index: (() if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes), is_owned)
        for item, is_owned in items
    }
    pieces: list[WrittenPiece] = []
    copies: list[WrittenPiece] = []
    for result, info, checksum in zip(results, stored, checksums, strict=True):
        index, (sizes, is_owned) = result.index, facts[result.index]
        offsets = None if index.offset is None else tuple(index.offset)
        piece = WrittenPiece(index.fqn, offsets, sizes, info.offset, info.length, checksum)
        (pieces if is_owned else copies).append(piece)
    file = next((info.relative_path for info in stored), f"__{rank}_0.distcp")
    table, content = build_rank_table(f"__{rank}.metadata", file, keys, pieces, copies)
    write_and_sync(folder / table.record.name, iter([content]))
    return table


def write_and_sync(path: Path, content: Iterator[bytes]) -> WrittenFile:
    """Write a new file and fsync it. ``content`` yields the bytes in order."""
    crc32 = nbytes = 0
    with path.open("wb") as file:
        for part in content:
            file.write(part)
            crc32 = isal_zlib.crc32(part, crc32)
            nbytes += len(part)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(crc32, nbytes)


class WriterProcess:
    """Separate process that writes shard files.

    The process is started for the first file. It ends when :meth:`close` is called or the
    training process ends. If it ends unexpectedly, it is started again for the next file.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sent_items: Sequence[PlannedItem] | None = None
        """Items of the previous file. The process keeps them, so they do not have to be sent again for
        the next file."""
        self.connection: Connection | None = None

    def write_shards(
        self,
        folder: Path,
        rank: int,
        items: Sequence[PlannedItem],
        keys: Sequence[KeyEntry],
        planner: SavePlanner,
    ) -> RankTable:
        """Write the shard file of a rank and its table in the writer process.

        The arguments and the result are the same as for the function :func:`write_shards`. This
        method blocks until the files are written. It starts the process if the process is not
        running. If ``items`` is the same object as for the previous file, neither ``items`` nor
        ``keys`` is sent again.

        Raises:
            OSError: If the file cannot be written, or if the process ends unexpectedly.
        """
        try:
            if self.connection is None or (self._process is not None and self._process.poll() is not None):
                self.start()
            assert self.connection is not None
            plan = None if self._sent_items is items else (list(items), list(keys))
            self.connection.send((folder.absolute(), rank, plan))
            self._sent_items = items
            while True:
                kind, value = self.connection.recv()
                if kind == _DONE:
                    table: RankTable = value
                    return table
                if kind == _FAILED:
                    raise OSError(value)
                self._send_batch(items[value:], planner)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = None if self._process is None else self._process.wait()
            raise OSError(
                f"the process that writes checkpoints ended with exit code {code}, possibly because memory "
                "ran out; set checkpoint.async to false to save without this process"
            ) from None

    def _send_batch(self, items: Sequence[PlannedItem], planner: SavePlanner) -> None:
        """Send one batch of items to the process: a list of their sizes, followed by their bytes.

        Args:
            items: Items that have not been sent yet. The batch contains the first of them. It ends
                as soon as it contains ``_BATCH_ITEMS`` items or at least ``_BATCH_BYTES`` bytes, so
                its last item may exceed the limit in bytes.
            planner: DCP planner that provides the data of the items.
        """
        assert self.connection is not None
        parts: list[memoryview] = []
        nbytes = 0
        for item, _ in items[:_BATCH_ITEMS]:
            parts.append(_view_as_bytes(planner.resolve_data(item)))
            nbytes += len(parts[-1])
            if nbytes >= _BATCH_BYTES:
                break
        self.connection.send([len(part) for part in parts])
        while parts:  # writev releases the GIL, even while it waits because the connection is full
            sent = os.writev(self.connection.fileno(), parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def start(self) -> None:
        """Start the process and connect to it.

        The process does not use accelerators: CUDA and ROCm GPUs are hidden from it, and torch does
        not automatically load device backends from other packages.
        """
        parent_connection, child_connection = Pipe()
        # Do not use `-m`, because classes of a main module cannot be sent to another process.
        command = [
            sys.executable,
            "-c",
            f"from {__name__} import main; main()",
            str(child_connection.fileno()),
        ]
        # The process does not need an accelerator, and would allocate memory on it.
        hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
        environment = {**os.environ, **hidden, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._sent_items = None
        self._process = subprocess.Popen(command, pass_fds=[child_connection.fileno()], env=environment)
        child_connection.close()
        self.connection = parent_connection

    def close(self) -> None:
        """Close the connection, which ends the process, and wait until it has exited."""
        if self.connection is not None:
            self.connection.close()
        if self._process is not None:
            self._process.wait()
        self._process = self.connection = None


def _view_as_bytes(value: torch.Tensor | io.BytesIO) -> memoryview:
    if isinstance(value, io.BytesIO):
        return value.getbuffer()
    tensor = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(tensor.view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


class _RemotePlanner:
    """DCP planner in the separate process that writes shard files.

    It requests the data of the items from the training process.

    Args:
        connection: Connection to the training process.
        items: Items of the current file.
    """

    def __init__(self, connection: Connection, items: Sequence[PlannedItem]) -> None:
        self._connection = connection
        self._numbers = {item.index: number for number, (item, _) in enumerate(items)}
        self._received: dict[int, bytearray] = {}

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item: a tensor, or a BytesIO for an item of type BYTE_IO.

        If the item has not been received yet, requests it from the training process. The reply may also
        contain the next few items, which are then cached.
        """
        number = self._numbers[item.index]
        if number not in self._received:
            self._connection.send((_READ, number))
            batch: list[int] = self._connection.recv()
            self._received = {number + i: self._receive_bytes(nbytes) for i, nbytes in enumerate(batch)}
        content = self._received.pop(number)
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(content)
        assert item.tensor_data is not None
        dtype, sizes = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
        if not content:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).reshape(sizes)

    def _receive_bytes(self, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        remaining = memoryview(content)
        while remaining:
            count = os.readv(self._connection.fileno(), [remaining])
            if count == 0:
                raise EOFError
            remaining = remaining[count:]
        return content


def serve_write_requests(connection: Connection) -> None:
    """Write the shard files that the training process requests, until it closes the connection.

    Write errors are sent to the training process. This function never returns normally.

    Raises:
        EOFError: If the training process has closed the connection.
        BrokenPipeError: If the connection was closed while a reply was sent.
        ConnectionResetError: If the connection was lost.
    """
    items: list[PlannedItem] = []
    keys: list[KeyEntry] = []
    while True:
        folder, rank, plan = connection.recv()
        if plan is not None:
            items, keys = plan
        planner: Any = _RemotePlanner(connection, items)
        try:
            answer: tuple[str, Any] = _DONE, write_shards(folder, rank, items, keys, planner)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            answer = _FAILED, to_one_line(error)
        connection.send(answer)


def main() -> None:
    """Run the writer process until the training process closes the connection.

    The first command-line argument is the file descriptor of the connection. SIGINT and SIGTERM are
    ignored, because only the training process decides when to stop.
    """
    # These signals may be sent to all processes, but only the training process decides when to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.nice(5)  # training has priority if there are few cores
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve_write_requests(Connection(int(sys.argv[1])))
