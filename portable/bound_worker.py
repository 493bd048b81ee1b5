"""Imported first of all by the server that forks data workers: it ends with its rank, and they with it.

Python alone would leave them for ever where a rank is killed: the server waits until nobody holds its pipe,
and its workers hold it, while they wait for the server to end.
"""

from __future__ import annotations

import os

from portable.bound import die_with_parent

_SERVER = os.getpid()

die_with_parent()
os.register_at_fork(after_in_child=lambda: die_with_parent(_SERVER))
