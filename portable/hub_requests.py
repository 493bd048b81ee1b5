"""Send requests to the Hugging Face Hub from only one rank of each node.

Even if all files are cached, loading a model sends several requests, and the Hub limits the number
of requests from an IP address. Therefore, on each node, only the first rank that starts to read a
repository sends requests. The other ranks of the node wait for this rank, and then read the files
from the shared cache without requests. The ranks synchronize through a lock file, because the
process group does not exist yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from portable.node_folder import get_node_folder, is_recently_written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
_revisions: dict[str, str] = {}
"""Commit of each repository that this process has read, keyed by type and name, such as ``model org/name``.

The value is an empty string if the commit is unknown.
"""
_holds_lock = False
"""Whether this process holds the lock file of its node."""


def read_hub_once_per_node(name: str, purpose: str, read: Callable[[], T], *, repo_type: str = "model") -> T:
    """Read a Hub repository, so that only one rank of each node sends requests.

    The first call on a node for a repository and purpose may send requests, and the other processes
    of the launch wait for it. If this call raises an exception, the next process may send requests.
    In the 15 minutes after a successful call, further calls run ``read`` in offline mode, in which
    it only reads the cache. If ``read`` fails in offline mode, for example because a file is not
    cached, it is called again without offline mode.

    ``read`` is called directly if ``HF_HUB_OFFLINE`` is set, if ``name`` is a local path, or if
    this process already holds the lock of its node, for example in a nested call.

    Args:
        name: Name of the repository, or a local path.
        purpose: Description of the files that ``read`` reads, such as ``model`` or ``tokenizer``.
            Calls with the same purpose must read the same files.
        read: Function that reads the repository. It may be called twice.
        repo_type: "model" or "dataset".

    Returns:
        The result of ``read``.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _is_path(name) or _holds_lock:
        return read()
    done_marker = get_node_folder() / hashlib.sha256(f"{repo_type}/{name}/{purpose}".encode()).hexdigest()
    try:
        with (get_node_folder() / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases the lock
            if not is_recently_written(done_marker):
                with _mark_lock_held():
                    result = read()
                done_marker.touch()
                return result
        with _force_offline():
            return read()
    except Exception:
        if not is_recently_written(done_marker):
            raise
    finally:
        _revisions[f"{repo_type} {name}"] = _read_revision(name, repo_type)
    return read()  # allow requests, because a file is not in the cache


def get_revisions_read() -> dict[str, str]:
    """Return the commits of the Hub repositories that this process has read.

    Only reads through this module are recorded. Nothing is recorded if ``HF_HUB_OFFLINE`` is set.

    Returns:
        Commits of the branch ``main``, keyed by repository type and name, such as
        ``model org/name``. Repositories whose commit is unknown are omitted.
    """
    return {name: revision for name, revision in _revisions.items() if revision}


def _is_path(name: str) -> bool:
    """Return whether ``name`` is a local path rather than the name of a repository.

    A name is a path if it exists on this machine, if it begins with ``/``, ``.`` or ``~``, or if it
    contains more than one slash.
    """
    try:
        return Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1
    except (OSError, ValueError):  # the name is not a valid path
        return False


def _read_revision(name: str, repo_type: str) -> str:
    """Return the cached commit of a repository's ``main`` branch, or an empty string if it is not cached."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{name.replace('/', '--')}"
    try:
        return (folder / "refs" / "main").read_text("ascii").strip()[:64]
    except (OSError, ValueError):
        return ""


@contextmanager
def _mark_lock_held() -> Iterator[None]:
    """Set ``_holds_lock`` within this context, so that a nested read does not wait for the lock.

    Without the flag, a nested call of :func:`read_hub_once_per_node` would wait forever for the
    lock that its own process holds.
    """
    global _holds_lock
    _holds_lock = True
    try:
        yield
    finally:
        _holds_lock = False


@contextmanager
def _force_offline() -> Iterator[None]:
    """Set ``HF_HUB_OFFLINE`` of huggingface_hub and datasets to True within this context.

    All threads of this process then read only the caches of these libraries. The flag of datasets
    is not set if datasets has not been imported yet.
    """
    from huggingface_hub import constants

    modules = [constants, *(sys.modules[name] for name in ("datasets.config",) if name in sys.modules)]
    before = [getattr(module, "HF_HUB_OFFLINE", False) for module in modules]
    for module in modules:
        vars(module)["HF_HUB_OFFLINE"] = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            vars(module)["HF_HUB_OFFLINE"] = value
