"""Send requests to the Hugging Face hub from only one rank of each node.

Even if all files are cached, loading a model sends several requests, and the hub limits the number
of requests from an IP address. Therefore, the first rank of a node that needs a repository sends
the requests. The other ranks of the node wait, and then read the files from the shared cache
without requests. The ranks synchronize through a lock file, because the process group does not
exist yet.
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
"""Commits of the repositories that this process has read, keyed by type and name, such as ``model org/name``.

The value is an empty string if the commit is unknown.
"""
_holds_lock = False
"""Whether this process holds the lock file of its node."""


def read_hub_once_per_node(name: str, purpose: str, read: Callable[[], T], *, repo_type: str = "model") -> T:
    """Call a function that reads a hub repository, so that only one rank of each node sends requests.

    The first call on a node for a repository and purpose may send requests, and the other processes of
    the launch wait for it. Later calls run ``read`` in offline mode, in which it only reads the cache.
    If ``read`` fails in offline mode, for example because a file is not cached, it is called again with
    requests.

    Args:
        name: Name of the repository. If it is a local folder, ``read`` is called without these
            restrictions.
        purpose: Description of the files that ``read`` reads, such as ``model`` or ``tokenizer``. Calls
            with the same purpose must read the same files.
        read: Function that reads the repository.
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
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
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
    return read()  # again with requests, because a file is not in the cache


def get_revisions_read() -> dict[str, str]:
    """Return the commits of the hub repositories that this process has read through this module.

    Returns:
        Commits, keyed by repository type and name, such as ``model org/name``. Repositories whose
        commit is unknown are omitted.
    """
    return {name: revision for name, revision in _revisions.items() if revision}


def _is_path(name: str) -> bool:
    """Return whether ``name`` is a local path instead of the name of a repository."""
    try:
        return Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1
    except (OSError, ValueError):  # not a possible path
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
    """Set ``_holds_lock`` within this context. Otherwise, a nested call would wait for the lock forever."""
    global _holds_lock
    _holds_lock = True
    try:
        yield
    finally:
        _holds_lock = False


@contextmanager
def _force_offline() -> Iterator[None]:
    """Make huggingface_hub and datasets read only their caches within this context."""
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
