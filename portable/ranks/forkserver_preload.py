"""Make a fork server and its data workers die when their rank is killed.

The fork server preloads this module. After the import, the server dies when its rank dies, and each
worker dies when the server dies. Without this module, the server and the workers would outlive a
killed rank. The server waits for a pipe to be closed before it exits, but the workers inherit this
pipe and keep it open until the server exits.
"""

from __future__ import annotations

import os

from portable.ranks.parent_death import die_with_parent

_SERVER = os.getpid()


class _Fork:
    """Fork hooks that make a data worker die when the fork server dies.

    The fork server is the process that imports this module. It forks the data workers.
    :meth:`record_parent` runs before a fork, and :meth:`bind_to_server` runs in the child process
    after the fork. Processes that a data worker forks inherit the hooks. In these processes, the
    hooks have no effect, because the parent is not the fork server.
    """

    parent = _SERVER

    @classmethod
    def record_parent(cls) -> None:
        """Record this process as the parent of the next fork. Called in the parent before each fork."""
        cls.parent = os.getpid()

    @classmethod
    def bind_to_server(cls) -> None:
        """Make this process die with the fork server, if the fork server is its parent.

        Called in the child process after each fork.
        """
        if cls.parent == _SERVER:
            die_with_parent(_SERVER)


die_with_parent()
os.register_at_fork(before=_Fork.record_parent, after_in_child=_Fork.bind_to_server)
