"""Token cache: the tokens of every document in memory-mapped files.

A cache is a folder with these files:

- ``<field>.bin`` for each field (``text``, and ``target`` for seq2seq or ``pair`` for text pairs):
  the concatenated tokens of all documents, little-endian uint16 or uint32.
- ``<field>.idx``: uint64 offsets. Document *d* spans the tokens ``[idx[d], idx[d + 1])``.
- ``trained.bin`` if only some tokens contribute to the loss: one bit per token, starting with the
  highest bit of each byte.
- ``labels.bin`` for classification: one int64 class number per document. If documents have several
  classes, ``labels.idx`` contains their offsets. Numeric labels are in ``values.bin`` instead, as
  float64.
- ``columns.bin`` for the additional columns of ``data.columns``: float64 ``[documents, columns]``.
- ``images.bin`` for conversations with images: the image files, without duplicates.
  ``image_rows.bin`` contains a row of :data:`IMAGE_FIELDS` for each image of each document, and
  ``images.idx`` the first row of each document. ``image_files.jsonl`` contains the state of each
  local image file, to detect changes.
- ``blocks.crc``: CRC-32 of each 64 KiB block of these files.
- ``meta.json``: sizes, names and fingerprint, with a digest of these entries.

The folder is written under a temporary name and then renamed. One process writes it, and other
processes wait on a file lock, which the kernel releases if the writer dies.

All data is verified before use. The CRC-32 of a block is checked when the block is first accessed,
which takes a few microseconds in addition to the page fault. Small files are checked completely
when the cache is opened.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from array import array
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from portable.data.images import ImageFile, ImageFileState, ImageSize, find_changed_image_file
from portable.data.sources.records import CsvCell
from portable.errors import RunError, UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from portable.data.sources.documents import Label
    from portable.data.tokens.chat_template import PlacedImage

CACHE_FORMAT = 2
BLOCK_BYTES = 1 << 16
"""Number of bytes per checksum. This is about the read-ahead of the operating system."""
MAX_FULLY_CHECKED_BYTES = 64 << 20
"""Maximum size in bytes of a file that is checked completely on opening. The check takes milliseconds."""
_BLOCKS_FILE = "blocks.crc"
_META_FILE = "meta.json"
_PROGRESS_FILE = "progress.json"
_VERIFIED_FILE = "image_files.verified"
_MAX_CHECKED_SUMS_BYTES = 1 << 20
"""Maximum size in bytes of a ``blocks.crc`` that is checked on opening. It contains the checksums of
16 GiB."""
_READ_BYTES = 1 << 22
_PROBE_BYTES = 1 << 16  # bytes at either end of a file that its ``probe`` covers
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OFFSET = np.dtype("<u8")
_CRC = np.dtype("<u4")
LABELS, LABEL_ENDS, VALUES = "labels.bin", "labels.idx", "values.bin"
TRAINED, COLUMNS = "trained.bin", "columns.bin"
IMAGES, IMAGE_ROWS, IMAGE_ENDS = "images.bin", "image_rows.bin", "images.idx"
IMAGE_FILES = "image_files.jsonl"
IMAGE_FIELDS = ("start", "num_bytes", "width", "height", "first_token", "num_tokens", "digest", "digest_end")
"""Fields of an image in ``image_rows.bin``, int64 each.

