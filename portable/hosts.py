"""Small agreements between ranks, made over the host's process group (gloo)."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from portable.quiet import native_stdout_closed

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
