"""Connect the ranks of a launch through a shared store of torch.distributed.

When torchrun restarts the ranks after a failure, it starts a new attempt, which uses other keys in
the store.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

if TYPE_CHECKING:
    import datetime

_JOIN_KEY, _START_KEY, _READY_KEY = "portable/join", "portable/start", "portable/ready"
_POLL_SECONDS = 0.1  # how often rank 0 checks which ranks have joined


class Rendezvous(NamedTuple):
    """Arguments of ``init_process_group`` that :func:`join_rendezvous` returns."""

    store: Any
    """Store of torch.distributed that all ranks share."""
    rank: int
    world_size: int


def join_rendezvous(timeout: datetime.timedelta) -> Rendezvous:
    """Connect to the store whose address is in the launcher's environment variables.

    All ranks have to call this function. torchrun keeps its store when it restarts the ranks. Under
    torchrun, the keys therefore get a different prefix after each restart, so that no rank reads
    addresses from before the restart.

    Args:
        timeout: Time limit for all ranks to connect.

    Returns:
        The store, the rank of this process, and the number of ranks.

    Raises:
        dist.DistError: If the ranks do not connect within ``timeout``, or if the port of the store
            is already in use.
    """
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))  # type: ignore[attr-defined]
    if "TORCHELASTIC_RUN_ID" in os.environ and world_size > 1:
        attempt = agree_on_attempt_name(store, rank, world_size, timeout)
        store = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    return Rendezvous(store, rank, world_size)


def agree_on_attempt_name(store: Any, rank: int, world_size: int, timeout: datetime.timedelta) -> str:
    """Agree with the other ranks on a name for this attempt.

    An attempt begins each time torchrun starts or restarts the ranks. All ranks have to call this
    function. The store may still contain keys of previous attempts, so a name under a fixed key
    could be outdated. Instead, every rank except rank 0 stores a random number, and rank 0 answers
    with the name under a key that contains this number. Rank 0 chooses the name at random, and
    continues to answer until all ranks have confirmed. ``TORCHELASTIC_RESTART_COUNT`` is unsuitable
    as a name, because each node counts its own restarts.

    Args:
        store: Store of torch.distributed that all ranks share.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Time limit for all ranks to join.

    Returns:
        The name, which is the same on all ranks.

    Raises:
        dist.DistStoreError: If the ranks do not join within ``timeout``.
    """
    if rank > 0:
        number = uuid.uuid4().hex
        store.set(f"{_JOIN_KEY}/{rank}", number)
        store.wait([f"{_START_KEY}/{number}"], timeout)
        attempt: str = store.get(f"{_START_KEY}/{number}").decode()
        store.add(f"{_READY_KEY}/{attempt}", 1)
        return attempt
    attempt, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    ranks = [f"{_JOIN_KEY}/{other}" for other in range(1, world_size)]
    store.wait(ranks, timeout)
    answered: set[bytes] = set()
    while store.add(f"{_READY_KEY}/{attempt}", 0) < world_size - 1:
        for number in set(store.multi_get(ranks)) - answered:
            store.set(f"{_START_KEY}/{number.decode()}", attempt)
            answered.add(number)
        if time.monotonic() > end:
            raise dist.DistStoreError(f"not all {world_size} ranks joined within {timeout}; read their logs")
        time.sleep(_POLL_SECONDS)
    return attempt
