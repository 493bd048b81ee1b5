"""Where the documents come from: the standard library's sources, local files, or a hub data set.

A source streams its documents, so a data set may be larger than memory, and has a ``key``: a digest that
changes whenever the documents would, cheap enough to take at every start.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

OWN_FORMATS = (".txt", ".jsonl")
LIBRARY_FORMATS = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
FORMATS = (*OWN_FORMATS, *LIBRARY_FORMATS)

PIECE_CHARS = 1 << 20  # a longer text is read and tokenized in pieces, so that one huge file fits in memory
_STDLIB_BYTES = 10_000_000
_STDLIB_LARGEST = 512_000
_STDLIB_SKIPS = re.compile(
    "tests?|idle_test|idlelib|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|.*-packages|__pycache__|config-.*"
)
_DIGEST_MEMO_FROM = 16 << 20  # bytes; a smaller file is hashed anew at every start


@dataclass(frozen=True)
class Document:
    """One document, or a piece of a long one (then only the last piece has ``ends`` set)."""

    text: str
    target: str | None = None
    label: int | str | None = None
    ends: bool = True


@dataclass(frozen=True)
class Fields:
    """The names of the columns to read; ``None`` for a column that the task does not use."""

    text: str = "text"
    target: str | None = None
    label: str | None = None


class Source(ABC):
    """A stream of documents that can be read again from the start."""

    remote = False
    """Whether the first look at it may download it."""
    name: str
    """What to call it in a message, for example the path as the person wrote it."""

    @property
    @abstractmethod
    def key(self) -> str:
        """A digest of the content and of what is read from it."""

    @property
    @abstractmethod
    def size_bytes(self) -> int | None:
        """About how many bytes of text there are; ``None`` when nobody knows yet."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The documents that are not empty, in a fixed order."""

    def check(self) -> None:
        """Look at the first document, writing nothing; raises ``UserError`` as reading would."""
        if next(self.documents(), None) is None:
            raise UserError(
                f"data.source: {self.name} has no text in it; give a source with at least one document"
            )


def open_source(
    source: str | Sequence[str] | None,
    *,
    fields: Fields | None = None,
    config_name: str | None = None,
    split: str | None = None,
    max_samples: int | None = None,
    digests: Path | None = None,
    remember: bool = True,
) -> Source:
    """Find what ``data.source`` names.

    Nothing large is read yet. ``digests`` is a folder that remembers the digests of large local files by
    their size and modification time; ``None`` hashes them anew, and without ``remember`` nothing is written.

    Raises:
        UserError: the source does not exist, or cannot be what it is said to be.
    """
    fields = fields or Fields()
    if max_samples is not None and max_samples < 1:
        raise UserError(f"data.max_samples: {max_samples} is less than 1; give a positive number or null")
    if source is None:
        _text_only(fields, "the standard library's sources")
        return StandardLibrary(max_samples)
    names = [source] if isinstance(source, str) else list(source)
    if not names or not all(names):
        raise UserError("data.source: it is empty; name a hub data set or files, or give null")
    local = [_local_files(name) for name in names]
    if any(files is None for files in local):
        if len(names) == 1:
            return HubDataset(names[0], fields, config_name, split, max_samples)
        missing = names[local.index(None)]
        raise UserError(f"data.source: {missing}: no such file or folder (a list may only name local files)")
    if config_name is not None:
        raise UserError(
            f"data.config_name: {config_name!r} is for a hub data set, but data.source names local files; "
            "remove it"
        )
    files = list(dict.fromkeys(path for found in local for path in found or ()))
    return LocalFiles(", ".join(names), files, fields, max_samples, digests, remember)


def _text_only(fields: Fields, what: str) -> None:
    for key, name in (("target_field", fields.target), ("label_field", fields.label)):
        if name is not None:
            raise UserError(
                f"data.{key}: {what} have text only, no {name!r}; give a data.source with that column "
                "(.jsonl, .json, .csv, .parquet or a hub data set)"
            )


# --- the standard library -----------------------------------------------------------------------------------


