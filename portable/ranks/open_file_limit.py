"""Raise and check the limit on open files and sockets of a rank's process."""

from __future__ import annotations

import contextlib
import os
import resource

from portable.errors import UserError

_NUM_PROCESS_GROUPS = 2
"""Number of gloo process groups: the default group, and the group for background threads."""
_NUM_OTHER_FILES = 256
"""Assumed number of other open files and pipes, for data, libraries, checkpoints, and data workers."""


def raise_open_file_limit(world_size: int) -> None:
    """Raise the soft limit on open files to the hard limit, and check that it is sufficient.

    The function also sets the environment variable ``TORCH_GLOO_LAZY_INIT``, so that gloo connects
    two ranks only when they communicate. A value that the user has set is kept. Call this function
    before a process group is created.

    Args:
        world_size: Number of ranks.

    Raises:
        UserError: If there are several ranks, and the hard limit is lower than the result of
            :func:`compute_needed_open_files`.
    """
    # Without this variable, each process group of gloo would connect every rank to every other rank.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems refuse their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = compute_needed_open_files(world_size)
    if limit != resource.RLIM_INFINITY and limit < needed and world_size > 1:
        raise UserError(
            f"RLIMIT_NOFILE: {world_size} ranks need up to {needed} open files and sockets per process, but "
            f"the hard limit is {limit}; raise the limit on every node (as root: ulimit -Hn {needed}, in "
            f"systemd: LimitNOFILE={needed}, with Docker: docker run --ulimit nofile={needed}), or use fewer "
            "ranks"
        )


def compute_needed_open_files(world_size: int) -> int:
    """Compute the maximum number of files and sockets that rank 0 has open. No other rank needs more.

    Rank 0 has a connection to each rank for each process group, for the store, and for failure
    notification.
    """
    return (_NUM_PROCESS_GROUPS + 2) * world_size + _NUM_OTHER_FILES
