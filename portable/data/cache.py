"""The token cache: every document's tokens, once, in files that are mapped into memory.

A cache is a folder. For each field (``text``; ``target`` for seq2seq) it holds ``<field>.bin``, the tokens
of all documents one after the other as little-endian uint16 or uint32, and ``<field>.idx``, uint64 offsets
of which document *d* spans ``[idx[d], idx[d + 1])``; for classification ``labels.bin``, an int64 for each
document; ``blocks.crc``, a CRC-32 of every 64 KiB of these files; and ``meta.json``, which holds a digest of
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
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from portable.errors import RunError, UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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
        self._labels = _Stream(folder / "labels.bin") if labels else None
        self._label_ids: dict[int | str, int] = {}
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

    def end_document(self, label: int | str | None = None) -> None:
        for field, stream in self._index.items():
            stream.write(np.array([self._counts[field]], dtype=_OFFSET))
        if self._labels is not None:
            assert label is not None
            number = self._label_ids.setdefault(label, len(self._label_ids))
            self._labels.write(np.array([number], dtype=_LABEL))
        self._documents += 1
        self.in_document = False

    def finish(self, **extra: Any) -> None:
        """Write ``meta.json``; the labels, numbered as they came, get their final ids in sorted order."""
        names: list[int | str] = []
        if self._labels is not None:
            self._labels.close()
            names = self._sort_labels()
        streams: dict[str, _Stream] = {f"{name}.bin": stream for name, stream in self._tokens.items()}
        streams |= {f"{name}.idx": stream for name, stream in self._index.items()}
        if self._labels is not None:
            streams["labels.bin"] = self._labels
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
            **extra,
        }
        meta["digest"] = _digest(meta)
        (self._folder / _META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")

    def close(self) -> None:
        for stream in (*self._tokens.values(), *self._index.values(), self._labels):
            if stream is not None:
                stream.close()

    def _sort_labels(self) -> list[int | str]:
        kinds = {isinstance(name, str) for name in self._label_ids}
        if len(kinds) > 1:
            raise UserError("data.label_field: some labels are numbers and some are strings; use one kind")
        names = sorted(self._label_ids, key=lambda name: (name if isinstance(name, int) else 0, str(name)))
        final = np.zeros(len(names), dtype=_LABEL)
        for number, name in enumerate(names):
            final[self._label_ids[name]] = number
        if self._documents:
            assert self._labels is not None
            self._labels.blocks = _BlockSums()
            stored = np.memmap(self._folder / "labels.bin", dtype=_LABEL, mode="r+")
            for start in range(0, len(stored), 1 << 20):
                piece = final[stored[start : start + (1 << 20)]]
                stored[start : start + (1 << 20)] = piece
                self._labels.blocks.update(piece.tobytes())
            stored.flush()
        return names


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


# --- reading ------------------------------------------------------------------------------------------------


class CheckedArray:
    """A file mapped into memory, of which each block is held against its CRC-32 when it is first read.

    Args:
        path: of the file.
        dtype: of its values.
        sums: the CRC-32 of each block.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], sums: npt.NDArray[Any]) -> None:
        self.path = path
        self.dtype = dtype
        size = path.stat().st_size
        # An empty file cannot be mapped.
        self._bytes: npt.NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, dtype=np.uint8)
        )
        self._values: npt.NDArray[Any] = self._bytes.view(dtype)
        self._sums = sums
        self._seen = bytearray(len(sums))

    def __len__(self) -> int:
        return len(self._values)

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
        width = self.dtype.itemsize
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
            dtypes |= {f"{name}.idx": _OFFSET for name in meta["tokens"]} | {"labels.bin": _LABEL}
            arrays: dict[str, CheckedArray] = {}
            for name, told in sorted(meta["files"].items()):
                count = -(-told["bytes"] // BLOCK)
                if (folder / name).stat().st_size != told["bytes"]:
                    raise CacheDamagedError(f"{folder / name}: not as it was written")
                array = CheckedArray(folder / name, dtypes[name], sums[at : at + count])
                if told["bytes"] <= CHECKED_WHOLE and array.damaged_block() is not None:
                    raise CacheDamagedError(f"{folder / name}: not as it was written")
                arrays[name], at = array, at + count
            tokens = {name: arrays[f"{name}.bin"] for name in meta["tokens"]}
            offsets = {name: arrays[f"{name}.idx"] for name in meta["tokens"]}
            labels = arrays.get("labels.bin")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheDamagedError(f"{folder}: {one_line(error)}") from error
        return TokenCache(folder, meta, tokens, offsets, labels)

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

    def document(self, field: str, number: int) -> npt.NDArray[Any]:
        """The tokens of one document, special tokens included."""
        offsets = self.offsets[field]
        tokens: npt.NDArray[Any] = self.tokens[field][int(offsets[number]) : int(offsets[number + 1])]
        return tokens

    def documents_between(self, field: str, start: int, stop: int) -> range:
        """The documents that the tokens ``[start, stop)`` of a field are of."""
        offsets = self.offsets[field]
        return range(bisect_right(offsets, start) - 1, bisect_right(offsets, stop - 1))
