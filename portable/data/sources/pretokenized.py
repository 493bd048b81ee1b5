"""Source of tokens that ``portable-data`` wrote before training. The tokens are read as a stream.

``portable-data`` writes the tokens to a folder or to a URL. The most important files are:

- ``tokens.json`` lists the shards and their sizes.
- ``shards/000000``, ``shards/000001`` ... are the shards. Each shard is a token cache.

Local shards are opened without a copy. Remote shards are copied to the cache when they are
needed.
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
from portable.data.sources.read_errors import convert_deleted_errors
from portable.data.sources.source import SourceSettings, SourceShard, TokenChunk, TokenSource
from portable.errors import RunError, UserError, to_one_line
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
"""Name of the file that is written last to the folder of a shard. A shard with this file is complete."""


class ShardRecord(NamedTuple):
    """Entry of a shard in ``tokens.json``. The entry of a shard without text is ``(0, 0, "")``.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens.
        fingerprint: Fingerprint of the tokens.
    """

    documents: int
    tokens: int
    fingerprint: str


@dataclass(frozen=True)
class TokenIndex:
    """Content of ``tokens.json``.

    Attributes:
        job_digest: Digest of the settings that determine the tokens, such as the tokenizer and the
            template. See :attr:`TokenizeJob.digest`.
        record_format: Format of the tokenized records.
        shards: Entries of all shards, in order.
    """

    job_digest: str
    record_format: RecordFormat
    shards: tuple[ShardRecord, ...]

    def to_json(self) -> str:
        """Convert the index to the text of ``tokens.json``."""
        content = {
            "format": INDEX_FORMAT,
            "made": self.job_digest,
            "kind": self.record_format,
            "shards": self.shards,
        }
        return json.dumps(content) + "\n"


def get_shard_folder(folder: AnyPath, number: int) -> AnyPath:
    """Return the folder or URL of a shard in ``folder``, such as ``shards/000001``."""
    return folder / "shards" / f"{number:06}"


def read_index(folder: AnyPath) -> TokenIndex:
    """Read ``tokens.json`` in a folder or at a URL.

    Raises:
        UserError: If the file is missing, damaged, or has the format of another version.
        RunError: If the object store is unavailable.
    """
    try:
        with convert_storage_errors("data.source"):
            content = read_json_file(folder / INDEX_FILE)
        if content["format"] != INDEX_FORMAT:
            raise ValueError(
                f"the file has format version {content['format']}, but this program reads version "
                f"{INDEX_FORMAT}"
            )
        shards = tuple(
            ShardRecord(int(documents), int(tokens), str(fingerprint))
            for documents, tokens, fingerprint in content["shards"]
        )
        return TokenIndex(str(content["made"]), content["kind"], shards)
    except (UserError, RunError):
        raise
    except Exception as error:  # the file may contain any values
        raise UserError(
            f"data.source: {folder / INDEX_FILE}: cannot be used ({to_one_line(error)}); run portable-data "
            "again"
        ) from error


def _build_folder_finder(file: str) -> Callable[[Path], Path | None]:
    """Return a function that takes a folder, and returns the folder if it contains ``file``.

    The function returns None if the folder does not contain the file. If ``file`` is
    empty, the folder only has to exist.
    :func:`portable.temporary_folder.open_or_build_cache_folder` uses such a function to open a
    folder.
    """
    return lambda folder: folder if (folder / file).exists() else None


class PretokenizedSource(TokenSource):
    """Source for a folder or URL of tokens that ``portable-data`` has written.

    The source can only be streamed. :meth:`iter_shards` yields a :class:`PretokenizedShard` for
    each shard, and the source itself yields no tokens.

    Args:
        name: Name of the source, used in error messages.
        folder: Folder or URL with ``tokens.json``.
        settings: Settings of the source.
    """

    only_text = ""  # column settings are allowed, because they applied to the records before tokenizing

    def __init__(self, name: str, folder: AnyPath, settings: SourceSettings) -> None:
        super().__init__(name, settings)
        self._place = folder

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> PretokenizedSource | None:
        """Open the source if one of ``names`` is a folder or URL written by ``portable-data``.

        Returns:
            Source for the first folder or URL that contains a ``tokens.json``. None if no folder or
            URL contains it.

        Raises:
            UserError: If such a folder or URL is found, but the source is evaluation data, or
                ``data.stream`` is not set. Also raised if the folder contains an entry
                that is not allowed (see :func:`portable.paths.check_folder_files`), if a URL
                is not valid, or if the store reports an error.
            RunError: If the object store cannot be reached after all retries.
        """
        for name in names:
            if (place := find_folder_with_file(name, INDEX_FILE)) is not None:
                if not is_in_store(place):
                    check_folder_files("data.source", str(place), max_files=None)
                if settings.is_evaluation:
                    raise UserError(
                        f"data.source: {name} contains output of portable-data, which can only be trained "
                        "on; set data.source to the files from which portable-data read the text"
                    )
                if not settings.is_stream:
                    raise UserError(
                        f"data.source: {name} contains output of portable-data, which can only be streamed; "
                        "set data.stream: true"
                    )
                return cls(name, place, settings)
        return None

    def compute_digest(self) -> str:
        """Compute a digest of ``tokens.json``, which contains the fingerprints of all shards."""
        return compute_text_digest(read_index(self._place).to_json())

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        """Yield nothing, because the shards from :meth:`iter_shards` contain the tokens."""
        return iter(())

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Yield each shard that ``portable-data`` has written.

        Shards are not divided into parts, so ``part_bytes`` is ignored.
        """
        index = read_index(self._place)
        for number, (documents, tokens, fingerprint) in enumerate(index.shards):
            folder = get_shard_folder(self._place, number)
            opened = partial(PretokenizedShard, folder, documents, fingerprint, index)
            yield SourceShard(opened, f"{number} {fingerprint}", 4 * tokens, tokens, fingerprint)

    def find_tokenizer_folder(self) -> Path:
        """Return the folder of the tokenizer that ``portable-data`` used.

        If the source is a URL, copies the tokenizer to the cache and returns the folder of the copy.
        """
        folder = self._place / TOKENIZER_FOLDER
        if not is_in_store(folder):
            return folder

        def write(draft: Path) -> None:
            with convert_deleted_errors(folder):
                copy_folder(folder, draft)

        with convert_storage_errors("data.source"):
            cache = self.settings.cache_folder.parent
            copy_path = cache / "tokenizers" / compute_text_digest(f"{folder} {list_files_below(folder)}")
            return open_or_build_cache_folder(copy_path, _build_folder_finder(""), write)


