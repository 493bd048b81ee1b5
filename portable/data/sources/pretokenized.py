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

from portable.converters.storage.folder_operations import copy_folder, list_files_below
from portable.converters.storage.path_or_url import is_in_store
from portable.data.sources.documents import RecordFormat, compute_text_digest
from portable.data.sources.listing import find_folder_with_file
from portable.data.sources.source import SourceSettings, SourceShard, TokenChunk, TokenSource
from portable.errors import UserError, to_one_line
from portable.paths import check_folder_files, convert_storage_errors, read_json_file
from portable.temporary_folder import open_or_build_cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from portable.converters.storage.path_or_url import AnyPath

INDEX_FORMAT = 1
INDEX_FILE = "tokens.json"
BEGUN_FILE = "begun.json"
TOKENIZER_FOLDER = "tokenizer"
LAST_FILE = "meta.json"
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
        job_digest: a digest of the tokenizer and of what it puts around texts.
        record_format: the format of the records.
        shards: documents, tokens and fingerprint of each; 0, 0 and nothing for one without text.
    """

    job_digest: str
    record_format: RecordFormat
    shards: tuple[ShardRecord, ...]

    def to_json(self) -> str:
        content = {
            "format": INDEX_FORMAT,
            "made": self.job_digest,
            "kind": self.record_format,
            "shards": self.shards,
        }
        return json.dumps(content) + "\n"


def get_shard_folder(folder: AnyPath, number: int) -> AnyPath:
    return folder / "shards" / f"{number:06}"


def read_index(folder: AnyPath) -> TokenIndex:
    """The list of shards at ``folder``.

    Raises:
        UserError: if it is damaged.
    """
    try:
        with convert_storage_errors("data.source"):
            content = read_json_file(folder / INDEX_FILE)
        if content["format"] != INDEX_FORMAT:
            raise ValueError(f"format {content['format']}, not {INDEX_FORMAT}")
        shards = tuple(
            ShardRecord(int(documents), int(tokens), str(fingerprint))
            for documents, tokens, fingerprint in content["shards"]
        )
        return TokenIndex(str(content["made"]), content["kind"], shards)
    except UserError:
        raise
    except Exception as error:  # the file may hold any values
        raise UserError(
            f"data.source: {folder / INDEX_FILE}: damaged ({to_one_line(error)}); run portable-data again"
        ) from error


def _build_folder_finder(file: str) -> Callable[[Path], Path | None]:
    """What finds a copied folder by its last file."""
    return lambda folder: folder if (folder / file).exists() else None


class PretokenizedSource(TokenSource):
    """A place that ``portable-data`` has written."""

    only_text = ""  # the index says what the tokens were made of

    def __init__(self, name: str, folder: AnyPath, settings: SourceSettings) -> None:
        super().__init__(name, settings)
        self._place = folder

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> PretokenizedSource | None:
        for name in names:
            if (place := find_folder_with_file(name, INDEX_FILE)) is not None:
                if not is_in_store(place):
                    check_folder_files("data.source", str(place))
                if not settings.data.stream:
                    raise UserError(
                        f"data.source: {name} was written by portable-data; set data.stream: true"
                    )
                return cls(name, place, settings)
        return None

    def compute_digest(self) -> str:
        return compute_text_digest(read_index(self._place).to_json())

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        """None of its own: its shards have them."""
        return iter(())

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        index = read_index(self._place)
        for number, (documents, tokens, fingerprint) in enumerate(index.shards):
            folder = get_shard_folder(self._place, number)
            opened = partial(PretokenizedShard, folder, documents, fingerprint, index)
            yield SourceShard(opened, f"{number} {fingerprint}", 4 * tokens, tokens, fingerprint)

    def find_tokenizer_folder(self) -> Path:
        folder = self._place / TOKENIZER_FOLDER
        if not is_in_store(folder):
            return folder
        with convert_storage_errors("data.source"):
            cache = self.settings.cache_folder.parent
            copy_path = cache / "tokenizers" / compute_text_digest(f"{folder} {list_files_below(folder)}")
            return open_or_build_cache_folder(
                copy_path, _build_folder_finder(""), partial(copy_folder, folder)
            )


class PretokenizedShard(TokenSource):
    """A shard that is tokenized already."""

    only_text = ""

    def __init__(
        self, folder: AnyPath, documents: int, fingerprint: str, index: TokenIndex, settings: SourceSettings
    ) -> None:
        super().__init__(str(folder), settings)
        self.downloads_to_read = is_in_store(folder)
        self.job_digest = index.job_digest
        self._documents = documents
        self._folder = folder
        self._fingerprint = fingerprint
        self._record_format = index.record_format

    def compute_digest(self) -> str:
        return compute_text_digest(f"{self.job_digest} {self._fingerprint}")

    def _detect_format(self) -> RecordFormat:
        if self.fields.format not in (None, self._record_format):
            raise UserError(
                f"data.format: {self.name} was made of {self._record_format}; set it to that, or auto"
            )
        return self._record_format

    def check_readable(self) -> None:
        """A no-op: the list of shards was read."""

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        """None to copy: see :meth:`find_pretokenized_folder`."""
        return iter(())

    def find_pretokenized_folder(self, copies_folder: Path, job_digest: str) -> Path:
        if job_digest != self.job_digest:
            raise UserError(
                f"data.tokenizer: {self.name} was made with another tokenizer, chat template or "
                "data.train_on; set those with which portable-data was run"
            )
        if not self._documents:
            raise self.build_no_text_error()
        folder = self._folder
        if not is_in_store(folder):
            return folder

        def write(draft: Path) -> None:
            if not (folder / LAST_FILE).is_file():
                raise UserError(f"data.source: {folder}: is not there; run portable-data again")
            copy_folder(folder, draft)

        with convert_storage_errors("data.source"):
            return open_or_build_cache_folder(
                copies_folder / self.cache_key, _build_folder_finder(LAST_FILE), write
            )
