"""Mark whether a folder in an object store is complete.

An object store cannot rename a folder after all of its files have been written. Therefore, this
package first writes an object `_INCOMPLETE`, then the files, and then an object `_COMPLETE`.
Finally, it deletes `_INCOMPLETE`. The state of a folder is thus always clear:

| the folder contains | state |
| --- | --- |
| `_COMPLETE` | complete, even if `_INCOMPLETE` still exists |
| only `_INCOMPLETE` | being written or deleted, left by an interruption, or damaged: never read |
| neither | written by another program: read like any other folder |

This order requires a store with strong read-after-write and list consistency, such as S3, Google
Cloud Storage, and Azure.
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
    """Mark a folder in an object store as incomplete, because it is being written or deleted, or damaged.

    Only one process of a run may call this function, before any process writes into the folder. The
    marker `_COMPLETE` is deleted, but other existing objects are not. To delete them, call
    `folder_operations.remove_folder` first.

    Args:
        folder: Folder to mark.
        facts: Values to store in `_INCOMPLETE` as JSON, in addition to the host, the process ID, and
            the time. They help to find out which program left a folder incomplete.

    Returns:
        Token to pass to `mark_folder_complete`, which uses it to detect a second writer.
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
    """Mark a folder in an object store as complete.

    Call this function in one process, after all processes have written their objects. It does not
    wait for them.

    Args:
        folder: Folder to mark.
        token: Return value of `mark_folder_incomplete`.
        facts: Values to store in `_COMPLETE` as JSON.

    Raises:
        RemoteError: If another process has since called `mark_folder_incomplete` for the same
            folder, or if the marker `_INCOMPLETE` has been deleted.
    """
    if read_json_object_or_empty(folder / INCOMPLETE_MARKER).get("writer") != token:
        raise RemoteError(
            f"{folder}: another process has begun to write to this folder; use a separate output "
            "folder for each run"
        )
    (folder / COMPLETE_MARKER).write_bytes(json.dumps({**facts, "completed": _format_utc_time()}).encode())
    (folder / INCOMPLETE_MARKER).unlink(missing_ok=True)


def _format_utc_time() -> str:
    """Return the current UTC time in ISO format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
