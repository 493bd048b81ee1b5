"""Check that all ranks have the same settings, before a mismatch causes a deadlock."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import TYPE_CHECKING, Any

import torch
import transformers

from portable.config import RunConfig, keys
from portable.config.origins import shown
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.backend import Backend

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