class StandardLibrary(Source):
    """The Python files of the running interpreter's standard library: real text, nothing to download.

    One document a file, without tests and tables, in an order by hashed name, so that any stretch of it, the
    evaluation tail included, is a fair sample.
    """

    name = "the standard library's sources"

    def __init__(self, max_samples: int | None = None, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._max_samples = max_samples
        self._key: str | None = None
        self._size = 0

    @property
    def key(self) -> str:
        if self._key is None:
            digest = hashlib.blake2b(b"stdlib", digest_size=16)
            self._size = 0
            for document in self.documents():
                content = document.text.encode()
                self._size += len(content)
                digest.update(hashlib.blake2b(content, digest_size=16).digest())
            self._key = digest.hexdigest()
        return self._key

    @property
    def size_bytes(self) -> int | None:
        return self._size if self.key else None

    def documents(self) -> Iterator[Document]:
        count = total = 0
        for path in self._files():
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if not text.strip():
                continue
            if count == self._max_samples or total + len(text) > _STDLIB_BYTES:
                break
            count, total = count + 1, total + len(text)
            yield Document(text)
        if not count:
            raise UserError(
                f"data.source: this Python has no standard library sources in {self._root}; "
                "name a file or data set"
            )

    def _files(self) -> list[Path]:
        found = []
        for folder, subfolders, names in os.walk(self._root):
            subfolders[:] = [name for name in subfolders if not _STDLIB_SKIPS.fullmatch(name)]
            # _sysconfigdata tells how this Python was built, and differs between machines.
            wanted = (
                name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
            )
            paths = (Path(folder, name) for name in wanted)
            found += [path for path in paths if path.stat().st_size <= _STDLIB_LARGEST]

        def order(path: Path) -> bytes:
            name = path.relative_to(self._root).as_posix()
            return hashlib.blake2b(name.encode(), digest_size=8).digest()

        return sorted(found, key=order)


# --- local files --------------------------------------------------------------------------------------------


def _local_files(name: str) -> list[Path] | None:
    """The files that ``name`` stands for, or ``None`` when it does not look like a local path."""
    expanded = Path(name).expanduser()
    if expanded.is_dir():
        found = sorted(
            path
            for path in expanded.rglob("*")
            if path.suffix.lower() in FORMATS
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(expanded).parts)
        )
        if not found:
            raise UserError(
                f"data.source: {name} has no {_listed(FORMATS)} files in it; name a folder that has"
            )
        return found
    if expanded.exists():
        found = [expanded]
    elif glob.has_magic(name):
        matches = glob.glob(str(expanded), recursive=True)  # noqa: PTH207 (a pattern may be absolute)
        found = sorted(path for path in map(Path, matches) if path.is_file())
        if not found:
            raise UserError(f"data.source: no file matches {name}; check the path and the pattern")
    elif name.startswith((".", "/", "~")) or expanded.suffix.lower() in FORMATS or name.count("/") > 1:
        raise UserError(f"data.source: {name}: no such file or folder; check the path")
    else:
        return None
    for path in found:
        if path.suffix.lower() not in FORMATS:
            raise UserError(f"data.source: {path}: cannot read this kind of file; use {_listed(FORMATS)}")
    return found


class LocalFiles(Source):
    """Local files, read in order: a ``.txt`` file is one document, the others have a row a document."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        fields: Fields | None = None,
        max_samples: int | None = None,
        digests: Path | None = None,
        remember: bool = True,
    ) -> None:
        self.name = name
        self._files = list(files)
        self._fields = fields = fields or Fields()
        self._max_samples = max_samples
        self._digests = digests
        self._remember = remember
        self._key: str | None = None
        for path in self._files:
            if path.suffix.lower() == ".txt":
                _text_only(fields, f"{path} and other .txt files")

    @property
    def key(self) -> str:
        if self._key is None:
            told = (self._fields.text, self._fields.target, self._fields.label, self._max_samples)
            digest = hashlib.blake2b(repr(told).encode(), digest_size=16)
            for path in self._files:
                digest.update(
                    path.suffix.lower().encode() + b"\0" + _file_digest(path, self._digests, self._remember)
                )
            self._key = digest.hexdigest()
        return self._key

    @property
    def size_bytes(self) -> int | None:
        if self._max_samples is not None or any(path.suffix.lower() == ".parquet" for path in self._files):
            return None
        return sum(path.stat().st_size for path in self._files)

    def documents(self) -> Iterator[Document]:
        left = self._max_samples
        for path in self._files:
            suffix = path.suffix.lower()
            if suffix == ".txt":
                if left == 0:
                    return
                yield from _text_file(path)
                left = None if left is None else left - 1
                continue
            rows = _jsonl_rows(path) if suffix == ".jsonl" else _library_rows(path)
            for where, row in islice(rows, left):
                left = None if left is None else left - 1
                document = read_row(row, self._fields, where)
                if document is not None:
                    yield document


def _file_digest(path: Path, memo: Path | None, remember: bool) -> bytes:
    """The digest of a file's bytes; that of a large file is remembered in the folder ``memo``."""
    try:
        stat = path.stat()
        key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
        # A file touched a moment ago may still change within one tick of its clock.
        settled = time.time_ns() - stat.st_mtime_ns > 2_000_000_000
        remembered = None
        if memo is not None and settled and stat.st_size >= _DIGEST_MEMO_FROM:
            remembered = memo / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
            if remembered.is_file() and len(digest := remembered.read_bytes()) == 16:
                return digest
        with path.open("rb") as file:
            hasher = hashlib.blake2b(digest_size=16)
            while chunk := file.read(1 << 22):
                hasher.update(chunk)
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot read it: {one_line(error.strerror)}") from error
    if remembered is not None and remember:
        _remember(remembered, hasher.digest())
    return hasher.digest()


