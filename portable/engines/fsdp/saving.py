"""Write checkpoints in the format of torch.distributed.checkpoint (DCP), optionally in the background.

DCP's own ``save`` gathers the plans and results of all ranks on rank 0. The work of rank 0
therefore grows with the number of ranks times the number of tensors. This module uses DCP's planner
and writer, but each rank decides by itself which items it writes, and describes them in a table
(:mod:`portable.converters.writers.dcp_tables`). Rank 0 first gathers a small record of each table.
It then receives the tables from one rank at a time, and assembles ``.metadata`` from them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from portable.checkpoint.store import start_background_call
from portable.converters.tensors.dtypes import FROM_TORCH
from portable.converters.writers.dcp_tables import (
    KeyEntry,
    count_elements,
    iter_metadata_bytes,
    write_rank_tables_index,
)
from portable.engines.background_saving import BackgroundWriteHandle, copy_state_to_host
from portable.engines.fsdp.shard_writer import PlannedItem, WriterProcess, write_and_sync, write_shards
from portable.errors import to_one_line
from portable.optim.local_shards import list_shard_blocks
from portable.private import torch_internals
from portable.ranks.collectives import get_or_create_background_group
from portable.terminal import silence_checkpoint_warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from portable.backend import SaveHandle
    from portable.converters.writers.dcp_tables import RankTable, TableRecord

T = TypeVar("T")
silence_checkpoint_warnings()

MIN_PROCESS_BYTES = 256 << 20
"""Minimum size in bytes of a shard file for which a background save uses a separate process."""
_MAX_COPIED_BYTES = 1024
"""Maximum size in bytes of a replicated tensor that every rank writes. A rank that resumes then finds these
tensors in its own file.
"""


class DcpSaver:
    """Writer of state dicts in DCP format. It caches the list of items that this rank writes.

    Each engine needs a separate saver. The cached list is reused if a state dict has the same keys,
    shapes and dtypes as the previous state dict, even if the placements differ. With a custom
    planner, nothing is cached.

    Args:
        planner: DCP planner class for state dicts that contain custom types. Such a state dict must
            already be in host memory. None if the state dicts contain plain tensors and DTensors,
            which may be on any device.
    """

    def __init__(self, planner: type[DefaultSavePlanner] | None = None) -> None:
        self._planner = planner
        self._writer_process = WriterProcess()
        self._items_by_digest: dict[bytes, list[PlannedItem]] = {}

    @cached_property
    def _process_group(self) -> dist.ProcessGroup | None:
        return get_or_create_background_group()

    def save(self, state: dict[str, Any], folder: Path, *, background: bool) -> SaveHandle:
        """Write this rank's part of a state into a folder. All ranks have to call this method.

        See :meth:`portable.backend.Engine.save_shards`.

        Args:
            state: Nested state dict.
            folder: Existing folder.
            background: Whether to write in a thread. The state is then first copied to host memory,
                so that training may change it after this method returns. If the constructor
                received a custom planner, the state is already in host memory and is not copied.

        Returns:
            Handle of the write. The write is already complete if ``background`` is False.
        """
        group = self._process_group  # creating the group is a collective, so do it before starting a thread
        if background and self._planner is None:
            state = copy_state_to_host(state)
        planner = (self._planner or _BlockPlanner)()

        def write() -> None:
            process = self._writer_process if background else None
            plans = self._items_by_digest if self._planner is None else None
            write_dcp_checkpoint(state, folder, planner, group, process, plans)

        if background:
            return BackgroundWriteHandle(start_background_call(write, name="checkpoint"))
        write()
        return BackgroundWriteHandle(None)

    def close(self) -> None:
        """End the separate process that writes large shard files, if it is running."""
        self._writer_process.close()


class _BlockPlanner(DefaultSavePlanner):
    """DCP planner that also supports shards that consist of several blocks of a tensor.

    DCP itself assumes that a shard is a single block. See
    :func:`portable.optim.local_shards.list_shard_blocks`.
    """

    def __init__(self) -> None:
        super().__init__()
        # Cached, because determining the parts of a shard takes longer than writing them.
        self._parts_by_name: dict[str, dict[torch.Size, Tensor]] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._split_item(item)]
        return replace(plan, items=items)

    def _split_item(self, item: WriteItem) -> list[WriteItem]:
        """Split the write item of a shard into one item for each block of the global tensor.

        Most shards are a single block, and their items are returned unchanged. A shard of the
        second LoRA factor of a stack of experts can consist of several blocks. See
        :func:`portable.optim.local_shards.list_shard_blocks`.
        """
        tensor, data = self.state_dict[item.index.fqn], item.tensor_data
        if data is None or not _has_several_parts(tensor):
            return [item]
        return [
            replace(
                item,
                index=replace(item.index, offset=offset),
                tensor_data=replace(data, chunk=ChunkStorageMetadata(offset, part.shape)),
            )
            for offset, part in self._get_parts(item.index.fqn).items()
        ]

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object that DCP writes for an item of the save plan.

        Args:
            index: Index of the item. If the local shard of a tensor consists of several parts, the
                offset in ``index`` selects one part.
        """
        if index.offset is None or not _has_several_parts(self.state_dict[index.fqn]):
            return super().lookup_object(index)
        return self._get_parts(index.fqn)[index.offset]

    def _get_parts(self, name: str) -> dict[torch.Size, Tensor]:
        """Return the parts of a tensor's local shard, keyed by their offsets in the tensor."""
        if name not in self._parts_by_name:
            tensor = self.state_dict[name]
            blocks = list_shard_blocks(tensor)
            offsets = [torch.Size(part.start for part in block) for block in blocks]
            parts = tensor.to_local().chunk(len(blocks), dim=1)
            self._parts_by_name[name] = dict(zip(offsets, parts, strict=True))
        return self._parts_by_name[name]


