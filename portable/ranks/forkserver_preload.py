"""Imported first of all by the server that forks data workers: it ends with its rank, and they with it.

Python alone would leave them for ever where a rank is killed: the server waits until nobody holds its pipe,
and its workers hold it, while they wait for the server to end.
"""

from __future__ import annotations

import os

from portable.ranks.parent_death import die_with_parent

_SERVER = os.getpid()


class _Fork:
    """Who forks; a worker's own children are its own affair."""

    parent = _SERVER

    @classmethod
    def before(cls) -> None:
        cls.parent = os.getpid()

    @classmethod
    def in_child(cls) -> None:
        if cls.parent == _SERVER:
            die_with_parent(_SERVER)


die_with_parent()
os.register_at_fork(before=_Fork.before, after_in_child=_Fork.in_child)
