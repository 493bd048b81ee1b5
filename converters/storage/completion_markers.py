"""Completion markers: which folder of an object store is complete, where nothing can be renamed.

This project begins a folder with an object `_INCOMPLETE`, and completes it with an object `_COMPLETE` after
everything else; `_INCOMPLETE` is deleted last. So, at any moment:

| the folder holds | state |
| --- | --- |
| `_COMPLETE` | complete, whether `_INCOMPLETE` is still there or not |
| `_INCOMPLETE` alone | being written, or left by a killed writer: never read |
| neither | written by another program: read like any other folder |

This order is enough on stores with strong read-after-write and list consistency (S3, Google Cloud Storage,
Azure).
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.storage.store_errors import RemoteError

if TYPE_CHECKING:
    from portable.converters.storage.object_store import RemotePath

COMPLETE_MARKER, INCOMPLETE_MARKER = "_COMPLETE", "_INCOMPLETE"


def mark_folder_incomplete(folder: RemotePath, **facts: Any) -> str:
    """Mark the folder as being written and no longer complete. One process of a run calls this.

    Existing objects stay; call `places.remove_folder` first to delete them.

    Args:
        facts: stored in `_INCOMPLETE`, for finding out who left a folder unfinished.

    Returns:
        A token for `mark_folder_complete`, which detects a second writer of the same folder by it.
    """
    token = os.urandom(8).hex()
    content = {
        **facts,
        "writer": token,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "begun": _format_utc_time(),
    }
    (folder / INCOMPLETE_MARKER).write_bytes(json.dumps(content).encode())
    (folder / COMPLETE_MARKER).unlink(missing_ok=True)
    return token


def mark_folder_complete(folder: RemotePath, token: str, **facts: Any) -> None:
    """Mark the folder as complete, after all hosts have written every object in it.

    Args:
        token: what `mark_folder_incomplete` returned.
        facts: stored in `_COMPLETE` as JSON.

    Raises:
        RemoteError: another process has begun the same folder since.
    """
    if read_json_object_or_empty(folder / INCOMPLETE_MARKER).get("writer") != token:
        raise RemoteError(
            f"{folder}: another process began to write this folder; give each run an output of its own"
        )
    (folder / COMPLETE_MARKER).write_bytes(json.dumps({**facts, "completed": _format_utc_time()}).encode())
    (folder / INCOMPLETE_MARKER).unlink(missing_ok=True)


def _format_utc_time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
