"""Small collectives on host data over the gloo process group, and checks that all ranks agree."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
import transformers

from portable.config import RunConfig, keys
from portable.config.origins import format_short_value
from portable.errors import ReportedElsewhereError, RunError, UserError, to_one_line
from portable.terminal import discard_native_stdout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.backend import Backend

T = TypeVar("T")
_background_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""Default process group, and the process group for background threads that was created from it."""

# These buffers are never freed, to avoid a deadlock: gloo's threads release a collective's tensors shortly
# after it ends. Releasing the last reference needs the GIL, which the main thread holds while it destroys the
# process group and joins those threads.
_MAX_NUMBERS = 2
_SUMS, _RECEIVED = (torch.zeros(_MAX_NUMBERS, dtype=torch.float64) for _ in range(2))
_TAG = 72  # separates these messages from other messages between the same ranks
_MAX_RING_RANKS = 64
"""Largest number of ranks for which gloo's ring all-reduce is faster than messages along a binary tree.

A separate message takes about 1.5 ms, and a message of the ring 0.1 ms (``benchmarks/ranks.py``).
"""


def sum_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Sum one or two numbers of each rank over all ranks, on the host.

    All ranks have to call this function, which is also a barrier. With up to 64 ranks, it uses
    gloo's all-reduce, which sends ``2 (ranks - 1)`` messages one after the other. With more ranks,
    the numbers are sent to rank 0 and back along a binary tree, so that a rank waits for only
    ``2 log2(ranks)`` messages. If torch.distributed is not initialized, the numbers are returned
    unchanged. Do not call this function from several threads, because its buffers are shared.

    Args:
        numbers: One or two numbers. All ranks have to pass the same count.

    Returns:
        The sums, bitwise equal on all ranks. Integers are exact up to 2**53.
    """
    if not dist.is_initialized():
        return list(numbers)
    rank, size, count = dist.get_rank(), dist.get_world_size(), len(numbers)
    sums, received = _SUMS[:count], _RECEIVED[:count]
    sums.copy_(torch.tensor(numbers, dtype=torch.float64))
    if size <= _MAX_RING_RANKS:
        dist.all_reduce(sums)
        return cast("list[float]", sums.tolist())
    distance = 1
    while distance < size and rank % (2 * distance) == 0:
        if rank + distance < size:
            dist.recv(received, rank + distance, tag=_TAG)
            sums += received
        distance *= 2
    if rank > 0:
        dist.send(sums, rank - distance, tag=_TAG)
        dist.recv(sums, rank - distance, tag=_TAG)
    while (distance := distance // 2) > 0:
        if rank + distance < size:
            dist.send(sums, rank + distance, tag=_TAG)
    return cast("list[float]", sums.tolist())


def reduce_any(flag: bool) -> bool:
    """Return whether ``flag`` is True on any rank. Acts as a barrier, so all ranks have to call it."""
    return sum_over_ranks([flag])[0] > 0


def gather_text(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Gather a string from every rank of a group. All ranks of the group have to call this function.

    Args:
        text: String of this rank.
        group: Process group. None for the default group.

    Returns:
        The strings in rank order. If torch.distributed is not initialized, a list with only
        ``text``.
    """
    if not dist.is_initialized():
        return [text]
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts


def raise_if_any_rank_failed(outcome: T | UserError | RunError) -> T:
    """Return the result of this rank, or raise an error on all ranks if any rank failed.

    All ranks have to call this function. Only one rank raises the original error, so that it is
    printed once.

    Args:
        outcome: Result of this rank, or the error with which it failed. RunErrors are included,
            because a failure of the network may affect only some ranks.

    Raises:
        UserError: The error of this rank, if this is the lowest rank that failed.
        RunError: The error of this rank, if this is the lowest rank that failed.
        ReportedElsewhereError: If any rank failed, and this rank does not raise the original error.
            It has the exit code of the original error.
    """
    error = outcome if isinstance(outcome, UserError | RunError) else None
    failure = None if error is None else [to_one_line(error), error.exit_code]
    failures = [json.loads(text) for text in gather_text(json.dumps(failure))]
    first = next((rank for rank, reported in enumerate(failures) if reported is not None), None)
    if first is None:
        return cast("T", outcome)
    if error is not None and (not dist.is_initialized() or dist.get_rank() == first):
        raise error
    raise ReportedElsewhereError(*failures[first])


