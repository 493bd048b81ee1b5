"""Small agreements between ranks, made over the host's process group (gloo)."""

from __future__ import annotations

import datetime
import json
from contextlib import suppress

import torch
import torch.distributed as dist

from portable.errors import RUN_ERROR, USER_ERROR, ToldElsewhereError, UserError, one_line
from portable.terminal import native_stdout_closed

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


def refuse_together(error: UserError | None) -> None:
    """End on all ranks where one has refused; all ranks call it, with what they have found.

    Raises:
        UserError: on the first rank that refused, ``error``.
        ToldElsewhereError: on the others.
    """
    refusals = gather_text("" if error is None else one_line(error))
    first = next((rank for rank, told in enumerate(refusals) if told), None)
    if first is None:
        return
    if error is not None and (not dist.is_initialized() or dist.get_rank() == first):
        raise error
    raise ToldElsewhereError(refusals[first], USER_ERROR)


def leave_word(error: Exception) -> None:
    """Let the ranks that will wait for this one in vain know why it ends, and give them the time to see.

    To be called on a rank that raises what other ranks may not: their next collective fails when this process
    ends, and they ask :func:`word_left` what it was.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    code = USER_ERROR if isinstance(error, UserError) else RUN_ERROR
    with suppress(Exception):  # the store may be gone with the rank that kept it
        store = dist.distributed_c10d._get_default_store()
        if not store.check([_WORD]):
            store.set(_WORD, json.dumps({"code": code, "message": one_line(error)}))


def word_left() -> ToldElsewhereError | None:
    """What another rank has said before it ended, if one has."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        if store.check([_WORD]):
            word = json.loads(store.get(_WORD))
            return ToldElsewhereError(word["message"], word["code"])
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
