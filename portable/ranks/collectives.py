"""Small collectives on host data, over the gloo process group; whether ranks have the same settings."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
import transformers

from portable.config import RunConfig, keys
from portable.config.origins import shown
from portable.errors import RUN_ERROR, USER_ERROR, ReportedElsewhereError, UserError, one_line
from portable.private import of_torch
from portable.terminal import native_stdout_closed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.backend import Backend

T = TypeVar("T")
_ERROR_KEY = "portable/error-of-a-rank"

# Never freed. Gloo's threads release a collective's tensors shortly after it ends. Releasing the last
# reference needs the GIL, which the main thread holds while it destroys the process group and joins those
# threads: a deadlock.
_FLAG = torch.zeros((), dtype=torch.int32)


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on any rank. A collective call and a barrier."""
    if not dist.is_initialized():
        return flag
    _FLAG.fill_(int(flag))
    dist.all_reduce(_FLAG, op=dist.ReduceOp.MAX)
    return bool(_FLAG.item())


def gather_text(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Gather ``text`` of all ranks in rank order. A collective call, of ``group`` or of the default one."""
    if not dist.is_initialized():
        return [text]
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts


def all_or_none(outcome: T | UserError) -> T:
    """Return ``outcome`` unless any rank passes a UserError. A collective call.

    Raises:
        UserError: on the lowest rank with an error.
        ReportedElsewhereError: on the other ranks.
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
    """Publish this rank's error so that its peers report the cause instead of a timeout.

    Call it if other ranks may not raise the same error. Their next collective fails when this process exits,
    and they read the cause with :func:`peer_error`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    code = USER_ERROR if isinstance(error, UserError) else RUN_ERROR
    with suppress(Exception):  # the rank that hosts the store may be dead
        store = of_torch.default_store()
        if not store.check([_ERROR_KEY]):
            store.set(_ERROR_KEY, json.dumps({"code": code, "message": one_line(error)}))


def peer_error() -> ReportedElsewhereError | None:
    """Return the error that another rank has published, or None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with suppress(Exception):
        store = of_torch.default_store()
        if store.check([_ERROR_KEY]):
            published = json.loads(store.get(_ERROR_KEY))
            return ReportedElsewhereError(published["message"], published["code"])
    return None


def background_group(ranks: list[int] | None = None) -> dist.ProcessGroup | None:
    """Create a process group for writing files; None in a single process. A collective call of all ranks.

    Its timeout is long because ranks write files at different speeds. A dead rank is detected anyway.

    Args:
        ranks: Ranks of the group; None for all.
    """
    if not dist.is_initialized():
        return None
    with native_stdout_closed():
        group = dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(days=1))
    return cast("dist.ProcessGroup", group)  # of all ranks, so this one is in it


# Paths may differ between hosts. The data itself is compared.
_LOCAL = (
    "output_dir",
    "data.source",
    "data.cache_dir",
    "data.num_workers",
    "checkpoint.staging_dir",
    "memory.nvme_path",
    "log.trackers",
)


def agree(backend: Backend, facts: Mapping[str, Any]) -> None:
    """Compare ``facts``, JSON values by name, over all ranks. A collective call.

    Ranks exchange digests first, and the facts only if the digests differ.

    Raises:
        UserError: on every rank, with the first fact in which a rank differs from rank 0.
    """
    text = json.dumps(facts)
    if len(set(backend.gather(hashlib.blake2b(text.encode()).hexdigest()))) == 1:
        return
    first, *others = [json.loads(other) for other in backend.gather(text)]
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            ours, theirs = first.get(name), other.get(name)
            if ours != theirs:
                raise UserError(
                    f"{name}: {shown(ours)} on rank 0, but {shown(theirs)} on rank {rank}; "
                    "start all ranks with the same settings, files and versions"
                )


def settings_and_versions(config: RunConfig) -> dict[str, Any]:
    """The settings that must be equal on all ranks, and the versions of the libraries."""
    facts = {
        key: keys.plain(config.get(key)) for key in keys.settings(RunConfig) if not key.startswith(_LOCAL)
    }
    versions = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return facts | {f"the version of {name}": version for name, version in versions.items()}
