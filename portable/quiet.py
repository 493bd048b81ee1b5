"""Warnings of torch that say nothing to a person who runs a training."""

from __future__ import annotations

import warnings


def quiet_checkpoint_warnings() -> None:
    """Drop torch's word on its own use of TypedStorage, and on a single process that saves alone.

    For the whole process, since a save in the background warns from another thread.
    """
    for message in ("TypedStorage is deprecated", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", message=message)
