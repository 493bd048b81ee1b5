"""Sources of documents: the standard library, local files, files in an object store, or a hub data set.

A source streams its documents, so a data set may be larger than memory. Its ``key`` is a digest that changes
whenever the documents do, and is cheap enough to compute at every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.storage.object_store import is_url
from converters.storage.path_or_url import without_file
from portable import plugins
from portable.data.sources.documents import Document, Fields, Source, text_only
from portable.data.sources.files import LocalFiles, local_files
from portable.data.sources.hub_files import files_of_folder
from portable.data.sources.library import HubDataset
from portable.data.sources.own_records import OwnRecords
from portable.data.sources.prepared import prepared_place
from portable.data.sources.remote_files import RemoteFiles, remote_files
from portable.data.sources.sharded_tokens import (
    ShardedTokens,
    pieces_of,
    saved_folder,
    saved_source,
    sharded_tokens,
)
from portable.data.sources.standard_library import StandardLibrary
from portable.data.sources.token_files import TokenFiles, names_tokens, token_files
from portable.errors import MissingDataError, UserError
from portable.paths import default_cache_dir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Document", "Fields", "HubDataset", "LocalFiles", "Source", "StandardLibrary", "open_source"]


def open_source(
    source: str | Sequence[str] | None,
    *,
    fields: Fields | None = None,
    config_name: str | None = None,
    split: str | None = None,
    max_samples: int | None = None,
    digests: Path | None = None,
    downloads: Path | None = None,
    remember: bool = True,
) -> Source:
    """Open the source that ``data.source`` names, without reading its contents.

    Args:
        source: as in ``data.source``.
        digests: folder that caches the digests of large local files; None for no cache.
        downloads: folder for copies of remote files; None for the user's cache.
        remember: whether to write to ``digests``.

    Raises:
        UserError: if the source does not exist or cannot be used.
    """
    fields = fields or Fields()
    if max_samples is not None and max_samples < 1:
        raise UserError(f"data.max_samples: {max_samples} is less than 1; give a positive number or null")
    if source is None:
        text_only(fields, "the standard library's sources")
        return StandardLibrary(max_samples)
    names = list(map(without_file, [source] if isinstance(source, str) else source))
    if not names or not all(names):
        raise UserError("data.source: it is empty; set it to a hub data set, files or null")
    if any(map(plugins.names_code, names)):
        if len(names) > 1 or config_name is not None:
            raise UserError(f"data.source: {names[0]}: code of your own stands alone; name nothing else")
        return OwnRecords(names[0], fields, max_samples)
    if len(names) == 1 and (saved := saved_folder(names[0], split or "train")) is not None:
        return saved_source(saved, fields, max_samples, digests, remember)
    if len(names) == 1 and max_samples is None and (sharded := sharded_tokens(names[0])) is not None:
        pieces = pieces_of(sharded[1], names[0])
        return ShardedTokens(sharded[0], pieces, fields, digests, remember)
    if any(map(names_tokens, names)):
        if not all(map(names_tokens, names)) or max_samples is not None:
            raise UserError(f"data.source: {names[0]}: files of tokens stand alone, without data.max_samples")
        tokens = [path for name in names for path in token_files(name)]
        return TokenFiles(", ".join(names), tokens, fields, digests, remember)
    if (made := next((name for name in names if prepared_place(name) is not None), None)) is not None:
        raise UserError(f"data.stream: {made} has tokens of portable-data; set it to true")
    if any(map(is_url, names)):
        downloads = downloads or default_cache_dir() / "downloads"
        return _remote_files(names, fields, config_name, split, max_samples, downloads)
    folders = [files_of_folder(name, config_name, split or "train") for name in names]
    local = [
        local_files(name) if files is None else files for name, files in zip(names, folders, strict=True)
    ]
    if any(files is None for files in local):
        if len(names) == 1:
            return HubDataset(names[0], fields, config_name, split, max_samples)
        missing = names[local.index(None)]
        raise MissingDataError(
            f"data.source: {missing}: no such file or folder (a list may only name local files)"
        )
    if None in folders:
        _without_splits(config_name, split, "local files")
    files = list(dict.fromkeys(path for found in local for path in found or ()))
    return LocalFiles(", ".join(names), files, fields, max_samples, digests, remember)


def _without_splits(config_name: str | None, split: str | None, what: str) -> None:
    """Refuse what says which part of a hub data set is read."""
    for key, given in (("config_name", config_name), ("split", None if split == "train" else split)):
        if given is not None:
            raise UserError(
                f"data.{key}: {given!r} is for a hub data set, but data.source names {what}; remove it"
            )


def _remote_files(
    names: Sequence[str],
    fields: Fields,
    config_name: str | None,
    split: str | None,
    max_samples: int | None,
    downloads: Path,
) -> RemoteFiles:
    if not all(map(is_url, names)):
        raise UserError(
            "data.source: a list may contain URLs or local files, not both; copy one kind to the other"
        )
    _without_splits(config_name, split, "files")
    found = {path: listed for name in names for path, listed in remote_files(name).items()}
    return RemoteFiles(", ".join(names), found, fields, max_samples, downloads)