class PretokenizedShard(TokenSource):
    """Source for one shard that ``portable-data`` has tokenized.

    Args:
        folder: Folder or URL of the shard.
        documents: Number of documents. 0 for a shard without text.
        fingerprint: Fingerprint of the shard's tokens.
        index: Content of ``tokens.json``.
        settings: Settings of the source.
    """

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
        """Compute a digest of the shard's fingerprint and of the settings used to tokenize it."""
        return compute_text_digest(f"{self.job_digest} {self._fingerprint}")

    def _determine_record_format(self) -> RecordFormat:
        if self.fields.format not in (None, self._record_format):
            raise UserError(
                f"data.format: {self.name} was created from {self._record_format} records; set data.format "
                f"to {self._record_format} or auto"
            )
        return self._record_format

    def check_readable(self) -> None:
        """Do nothing, because ``tokens.json`` has already been read without an error."""

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        """Yield nothing, because the shard is a token cache that is opened directly.

        See :meth:`find_pretokenized_folder`.
        """
        return iter(())

    def find_pretokenized_folder(self, copies_folder: Path, job_digest: str) -> Path:
        """Return the folder of the shard's token cache. Copies a remote shard to ``copies_folder`` first.

        The folder of a local shard is returned without checking that it exists. See
        :meth:`DataSource.find_pretokenized_folder`.

        Raises:
            UserError: If a remote shard is missing, or if the shard was tokenized with different
                settings.
            NoTextError: If the shard contains no documents.
        """
        if job_digest != self.job_digest:
            raise UserError(
                f"data.tokenizer: {self.name} was created with a different tokenizer, chat template or "
                "data.train_on; use the settings with which portable-data was run"
            )
        if not self._documents:
            raise self.build_no_text_error()
        folder = self._folder
        if not is_in_store(folder):
            return folder

        def write(draft: Path) -> None:
            if not (folder / LAST_FILE).is_file():
                raise UserError(f"data.source: {folder}: does not exist; run portable-data again")
            with convert_deleted_errors(folder):
                copy_folder(folder, draft)

        with convert_storage_errors("data.source"):
            return open_or_build_cache_folder(
                copies_folder / self.cache_key, _build_folder_finder(LAST_FILE), write
            )
