"""Module preloaded by the fork server of data workers, so that they end when their rank is killed.

Importing the module makes the server die with its rank, and the workers die with the server.
Otherwise, they would outlive a killed rank: the server waits until its pipe is closed, but its
workers keep the pipe open and wait for the server.
"""

from __future__ import annotations

import os

from portable.ranks.parent_death import die_with_parent

_SERVER = os.getpid()


class _Fork:
    """Hooks around each fork. They affect only children of the server, not children of a worker."""

    parent = _SERVER

    @classmethod
    def record_parent(cls) -> None:
        """Record this process as the parent of the next fork. Called in the parent before each fork."""
        cls.parent = os.getpid()

    @classmethod
    def bind_to_server(cls) -> None:
        """Make this process die with the server, if it was forked by the server. Called in the child."""
        if cls.parent == _SERVER:
            die_with_parent(_SERVER)


die_with_parent()
os.register_at_fork(before=_Fork.record_parent, after_in_child=_Fork.bind_to_server)
