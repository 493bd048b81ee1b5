"""Read records from user-defined code, and write records passed from Python code to a file."""

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
"""Time in seconds after which a note shows the number of records read so far.

The note makes the user aware that the code may yield records without an end.
"""


class CustomRecords(DataSource):
    """Source of records from user-defined code, such as ``my_package.my_module:records``.

    If the import path refers to a callable, such as a function or class, the callable is called.
    The imported object, or the result of the call, must be an iterable of mappings, or an object
    with ``__getitem__`` and ``__len__``. Each pass must yield the same records. If a call returns
    an iterator, such as a generator, the callable is called again for each pass over the records.

    The object may have an attribute or method ``fingerprint`` that gives a string. The string must
    change whenever the records change. The digest that identifies the data is then computed from
    this string, without reading the records. Without a fingerprint, the digest is computed from the
    records, which must then be convertible to JSON.
    """

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> CustomRecords | None:
        """Open the source if one of the names is an import path, such as ``my_module:records``.

        Imports the module, and calls the object if it is callable.

        Returns:
            The source. None if no name is an import path.

        Raises:
            UserError: If an import path is combined with other names or with ``data.config_name``,
                if the object cannot be imported, or if the call fails.
        """
        code_name = next(filter(plugins.is_plugin_name, names), None)
        if code_name is None:
            return None
        if settings.data.config_name is not None:
            raise UserError(
                f"data.config_name: has no effect with the Python source {code_name}; remove data.config_name"
            )
        if len(names) > 1:
            raise UserError(
                f"data.source: {code_name}: a Python source cannot be combined with other sources; use "
                "data.sources for a mixture"
            )
        return cls(code_name, settings)

    def __init__(self, name: str, settings: SourceSettings) -> None:
        super().__init__(str(plugins.parse_setting_spec("data.source", name)), settings)
        self.records = plugins.load_plugin_value("data.source", name)
        """The imported object, or its return value if it is callable.

        An iterator can be read only once, so it is created again for each pass.
        """

    def compute_digest(self) -> str:
        """Compute a digest of the records, of the code that provides them, and of the settings.

        If the user-defined object has a ``fingerprint``, the digest includes the fingerprint
        instead of the records, and the records are not read.
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
        """Check that the first document can be read.

        Does nothing if ``data.format`` is ``samples``, because samples are checked when the
        datasets are built.

        Raises:
            UserError: If the records cannot be read or contain no text.
        """
        if self.settings.data.format != CUSTOM_SAMPLES:  # samples are checked when the datasets are built
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
                raise UserError(
                    f"{subject}: provides a {type(records).__name__}, not an iterable of records; provide an "
                    "iterable of mappings from column names to values"
                )
            asks_at = time.monotonic() + NOTE_AFTER_SECONDS
            for number, row in enumerate(islice(records, self.settings.data.max_samples), start=1):
                if number % 1000 == 0 and time.monotonic() > asks_at:
                    asks_at = float("inf")
                    print_error(
                        f"note: {subject}: {number:,} records so far; if the source is infinite, set "
                        "data.max_samples to the number of records to read"
                    )
                location = f"{self.name}: record {number}"
                if not isinstance(row, Mapping):
                    raise UserError(
                        f"data.source: {location} is a {type(row).__name__}, not a mapping; use a mapping "
                        "from column names to values"
                    )
                yield LocatedRow(location, row)

    def _compute_records_digest(self) -> str:
        """Read the records, up to ``data.max_samples``, and compute their digest.

        Raises:
            UserError: If the records cannot be read, if a record is not a mapping, or if it cannot
                be converted to JSON.
        """
        digest = hashlib.blake2b(digest_size=16)
        for location, row in self.iter_rows():
            try:
                digest.update(json.dumps(row, sort_keys=True, default=_convert_mapping).encode() + b"\n")
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"data.source: {location} cannot be converted to JSON ({to_one_line(error)}); use only "
                    "numbers, strings, lists and mappings"
                ) from error
        return digest.hexdigest()


def _convert_mapping(value: object) -> dict[Any, Any]:
    """Convert a mapping that is not a dict, such as a MappingProxyType, for :func:`json.dumps`.

    Raises:
        TypeError: If ``value`` is not a mapping.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"the type {type(value).__name__} is not supported")


def write_records_file(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write records to a .jsonl file that is named after the digest of its content.

    Args:
        rows: Records, as JSON-serializable mappings.
        folder: Folder to write to. It is created if it does not exist.

    Returns:
        Path of the file.

    Raises:
        UserError: If a record is not a mapping, or is not JSON-serializable.
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
                    line = json.dumps(row, ensure_ascii=False, default=_convert_mapping).encode() + b"\n"
                except (TypeError, ValueError) as error:
                    raise UserError(
                        f"data: record {number} cannot be converted to JSON ({to_one_line(error)}); use only "
                        "numbers, strings, lists and mappings"
                    ) from error
                digest.update(line)
                file.write(line)
        final = folder / f"{digest.hexdigest()}.jsonl"
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)
    return final
