"""Records from code of the user's: whatever it yields, in its order, read again whenever they are needed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from converters.console import complain
from portable import plugins
from portable.data.sources.documents import Document, Fields, Source, changed_meanwhile, read_rows
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from pathlib import Path

    from portable.data.sources.conversations import Format


PATIENCE = 20.0
"""Seconds of reading records until the user is told how many there are so far."""


class OwnRecords(Source):
    """The records of a function, class or object, such as ``my_package.my_module:records``.

    It is called, if it can be, and gives an iterable of mappings, with the same records each time. With a
    ``fingerprint``, a text that changes whenever the records do, they are not read to find out.
    """

    def __init__(self, name: str, fields: Fields, max_samples: int | None) -> None:
        self.name = str(plugins.parse(name))
        self._fields = fields
        self.bad = fields.bad
        self._max_samples = max_samples
        self.records = plugins.load_made("data.source", name)
        """What it is, or returns; a generator is made anew each time that it is read."""
        self._key: str | None = None

    @property
    def key(self) -> str:
        if self._key is None:
            told = getattr(self.records, "fingerprint", None)
            with plugins.told_as(f"data.source: {self.name}: fingerprint"):
                told = told() if callable(told) else told
            if told is None:
                told = self._digest()
            content = (self.name, plugins.digest(self.name), str(told), self._fields.key, self._max_samples)
            self._key = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
        return self._key

    def recognised(self, fields: Fields) -> Format:
        if fields.format is None:
            first = next(self.rows(), None)
            if first is not None and {"input_ids", "labels"} <= first[1].keys():
                return "samples"
        return super().recognised(fields)

    @property
    def size_bytes(self) -> int | None:
        return None

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        told = f"data.source: {self.name}"
        with plugins.told_as(told):
            found = self.records
            if isinstance(found, Iterator):  # can be read once
                found = plugins.load_made("data.source", self.name)
            elif (
                not isinstance(found, Iterable)
                and hasattr(found, "__getitem__")
                and hasattr(found, "__len__")
            ):
                found = map(found.__getitem__, range(len(found)))
            if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
                raise UserError(f"{told}: gives a {type(found).__name__}, not an iterable of records")
            asks_at = time.monotonic() + PATIENCE
            for number, row in enumerate(islice(found, self._max_samples), start=1):
                if number % 1000 == 0 and time.monotonic() > asks_at:
                    asks_at = float("inf")
                    complain(
                        f"note: {told}: {number:,} records so far; if there is no end of them, set "
                        "data.max_samples"
                    )
                where = f"{self.name}: record {number}"
                if not isinstance(row, Mapping):
                    raise UserError(f"data.source: {where} is a {type(row).__name__}, not a mapping")
                yield where, row

    def documents(self) -> Iterator[Document]:
        for where, row in self.rows():
            yield from read_rows(row, self._fields, where)

    def documents_of_key(self) -> Iterator[Document]:
        before = self.key
        yield from self.documents()
        self._key = None
        if self.key != before:
            raise changed_meanwhile(self.name)

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for where, row in self.rows():
            try:
                digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
            except (TypeError, ValueError) as error:
                raise UserError(f"data.source: {where} is not of plain values ({one_line(error)})") from error
        return digest.hexdigest()


def written_records(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write records that a script has in memory to a file named by their digest, and return it.

    Raises:
        UserError: if they are no mappings of plain values.
    """
    digest = hashlib.blake2b(digest_size=16)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"draft-{id(rows)}"
    try:
        with draft.open("wb") as file:
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, Mapping):
                    raise UserError(f"data: record {number} is a {type(row).__name__}, not a mapping")
                try:
                    line = json.dumps(dict(row), ensure_ascii=False).encode() + b"\n"
                except (TypeError, ValueError) as error:
                    raise UserError(f"data: record {number} is not plain ({one_line(error)})") from error
                digest.update(line)
                file.write(line)
        final = folder / f"{digest.hexdigest()}.jsonl"
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)
    return final
