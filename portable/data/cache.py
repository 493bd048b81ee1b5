"""The token cache: every document's tokens, once, in files that are mapped into memory.

A cache is a folder. For each field (``text``; ``target`` for seq2seq) it holds ``<field>.bin``, the tokens
of all documents one after the other as little-endian uint16 or uint32, and ``<field>.idx``, uint64 offsets
of which document *d* spans ``[idx[d], idx[d + 1])``. For classification it holds ``labels.bin``, an int64 for
each document, or several, with ``labels.idx``; or, where the labels are numbers, ``values.bin``, equally many
float64 for each. ``blocks.crc`` has a CRC-32 of every 64 KiB of these files, and ``meta.json`` a digest of
itself. It is written under another name and appears by rename. One process writes; others that want the same
one wait for it on a file lock, which the kernel frees if the writer dies.

Nothing is read unchecked. A block is held against its CRC-32 when it is first touched, which costs a few
microseconds beside the page fault; a file that is small is checked as a whole when the cache is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from bisect import bisect_right
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from portable.errors import RunError, UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from portable.data.documents import Label

FORMAT = 2
BLOCK = 1 << 16
"""Bytes that are checked together: about what the system reads ahead anyway."""
CHECKED_WHOLE = 64 << 20
"""Bytes of a file that is checked as a whole when it is opened, in milliseconds."""
_BLOCKS_FILE = "blocks.crc"
_META_FILE = "meta.json"
_PROBE = 1 << 16  # bytes at either end of a file that are checked when it is opened
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OFFSET = np.dtype("<u8")
_LABEL = np.dtype("<i8")
_CRC = np.dtype("<u4")
_VALUE = np.dtype("<f8")
LabelKind = Literal["classes", "sets", "values"]
"""A class for each document, any number of classes, or numbers, equally many for each."""


class CacheDamagedError(Exception):
    """The folder is no complete cache: build it again."""


class Draft:
    """A folder in the making; ``commit`` gives it its name."""

    def __init__(self, path: Path, final: Path) -> None:
        self.path = path
        self._final = final

    def commit(self) -> None:
        for file in self.path.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        if self._final.exists():  # only a damaged one is ever written again
            shutil.rmtree(self._final)
        self.path.rename(self._final)


@contextmanager
def locked_folder(final: Path) -> Iterator[Draft]:
    """Hold the lock of ``final`` and give an empty folder beside it to write into.

    Raises:
        UserError: nothing can be written there.
    """
    from filelock import FileLock

    draft = final.with_name(f"{final.name}.draft")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(final.with_name(f"{final.name}.lock")):
            shutil.rmtree(draft, ignore_errors=True)  # of a writer that died: we hold the lock
            draft.mkdir()
            try:
                yield Draft(draft, final)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"data.cache_dir: cannot write in {final.parent} ({one_line(error)}); "
            "name a folder that can be written"
        ) from error


# --- writing ------------------------------------------------------------------------------------------------


class _BlockSums:
    """The CRC-32 of each block of what is given to it, piece by piece."""

    def __init__(self) -> None:
        self._whole: list[int] = []
        self._crc = self._filled = 0

    def update(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            piece = view[: BLOCK - self._filled]
            self._crc = isal_zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            if self._filled == BLOCK:
                self._whole.append(self._crc)
                self._crc = self._filled = 0
            view = view[len(piece) :]

    def sums(self) -> npt.NDArray[Any]:
        return np.array([*self._whole, *([self._crc] if self._filled else [])], dtype=_CRC)


class _Stream:
    """One file, written in order, with what the reader checks it by."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._path = path
        self._hash = hashlib.blake2b(digest_size=16)
        self.blocks = _BlockSums()

    def write(self, values: npt.NDArray[Any]) -> None:
        data = values.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.blocks.update(data)

    def close(self) -> None:
        self._file.close()

    def meta(self) -> dict[str, Any]:
        self._file.close()
        size = self._path.stat().st_size
        return {"bytes": size, "probe": _probe(self._path, size), "digest": self._hash.hexdigest()}


def _probe(path: Path, size: int) -> int:
    """A CRC-32 of the first and the last stretch of a file."""
    with path.open("rb") as file:
        crc = zlib.crc32(file.read(_PROBE))
        file.seek(max(0, size - _PROBE))
        return zlib.crc32(file.read(_PROBE), crc)


