"""Small agreements between ranks, made over the host's process group (gloo)."""

from __future__ import annotations

import datetime
import json
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist

from portable.errors import RUN_ERROR, USER_ERROR, ReportedElsewhereError, UserError, one_line
from portable.terminal import native_stdout_closed

T = TypeVar("T")
_WORD = "portable/why-a-rank-ended"

# One tensor for the life of the process. Gloo's threads let go of a collective's tensors a moment after it is
# over. Were theirs the last reference they would need Python's lock, which the main thread holds while it
# ends the process group and waits for those threads: neither would ever go on.
_FLAG = torch.zeros((), dtype=torch.int32)


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on any rank; all ranks call it, and none returns before all have."""
    if not dist.is_initialized():
        return flag
    _FLAG.fill_(int(flag))
    dist.all_reduce(_FLAG, op=dist.ReduceOp.MAX)
    return bool(_FLAG.item())


def gather_text(text: str) -> list[str]:
    """What every rank gave, in the order of ranks; all ranks call it."""
    if not dist.is_initialized():
        return [text]
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def all_or_none(outcome: T | UserError) -> T:
    """Return ``outcome``, unless a rank passes a UserError; all ranks call it with what they have.

    Raises:
        UserError: on the first rank with an error, that error.
        ReportedElsewhereError: on the others.
    """
    error = outcome if isinstance(outcome, UserError) else None
    refusals = gather_text("" if error is None else one_line(error))
    first = next((rank for rank, refusal in enumerate(refusals) if refusal), None)
    if error is not None and (not dist.is_initialized() or dist.get_rank() == first):
        raise error
    if first is not None or isinstance(outcome, UserError):
        raise ReportedElsewhereError(refusals[first or 0], USER_ERROR)
    return outcome


def publish_error(error: Exception) -> None:
    """Let the ranks that will wait for this one in vain know why it ends, and give them the time to see.

    To be called on a rank that raises what other ranks may not: their next collective fails when this process
    ends, and they ask :func:`peer_error` what it was.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    code = USER_ERROR if isinstance(error, UserError) else RUN_ERROR
    with suppress(Exception):  # the store may be gone with the rank that kept it
        store = dist.distributed_c10d._get_default_store()
        if not store.check([_WORD]):
            store.set(_WORD, json.dumps({"code": code, "message": one_line(error)}))


def peer_error() -> ReportedElsewhereError | None:
    """What another rank has said before it ended, if one has."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        if store.check([_WORD]):
            word = json.loads(store.get(_WORD))
            return ReportedElsewhereError(word["message"], word["code"])
    return None


def background_group() -> dist.ProcessGroup | None:
    """A group of all ranks for threads that talk to each other while the loop does; None without ranks.

    All ranks call it, before any thread needs it. Ranks write at their own pace, and one that dies is noticed
    at once: so its members wait for long.
    """
    if not dist.is_initialized():
        return None
    with native_stdout_closed():
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
    return group
