"""What every source gives: documents, and how a row becomes one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TextSplit = Literal["file", "paragraph", "line"]
Label = int | float | str | tuple[int | float | str, ...]
"""A class, several, a number, or several."""
PIECE_CHARS = 1 << 20  # a longer text is read and tokenized in pieces, so that one huge file fits in memory


@dataclass(frozen=True)
class Document:
    """One document, or a piece of a long one (then only the last piece has ``ends`` set)."""

    text: str
    target: str | None = None
    label: Label | None = None
    ends: bool = True
    pair: str | None = None


@dataclass(frozen=True)
class Fields:
    """The names of the columns to read; ``None`` for a column that the task does not use."""

    text: str = "text"
    target: str | None = None
    label: str | None = None
    text_split: TextSplit = field(default="file", repr=False)
    """What of a ``.txt`` file is a document."""
    pair: str | None = None
    prefix: str = ""
    """Put before every text."""


class Source(ABC):
    """A stream of documents that can be read again from the start."""

    remote = False
    """Whether the first look at it may download it."""
    name: str
    """What to call it in a message, for example the path as the person wrote it."""

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, where the source has them and its labels are numbers of these."""
        return None

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

    def documents_of_key(self) -> Iterator[Document]:
        """All documents, held to the ``key`` as they are read.

        Raises:
            UserError: at the end, where they are not those that the key tells of: another program wrote to
                them meanwhile. What was made of them may be kept under no key.
        """
        yield from self.documents()

    def check(self) -> None:
        """Look at the first document, writing nothing; raises ``UserError`` as reading would."""
        if next(self.documents(), None) is None:
            raise UserError(
                f"data.source: {self.name} has no text in it; give a source with at least one document"
            )


def changed_meanwhile(path: object) -> UserError:
    """What to tell a person whose data changed while it was read."""
    return UserError(
        f"data.source: {path} has changed while it was read; let what writes to it end, and start again"
    )


def read_row(row: Mapping[str, Any], fields: Fields, where: str) -> Document | None:
    """The document in a row; ``None`` for one without text, of which there is nothing to learn.

    Raises:
        UserError: a field is missing or of the wrong kind; ``where`` says which row.
    """
    text = _text_of(row, "text_field", fields.text, where)
    target = None if fields.target is None else _text_of(row, "target_field", fields.target, where)
    label = None if fields.label is None else _label_of(row, fields.label, where)
    pair = None if fields.pair is None else _text_of(row, "text_pair_field", fields.pair, where)
    if not text.strip() or (target is not None and not target.strip()):
        return None
    return Document(fields.prefix + text, target, label, pair=pair)


def _text_of(row: Mapping[str, Any], key: str, name: str, where: str) -> str:
    value = _value_of(row, key, name, where)
    if not isinstance(value, str):
        raise UserError(
            f"data.{key}: {where}: {name!r} is {_kind(value)}, not a string; "
            + (
                f"name a field in it, as {name}.{next(iter(value))}"
                if isinstance(value, dict) and value
                else "name a column of text or convert it"
            )
        )
    # A lone surrogate, which JSON can spell and UTF-8 cannot, would stop the tokenizer.
    return value if value.isascii() else value.encode(errors="replace").decode()


def _label_of(row: Mapping[str, Any], name: str, where: str) -> Label:
    value = _value_of(row, "label_field", name, where)
    if isinstance(value, list | tuple):
        # Booleans say of each class whether it is the text's: they are numbers, not classes.
        return tuple(
            float(item) if isinstance(item, bool) else _one_label(item, name, where) for item in value
        )
    return _one_label(value, name, where)


def _one_label(value: Any, name: str, where: str) -> int | float | str:
    if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        shown = value if isinstance(value, float) else _kind(value)
        raise UserError(
            f"data.label_field: {where}: {name!r} is {shown}, neither a class (an integer or a string) nor a "
            "number, nor a list of these; name a column of labels"
        )
    return int(value) if isinstance(value, bool) else value


def _value_of(row: Mapping[str, Any], key: str, name: str, where: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            break
        value = value[part]
    else:
        return value
    fields = list(_fields_of(row))
    near = get_close_matches(name, fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; set data.{key} to the one to read"
    raise UserError(
        f"data.{key}: {where}: no field {name!r}; the fields are {listed(fields) or 'none'}{hint}"
    )


def _fields_of(row: Mapping[str, Any]) -> Iterator[str]:
    """The names of the fields; of one that holds fields, those of these."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def listed(names: Iterable[str]) -> str:
    shown = list(islice(names, 21))
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")


def text_only(fields: Fields, what: str) -> None:
    for key, name in (
        ("target_field", fields.target),
        ("label_field", fields.label),
        ("text_pair_field", fields.pair),
    ):
        if name is not None:
            raise UserError(
                f"data.{key}: {what} have text only, no {name!r}; give a data.source with that column "
                "(.jsonl, .json, .csv, .parquet or a hub data set)"
            )
