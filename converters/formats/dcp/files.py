"""The files of a DCP folder, recognised by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from converters.storage.path_or_url import Place

# One `.metadata`, or one per rank where the ranks saved without communicating.
_METADATA = re.compile(r"(?:__\d+)?\.metadata")


def metadata_files(folder: Place) -> list[str]:
    """The names of the metadata files in `folder`; empty where it is no complete DCP folder."""
    try:
        names = [entry.name for entry in folder.iterdir() if _METADATA.fullmatch(entry.name)]
    except OSError:
        return []
    return [".metadata"] if ".metadata" in names else sorted(names)


def is_metadata_file(path: Place) -> bool:
    """Whether `path` is named like DCP metadata."""
    return _METADATA.fullmatch(path.name) is not None
