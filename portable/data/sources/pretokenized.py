"""Tokens that ``portable-data`` wrote ahead of time, as the shards of a stream.

A folder or a place in an object store has ``tokens.json``, the list of shards with their lengths, and
``shards/000000`` and so on, each a token cache. Local ones are read where they are; others are copied into
the cache when they are needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.storage.folder_operations import copy_folder, files_below
from portable.converters.storage.path_or_url import in_store
from portable.data.sources.documents import Format, compute_digest
from portable.data.sources.listing import find_folder
from portable.data.sources.source import SourceSettings, SourceShard, TokenChunk, TokenSource
from portable.errors import UserError, to_one_line
from portable.paths import check_folder, convert_storage_errors, read_json
from portable.temporary_folder import open_or_build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from portable.converters.storage.path_or_url import Place

FORMAT = 1
INDEX = "tokens.json"
BEGUN = "begun.json"
TOKENIZER = "tokenizer"
LAST = "meta.json"
"""The file of a shard that is written last."""


class ShardRecord(NamedTuple):
    """Size and fingerprint of the tokens of a shard; 0, 0 and "" for a shard without text."""

    documents: int
    tokens: int
    fingerprint: str


@dataclass(frozen=True)
class TokenIndex:
    """What ``tokens.json`` says.

    Attributes:
        made: a digest of the tokenizer and of what it puts around texts.
        kind: the format of the records.
        shards: documents, tokens and fingerprint of each; 0, 0 and nothing for one without text.
    """

    made: str
    kind: Format
    shards: tuple[ShardRecord, ...]

    def to_json(self) -> str:
        content = {"format": FORMAT, "made": self.made, "kind": self.kind, "shards": self.shards}
        return json.dumps(content) + "\n"


def get_shard_folder(place: Place, number: int) -> Place:
    return place / "shards" / f"{number:06}"


def read_index(place: Place) -> TokenIndex:
    """The list of shards at ``place``.

    Raises:
        UserError: if it is damaged.
    """
    try:
        with convert_storage_errors("data.source"):
            content = read_json(place / INDEX)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, not {FORMAT}")
        shards = tuple(
            ShardRecord(int(documents), int(tokens), str(fingerprint))
            for documents, tokens, fingerprint in content["shards"]
        )
        return TokenIndex(str(content["made"]), content["kind"], shards)
    except UserError:
        raise
    except Exception as error:  # the file may hold any values
        raise UserError(
            f"data.source: {place / INDEX}: damaged ({to_one_line(error)}); run portable-data again"
        ) from error


def _build_folder_finder(file: str) -> Callable[[Path], Path | None]:
    """What finds a copied folder by its last file."""
    return lambda folder: folder if (folder / file).exists() else None


class PreparedTokens(TokenSource):
    """A place that ``portable-data`` has written."""

    only_text = ""  # the index says what the tokens were made of

    def __init__(self, name: str, place: Place, settings: SourceSettings) -> None:
        super().__init__(name, settings)
        self._place = place

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> PreparedTokens | None:
        for name in names:
            if (place := find_folder(name, INDEX)) is not None:
                if not in_store(place):
                    check_folder("data.source", str(place))
                if not settings.data.stream:
                    raise UserError(
                        f"data.source: {name} was written by portable-data; set data.stream: true"
                    )
                return cls(name, place, settings)
        return None

    def digest(self) -> str:
        return compute_digest(read_index(self._place).to_json())

    def _read_tokens(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        """None of its own: its shards have them."""
        return iter(())

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        index = read_index(self._place)
        for number, (documents, tokens, print_) in enumerate(index.shards):
            folder = get_shard_folder(self._place, number)
            opened = partial(PreparedShard, folder, documents, print_, index)
            yield SourceShard(opened, f"{number} {print_}", 4 * tokens, tokens, print_)

    def find_tokenizer_folder(self) -> Path:
        folder = self._place / TOKENIZER
        if not in_store(folder):
            return folder
        with convert_storage_errors("data.source"):
            cache = self.settings.cache.parent
            copy_path = cache / "tokenizers" / compute_digest(f"{folder} {files_below(folder)}")
            return open_or_build(copy_path, _build_folder_finder(""), partial(copy_folder, folder))


class PreparedShard(TokenSource):
    """A shard that is tokenized already."""

    only_text = ""

    def __init__(
        self, folder: Place, documents: int, fingerprint: str, index: TokenIndex, settings: SourceSettings
    ) -> None:
        super().__init__(str(folder), settings)
        self.downloads = in_store(folder)
        self.made = index.made
        self._documents = documents
        self._folder = folder
        self._print = fingerprint
        self._kind = index.kind

    def digest(self) -> str:
        return compute_digest(f"{self.made} {self._print}")

    def _detect_format(self) -> Format:
        if self.fields.format not in (None, self._kind):
            raise UserError(f"data.format: {self.name} was made of {self._kind}; set it to that, or auto")
        return self._kind

    def check(self) -> None:
        """A no-op: the list of shards was read."""

    def _read_tokens(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        """None to copy: see :meth:`find_token_cache`."""
        return iter(())

    def find_token_cache(self, cache: Path, digest: str) -> Path:
        if digest != self.made:
            raise UserError(
                f"data.tokenizer: {self.name} was made with another tokenizer, chat template or "
                "data.train_on; set those with which portable-data was run"
            )
        if not self._documents:
            raise self.build_no_text_error()
        folder = self._folder
        if not in_store(folder):
            return folder

        def write(draft: Path) -> None:
            if not (folder / LAST).is_file():
                raise UserError(f"data.source: {folder}: is not there; run portable-data again")
            copy_folder(folder, draft)

        with convert_storage_errors("data.source"):
            return open_or_build(cache / self.key, _build_folder_finder(LAST), write)
