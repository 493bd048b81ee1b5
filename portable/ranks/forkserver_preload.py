"""Preloaded by the fork server of data workers: the server dies with its rank, and the workers with the
server.

Otherwise they would outlive a killed rank. The server waits until its pipe is closed, but its workers keep
the pipe open and wait for the server.
"""

from __future__ import annotations

import os

from portable.ranks.parent_death import die_with_parent

_SERVER = os.getpid()


class _Fork:
    """The process that forks. Children of a worker are not affected."""

    parent = _SERVER

    @classmethod
    def record_parent(cls) -> None:
        cls.parent = os.getpid()

    @classmethod
    def bind_to_server(cls) -> None:
        if cls.parent == _SERVER:
            die_with_parent(_SERVER)


die_with_parent()
os.register_at_fork(before=_Fork.record_parent, after_in_child=_Fork.bind_to_server)