class TokenWriter:
    """Fills a folder with a token cache, a stretch of tokens at a time, holding none of them."""

    def __init__(self, folder: Path, fields: Sequence[str], vocab_size: int, *, labels: bool = False) -> None:
        self._folder = folder
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._tokens = {name: _Stream(folder / f"{name}.bin") for name in fields}
        self._index = {name: _Stream(folder / f"{name}.idx") for name in fields}
        self._counts = dict.fromkeys(fields, 0)
        self._labels = _LabelWriter(folder) if labels else None
        self._documents = 0
        self.in_document = False
        """Whether tokens were added since the last document ended."""
        for stream in self._index.values():
            stream.write(np.zeros(1, dtype=_OFFSET))

    def append(self, field: str, tokens: Sequence[int]) -> None:
        """Add tokens to the current document."""
        self._tokens[field].write(np.asarray(tokens, dtype=_DTYPES[self._dtype]))
        self._counts[field] += len(tokens)
        self.in_document = True

    def end_document(self, label: Label | None = None) -> None:
        for field, stream in self._index.items():
            stream.write(np.array([self._counts[field]], dtype=_OFFSET))
        if self._labels is not None:
            assert label is not None
            self._labels.add(label)
        self._documents += 1
        self.in_document = False

    def finish(self, **extra: Any) -> None:
        """Write ``meta.json``; the classes, numbered as they came, get their final ids in sorted order."""
        names: list[int | str] = []
        labels: dict[str, _Stream] = {}
        told: dict[str, Any] = {}
        if self._labels is not None:
            kind, width, names, labels = self._labels.finish()
            told = {} if kind == "classes" else {"label_kind": kind, "label_width": width}
        streams: dict[str, _Stream] = {f"{name}.bin": stream for name, stream in self._tokens.items()}
        streams |= {f"{name}.idx": stream for name, stream in self._index.items()}
        streams |= labels
        files = {name: stream.meta() for name, stream in streams.items()}
        blocks = np.concatenate([streams[name].blocks.sums() for name in sorted(streams)]).tobytes()
        (self._folder / _BLOCKS_FILE).write_bytes(blocks)
        meta: dict[str, Any] = {
            "format": FORMAT,
            "dtype": self._dtype,
            "documents": self._documents,
            "tokens": self._counts,
            "label_names": names,
            "files": files,
            "blocks": hashlib.blake2b(blocks, digest_size=16).hexdigest(),
            "fingerprint": _digest([self._dtype, names, files]),
            **told,
            **extra,
        }
        meta["digest"] = _digest(meta)
        (self._folder / _META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")

    def close(self) -> None:
        for stream in (*self._tokens.values(), *self._index.values()):
            stream.close()
        if self._labels is not None:
            self._labels.close()


class _LabelWriter:
    """Labels of any kind. Of which kind they are, the last of them may still decide."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids = _Stream(folder / "labels.bin")
        self._ends = _Stream(folder / "labels.idx")
        self._values = _Stream(folder / "values.bin")
        self._known: dict[Any, int] | None = {}
        """The number of each class; None once a label was no class."""
        self._numbers = True  # so far
        self._lists: bool | None = None
        self._repeated = False
        self._widths: set[int] = set()
        self._count = 0
        self._ends.write(np.zeros(1, dtype=_OFFSET))

    def add(self, label: Label) -> None:
        lists = isinstance(label, tuple)
        items = label if isinstance(label, tuple) else (label,)
        if self._lists not in (None, lists):
            raise UserError("data.label_field: some labels are lists and some are not; use one kind")
        self._lists = lists
        self._count += len(items)
        self._repeated = self._repeated or len(set(items)) < len(items)
        if len(self._widths) < 2:  # more only say again that they differ
            self._widths.add(len(items))
        if any(isinstance(item, float) for item in items):
            self._known = None
        self._numbers = self._numbers and not any(isinstance(item, str) for item in items)
        if self._known is None and not self._numbers:
            raise _mixed()
        if self._known is not None:
            ids = [self._known.setdefault(item, len(self._known)) for item in items]
            self._ids.write(np.array(ids, dtype=_LABEL))
            self._ends.write(np.array([self._count], dtype=_OFFSET))
        if self._numbers:
            self._values.write(np.array(items, dtype=_VALUE))

    def close(self) -> None:
        for stream in (self._ids, self._ends, self._values):
            stream.close()

    def finish(self) -> tuple[LabelKind, int, list[int | str], dict[str, _Stream]]:
        """Kind, numbers a document, names of the classes, and the files that are kept."""
        self.close()
        width = min(self._widths, default=1)
        if self._known is None:
            if len(self._widths) > 1 or not width:
                raise UserError(
                    "data.label_field: some lists of numbers are longer than others; give every text equally "
                    "many numbers, or classes as integers or strings"
                )
            self._drop("labels.bin", "labels.idx")
            return "values", width, [], {"values.bin": self._values}
        names = self._sort(self._known)
        if self._lists and self._repeated:
            raise UserError(
                "data.label_field: a list names a class twice; a list holds the classes of its text, or for "
                "each class a number with a fraction (0.0, 1.0) or a boolean"
            )
        if self._lists:
            self._drop("values.bin")
            return "sets", 0, names, {"labels.bin": self._ids, "labels.idx": self._ends}
        self._drop("values.bin", "labels.idx")
        return "classes", 1, names, {"labels.bin": self._ids}

    def _drop(self, *names: str) -> None:
        for name in names:
            (self._folder / name).unlink()

    def _sort(self, known: dict[Any, int]) -> list[int | str]:
        if len({isinstance(name, str) for name in known}) > 1:
            raise _mixed()
        names = sorted(known, key=lambda name: (name if isinstance(name, int) else 0, str(name)))
        final = np.zeros(len(names), dtype=_LABEL)
        for number, name in enumerate(names):
            final[known[name]] = number
        if names:
            self._ids.blocks = _BlockSums()
            stored = np.memmap(self._folder / "labels.bin", dtype=_LABEL, mode="r+")
            for start in range(0, len(stored), 1 << 20):
                piece = final[stored[start : start + (1 << 20)]]
                stored[start : start + (1 << 20)] = piece
                self._ids.blocks.update(piece.tobytes())
            stored.flush()
        return names


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _mixed() -> UserError:
    return UserError("data.label_field: some labels are numbers and some are strings; use one kind")


# --- reading ------------------------------------------------------------------------------------------------


class CheckedArray:
    """A file mapped into memory, of which each block is held against its CRC-32 when it is first read.

    Args:
        path: of the file.
        dtype: of its values.
        sums: the CRC-32 of each block.
        width: values in a row, where it has rows.
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
        self._seen = bytearray(len(sums))

    def __len__(self) -> int:
        return len(self._values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._values.shape

    def __getitem__(self, at: Any) -> Any:
        """A value, those of a slice (shared with the file), or those at a list of places (copied).

        Raises:
            RunError: the file is not as it was written.
        """
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self._values))
            self._check(start, stop)
        elif isinstance(at, int | np.integer):
            place = int(at) + (len(self._values) if at < 0 else 0)
            self._check(place, place + 1)
        else:
            for place in np.asarray(at).ravel().tolist():
                self._check(place, place + 1)
        return self._values[at]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def tolist(self) -> list[Any]:
        values: list[Any] = self[:].tolist()
        return values

    def damaged_block(self, first: int = 0, last: int | None = None) -> int | None:
        """The first block from ``first`` up to ``last`` that is not as it was written."""
        last = len(self._sums) if last is None else last
        while (block := self._seen.find(0, first, last)) >= 0:
            data = self._bytes[block * BLOCK : (block + 1) * BLOCK]
            if isal_zlib.crc32(data.data) != self._sums[block]:
                return block
            self._seen[block] = 1
            first = block + 1
        return None

    def _check(self, start: int, stop: int) -> None:
        width = self._item_bytes
        block = self.damaged_block(start * width // BLOCK, -(-stop * width // BLOCK))
        if block is not None:
            # Without it the cache is none, and the next leg makes it again.
            with suppress(OSError):
                (self.path.parent / _META_FILE).unlink()
            raise RunError(
                f"data.cache_dir: {self.path}: not as it was written at byte {block * BLOCK:,}; run the same "
                "command to tokenize the data anew and go on from the last checkpoint"
            )


@dataclass(frozen=True)
class TokenCache:
    """An open token cache; pickling it carries the path, not the tokens."""

    folder: Path
    meta: dict[str, Any]
    tokens: dict[str, CheckedArray]
    """For each field all tokens, end to end: uint16 or uint32, mapped from disk."""
    offsets: dict[str, CheckedArray]
    labels: CheckedArray | None
    """The number of each document's class; with ``label_offsets``, of its classes."""
    label_offsets: CheckedArray | None = None
    values: CheckedArray | None = None
    """``[documents, width]``, where the labels are numbers."""

    @staticmethod
    def open(folder: Path) -> TokenCache:
        """Map a cache; check what tells of it, the sizes of its files, and all that is small.

        Raises:
            CacheDamagedError: there is none, or not all of it is there.
        """
        try:
            meta = json.loads((folder / _META_FILE).read_text(encoding="utf-8"))
            if meta["format"] != FORMAT:
                raise CacheDamagedError(f"{folder}: format {meta['format']}, not {FORMAT}")
            if _digest({key: value for key, value in meta.items() if key != "digest"}) != meta["digest"]:
                raise CacheDamagedError(f"{folder / _META_FILE}: not as it was written")
            blocks = (folder / _BLOCKS_FILE).read_bytes()
            if hashlib.blake2b(blocks, digest_size=16).hexdigest() != meta["blocks"]:
                raise CacheDamagedError(f"{folder / _BLOCKS_FILE}: not as it was written")
            sums, at = np.frombuffer(blocks, dtype=_CRC), 0
            dtypes = {f"{name}.bin": _DTYPES[meta["dtype"]] for name in meta["tokens"]}
            dtypes |= {f"{name}.idx": _OFFSET for name in meta["tokens"]}
            dtypes |= {"labels.bin": _LABEL, "labels.idx": _OFFSET, "values.bin": _VALUE}
            arrays: dict[str, CheckedArray] = {}
            for name, told in sorted(meta["files"].items()):
                count = -(-told["bytes"] // BLOCK)
                if (folder / name).stat().st_size != told["bytes"]:
                    raise CacheDamagedError(f"{folder / name}: not as it was written")
                width = meta["label_width"] if name == "values.bin" else None
                array = CheckedArray(folder / name, dtypes[name], sums[at : at + count], width)
                if told["bytes"] <= CHECKED_WHOLE and array.damaged_block() is not None:
                    raise CacheDamagedError(f"{folder / name}: not as it was written")
                arrays[name], at = array, at + count
            tokens = {name: arrays[f"{name}.bin"] for name in meta["tokens"]}
            offsets = {name: arrays[f"{name}.idx"] for name in meta["tokens"]}
            labels = arrays.get("labels.bin")
            ends, values = arrays.get("labels.idx"), arrays.get("values.bin")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheDamagedError(f"{folder}: {one_line(error)}") from error
        return TokenCache(folder, meta, tokens, offsets, labels, ends, values)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache.open, (self.folder,)

    @property
    def documents(self) -> int:
        return int(self.meta["documents"])

    @property
    def total_tokens(self) -> int:
        return sum(self.meta["tokens"].values())

    @property
    def fingerprint(self) -> str:
        """A digest of every token and label: the same wherever and from whatever format it was built."""
        return str(self.meta["fingerprint"])

    @property
    def label_names(self) -> list[int | str]:
        return list(self.meta["label_names"])

    @property
    def label_kind(self) -> LabelKind:
        kind: LabelKind = self.meta.get("label_kind", "classes")
        return kind

    def document(self, field: str, number: int) -> npt.NDArray[Any]:
        """The tokens of one document, special tokens included."""
        offsets = self.offsets[field]
        tokens: npt.NDArray[Any] = self.tokens[field][int(offsets[number]) : int(offsets[number + 1])]
        return tokens

    def documents_between(self, field: str, start: int, stop: int) -> range:
        """The documents that the tokens ``[start, stop)`` of a field are of."""
        offsets = self.offsets[field]
        return range(bisect_right(offsets, start) - 1, bisect_right(offsets, stop - 1))