def _has_several_parts(value: Any) -> bool:
    """Return whether a value in a state dict is a tensor whose local shard consists of several parts."""
    return isinstance(value, DTensor) and torch_internals.count_interleaved_blocks(value) > 1


def write_dcp_checkpoint(
    state: dict[str, Any],
    folder: Path,
    planner: DefaultSavePlanner,
    group: dist.ProcessGroup | None,
    writer_process: WriterProcess | None = None,
    items_by_digest: dict[bytes, list[PlannedItem]] | None = None,
) -> None:
    """Write this rank's shard file, and the table that describes the items in the file.

    Rank 0 also writes ``.metadata``, and ``shard_checksums.json``, which lists the tables. All
    ranks have to call this function.

    Args:
        state: Nested state dict.
        folder: Existing folder on this rank's host. Other ranks may use other folders.
        planner: DCP planner that lists the items of the state and provides their data.
        group: Process group of all ranks. None in a single process.
        writer_process: Process that writes large shard files. None to write all files in this
            process.
        items_by_digest: Cache of the items that this rank wrote in the engine's previous save,
            keyed by a digest of the state dict's keys. It is updated in place. None to plan the
            items again in each save.

    Raises:
        OSError: On every rank, if any rank could not write its files, if a tensor has different
            shapes or dtypes on two ranks, or if some elements of the state were not written. A rank
            on which the save failed with another exception raises this exception instead.
    """
    ranks = _SaveCollectives(group)
    keys: list[KeyEntry] = []
    holders: Mapping[str, tuple[int, ...]] = {}
    written_tables: list[RankTable] = []
    digest = b""

    def describe_keys() -> bytes:
        planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
        nonlocal digest
        keys.extend(_build_key_entries(planner))
        digest = hashlib.blake2b(repr(keys).encode()).digest()
        return digest

    def write_own_shards() -> TableRecord:
        # An engine does not change its placements, so the items are the same if the keys are the same.
        items = items_by_digest.get(digest) if items_by_digest is not None and not holders else None
        if items is None:
            items = _plan_local_items(planner, ranks, holders)
            if items_by_digest is not None and not holders:
                items_by_digest.clear()  # one entry is enough, because an engine always saves the same keys
                items_by_digest[digest] = items
        nbytes = sum(item.tensor_storage_size() or 0 for item, _ in items)
        is_large = writer_process is not None and nbytes >= MIN_PROCESS_BYTES
        write = writer_process.write_shards if writer_process is not None and is_large else write_shards
        table = write(folder, ranks.rank, items, keys, planner)
        written_tables.append(table)
        return table.record

    def write_metadata(records: Sequence[TableRecord]) -> None:
        pieces = (
            ranks.receive_from_rank(rank, record.pieces_nbytes) for rank, record in enumerate(records) if rank
        )
        content = iter_metadata_bytes(written_tables[0], pieces)
        try:
            metadata_file = write_and_sync(folder / ".metadata", content)
        finally:
            # Receive the remaining pieces after an error, because the other ranks would otherwise wait
            # forever.
            for _ in pieces:
                pass
        stored, expected = sum(record.numel for record in records), count_elements(keys)
        if stored != expected:
            raise OSError(
                f"{folder}: the ranks have written only {stored:,} of {expected:,} tensor elements; run the "
                "same command again to resume from the last checkpoint"
            )
        write_rank_tables_index(
            folder,
            records,
            metadata_crc32=metadata_file.crc32,
            metadata_nbytes=metadata_file.size_bytes,
        )

    digests = ranks.run_on_all_ranks(describe_keys)
    # Ranks have different keys only if the state of a custom optimizer differs between them.
    if not ranks.broadcast_from_rank_0(digests is not None and len(set(digests)) == 1):
        merged_keys = _merge_keys(ranks.all_gather_values(keys))
        keys[:], holders = merged_keys.keys, merged_keys.holders
    records = ranks.run_on_all_ranks(write_own_shards)
    ranks.run_on_all_ranks(
        partial(ranks.send_to_rank_0, written_tables[0].pieces)
        if records is None
        else partial(write_metadata, records)
    )


