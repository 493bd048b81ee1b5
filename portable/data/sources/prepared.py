"""Tokens that ``portable-data`` wrote ahead of time, as the shards of a stream.

A folder or a place in an object store has ``tokens.json``, the list of shards with their lengths, and
``shards/000000`` and so on, each a token cache. Local ones are read where they are; others are copied into
the cache when they are needed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from converters.storage.places import copy_folder, files_below, in_store
from portable.data.locked_folder import locked_folder
from portable.data.sources.documents import Document, Fields, Source
from portable.data.sources.files import place_with
from portable.data.sources.shard import Shard
from portable.errors import UserError, one_line
from portable.paths import read_json, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from converters.storage.path_or_url import Place
    from portable.data.sources.conversations import Format

FORMAT = 1
INDEX = "tokens.json"
BEGUN = "begun.json"
TOKENIZER = "tokenizer"
LAST = "meta.json"
"""The file of a shard that is written last."""


@dataclass(frozen=True)
class Index:
    """What ``tokens.json`` says.

    Attributes:
        made: a digest of the tokenizer and of what it puts around texts.
        kind: the format of the records.
        shards: documents, tokens and fingerprint of each; 0, 0 and nothing for one without text.
    """

    made: str
    kind: Format
    shards: tuple[tuple[int, int, str], ...]

    def text(self) -> str:
        content = {"format": FORMAT, "made": self.made, "kind": self.kind, "shards": self.shards}
        return json.dumps(content) + "\n"


def prepared_place(name: str) -> Place | None:
    """The place that ``name`` means, if ``portable-data`` has written it."""
    return place_with(name, INDEX)


def shard_folder(place: Place, number: int) -> Place:
    return place / "shards" / f"{number:06}"


def read_index(place: Place) -> Index:
    """The list of shards at ``place``.

    Raises:
        UserError: if it is damaged.
    """
    try:
        with storage_errors("data.source"):
            found = read_json(place / INDEX)
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, not {FORMAT}")
        shards = tuple((int(n), int(tokens), str(print_)) for n, tokens, print_ in found["shards"])
        return Index(str(found["made"]), found["kind"], shards)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"data.source: {place / INDEX}: damaged ({one_line(error)}); run portable-data again"
        ) from error


def prepared_shards(place: Place) -> Iterator[Shard]:
    index = read_index(place)
    for number, (documents, tokens, print_) in enumerate(index.shards):
        folder = shard_folder(place, number)
        opened = partial(PreparedShard, folder, documents, print_, index)
        yield Shard(opened, f"{number} {print_}", 4 * tokens, tokens, print_)


def prepared_tokenizer(place: Place, cache: Path) -> Path:
    """The folder of the tokenizer that made the tokens; from an object store, a copy in ``cache``."""
    folder = place / TOKENIZER
    if not in_store(folder):
        return folder
    with storage_errors("data.source"):
        name = hashlib.blake2b(f"{folder} {files_below(folder)}".encode(), digest_size=16).hexdigest()
        copy = cache / "tokenizers" / name
        if not copy.is_dir():
            with locked_folder(copy) as draft:
                copy_folder(folder, draft.path)
                draft.commit()
    return copy


class PreparedShard(Source):
    """A shard that is tokenized already."""

    tokenized = True

    def __init__(self, folder: Place, documents: int, fingerprint: str, index: Index, fields: Fields) -> None:
        self.name = str(folder)
        self.downloads = in_store(folder)
        self.made = index.made
        self._documents = documents
        self._folder = folder
        self._print = fingerprint
        self._kind = index.kind

    @property
    def key(self) -> str:
        return hashlib.blake2b(f"{self.made} {self._print}".encode(), digest_size=16).hexdigest()

    @property
    def size_bytes(self) -> None:
        return None

    def recognised(self, fields: Fields) -> Format:
        if fields.format not in (None, self._kind):
            raise UserError(f"data.format: {self.name} was made of {self._kind}; set it to that, or auto")
        return self._kind

    def documents(self) -> Iterator[Document]:
        raise UserError(
            f"data.tokenizer: {self.name} has tokens and no text; set it to the tokenizer that made them"
        )

    def check(self) -> None:
        """A no-op: the list of shards was read."""

    def local(self, cache: Path) -> Path:
        """The folder with the tokens; from an object store, a copy in ``cache``.

        Raises:
            UserError: if it is missing. NoTextError: if it has no document.
        """
        if not self._documents:
            raise self.no_text()
        folder = self._folder
        if not in_store(folder):
            return folder
        copy = cache / self.key
        if (copy / LAST).is_file():
            return copy
        with storage_errors("data.source"), locked_folder(copy) as draft:
            if not (copy / LAST).is_file():
                if not (folder / LAST).is_file():
                    raise UserError(f"data.source: {folder}: is not there; run portable-data again")
                copy_folder(folder, draft.path)
                draft.commit()
        return copy