def get_or_create_background_group(ranks: list[int] | None = None) -> dist.ProcessGroup | None:
    """Return a gloo process group for background threads. All ranks have to call this function.

    The group of all ranks is created on the first call and then shared by all threads, because each
    group opens its own sockets. Sharing is safe, because no two threads use it at the same time: a
    checkpoint is uploaded after its shards are written. The group has a timeout of one day, because
    ranks write files at different speeds, and rank failures are detected in another way.

    Args:
        ranks: Ranks of a new group that is not shared. None for the shared group of all ranks.

    Returns:
        The group. None if torch.distributed is not initialized, as in a single process. On a rank
        that is not in ``ranks``, the result is ``dist.GroupMember.NON_GROUP_MEMBER``, which is not
        a process group.
    """
    global _background_group
    world = dist.group.WORLD
    if world is None:
        return None
    if ranks is not None:
        return _build_background_group(ranks)
    if _background_group is None or _background_group[0] is not world:
        _background_group = (world, _build_background_group(None))
    return _background_group[1]


def _build_background_group(ranks: list[int] | None) -> dist.ProcessGroup:
    """Create a gloo group, and discard the messages that gloo prints to stdout.

    The group contains the given ranks, or all ranks if ``ranks`` is None.
    """
    with discard_native_stdout():
        group = dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(days=1))
    return cast("dist.ProcessGroup", group)


_SETTINGS_OF_HOST = (
    "output_dir",
    "data.source",
    "data.cache_dir",
    "data.num_workers",
    "checkpoint.staging_dir",
    "memory.nvme_path",
    "log.trackers",
)
"""Settings that may differ between hosts, such as paths. The data that they refer to is compared
separately."""


def check_ranks_agree(backend: Backend, facts: Mapping[str, Any]) -> None:
    """Check that the values are equal on all ranks. All ranks have to call this function.

    The ranks first exchange digests. They exchange the values only if the digests differ.

    Args:
        backend: Backend of this rank.
        facts: JSON values of this rank, keyed by their names in error messages.

    Raises:
        UserError: On all ranks, if a value on any rank differs from the value on rank 0. The message
            contains the name of the first such value.
    """
    text = json.dumps(facts)
    if len(set(backend.gather_text(hashlib.blake2b(text.encode()).hexdigest()))) == 1:
        return
    first, *others = [json.loads(other) for other in backend.gather_text(text)]
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            value_of_rank_0, value_of_other = first.get(name), other.get(name)
            if value_of_rank_0 != value_of_other:
                raise UserError(
                    f"{name}: the value is {format_short_value(value_of_rank_0)} on rank 0, but "
                    f"{format_short_value(value_of_other)} on rank {rank}; start all ranks with the same "
                    "settings, files and versions"
                )


def collect_values_equal_on_all_ranks(config: RunConfig) -> dict[str, Any]:
    """Collect the settings and library versions that must be equal on all ranks, keyed by name.

    Pass the result to :func:`check_ranks_agree`. Settings that may differ between hosts, such as
    paths, are omitted. These are all settings whose keys begin with a string in
    :data:`_SETTINGS_OF_HOST`, such as ``data.source_prefix``.
    """
    facts = {
        key: keys.to_plain_value(config.get(key))
        for key in keys.get_setting_fields(RunConfig)
        if not key.startswith(_SETTINGS_OF_HOST)
    }
    versions = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return facts | {f"the version of {name}": version for name, version in versions.items()}
