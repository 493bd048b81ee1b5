"""A rendezvous for local ranks: a store of the launcher that listens on the loopback interface only.

torch's rendezvous opens stores on every interface, to which anyone on the network can write, and pickles its
state.
"""

from __future__ import annotations

import datetime
import socket

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

LOOPBACK = "127.0.0.1"
BACKEND = "portable-loopback"
_TIMEOUT = datetime.timedelta(minutes=10)


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one launcher with ranks on the same machine. The ranks use its store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        self._port: int = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            None,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """A no-op: there is only one round."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> str:
    """Register it with torch and return its name."""

    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
