"""Source for token files (.bin) written by nanoGPT, llm.c or Megatron-LM.

The tokens and their document boundaries are copied into the token cache once. The cache stores
checksums, so a run can detect damaged tokens. Document boundaries are read from the .idx file of a
Megatron-LM file. Without an .idx file, a document is assumed to end after each end token of the
tokenizer.
"""

from __future__ import annotations

import glob
import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portable.data.sources.files import compute_file_digest
from portable.data.sources.read_errors import build_unreadable_error
from portable.data.sources.source import SourceSettings, SourceShard, TokenChunk, TokenSource
from portable.errors import MissingDataError, UserError
from portable.paths import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

_CHUNK = 1 << 22  # tokens yielded at a time
_LLM_C: dict[tuple[int, int], np.dtype[Any]] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
"""Dtype of the tokens, keyed by the magic number and version in an llm.c file."""
_LLM_C_HEADER = 256 * 4
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def is_token_file(name: str) -> bool:
    """Return whether a name is a local path or pattern that ends with ``.bin``."""
    return name.endswith(".bin") and "://" not in name


@dataclass(frozen=True)
class _TokenFileLayout:
    """Layout of a token file.

    Attributes:
        dtype: Data type of the tokens.
        start_byte: Byte offset of the first token.
        num_tokens: Number of tokens.
        document_lengths: Number of tokens in each document, int64. None if the file stores no
            boundaries.
    """

    dtype: np.dtype[Any]
    start_byte: int
    num_tokens: int
    document_lengths: npt.NDArray[np.int64] | None = None


class TokenFilesSource(TokenSource):
    """Source for local token files, which are read in order.

    A file with an ``.idx`` file next to it is read as a file of Megatron-LM. A file with the header
    of llm.c is read as a file of llm.c. Any other file is read as a file of nanoGPT, which contains
    only 16-bit tokens.

    Args:
        name: Name of the source, used in error messages.
        files: Paths of the ``.bin`` files.
        settings: Settings of the source.
    """

    def __init__(self, name: str, files: Sequence[Path], settings: SourceSettings) -> None:
        super().__init__(name, settings)
        self._files = tuple(files)

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> TokenFilesSource | None:
        """Open the files if the names are local paths or patterns that end with ``.bin``.

        Returns:
            The source. None if no name is such a path or pattern. URLs do not count.

        Raises:
            UserError: If only some names are such paths or patterns, if ``data.max_samples`` is
                set, or if the settings refer to a column or to a format other than text.
            MissingDataError: If a file does not exist.
        """
        if not any(map(is_token_file, names)):
            return None
        if not all(map(is_token_file, names)):
            raise UserError(
                f"data.source: {names[0]}: token files cannot be mixed with other files; specify only token "
                "files"
            )
        if settings.data.max_samples is not None:
            raise UserError(
                f"data.max_samples: does not work with token files such as {names[0]}; remove "
                "data.max_samples"
            )
        return cls(", ".join(names), [path for name in names for path in list_token_files(name)], settings)

    def compute_digest(self) -> str:
        """Compute a digest of the contents of all files and of their ``.idx`` files."""
        digest = hashlib.blake2b(b"tokens", digest_size=16)
        for path in self._files:
            digest.update(compute_file_digest(path, self.settings))
            if _get_index_path(path).is_file():
                digest.update(compute_file_digest(_get_index_path(path), self.settings))
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        """Total number of tokens, not bytes, because the progress bar counts tokens for this source."""
        return sum(_read_layout(path).num_tokens for path in self._files)

    @property
    def stored_bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(path.stat().st_size for path in self._files)

    def check_readable(self) -> None:
        """Check that the layout of each file can be read.

        Raises:
            UserError: If a file cannot be read, if its index is damaged, or if its size does not
                match its layout.
        """
        for path in self._files:
            _read_layout(path)

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        for path in self._files:
            yield from _iter_file_chunks(path, vocab_size, end)

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Yield each file as one shard of a stream.

        Files are not divided into parts, so ``part_bytes`` is ignored.
        """
        for path in self._files:
            size = path.stat().st_size
            yield SourceShard(partial(TokenFilesSource, str(path), [path]), f"{path.name} {size}", size)


def check_token_ids(tokens: npt.NDArray[Any], vocab_size: int, path: object) -> None:
    """Check that all token ids are in the vocabulary of the tokenizer.

    Args:
        tokens: Token ids. The array must not be empty.
        vocab_size: Vocabulary size of the tokenizer.
        path: Path of the token file, or name of the source, used in the error message.

    Raises:
        UserError: If a token id is negative or too large.
    """
    if (least := int(tokens.min())) < 0:
        raise UserError(
            f"data.source: {path}: contains the negative token id {least}; write the file again with the "
            "token ids of a tokenizer"
        )
    if (largest := int(tokens.max())) >= vocab_size:
        raise UserError(
            f"data.tokenizer: {path} contains the token id {largest}, but the tokenizer has only "
            f"{vocab_size} tokens; set data.tokenizer to the tokenizer that created the file"
        )


def list_token_files(name: str) -> list[Path]:
    """List the token files that a path or pattern matches, sorted by name.

    Raises:
        MissingDataError: If there are none.
    """
    files = [Path(name)] if Path(name).is_file() else sorted(map(Path, glob.glob(name, recursive=True)))  # noqa: PTH207
    if not files:
        raise MissingDataError(f"data.source: {name}: no such file; check the path and the pattern")
    return files


def _get_index_path(path: Path) -> Path:
    """Return the path of a token file's Megatron-LM index, which may not exist."""
    return path.with_suffix(".idx")


