"""The files of a DCP folder, recognized by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from converters.storage.places import names_in

if TYPE_CHECKING:
    from converters.storage.path_or_url import Place

# One `.metadata`, or one per rank where the ranks saved without communicating.
_METADATA = re.compile(r"(?:__\d+)?\.metadata")


def metadata_files(folder: Place) -> list[str]:
    """The names of the metadata files in `folder`; empty where it is no complete DCP folder."""
    names = [name for name in names_in(folder) if _METADATA.fullmatch(name)]
    return [".metadata"] if ".metadata" in names else names


def is_metadata_file(path: Place) -> bool:
    """Whether `path` is named like DCP metadata."""
    return _METADATA.fullmatch(path.name) is not None
