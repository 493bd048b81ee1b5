"""Records from code of the user's: whatever it yields, in its order, read again whenever they are needed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from portable import plugins
from portable.converters.console import print_error
from portable.data.sources.documents import Format, digest_of
from portable.data.sources.source import FINISHED, Source, SourceSettings
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


PATIENCE = 20.0
"""Seconds of reading records until the user is told how many there are so far."""


class UserRecords(Source):
    """The records of a function, class or object, such as ``my_package.my_module:records``.

    It is called, if it can be, and gives an iterable of mappings, with the same records each time. With a
    ``fingerprint``, a text that changes whenever the records do, they are not read to find out.
    """

    @classmethod
    def of(cls, names: Sequence[str], settings: SourceSettings) -> UserRecords | None:
        named = next(filter(plugins.names_code, names), None)
        if named is None:
            return None
        if len(names) > 1 or settings.data.config_name is not None:
            raise UserError(f"data.source: {named}: a Python source cannot be combined with others")
        return cls(named, settings)

    def __init__(self, name: str, settings: SourceSettings) -> None:
        super().__init__(str(plugins.parse(name)), settings)
        self.records = plugins.load_made("data.source", name)
        """What it is, or returns; a generator is made anew each time that it is read."""

    def digest(self) -> str:
        told = getattr(self.records, "fingerprint", None)
        with plugins.user_code_errors(f"data.source: {self.name}: fingerprint"):
            told = told() if callable(told) else told
        if told is None:
            told = self._digest()
        most = self.settings.data.max_samples
        return digest_of(repr((self.name, plugins.digest(self.name), str(told), self.fields.key, most)))

    def _recognised(self) -> Format:
        if self.fields.format is None:
            first = next(self.rows(), None)
            if first is not None and {"input_ids", "labels"} <= first[1].keys():
                return "samples"
        return super()._recognised()

    def check(self) -> None:
        if self.settings.data.format != FINISHED:  # those are checked when they are counted
            super().check()

    def _read_rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        told = f"data.source: {self.name}"
        with plugins.user_code_errors(told):
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
            for number, row in enumerate(islice(found, self.settings.data.max_samples), start=1):
                if number % 1000 == 0 and time.monotonic() > asks_at:
                    asks_at = float("inf")
                    print_error(
                        f"note: {told}: {number:,} records so far; if there is no end of them, set "
                        "data.max_samples"
                    )
                where = f"{self.name}: record {number}"
                if not isinstance(row, Mapping):
                    raise UserError(f"data.source: {where} is a {type(row).__name__}, not a mapping")
                yield where, row

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