def _read_layout(path: Path) -> _TokenFileLayout:
    """Read the layout of a token file from its Megatron-LM index or its llm.c header.

    A file without either is assumed to be a nanoGPT file, which contains only 16-bit tokens.

    Raises:
        UserError: If the file cannot be read, if its index is damaged, or if its size does not
            match the layout.
    """
    try:
        size = path.stat().st_size
        if _get_index_path(path).is_file():
            return _read_megatron_layout(path, size)
        with open_file(path) as file:
            head = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4")
    except OSError as error:
        raise build_unreadable_error(path, error) from error
    dtype = _LLM_C.get((int(head[0]), int(head[1])))
    if dtype is not None:
        layout = _TokenFileLayout(dtype, _LLM_C_HEADER, int(head[2]))
    else:
        layout = _TokenFileLayout(np.dtype("<u2"), 0, size // 2)
    if layout.start_byte + layout.num_tokens * layout.dtype.itemsize != size:
        raise UserError(
            f"data.source: {path}: has {size:,} bytes, which is not the size of {layout.num_tokens:,} tokens "
            f"of {layout.dtype.itemsize} bytes each; copy the file again"
        )
    return layout


def _read_megatron_layout(path: Path, size: int) -> _TokenFileLayout:
    """Read the layout of a token file from its Megatron-LM index.

    Args:
        path: Path of the token file.
        size: Size of the token file in bytes.

    Raises:
        OSError: If the index cannot be read.
        UserError: If the index is damaged, or if it does not match the size of the token file.
    """
    index = _get_index_path(path)
    with open_file(index) as file:
        data = file.read()
    if not data.startswith(_MEGATRON) or len(data) < 34 or data[17] not in _MEGATRON_TYPES:
        raise UserError(
            f"data.source: {index}: is not a Megatron index file; remove the file, or copy the file again"
        )
    dtype = np.dtype(_MEGATRON_TYPES[data[17]])
    sequences, documents = np.frombuffer(data, "<u8", 2, offset=18).astype(np.int64).tolist()
    if len(data) < 34 + 12 * sequences + 8 * documents:
        raise UserError(f"data.source: {index}: is truncated; copy the file again")
    lengths = np.frombuffer(data, "<i4", sequences, offset=34).astype(np.int64)
    starts = np.frombuffer(data, "<i8", sequences, offset=34 + 4 * sequences)
    ends = np.frombuffer(data, "<i8", documents, offset=34 + 12 * sequences)
    after = np.concatenate([[0], np.cumsum(lengths)])
    if (
        after[-1] * dtype.itemsize != size
        or (starts != after[:-1] * dtype.itemsize).any()
        or not documents
        or ends[0] != 0
        or ends[-1] != sequences
        or (np.diff(ends) < 0).any()
    ):
        raise UserError(f"data.source: {index}: does not match {path.name}; copy both files again")
    return _TokenFileLayout(dtype, 0, int(after[-1]), np.diff(after[ends]))


def _iter_file_chunks(path: Path, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
    """Yield the tokens of a file in chunks. Yields nothing for an empty file.

    Document boundaries are read from the index. Without an index, a document ends after each
    ``end`` token and at the end of the file.

    Args:
        path: Path of the file.
        vocab_size: Vocabulary size of the tokenizer. All token ids must be smaller.
        end: Token that ends each document. If None, a file without an index is one document.

    Raises:
        UserError: If the file is damaged, or if a token is outside the vocabulary.
    """
    layout = _read_layout(path)
    if not layout.num_tokens:
        return
    stored = np.memmap(
        path, dtype=layout.dtype, mode="r", offset=layout.start_byte, shape=(layout.num_tokens,)
    )
    ends = None if layout.document_lengths is None else np.cumsum(layout.document_lengths)
    for start in range(0, layout.num_tokens, _CHUNK):
        piece = np.asarray(stored[start : start + _CHUNK])
        check_token_ids(piece, vocab_size, path)
        stop = start + len(piece)
        last = stop == layout.num_tokens
        if ends is not None:
            first = np.searchsorted(ends, start, "right") if start else 0
            inside = ends[first : np.searchsorted(ends, stop, "right")] - start
        else:
            inside = np.zeros(0, dtype=np.int64) if end is None else np.flatnonzero(piece == end) + 1
            if last and (not len(inside) or inside[-1] < len(piece)):
                inside = np.append(inside, len(piece))
        yield TokenChunk(piece, np.diff(inside, prepend=0).tolist())
