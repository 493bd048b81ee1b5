"""Records from user-defined code."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from portable import plugins
from portable.converters.console import print_error
from portable.data.sources.documents import RecordFormat, compute_text_digest
from portable.data.sources.records import LocatedRow
from portable.data.sources.source import CUSTOM_SAMPLES, DataSource, SourceSettings
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


NOTE_AFTER_SECONDS = 20.0
"""Seconds until a note shows the number of records read so far."""


class CustomRecords(DataSource):
    """Records of a function, class or object, such as ``my_package.my_module:records``.

    A callable is called. The result must be an iterable of mappings, with the same records each time. If it
    has an attribute ``fingerprint``, a text that changes whenever the records change, the digest is computed
    without reading the records.
    """

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> CustomRecords | None:
        """Return the records if a name is an import path, such as ``my_module:records``.

        Returns:
            None if no name is an import path.

        Raises:
            UserError: If there are further names, or if ``data.config_name`` is set.
        """
        code_name = next(filter(plugins.is_plugin_name, names), None)
        if code_name is None:
            return None
        if len(names) > 1 or settings.data.config_name is not None:
            raise UserError(
                f"data.source: {code_name}: a Python source cannot be combined with others; use data.sources "
                "for a mixture"
            )
        return cls(code_name, settings)

    def __init__(self, name: str, settings: SourceSettings) -> None:
        super().__init__(str(plugins.parse_plugin_spec(name)), settings)
        self.records = plugins.load_plugin_value("data.source", name)
        """The object, or the value that it returns. A generator is created again for each pass."""

    def compute_digest(self) -> str:
        """Compute a digest of the records, their code and the settings for reading them.

        If the object has a ``fingerprint``, the fingerprint replaces the records.
        """
        records_digest = getattr(self.records, "fingerprint", None)
        with plugins.convert_user_errors(f"data.source: {self.name}: fingerprint"):
            records_digest = records_digest() if callable(records_digest) else records_digest
        if records_digest is None:
            records_digest = self._compute_records_digest()
        most = self.settings.data.max_samples
        return compute_text_digest(
            repr(
                (
                    self.name,
                    plugins.compute_plugin_digest(self.name),
                    str(records_digest),
                    self.fields.cache_key,
                    most,
                )
            )
        )

    def _determine_record_format(self) -> RecordFormat:
        if self.fields.format is None:
            first = next(self.iter_rows(), None)
            if first is not None and {"input_ids", "labels"} <= first[1].keys():
                return "samples"
        return super()._determine_record_format()

    def check_readable(self) -> None:
        """Read the first document, unless the records are samples.

        Samples are checked when the datasets are built.
        """
        if self.settings.data.format != CUSTOM_SAMPLES:  # samples are checked when they are counted
            super().check_readable()

    def _read_rows(self) -> Iterator[LocatedRow]:
        subject = f"data.source: {self.name}"
        with plugins.convert_user_errors(subject):
            records = self.records
            if isinstance(records, Iterator):  # an iterator can be read only once
                records = plugins.load_plugin_value("data.source", self.name)
            elif (
                not isinstance(records, Iterable)
                and hasattr(records, "__getitem__")
                and hasattr(records, "__len__")
            ):
                records = map(records.__getitem__, range(len(records)))
            if isinstance(records, str | Mapping) or not isinstance(records, Iterable):
                raise UserError(f"{subject}: returns a {type(records).__name__}, not an iterable of records")
            asks_at = time.monotonic() + NOTE_AFTER_SECONDS
            for number, row in enumerate(islice(records, self.settings.data.max_samples), start=1):
                if number % 1000 == 0 and time.monotonic() > asks_at:
                    asks_at = float("inf")
                    print_error(
                        f"note: {subject}: {number:,} records so far; if there are infinitely many "
                        "records, set data.max_samples"
                    )
                location = f"{self.name}: record {number}"
                if not isinstance(row, Mapping):
                    raise UserError(
                        f"data.source: {location} is a {type(row).__name__}, not a mapping; use a mapping "
                        "from column names to values"
                    )
                yield LocatedRow(location, row)

    def _compute_records_digest(self) -> str:
        """Compute a digest of all records. Reads them all.

        Raises UserError if a record cannot be converted to JSON.
        """
        digest = hashlib.blake2b(digest_size=16)
        for location, row in self.iter_rows():
            try:
                digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"data.source: {location} does not consist of plain values "
                    f"({to_one_line(error)}); use numbers, strings, lists and mappings"
                ) from error
        return digest.hexdigest()


def write_records_file(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write records in memory to a .jsonl file whose name is their digest.

    Args:
        rows: Mappings with values that JSON supports.
        folder: Folder of the file.

    Returns:
        Path of the file.

    Raises:
        UserError: If a record is not a mapping or has other values.
    """
    digest = hashlib.blake2b(digest_size=16)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"draft-{id(rows)}"
    try:
        with draft.open("wb") as file:
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, Mapping):
                    raise UserError(
                        f"data: record {number} is a {type(row).__name__}, not a mapping; use a mapping "
                        "from column names to values"
                    )
                try:
                    line = json.dumps(dict(row), ensure_ascii=False).encode() + b"\n"
                except (TypeError, ValueError) as error:
                    raise UserError(
                        f"data: record {number} does not consist of plain values ({to_one_line(error)}); "
                        "use numbers, strings, lists and mappings"
                    ) from error
                digest.update(line)
                file.write(line)
        final = folder / f"{digest.hexdigest()}.jsonl"
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)
    return final
