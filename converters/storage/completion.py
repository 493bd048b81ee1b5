"""Which folder of an object store is whole, where nothing can be renamed.

A folder that this project writes is *begun* by an object `_INCOMPLETE` and *completed* by an object
`_COMPLETE`, written after everything else; `_INCOMPLETE` goes last. So, at any moment:

| in the folder | it is |
| --- | --- |
| `_COMPLETE` | whole, whether `_INCOMPLETE` is still there or not |
| `_INCOMPLETE` alone | being written, or left by a writer that was killed: never read |
| neither | somebody else's, who marks nothing: read like any other folder |

Stores on which a finished write is seen by every later read and list (S3, Google Cloud Storage, Azure) need
no more than this order.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from converters.storage.store_errors import RemoteError

if TYPE_CHECKING:
    from converters.storage.object_store import RemotePath

COMPLETE, INCOMPLETE = "_COMPLETE", "_INCOMPLETE"


def is_complete(folder: RemotePath) -> bool:
    """Whether this project completed the folder."""
    return (folder / COMPLETE).is_file()


def is_unfinished(folder: RemotePath) -> bool:
    """Whether this project began the folder and did not complete it (yet)."""
    return not is_complete(folder) and (folder / INCOMPLETE).is_file()


def facts_of(folder: RemotePath) -> dict[str, Any]:
    """What the folder's marker tells, of completion or else of the beginning; empty where it has none."""
    for name in (COMPLETE, INCOMPLETE):
        try:
            told = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError):
            return {}
        return told if isinstance(told, dict) else {}
    return {}


def begin(folder: RemotePath, **facts: Any) -> str:
    """Mark the folder as being written, and as complete no longer; one process of a run does this.

    Objects that are there already stay: `remove_tree` first where they should not.

    Args:
        facts: anything worth knowing about the folder if it is never completed; goes into `_INCOMPLETE`.

    Returns:
        A token to give to `complete`, by which a second writer of the same folder is found out.
    """
    token = os.urandom(8).hex()
    said = {**facts, "writer": token, "host": socket.gethostname(), "pid": os.getpid(), "begun": _now()}
    (folder / INCOMPLETE).write_bytes(json.dumps(said).encode())
    (folder / COMPLETE).unlink(missing_ok=True)
    return token


def complete(folder: RemotePath, token: str, **facts: Any) -> None:
    """Mark the folder as whole: after every object in it has been written, by all hosts.

    Args:
        token: what `begin` returned.
        facts: anything worth knowing about the folder; goes into `_COMPLETE`, which is JSON.

    Raises:
        RemoteError: somebody else has begun the same folder meanwhile.
    """
    try:
        writer = json.loads((folder / INCOMPLETE).read_bytes()).get("writer")
    except (FileNotFoundError, ValueError, AttributeError):
        writer = None
    if writer != token:
        raise RemoteError(f"{folder}: another process began to write this folder meanwhile")
    (folder / COMPLETE).write_bytes(json.dumps({**facts, "completed": _now()}).encode())
    (folder / INCOMPLETE).unlink(missing_ok=True)


def remove_tree(folder: RemotePath) -> None:
    """Delete every object below, and abort uploads left open.

    The marker of completion goes first. To clear a folder that may be read meanwhile, `begin` it before:
    `_INCOMPLETE` goes last.
    """
    folder.abort_uploads()
    names = folder.files()
    if COMPLETE in names:
        (folder / COMPLETE).unlink(missing_ok=True)
    folder.remove([name for name in names if name not in (COMPLETE, INCOMPLETE)])
    if INCOMPLETE in names:
        (folder / INCOMPLETE).unlink(missing_ok=True)
    folder.remove_folders()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
