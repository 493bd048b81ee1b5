"""Read Megatron checkpoints: Megatron-Core's `torch_dist` format, and one file per rank.

`core` detects both formats, and `names` converts the tensor names to transformers' names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.converters.storage.folder_operations import list_entry_names

if TYPE_CHECKING:
    from portable.converters.storage.path_or_url import AnyPath

RANK = re.compile(r"mp_rank_(?P<tp>\d{2,6})(?:_(?P<pp>\d{3,6}))?(?P<ep>_\d{3,6})?")
"""Pattern of the name of a rank's folder, such as `mp_rank_00_001`. Each such folder contains one
file.
"""
FILE = "model_optim_rng.pt"
"""Name of the file in each rank's folder."""


def list_rank_folders(path: AnyPath) -> list[str]:
    """List the names of the subfolders of `path` that contain a rank's checkpoint file.

    The name of such a subfolder is, for example, `mp_rank_00_001`.
    """
    return [
        name for name in list_entry_names(path) if RANK.fullmatch(name) and (path / name / FILE).is_file()
    ]