class _SaveCollectives:
    """Collective operations on the host that the ranks use while they save a checkpoint.

    Args:
        group: Process group of all ranks. None in a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    def run_on_all_ranks(self, function: Callable[[], T]) -> list[T] | None:
        """Call a function on every rank, and raise an error on all ranks if it fails on any rank.

        Args:
            function: Function that this rank calls. Its result must have a small, fixed size.

        Returns:
            On rank 0, the results of all ranks in rank order. None on the other ranks.

        Raises:
            OSError: If the function failed only on other ranks. A rank on which it failed raises the
                original exception instead.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = function()
        except Exception as error:
            failure = error
        results = self._gather_to_rank_0((None if failure is None else to_one_line(failure), result))
        failures = [(rank, reason) for rank, (reason, _) in enumerate(results or ()) if reason is not None]
        failed = self.broadcast_from_rank_0("; ".join(f"rank {rank}: {reason}" for rank, reason in failures))
        if failure is not None:
            raise failure
        if failed:
            raise OSError(failed)
        return None if results is None else [result for _, result in results]

    def _gather_to_rank_0(self, value: Any) -> list[Any] | None:
        """Gather a picklable value from every rank on rank 0.

        Returns:
            On rank 0, the values in rank order. None on the other ranks.
        """
        if self._group is None:
            return [value]
        values = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def all_gather_values(self, value: T) -> list[T]:
        """Gather a picklable value from every rank, and return the values in rank order on all ranks."""
        values = [value] * self.world_size
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_from_rank_0(self, value: T) -> T:
        """Broadcast rank 0's value, which must be picklable, to all ranks, and return it.

        Args:
            value: Value to broadcast. Ignored on the other ranks.
        """
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def send_to_rank_0(self, content: bytes) -> None:
        """Send bytes to rank 0, which has to call :meth:`receive_from_rank`.

        Does nothing if ``content`` is empty.
        """
        if content:
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), dst=0, group=self._group)

    def receive_from_rank(self, rank: int, nbytes: int) -> bytes:
        """Receive the bytes that a rank sends with :meth:`send_to_rank_0`. Called only on rank 0.

        Args:
            rank: Rank that sends.
            nbytes: Number of bytes to receive. If it is 0, nothing is received.
        """
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            dist.recv(buffer, src=rank, group=self._group)
        return buffer.numpy().tobytes()


