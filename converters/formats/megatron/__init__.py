"""Megatron's two formats: `core` finds them, `names` has transformers' names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.converters.storage.folder_operations import list_entry_names

if TYPE_CHECKING:
    from portable.converters.storage.path_or_url import AnyPath

RANK = re.compile(r"mp_rank_(?P<tp>\d{2,6})(?:_(?P<pp>\d{3,6}))?(?P<ep>_\d{3,6})?")
"""The folder of a rank, where each has a file of its own."""
FILE = "model_optim_rng.pt"


def list_rank_folders(path: AnyPath) -> list[str]:
    """The folders of ranks in a folder."""
    return [
        name for name in list_entry_names(path) if RANK.fullmatch(name) and (path / name / FILE).is_file()
    ]