They are the position and the size of its file in ``images.bin``, its width and height in pixels, the index of
its first token in its document, the number of its tokens, and the two halves of the digest of its file.
"""
_FILE_DTYPES: dict[str, np.dtype[Any]] = {
    LABELS: np.dtype("<i8"),
    LABEL_ENDS: _OFFSET,
    VALUES: np.dtype("<f8"),
    TRAINED: np.dtype("u1"),
    COLUMNS: np.dtype("<f8"),
    IMAGES: np.dtype("u1"),
    IMAGE_ROWS: np.dtype("<i8"),
    IMAGE_ENDS: _OFFSET,
    IMAGE_FILES: np.dtype("u1"),
}
LabelKind = Literal["classes", "sets", "values"]
"""Kind of labels: one class per document (``classes``), any number of classes (``sets``), or a fixed
number of numeric values (``values``).
"""


class CacheDamagedError(Exception):
    """Raised if a folder is not a complete and intact cache, so that it has to be rebuilt."""


# --- writing ------------------------------------------------------------------------------------------------


class _BlockChecksums:
    """Accumulator for the CRC-32 of each block of :data:`BLOCK_BYTES` bytes in a stream."""

    def __init__(self) -> None:
        self._finished = array("I")  # 4 bytes per block instead of 36 in a list
        self._crc = self._filled = 0

    def update(self, data: bytes) -> None:
        """Add bytes to the stream."""
        view = memoryview(data)
        while view:
            piece = view[: BLOCK_BYTES - self._filled]
            self._crc = isal_zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            if self._filled == BLOCK_BYTES:
                self._finished.append(self._crc)
                self._crc = self._filled = 0
            view = view[len(piece) :]

    def to_array(self) -> npt.NDArray[Any]:
        """Return the checksums of all blocks, including the last incomplete block."""
        return np.array([*self._finished, *([self._crc] if self._filled else [])], dtype=_CRC)


class ChecksummedFile:
    """Sequential file writer that computes a digest of the file and the CRC-32 of each block.

    The digest is a BLAKE2b digest of 16 bytes.

    Args:
        path: Path of the file.
        dtype: Data type of the values.
        saved: State that :meth:`flush_and_get_state` returned in an earlier process. The existing
            file is truncated to the size in this state and then continued. If None, a new file is
            written.

    Attributes:
        path: Path of the file.
        blocks: Checksums of the blocks that have been written so far.

    Raises:
        CacheDamagedError: If the existing file does not match the saved state.
        FileNotFoundError: If ``saved`` is not None, but the file does not exist.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], saved: Mapping[str, Any] | None = None) -> None:
        self._file: BinaryIO = path.open("wb" if saved is None else "r+b")
        self._dtype = dtype
        self._hash = hashlib.blake2b(digest_size=16)
        self.path = path
        self.blocks = _BlockChecksums()
        if saved is not None:
            self._resume_writing(int(saved["bytes"]), saved["digest"])

    def _resume_writing(self, size: int, digest: object) -> None:
        """Compute the checksums of the first ``size`` bytes, and remove everything after them.

        Raises:
            CacheDamagedError: If the file is shorter, or if the digest of these bytes is not ``digest``.
        """
        remaining = size
        while remaining and (data := self._file.read(min(remaining, _READ_BYTES))):
            self._hash.update(data)
            self.blocks.update(data)
            remaining -= len(data)
        if remaining or self._hash.hexdigest() != digest:
            self._file.close()
            raise CacheDamagedError(f"{self.path}: is damaged; tokenize the data again")
        self._file.seek(size)
        self._file.truncate()

    def flush_and_get_state(self) -> dict[str, Any]:
        """Flush the file to disk, and return the state that a later process needs to continue it.

        Returns:
            The size (``bytes``) and ``digest`` of the content so far.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "digest": self._hash.hexdigest()}

    def write(self, values: npt.ArrayLike) -> None:
        """Append values to the file, converted to its dtype.

        Integers of a NumPy array that exceed the range of the dtype wrap around without an error.
        """
        data = np.asarray(values, dtype=self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.blocks.update(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def close_and_summarize(self) -> dict[str, Any]:
        """Close the file, and return its entry for ``meta.json``.

        Returns:
            The size (``bytes``), the CRC-32 of the file's beginning and end (``probe``), and the
            ``digest`` of the values as they were written. For the class numbers in ``labels.bin``,
            which are renumbered in place afterwards, this is not the digest of the final content.
        """
        self._file.close()
        size = self.path.stat().st_size
        return {"bytes": size, "probe": _compute_probe(self.path, size), "digest": self._hash.hexdigest()}


def _compute_probe(path: Path, size: int) -> int:
    """Compute one CRC-32 over the first and the last :data:`_PROBE_BYTES` bytes of a file."""
    with path.open("rb") as file:
        crc = zlib.crc32(file.read(_PROBE_BYTES))
        file.seek(max(0, size - _PROBE_BYTES))
        return zlib.crc32(file.read(_PROBE_BYTES), crc)


class TokenCacheWriter:
    """Writer of a token cache.

    Documents are added in order. Their tokens are added with :meth:`add_documents`, separately for
    each field. :meth:`add_labels`, :meth:`add_columns` and :meth:`add_images` add the rest. Call
    :meth:`write_metadata` after the last document, and finally :meth:`close`, even after an error.

    Args:
        folder: Folder to write into.
        fields: Fields of a document, such as ``text``. Every document has the first field.
        vocab_size: Vocabulary size of the tokenizer. Tokens are stored as uint16 if the size is at
            most 65,536, and otherwise as uint32.
        labels: Whether documents have labels.
        masked: Whether only some tokens of a document contribute to the loss.
        images: Whether documents may contain images.
        columns: Names of the numeric columns that ``data.columns`` adds.
        progress: Progress that :meth:`save_progress` saved in an earlier process, to continue the
            cache in the folder. If None, a new cache is written.

    Attributes:
        num_documents: Number of documents in the cache so far, including documents that an earlier
            process has written.

    Raises:
        CacheDamagedError: If the files in the folder do not match the progress.
        FileNotFoundError: If ``progress`` is not None, but a file is missing.
    """

    def __init__(
        self,
        folder: Path,
        fields: Sequence[str],
        vocab_size: int,
        *,
        labels: bool = False,
        masked: bool = False,
        images: bool = False,
        columns: Sequence[str] = (),
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._saved_files: Mapping[str, Any] | None = None if progress is None else progress["files"]
        self._counts = dict.fromkeys(fields, 0)
        self._streams: dict[str, ChecksummedFile] = {}
        for field in fields:
            self._open_file(f"{field}.bin", _DTYPES[self._dtype])
            self._open_file(f"{field}.idx", _OFFSET, first=[0])
        for name in (*((LABELS, VALUES) if labels else ()), *[TRAINED] * masked):
            self._open_file(name, _FILE_DTYPES[name])
        if labels:
            self._open_file(LABEL_ENDS, _OFFSET, first=[0])
        if columns:
            self._open_file(COLUMNS, _FILE_DTYPES[COLUMNS])
        self._images = _ImageWriter(folder, self._open_file, self._streams) if images else None
        self._labels = _LabelWriter(self._streams) if labels else None
        self._integer_columns = dict.fromkeys(columns, True)
        """For each additional column, whether all its numbers so far are integers."""
        self.num_documents = self._trained = 0
        self._bits = np.zeros(0, dtype=bool)  # loss mask of the last tokens, until it fills a byte
        if progress is not None:
            self._counts = dict(progress["tokens"])
            self._integer_columns = dict(progress["whole"])
            self.num_documents, self._trained = progress["documents"], progress["trained"]
            self._bits = np.array(progress["bits"], dtype=bool)

    def _open_file(self, name: str, dtype: np.dtype[Any], first: Sequence[int] = ()) -> None:
        """Open one of the cache's files for writing.

        A file that an earlier process began is continued. If the file is new, the values ``first``
        are written to it.
        """
        saved = None if self._saved_files is None else self._saved_files[name]
        self._streams[name] = ChecksummedFile(self._folder / name, dtype, saved)
        if saved is None and first:
            self._streams[name].write(first)

    def save_progress(self, **facts: Any) -> None:
        """Flush the files, and save the progress for a later process to complete the cache.

        The progress file is replaced atomically. It does not contain the classes of the labels. If
        the cache is continued, the caller must therefore pass all earlier labels to
        :meth:`add_labels` again, with ``write=False``.

        Args:
            facts: JSON values that the caller needs to continue, keyed by name.
        """
        progress: dict[str, Any] = {
            "format": CACHE_FORMAT,
            "documents": self.num_documents,
            "trained": self._trained,
            "tokens": self._counts,
            "whole": self._integer_columns,
            "bits": self._bits.tolist(),
            "files": {name: stream.flush_and_get_state() for name, stream in self._streams.items()},
            "facts": facts,
        }
        progress["digest"] = _compute_json_digest(progress)
        draft = self._folder / f"{_PROGRESS_FILE}.new"
        draft.write_text(json.dumps(progress), encoding="utf-8")
        draft.replace(self._folder / _PROGRESS_FILE)

    def add_documents(
        self,
        field: str,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        trained: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Add tokens of one field. A document may be split across several calls.

        Args:
            field: Field of the documents, such as ``text``.
            tokens: Concatenated tokens. They may begin with the rest of a document from the
                previous call, and may end with the start of a document that the next call
                continues.
            lengths: Number of tokens in ``tokens`` for each document that ends in this call. Tokens
                from earlier calls are not counted, and a document that continues in the next call
                has no entry.
            trained: Loss mask, bool ``[tokens]``. Required for the field ``text`` if the cache was
                opened with ``masked``, and ignored otherwise.
        """
        values = np.asarray(tokens)
        if TRAINED in self._streams and field == "text":
            assert trained is not None
            self._trained += int(trained.sum())
            bits = np.concatenate((self._bits, trained))
            num_whole_bits = len(bits) // 8 * 8
            self._streams[TRAINED].write(np.packbits(bits[:num_whole_bits]))
            self._bits = bits[num_whole_bits:]
        ends = np.cumsum(lengths, dtype=np.int64)
        self._streams[f"{field}.bin"].write(values)
        self._streams[f"{field}.idx"].write(self._counts[field] + ends)
        self._counts[field] += len(values)
        if field == next(iter(self._counts)):
            self.num_documents += len(ends)

    def count_tokens(self, field: str) -> int:
        """Return the number of tokens that have been written for a field."""
        return self._counts[field]

    def add_labels(self, labels: Sequence[Label | None], *, write: bool = True) -> None:
        """Add the labels of documents. Does nothing if the cache was opened without labels.

        Args:
            labels: Label of each document. None is not allowed, except if the cache was opened
                without labels.
            write: Whether to write the labels. If an earlier process has already written them, pass
                False to register only their kinds and classes.

        Raises:
            UserError: If only some of the labels are lists, or if some labels are strings and
                others are decimal numbers, such as 0.5. Decimal numbers in .csv cells are an
                exception, see :meth:`_LabelWriter.add_label`.
        """
        if self._labels is not None:
            for label in labels:
                assert label is not None
                self._labels.add_label(label, write=write)

    def add_columns(self, rows: Sequence[Sequence[float]]) -> None:
        """Append the values that documents have in the additional columns of ``data.columns``.

        Does nothing if the cache was opened without additional columns. A column is read as int64
        if all numbers in it are of type int, and otherwise as float32.

        Args:
            rows: One row per document, with its numbers in the order of the columns.
        """
        if self._integer_columns:
            self._streams[COLUMNS].write(rows)
            for index, name in enumerate(self._integer_columns):
                self._integer_columns[name] &= all(isinstance(row[index], int) for row in rows)

    def add_images(self, images: Sequence[Sequence[PlacedImage]]) -> None:
        """Append the images of the next documents to the cache.

        Does nothing if the cache was opened without images.

        Args:
            images: Images of each of these documents.
        """
        if self._images is not None:
            self._images.add_images(images)

    def add_image_files(self, states: Sequence[ImageFileState]) -> None:
        """Add the states of local image files. Does nothing if the cache was opened without images.

        Args:
            states: States of the files. Files that were added before are ignored.
        """
        if self._images is not None:
            self._images.add_files(states)

    def write_metadata(self, **extra: Any) -> None:
        """Complete the cache: finish the labels, close the data files, and write ``meta.json``.

        The labels of a classifier are classes or numbers. Classes are renumbered: the new number of
        a class is the position of its name in the sorted list of names. Also deletes the
        progress that :meth:`save_progress` has saved.

        Args:
            extra: Additional entries to write to ``meta.json``.

        Raises:
            UserError: If the labels of the documents are not valid. See
                :meth:`_LabelWriter.finish_labels`.
        """
        names: list[int | str] = []
        if self._labels is not None:
            kind, width, names = self._labels.finish_labels()
            extra |= self._labels.fraction_facts
            extra |= {} if kind == "classes" else {"label_kind": kind, "label_width": width}
        if TRAINED in self._streams:
            self._streams[TRAINED].write(np.packbits(self._bits))
            extra["trained_tokens"] = self._trained
        if self._images is not None:
            extra["images"] = self._images.num_images
        if self._integer_columns:
            extra["columns"] = {
                name: "int64" if is_integer else "float32"
                for name, is_integer in self._integer_columns.items()
            }
        files = {name: stream.close_and_summarize() for name, stream in self._streams.items()}
        blocks = np.concatenate([self._streams[name].blocks.to_array() for name in sorted(files)]).tobytes()
        (self._folder / _BLOCKS_FILE).write_bytes(blocks)
        meta: dict[str, Any] = {
            "format": CACHE_FORMAT,
            "dtype": self._dtype,
            "documents": self.num_documents,
            "tokens": self._counts,
            "label_names": names,
            "files": files,
            "blocks": hashlib.blake2b(blocks, digest_size=16).hexdigest(),
            # The fingerprint must not depend on the machine, so it excludes the modification times of image
            # files.
            "fingerprint": _compute_json_digest(
                [self._dtype, names, {name: file for name, file in files.items() if name != IMAGE_FILES}]
            ),
            **extra,
        }
        meta["digest"] = _compute_json_digest(meta)
        (self._folder / _META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        (self._folder / _PROGRESS_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files. The cache is incomplete unless :meth:`write_metadata` was called."""
        for stream in self._streams.values():
            stream.close()


class _ImageWriter:
    """Writer for the images of documents. An image file in several documents is written only once.

    Args:
        folder: Folder of the cache.
        open_file: Function that creates a file of the cache, or reopens it if an interrupted write
            is resumed. It adds the file to ``streams``.
        streams: Open files of the cache, keyed by file name.
    """

    def __init__(
        self, folder: Path, open_file: Callable[..., None], streams: Mapping[str, ChecksummedFile]
    ) -> None:
        open_file(IMAGES, _FILE_DTYPES[IMAGES])
        open_file(IMAGE_ROWS, _FILE_DTYPES[IMAGE_ROWS])
        open_file(IMAGE_ENDS, _OFFSET, first=[0])
        open_file(IMAGE_FILES, _FILE_DTYPES[IMAGE_FILES])
        self._streams = streams
        self._file_paths = {state.path for state in _parse_image_files((folder / IMAGE_FILES).read_bytes())}
        rows = np.fromfile(folder / IMAGE_ROWS, dtype=_FILE_DTYPES[IMAGE_ROWS])
        rows = rows.reshape(-1, len(IMAGE_FIELDS))
        self.num_images = len(rows)
        self._start_by_digest = {row[-2:].tobytes(): int(row[0]) for row in rows}
        self._num_bytes = int((rows[:, 0] + rows[:, 1]).max()) if len(rows) else 0

    def add_files(self, states: Sequence[ImageFileState]) -> None:
        """Record the states of local image files in the cache.

        The state of a file includes its path, size and modification time. Files that are already
        recorded are skipped.
        """
        lines = []
        for state in states:
            if state.path not in self._file_paths:
                self._file_paths.add(state.path)
                lines.append(json.dumps(state) + "\n")
        self._streams[IMAGE_FILES].write(np.frombuffer("".join(lines).encode(), dtype=np.uint8))

    def add_images(self, images: Sequence[Sequence[PlacedImage]]) -> None:
        """Write the images of the next documents to the cache, and store equal files only once.

        Args:
            images: Images of each document. An item is empty if the document has no images.
        """
        for document_images in images:
            for image in document_images:
                if (start := self._start_by_digest.get(image.digest)) is None:
                    start = self._start_by_digest[image.digest] = self._num_bytes
                    self._streams[IMAGES].write(np.frombuffer(image.data, dtype=np.uint8))
                    self._num_bytes += len(image.data)
                digest = np.frombuffer(image.digest, dtype=_FILE_DTYPES[IMAGE_ROWS])
                tokens = image.first_token, image.num_tokens
                self._streams[IMAGE_ROWS].write([start, len(image.data), *image.size, *tokens, *digest])
            self.num_images += len(document_images)
            self._streams[IMAGE_ENDS].write([self.num_images])


def _parse_image_files(content: bytes) -> list[ImageFileState]:
    """Parse the content of ``image_files.jsonl``."""
    return [ImageFileState(*json.loads(line)) for line in content.splitlines()]


class OpenedWriter(NamedTuple):
    """Opened writer of a token cache.

    Attributes:
        writer: The writer.
        facts: JSON values that an earlier process stored with
            :meth:`TokenCacheWriter.save_progress`, keyed by name. For a new cache, the values
            passed to :func:`open_or_resume_writer`.
    """

    writer: TokenCacheWriter
    facts: dict[str, Any]


def open_or_resume_writer(
    folder: Path, facts: Mapping[str, Any], *arguments: Any, **options: Any
) -> OpenedWriter:
    """Open a token cache writer, and continue the cache of a killed process if possible.

    In three cases, all files in the folder are removed and a new cache is started:

    - The folder contains no saved progress.
    - The saved progress or a data file is damaged.
    - The saved progress has another cache format, or does not contain all values in ``facts``.

    Args:
        folder: Folder to write into. It must exist, and must not contain other folders.
        facts: JSON values that identify how the cache is written, such as its batch size, keyed by
            name. The incomplete cache is continued only if the killed process has saved equal
            values.
        arguments: Positional arguments of :class:`TokenCacheWriter` after the folder.
        options: Keyword arguments of :class:`TokenCacheWriter`.

    Returns:
        The writer and its facts. For a new cache, the facts are a copy of ``facts``. For a
        continued cache, they also contain the other values that the killed process saved, such as
        the number of written batches.
    """
    with suppress(CacheDamagedError, OSError, ValueError, LookupError, TypeError, RecursionError):
        progress = json.loads((folder / _PROGRESS_FILE).read_text(encoding="utf-8"))
        digest = _compute_json_digest({key: value for key, value in progress.items() if key != "digest"})
        if progress["format"] == CACHE_FORMAT and digest == progress["digest"]:
            saved = dict(progress["facts"])
            if all(saved[name] == value for name, value in facts.items()):
                return OpenedWriter(TokenCacheWriter(folder, *arguments, **options, progress=progress), saved)
    for path in folder.iterdir():
        path.unlink()
    return OpenedWriter(TokenCacheWriter(folder, *arguments, **options), dict(facts))


_MAX_CELL_CLASSES = 1 << 20
"""Maximum number of different .csv cells that may be class names if some of them are numbers with a
fraction."""
_MISSING_NUMBER_WORDS = frozenset({"na", "n/a", "<na>", "null", "nan", "none", "#n/a", "-", "?"})
"""Lowercase words that mark a missing number."""


class _LabelSummary(NamedTuple):
    """Summary of the labels in a cache.

    Attributes:
        kind: Kind of the labels: ``classes`` (one class per document), ``sets`` (any number of
            classes) or ``values`` (numbers).
        width: Number of values per document. 0 for ``sets``.
        names: Class names in the order of their numbers. Empty for ``values``.
    """

    kind: LabelKind
    width: int
    names: list[int | str]


class _LabelWriter:
    """Writer for labels. It detects the kind of labels while they are written.

    Even the last label may change the kind. The writer therefore writes two sets of files at first:
    the files for classes, and the file for numbers. At the end, it deletes the files that the kind
    does not require.
    """

    def __init__(self, streams: dict[str, ChecksummedFile]) -> None:
        self._streams = streams
        self._class_numbers: dict[Any, int] | None = {}
        """Number of each class, in the order of first occurrence. None as soon as the labels cannot be
        classes."""
        self._names: dict[Any, Any] = {}
        """Final name of each class, keyed by label. Empty until all labels are known."""
        self._are_numbers = True  # whether all labels so far are numbers
        self._are_lists: bool | None = None
        self._has_repeated_class = False
        self._widths: set[int] = set()
        self._count = 0
        self._fractions, self._fraction = 0, 0.0  # number of labels with a fraction, and the first such label

    def add_label(self, label: Label, *, write: bool = True) -> None:
        """Add the label of a document: a class, a number, or a tuple of these.

        Args:
            label: The label.
            write: Whether to write the label to the cache. Pass False if an earlier process has
                already written it. The label is then only used to determine the kind and the
                classes of the labels.

        Raises:
            UserError: If only some of the labels are tuples, or if some labels are strings and
                others are floats, such as 0.5. Floats in .csv cells are compared with the other
                labels only in :meth:`finish_labels`, unless there are more than
                :data:`_MAX_CELL_CLASSES` different labels.
        """
        lists = isinstance(label, tuple)
        items = label if isinstance(label, tuple) else (label,)
        if self._are_lists not in (None, lists):
            raise UserError(
                "data.label_field: some labels are lists, but others are not; use a list for every label, "
                "or for none"
            )
        self._are_lists = lists
        self._count += len(items)
        self._has_repeated_class = self._has_repeated_class or len(set(items)) < len(items)
        if len(self._widths) < 2:  # two different lengths are enough to detect a difference
            self._widths.add(len(items))
        numbers: list[Any] = [item.parse_number() if isinstance(item, CsvCell) else item for item in items]
        self._are_numbers = self._are_numbers and not any(isinstance(item, str | None) for item in numbers)
        if not lists and isinstance(numbers[0], float):
            self._fraction = numbers[0] if not self._fractions else self._fraction
            self._fractions += 1
        # Cells may still be class names, unless there are too many different ones.
        many = (
            self._class_numbers is not None
            and len(self._class_numbers) > _MAX_CELL_CLASSES
            and self._fractions
        )
        if many or any(isinstance(item, float) for item in items):
            self._class_numbers = None
        if self._class_numbers is None and not self._are_numbers:
            raise _build_mixed_labels_error()
        if self._class_numbers is not None:
            classes = [self._class_numbers.setdefault(item, len(self._class_numbers)) for item in items]
            if write:
                self._streams[LABELS].write(classes)
                self._streams[LABEL_ENDS].write([self._count])
        if self._are_numbers and write:
            self._streams[VALUES].write(numbers)

    @property
    def fraction_facts(self) -> dict[str, Any]:
        """Entries of ``meta.json`` about scalar labels with a fractional part, such as 0.5.

        ``fractions`` is the number of these labels, and ``fraction`` is the value of the first such label.
        Empty if no label has a fractional part.
        """
        return {"fractions": self._fractions, "fraction": self._fraction} if self._fractions else {}

    def _resolve_cell_names(self) -> None:
        """Determine the final class names after all labels are known, and store them in ``_names``.

        There are three cases:

        - All labels are integers: labels from .csv cells are converted to integers.
        - All labels are numbers, and some have a fraction: the labels are not classes, and
          ``_class_numbers`` is set to None.
        - Some labels are not numbers: labels from .csv cells are converted to strings.

        Raises:
            UserError: If some labels have a fraction, and there are .csv cells that are not numbers,
                all of which are placeholders for missing values, such as ``NA``.
        """
        assert self._class_numbers is not None
        cells = [name for name in self._class_numbers if isinstance(name, CsvCell)]
        self._names = dict(zip(self._class_numbers, self._class_numbers, strict=True))
        if self._are_numbers and self._fractions:
            self._class_numbers = None
        elif self._are_numbers:
            self._names |= {cell: cell.parse_number() for cell in cells}
        elif cells:
            texts = [cell for cell in cells if cell.parse_number() is None]
            is_missing = [cell.strip().casefold() in _MISSING_NUMBER_WORDS for cell in texts]
            if self._fractions and texts and all(is_missing):
                raise UserError(
                    f"data.label_field: the label {str(texts[0])!r} is not a number, but other labels are "
                    f"decimal numbers, such as {self._fraction:g}; remove the records whose label is not a "
                    "number, or clear those labels and set data.on_bad_record to skip"
                )
            self._names |= {cell: str(cell) for cell in cells}

    def finish_labels(self) -> _LabelSummary:
        """Finish the label files, and return a summary of the labels.

        Even the last label can show that the labels are numbers and not classes, or the reverse.
        Until this call, each label is therefore written in every form that is still possible: as a
        class, as a number, or both. This call deletes the files of the form that does not apply. If
        the labels are classes, they are renumbered in the order of their sorted names.

        Raises:
            UserError: If some labels are numbers and others are strings, if lists of numbers are
                empty or have different lengths, or if a list contains a class twice. Numbers in
                .csv cells may be mixed with strings, because they become class names. The exception
                are columns of numbers, some with a fraction, whose only other cells are placeholders
                for missing values, such as ``NA``.
        """
        width = min(self._widths, default=1)
        if self._class_numbers is not None:
            self._resolve_cell_names()
        if self._class_numbers is None:
            if len(self._widths) > 1 or not width:
                raise UserError(
                    "data.label_field: the lists of numbers have different lengths; use lists of the same "
                    "length for all texts, or write classes as integers or strings"
                )
            self._delete_files(LABELS, LABEL_ENDS)
            return _LabelSummary("values", width, [])
        names = self._renumber_in_sorted_order(self._class_numbers)
        if self._are_lists and self._has_repeated_class:
            raise UserError(
                "data.label_field: a list contains a class twice; list each class of a text once, or list "
                "one float (0.0, 1.0) or boolean for every class"
            )
        self._delete_files(VALUES, *(() if self._are_lists else (LABEL_ENDS,)))
        return _LabelSummary("sets", 0, names) if self._are_lists else _LabelSummary("classes", 1, names)

    def _delete_files(self, *names: str) -> None:
        """Close and delete the given files, and remove them from the open files of the cache.

        As a result, ``meta.json`` does not list them.
        """
        for name in names:
            stream = self._streams.pop(name)
            stream.close()
            stream.path.unlink()

    def _renumber_in_sorted_order(self, class_numbers: dict[Any, int]) -> list[int | str]:
        """Sort the class names, and renumber the classes in the cache's label file accordingly.

        The new number of a class is the position of its name in the sorted list. Labels with the
        same name become one class. For example, the integer 1 and the .csv cell ``1`` have the same
        name if all labels are integers.

        Args:
            class_numbers: Current number of each class, keyed by its label as read from the record.

        Returns:
            The sorted names.

        Raises:
            UserError: If some names are numbers and others are strings.
        """
        if len({isinstance(name, str) for name in self._names.values()}) > 1:
            raise _build_mixed_labels_error()
        names = sorted(
            set(self._names.values()), key=lambda name: (name if isinstance(name, int) else 0, str(name))
        )
        numbers = {name: number for number, name in enumerate(names)}
        final = np.zeros(len(class_numbers), dtype=_FILE_DTYPES[LABELS])
        for label, index in class_numbers.items():
            final[index] = numbers[self._names[label]]
        if names:
            stream = self._streams[LABELS]
            stream.close()
            stream.blocks = _BlockChecksums()
            stored = np.memmap(stream.path, dtype=final.dtype, mode="r+")
            for start in range(0, len(stored), 1 << 20):
                piece = final[stored[start : start + (1 << 20)]]
                stored[start : start + (1 << 20)] = piece
                stream.blocks.update(piece.tobytes())
            stored.flush()
        return names


def _compute_json_digest(content: Any) -> str:
    """Compute a hexadecimal digest of a JSON value. The order of keys does not affect it."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _build_mixed_labels_error() -> UserError:
    return UserError(
        "data.label_field: some labels are numbers, but others are strings; use only numbers or only strings"
    )


# --- reading ------------------------------------------------------------------------------------------------


class CheckedArray:
    """Memory-mapped array that verifies the CRC-32 of each block when it is first accessed.

    Args:
        path: Path of the file.
        dtype: Data type of the values.
        sums: CRC-32 of each block.
        width: Number of values per row. None for a 1-d array.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], sums: npt.NDArray[Any], width: int | None = None
    ) -> None:
        self.path = path
        self.dtype = dtype
        size = path.stat().st_size
        # An empty file cannot be mapped.
        self._bytes: npt.NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, dtype=np.uint8)
        )
        values = self._bytes.view(dtype)
        self._values: npt.NDArray[Any] = values if width is None else values.reshape(-1, width)
        self._item_bytes = dtype.itemsize * (width or 1)
        self._sums = sums
        # One byte per block records whether it has been checked. Only the pages that are used take memory.
        self._checked_blocks = mmap.mmap(-1, max(1, len(sums)))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._values.shape

    def __getitem__(self, key: Any) -> Any:
        """Return a value, a slice or a list of values, after verifying their blocks.

        A slice shares the memory of the file. A list of indices returns a copy. Do not use a
        negative step, a list with negative indices or a boolean mask, because their blocks are not
        verified.

        Raises:
            RunError: If a block is damaged. The cache is then invalidated, and the next launch
                rebuilds it.
        """
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self._values))
            self._check_items(start, stop)
        elif isinstance(key, int | np.integer):
            index = int(key) + (len(self._values) if key < 0 else 0)
            self._check_items(index, index + 1)
        else:
            for index in np.asarray(key).ravel().tolist():
                self._check_items(index, index + 1)
        return self._values[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def tolist(self) -> list[Any]:
        """Return all values as a list, after verifying all blocks."""
        values: list[Any] = self[:].tolist()
        return values

    def find_damaged_block(self, first: int = 0, last: int | None = None) -> int | None:
        """Find the first damaged block in ``[first, last)``. Skips blocks that have already been verified.

        Args:
            first: Index of the first block to check.
            last: Exclusive end of the blocks to check. None checks to the end of the file.

        Returns:
            Index of the block. None if all blocks are intact.
        """
        last = len(self._sums) if last is None else last
        while (block := self._checked_blocks.find(b"\0", first, last)) >= 0:
            data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if isal_zlib.crc32(data.data) != self._sums[block]:
                return block
            self._checked_blocks[block] = 1
            first = block + 1
        return None

    def _check_items(self, start: int, stop: int) -> None:
        """Verify the blocks of the items ``[start, stop)``. An item is a value, or a row of a 2-d array.

        If a block is damaged, deletes the cache's metadata file, so that the next launch rebuilds the
        cache.

        Raises:
            RunError: If a block is damaged.
        """
        width = self._item_bytes
        block = self.find_damaged_block(start * width // BLOCK_BYTES, -(-stop * width // BLOCK_BYTES))
        if block is not None:
            # Without this file, the cache is invalid and the next launch rebuilds it.
            with suppress(OSError):
                (self.path.parent / _META_FILE).unlink()
            raise RunError(
                f"data.cache_dir: {self.path}: is damaged at byte {block * BLOCK_BYTES:,}; run the same "
                "command to tokenize the data again and resume from the last checkpoint"
            )


def _open_checksums(path: Path, digest: str) -> npt.NDArray[Any]:
    """Open ``blocks.crc``, and return the checksums of all blocks.

    A file of more than :data:`_MAX_CHECKED_SUMS_BYTES` bytes is memory-mapped and not compared with
    its digest, because every rank would have to read the entire file. A damaged checksum is still
    detected later, because it does not match its block.

    Args:
        path: Path of the file.
        digest: Expected digest of the file.

    Raises:
        CacheDamagedError: If a smaller file does not match ``digest``.
    """
    if path.stat().st_size > _MAX_CHECKED_SUMS_BYTES:
        return np.memmap(path, dtype=_CRC, mode="r")
    blocks = path.read_bytes()
    if hashlib.blake2b(blocks, digest_size=16).hexdigest() != digest:
        raise CacheDamagedError(f"{path}: is damaged; tokenize the data again")
    return np.frombuffer(blocks, dtype=_CRC)


class CachedImage(NamedTuple):
    """Image in a document.

    Attributes:
        start: Byte offset of the image file in ``images.bin``.
        num_bytes: Size of the image file in bytes.
        size: Size at which the image is passed to the model's processor.
        first_token: Index of the image's first token in the document.
        num_tokens: Number of image tokens.
    """

    start: int
    num_bytes: int
    size: ImageSize
    first_token: int
    num_tokens: int


@dataclass(frozen=True)
class TokenCache:
    """Token cache opened for reading. Its pickle contains only the path; unpickling opens the cache again.

    Attributes:
        folder: Folder of the cache.
        meta: Content of ``meta.json``.
        arrays: Memory-mapped arrays, keyed by file name.
    """

    folder: Path
    meta: dict[str, Any]
    arrays: dict[str, CheckedArray]

    @staticmethod
    def open(folder: Path) -> TokenCache:
        """Open a cache, after verifying the metadata, the file sizes and all small files.

        Files of up to :data:`MAX_FULLY_CHECKED_BYTES` bytes are verified completely. In larger
        files, a block is verified when it is first accessed.

        Raises:
            CacheDamagedError: If the cache does not exist, is damaged or cannot be read, or if it
                has another format version.
        """
        try:
            meta = json.loads((folder / _META_FILE).read_text(encoding="utf-8"))
            if meta["format"] != CACHE_FORMAT:
                raise CacheDamagedError(
                    f"{folder}: the cache has format version {meta['format']}, but this program reads "
                    f"version {CACHE_FORMAT}; tokenize the data again"
                )
            if (
                _compute_json_digest({key: value for key, value in meta.items() if key != "digest"})
                != meta["digest"]
            ):
                raise CacheDamagedError(f"{folder / _META_FILE}: is damaged; tokenize the data again")
            sums, first_block = _open_checksums(folder / _BLOCKS_FILE, meta["blocks"]), 0
            dtypes = dict(_FILE_DTYPES)
            for name in meta["tokens"]:
                dtypes |= {f"{name}.bin": _DTYPES[meta["dtype"]], f"{name}.idx": _OFFSET}
            widths = {
                VALUES: meta.get("label_width"),
                COLUMNS: len(meta.get("columns", ())),
                IMAGE_ROWS: len(IMAGE_FIELDS),
            }
            arrays: dict[str, CheckedArray] = {}
            for name, file_meta in sorted(meta["files"].items()):
                count = -(-file_meta["bytes"] // BLOCK_BYTES)
                if (folder / name).stat().st_size != file_meta["bytes"]:
                    raise CacheDamagedError(f"{folder / name}: is damaged; tokenize the data again")
                array = CheckedArray(
                    folder / name, dtypes[name], sums[first_block : first_block + count], widths.get(name)
                )
                if file_meta["bytes"] <= MAX_FULLY_CHECKED_BYTES and array.find_damaged_block() is not None:
                    raise CacheDamagedError(f"{folder / name}: is damaged; tokenize the data again")
                arrays[name], first_block = array, first_block + count
            cache = TokenCache(folder, meta, arrays)
            assert cache.tokens.keys() == cache.offsets.keys()
        except (CacheDamagedError, MemoryError):
            raise
        except Exception as error:  # the files may contain any values
            raise CacheDamagedError(
                f"{folder}: cannot be read ({to_one_line(error)}); tokenize the data again"
            ) from error
        return cache

    @staticmethod
    def open_if_intact(folder: Path) -> TokenCache | None:
        """Open a cache like :meth:`open`, but return None instead of raising an error.

        Returns:
            The cache. None if it does not exist or is damaged.
        """
        with suppress(CacheDamagedError):
            return TokenCache.open(folder)
        return None

    @cached_property
    def tokens(self) -> dict[str, CheckedArray]:
        """Concatenated tokens of all documents, uint16 or uint32, keyed by field."""
        return {name: self.arrays[f"{name}.bin"] for name in self.meta["tokens"]}

    @cached_property
    def offsets(self) -> dict[str, CheckedArray]:
        """Start of each document in :attr:`tokens`, followed by the total number of tokens.

        A dict with one uint64 array ``[documents + 1]`` per field, keyed by the name of the field,
        such as ``text``. Document *d* contains the tokens ``[offsets[d], offsets[d + 1])`` of the
        field.
        """
        return {name: self.arrays[f"{name}.idx"] for name in self.meta["tokens"]}

    @property
    def labels(self) -> CheckedArray | None:
        """Class numbers of the documents, int64.

        A document has one class, or several if :attr:`label_offsets` is not None. The property is
        None if there are no labels, or if the labels are numeric values, which are in
        :attr:`label_values`.
        """
        return self.arrays.get(LABELS)

    @property
    def label_offsets(self) -> CheckedArray | None:
        """Start of each document's classes in ``labels``, followed by the total number of classes.

        None unless a document may have several classes (the kind of labels is ``sets``).
        """
        return self.arrays.get(LABEL_ENDS)

    @property
    def label_values(self) -> CheckedArray | None:
        """Numeric labels, float64 ``[documents, width]``. None if there are no numeric labels."""
        return self.arrays.get(VALUES)

    @property
    def trained_bits(self) -> CheckedArray | None:
        """Loss mask, one bit per token of the texts. See :meth:`read_trained_mask`.

        None if all tokens contribute to the loss.
        """
        return self.arrays.get(TRAINED)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache.open, (self.folder,)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return int(self.meta["documents"])

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in all fields."""
        return sum(self.meta["tokens"].values())

    @property
    def fingerprint(self) -> str:
        """Digest of the data in the cache, independent of the machine.

        It does not depend on the file format of the source either. The digest covers tokens,
        labels, loss masks, numeric columns and images. It does not cover the states of local image
        files.
        """
        return str(self.meta["fingerprint"])

    @property
    def label_names(self) -> list[int | str]:
        """Class names in the order of their numbers. Empty if there are no classes."""
        return list(self.meta["label_names"])

    @property
    def label_kind(self) -> LabelKind:
        """Kind of the labels. ``classes`` if there are no labels."""
        kind: LabelKind = self.meta.get("label_kind", "classes")
        return kind

    def read_document(self, field: str, number: int) -> npt.NDArray[Any]:
        """Read the tokens of one field of document ``number``, including special tokens.

        The result is a read-only view of the memory-mapped file, uint16 or uint32.
        """
        offsets = self.offsets[field]
        tokens: npt.NDArray[Any] = self.tokens[field][int(offsets[number]) : int(offsets[number + 1])]
        return tokens

    @property
    def has_extra_columns(self) -> bool:
        """Whether the cache contains values for the additional numeric columns in ``data.columns``."""
        return COLUMNS in self.arrays

    def read_extra_columns(self, numbers: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Read the values in the additional numeric columns of the given documents.

        Do not call this method if :attr:`has_extra_columns` is False.

        Args:
            numbers: Indices of the documents.

        Returns:
            Values of each column, int64 or float32 ``[len(numbers)]``, keyed by the name of the
            column.
        """
        rows = self.arrays[COLUMNS][list(numbers)]
        kinds: dict[str, str] = self.meta["columns"]
        return {name: rows[:, index].astype(kind) for index, (name, kind) in enumerate(kinds.items())}

    @property
    def has_images(self) -> bool:
        """Whether documents may contain images."""
        return IMAGE_ROWS in self.arrays

    @property
    def num_images(self) -> int:
        """Total number of images in all documents."""
        return int(self.meta.get("images", 0))

    @property
    def num_image_tokens(self) -> int:
        """Total number of image tokens."""
        return int(self.count_image_tokens().sum())

    def count_image_tokens(self, max_tokens: int | None = None) -> npt.NDArray[np.int64]:
        """Count the image tokens in each document.

        Args:
            max_tokens: Number of tokens to which each document is truncated. An image is counted
                only if it ends within these tokens. If None, all images are counted.

        Returns:
            Number of image tokens per document, int64 ``[documents]``.
        """
        counts = np.zeros(self.num_documents, dtype=np.int64)
        if not self.has_images:
            return counts
        rows, ends = self.arrays[IMAGE_ROWS][:], self.arrays[IMAGE_ENDS][:].astype(np.int64)
        first_tokens, num_tokens = (
            rows[:, IMAGE_FIELDS.index(name)] for name in ("first_token", "num_tokens")
        )
        if max_tokens is not None:
            num_tokens = np.where(first_tokens + num_tokens <= max_tokens, num_tokens, 0)
        np.add.at(counts, np.repeat(np.arange(self.num_documents), np.diff(ends)), num_tokens)
        return counts

    def find_changed_image_file(self, root: Path | None) -> str | None:
        """Find a local image file whose content has changed since the cache was written.

        Do not call this method if :attr:`has_images` is False. A file is read again only if
        its size or modification time has changed. The time can change although the content does
        not, for example when a file is copied. If all contents turn out to be unchanged, the cache
        stores a digest of the new sizes and times. If the digest still matches, later calls do not
        read the files again.

        Deleted files are ignored. A file that could not be read when the cache was written has
        changed if it now has another size or modification time.

        Args:
            root: Image folder. None means the current folder.

        Returns:
            Path of the file, as in the record. None if no file has changed.
        """
        states = _parse_image_files(self.arrays[IMAGE_FILES][:].tobytes())
        verified_file, verified_digest = self.folder / _VERIFIED_FILE, ""
        with suppress(OSError, ValueError):
            verified_digest = verified_file.read_text("utf-8")
        comparison = find_changed_image_file(root, states, verified_digest)
        if comparison.verified_digest:
            with suppress(OSError):  # the cache may be read-only
                verified_file.write_text(comparison.verified_digest, "utf-8")
        return comparison.changed_path

    def list_images(self, number: int) -> list[CachedImage]:
        """List the images of a document in token order, without reading their files."""
        if not self.has_images:
            return []
        first, last = (int(self.arrays[IMAGE_ENDS][index]) for index in (number, number + 1))
        return [
            CachedImage(start, num_bytes, ImageSize(width, height), first_token, num_tokens)
            for start, num_bytes, width, height, first_token, num_tokens, *_ in self.arrays[IMAGE_ROWS][
                first:last
            ].tolist()
        ]

    def read_image_files(self, number: int, num_tokens: int) -> list[ImageFile]:
        """Read the files of the images that begin in the first ``num_tokens`` tokens of a document.

        Args:
            number: Number of the document.
            num_tokens: Number of tokens at the start of the document.

        Returns:
            The image files, in token order.
        """
        return [
            ImageFile(self.arrays[IMAGES][image.start : image.start + image.num_bytes].tobytes(), image.size)
            for image in self.list_images(number)
            if image.first_token < num_tokens
        ]

    def read_trained_mask(self, field: str, number: int) -> npt.NDArray[np.bool_] | None:
        """Read the loss mask of one field of document ``number``.

        Returns:
            Loss mask, bool ``[tokens]``. None if all tokens contribute to the loss, which is always the
            case for fields other than ``text``.
        """
        if self.trained_bits is None or field != "text":
            return None
        offsets = self.offsets[field]
        return self.read_trained_range(int(offsets[number]), int(offsets[number + 1]))

    def read_trained_range(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Read the loss mask of the tokens ``[start, stop)`` of the concatenated texts.

        Returns:
            Loss mask, bool ``[stop - start]``. None if all tokens contribute to the loss.
        """
        if self.trained_bits is None:
            return None
        first = start // 8
        bits = np.unpackbits(self.trained_bits[first : -(-stop // 8)])
        return bits[start - 8 * first : stop - 8 * first].view(bool)

    def find_documents_of_tokens(self, field: str, start: int, stop: int) -> range:
        """Return the numbers of the documents that contain the tokens ``[start, stop)`` of a field.

        The range also includes empty documents between these documents.
        """
        offsets = self.offsets[field]
        return range(bisect_right(offsets, start) - 1, bisect_right(offsets, stop - 1))
