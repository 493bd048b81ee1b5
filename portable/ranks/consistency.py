"""Ranks that were not started alike are told so, before one of them waits for what another will not do."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Any

import torch
import transformers

from portable.config import RunConfig, keys
from portable.config.problems import shown
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.backend import Backend

# Where a host keeps its files, and how it reads them, is its own affair; the text itself is compared.
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
    """Compare ``facts``, which are plain JSON values by name, over all ranks; all of them call it.

    Raises:
        UserError: on every rank alike, with the first fact in which a rank differs from rank 0.
    """
    first, *others = [json.loads(text) for text in backend.gather(json.dumps(facts))]
    for rank, other in enumerate(others, start=1):
        for name in first | other:
            ours, theirs = first.get(name), other.get(name)
            if ours != theirs:
                raise UserError(
                    f"{name}: {shown(ours)} on rank 0, but {shown(theirs)} on rank {rank}; "
                    "start all ranks with the same settings, files and versions"
                )


def settings_and_versions(config: RunConfig) -> dict[str, Any]:
    """What must be the same before anything else can be."""
    facts = {
        key: keys.plain(config.get(key)) for key in keys.settings(RunConfig) if not key.startswith(_LOCAL)
    }
    versions = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return facts | {f"the version of {name}": version for name, version in versions.items()}