def _build_key_entries(planner: DefaultSavePlanner) -> list[KeyEntry]:
    """List the keys of a planner's flattened state dict, with the dtype and shape of each tensor.

    Raises:
        OSError: If a tensor has a dtype that cannot be saved.
    """
    keys = []
    for key, value in planner.state_dict.items():
        dtype = getattr(value, "dtype", None)
        if isinstance(dtype, torch.dtype):
            name = FROM_TORCH.get(str(dtype).removeprefix("torch."))
            if name is None:
                raise OSError(f"{key}: tensors of {dtype} cannot be saved; use another dtype")
            keys.append(KeyEntry(key, planner.mappings[key], name, tuple(value.shape)))
        else:
            keys.append(KeyEntry(key, planner.mappings[key]))
    return keys


class _MergedKeys(NamedTuple):
    """Union of the state dict keys of all ranks.

    Attributes:
        keys: All keys, in order of first occurrence.
    """

    keys: list[KeyEntry]
    holders: Mapping[str, tuple[int, ...]]
    """Ranks that have a key, for each key that at least one rank lacks."""


def _merge_keys(keys_by_rank: Sequence[list[KeyEntry]]) -> _MergedKeys:
    """Merge the state dict keys of all ranks, in order of first occurrence.

    Args:
        keys_by_rank: Keys of each rank, in rank order.

    Raises:
        OSError: If a key has different shapes or dtypes on two ranks.
    """
    merged: dict[str, KeyEntry] = {}
    holders: dict[str, list[int]] = {}
    for rank, keys_of_rank in enumerate(keys_by_rank):
        for entry in keys_of_rank:
            if merged.setdefault(entry.key, entry) != entry:
                raise OSError(
                    f"{entry.key}: the tensor has a different shape or dtype on rank {rank} than on lower "
                    "ranks; build the same model on every rank"
                )
            holders.setdefault(entry.key, []).append(rank)
    incomplete = {key: tuple(ranks) for key, ranks in holders.items() if len(ranks) < len(keys_by_rank)}
    return _MergedKeys(list(merged.values()), incomplete)


def _plan_local_items(
    planner: DefaultSavePlanner, ranks: _SaveCollectives, holders: Mapping[str, tuple[int, ...]]
) -> list[PlannedItem]:
    """Choose the items that this rank writes.

    An item that is replicated on several ranks has one owner among them, and the owner writes it.
    If the item is small, the other ranks with a replica write it as well. A rank that resumes then
    finds the item in its own file. Empty shards are not written. A tensor without elements is
    written only by rank 0.

    The owners are chosen so that each rank with a replica writes about the same number of bytes.
    Every rank computes the same assignment without communication.

    Args:
        planner: DCP's planner, after ``set_up_planner``.
        ranks: Collectives of the save. Only the rank and the world size are used.
        holders: Ranks that have a key, for each key that is not present on all ranks.
    """
    everyone = tuple(range(ranks.world_size))
    # Bytes assigned so far to each rank of a group of replicas. All ranks of the group compute the same
    # numbers.
    loads: dict[tuple[int, ...], list[int]] = {}
    items: list[PlannedItem] = []
    for item in planner.create_local_plan().items:
        data, value = item.tensor_data, planner.state_dict[item.index.fqn]
        if isinstance(value, DTensor):
            replicas = _find_replica_ranks(value)
        elif isinstance(value, torch.Tensor) or data is None:
            replicas = holders.get(item.index.fqn, everyone)
        else:  # a custom planner's type, each of whose pieces exists on only one rank
            replicas = (ranks.rank,)
        is_empty = data is not None and 0 in data.chunk.sizes
        if data is not None and is_empty and (ranks.rank != 0 or 0 not in data.size):
            continue
        nbytes = item.tensor_storage_size() or 1
        load = loads.setdefault(replicas, [0] * len(replicas))
        writer = load.index(min(load))
        load[writer] += nbytes
        is_owner = replicas[writer] == ranks.rank or is_empty
        if is_owner or nbytes <= _MAX_COPIED_BYTES:
            items.append(PlannedItem(item, is_owner))
    return items


def _find_replica_ranks(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks that have the same shard of a DTensor as this rank, including this rank."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(
        slice(None) if placement.is_replicate() else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(mesh.mesh[index].flatten().tolist())