def _remember(path: Path, digest: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_bytes(digest)
        draft.replace(path)
    except OSError:  # the memo only saves time
        return


def _text_file(path: Path) -> Iterator[Document]:
    """One document, in pieces that end at a line's end where it is long; nothing for an empty file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            piece = file.read(PIECE_CHARS)
            while piece:
                if len(piece) == PIECE_CHARS:
                    piece += file.readline(PIECE_CHARS)
                following = file.read(PIECE_CHARS)
                if following or piece.strip():
                    yield Document(piece, ends=not following)
                piece = following
    except UnicodeDecodeError as error:
        raise UserError(f"data.source: {path}: it is not UTF-8 text; convert it (iconv -t utf-8)") from error
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot read it: {one_line(error.strerror)}") from error


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else one_line(error)
                    raise UserError(
                        f"data.source: {path}:{number}: not a line of JSON ({reason}); mend or remove it"
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(
                        f"data.source: {path}:{number}: a {type(row).__name__}, not an object; "
                        'each line must look like {"text": "..."}'
                    )
                yield f"{path}:{number}", row
    except OSError as error:
        raise UserError(f"data.source: {path}: cannot read it: {one_line(error.strerror)}") from error


def read_row(row: Mapping[str, Any], fields: Fields, where: str) -> Document | None:
    """The document in a row; ``None`` for one without text, of which there is nothing to learn.

    Raises:
        UserError: a field is missing or of the wrong kind; ``where`` says which row.
    """
    text = _text_of(row, "text_field", fields.text, where)
    target = None if fields.target is None else _text_of(row, "target_field", fields.target, where)
    label = None if fields.label is None else _label_of(row, fields.label, where)
    if not text.strip() or (target is not None and not target.strip()):
        return None
    return Document(text, target, label)


def _text_of(row: Mapping[str, Any], key: str, name: str, where: str) -> str:
    value = _value_of(row, key, name, where)
    if not isinstance(value, str):
        raise UserError(
            f"data.{key}: {where}: {name!r} is {_kind(value)}, not a string; "
            "name a column of text or convert it"
        )
    # A lone surrogate, which JSON can spell and UTF-8 cannot, would stop the tokenizer.
    return value if value.isascii() else value.encode(errors="replace").decode()


def _label_of(row: Mapping[str, Any], name: str, where: str) -> int | str:
    value = _value_of(row, "label_field", name, where)
    if not isinstance(value, int | str):
        raise UserError(
            f"data.label_field: {where}: {name!r} is {_kind(value)}, not an integer or a string; "
            "name a column of classes"
        )
    return int(value) if isinstance(value, bool) else value


def _value_of(row: Mapping[str, Any], key: str, name: str, where: str) -> Any:
    if name in row:
        return row[name]
    near = get_close_matches(name, list(row), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; set data.{key} to the one to read"
    raise UserError(f"data.{key}: {where}: no field {name!r}; the fields are {_listed(row) or 'none'}{hint}")


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _listed(names: Iterable[str]) -> str:
    shown = list(islice(names, 21))
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")


# --- through the datasets library ---------------------------------------------------------------------------


def _datasets(need: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data.source: {need} needs the datasets library; run: pip install datasets "
            "(.txt and .jsonl files do without)"
        ) from error
    return datasets


def _library_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a .json, .csv or .parquet file, streamed, with no copy left in a cache."""
    datasets = _datasets(f"reading {path}")
    reader = LIBRARY_FORMATS[path.suffix.lower()]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows = datasets.load_dataset(
                reader, data_files=[glob.escape(str(path))], split="train", streaming=True, cache_dir=scratch
            )
            for number, row in enumerate(rows, start=1):
                yield f"{path}: row {number}", row
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"data.source: {path}: not a readable {path.suffix} file ({_reason(error)})"
            ) from error


class HubDataset(Source):
    """A data set of the Hugging Face hub, downloaded by the ``datasets`` library into its own cache."""

    remote = True

    # One load for all the sources of a process: the key, the tokenizer and the tokens each need it.
    _loaded: ClassVar[dict[tuple[str, str | None, str], Any]] = {}

    def __init__(
        self, name: str, fields: Fields, config_name: str | None, split: str | None, max_samples: int | None
    ) -> None:
        self.name = name
        self._fields = fields
        self._config_name = config_name
        self._split = split or "train"
        self._max_samples = max_samples

    def _rows(self) -> Any:
        place = (self.name, self._config_name, self._split)
        if place not in self._loaded:
            datasets = _datasets(f"the hub data set {self.name!r}")
            try:
                self._loaded[place] = datasets.load_dataset(self.name, self._config_name, split=self._split)
            except Exception as error:
                asked = ", ".join(str(part) for part in place if part)
                raise UserError(
                    f"data.source: cannot load {asked} as a local file or from the hub ({_reason(error)}); "
                    "check the name, data.config_name, data.split and the network, or give local files"
                ) from error
        return self._loaded[place]

    @property
    def key(self) -> str:
        # The library's fingerprint covers the repository, its revision, the configuration and the split.
        told = (self._rows()._fingerprint, self._fields, self._max_samples)
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()

    @property
    def size_bytes(self) -> int | None:
        return None

    def documents(self) -> Iterator[Document]:
        for number, row in enumerate(islice(self._rows(), self._max_samples), start=1):
            document = read_row(row, self._fields, f"{self.name}: row {number}")
            if document is not None:
                yield document

    def check(self) -> None:
        """Nothing: a look would download it."""


def _reason(error: BaseException) -> str:
    """The root of a chained error in one short line: the library wraps what matters."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
