"""Convert records to documents, and collect the errors of records that cannot be read."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from portable.converters.similar_names import find_similar_names
from portable.data.sources.conversations import parse_documents
from portable.data.sources.documents import (
    DEFAULT_TRAINED_ROLES,
    Document,
    Label,
    RecordError,
    RecordFormat,
    describe_type,
    format_name_list,
    get_field_value,
    iter_field_names,
    replace_surrogates,
)
from portable.errors import MultipleMistakesError, UserError, to_one_line
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Mapping


TextSplit = Literal["file", "paragraph", "line"]
"""Values of ``data.text_split``: the unit of a .txt file that becomes one document."""
_MAX_PRINTED = 5
"""Maximum number of skipped records whose errors are printed."""
_MOST_NAMED, _MOST_KINDS, _MOST_COLLECTED = 10, 5, 1000
"""Maximum number of bad records to list in an error message, of error kinds to count in it, and of bad
records to collect from a source.
"""
_LOCATION_PATTERN = re.compile(r"^data\.[\w.-]+: (?:.*?:\d+: |.*?: (?:row|record) \d+: |.*?, byte \d+: )?")


class LocatedRow(NamedTuple):
    """Record that has not been converted to documents yet, and its location.

    Attributes:
        location: Position of the record in its source, such as ``a.jsonl:3``, used in error
            messages.
        row: Values of the record, keyed by field.
    """

    location: str
    row: Mapping[str, Any]


class CsvCell(str):
    """Text of a .csv cell that may be converted to a number later.

    A column contains either numbers or class names. All cells of the column must be read to decide
    between the two.
    """

    __slots__ = ()

    def parse_number(self) -> int | float | None:
        """Parse the cell as a number.

        Returns:
            An int if the cell has only digits and an optional sign, or if the value has no fraction
            and is below 2**53 in absolute value. Otherwise, a float. None if the cell is not a
            finite number, or if it is a code with leading zeros, such as 007.
        """
        text = self.strip()
        if not _NUMBER.fullmatch(text) or _LEADING_ZERO.match(text):
            return None
        number = float(text)
        if not math.isfinite(number):
            return None
        if _INTEGER.fullmatch(text):
            return int(text)
        return int(number) if is_whole(number) else number


_NUMBER = re.compile(r"[+-]?(\d{1,300}\.?\d{0,300}|\.\d{1,300})([eE][+-]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_LEADING_ZERO = re.compile(r"[+-]?0\d")


def is_whole(number: float) -> bool:
    """Return whether a float is an integer below 2**53 in absolute value.

    Floats represent these integers exactly, so they can be converted to an int without loss.
    """
    return number.is_integer() and abs(number) < 2**53


class BadRecords:
    """Counter of records that are skipped because they cannot be read. It prints the first few errors."""

    def __init__(self) -> None:
        self._seen: set[str] = set()  # a source may be read again, for example after training its tokenizer

    @property
    def num_skipped(self) -> int:
        """Number of bad records so far."""
        return len(self._seen)

    def skip_record(self, error: UserError) -> None:
        """Count a bad record. The errors of the first :data:`_MAX_PRINTED` records are also printed.

        An error that was already counted is ignored, because a source is read several times.

        Args:
            error: Error that contains the location of the record.
        """
        if str(error) in self._seen:
            return
        self._seen.add(str(error))
        if self.num_skipped <= _MAX_PRINTED:
            print_status(
                f"warning: skipped: {str(error).removesuffix(', or set data.on_bad_record to skip')}"
            )

    def print_skipped_count(self, name: str) -> None:
        """Print the number of skipped records, unless all their errors have been printed.

        Args:
            name: Name of the source.
        """
        if self.num_skipped > _MAX_PRINTED:
            print_status(
                f"warning: {name}: {self.num_skipped:,} bad records were skipped (data.on_bad_record: skip)"
            )


@dataclass
class BlankRecords:
    """Counter of records that are skipped because their text or target is blank.

    Attributes:
        num_skipped: Number of blank records in the current pass over the source. The caller must
            set it to 0 before each pass.
    """

    num_skipped: int = 0

    def describe_skipped(self, name: str, fields: Fields) -> list[str]:
        """Describe the skipped blank records in a note to the user.

        Args:
            name: Name of the source.
            fields: Names of the columns that may be blank.

        Returns:
            A list with one line, or an empty list if no record was skipped.
        """
        if not self.num_skipped:
            return []
        columns = repr(fields.text) + (f" or {fields.target!r}" if fields.target is not None else "")
        records = "record is" if self.num_skipped == 1 else "records are"
        return [f"{name}: {self.num_skipped:,} {records} left out, because {columns} is blank"]


class CollectedErrors(BadRecords):
    """Collector of errors, for reporting all bad records of a source in a single message.

    Unlike :class:`BadRecords`, it prints nothing. Collecting stops when 1000 different errors have
    been collected, or when the time limit has passed since the object was created.

    Args:
        seconds: Time limit for collecting errors, in seconds.

    Attributes:
        errors: Collected errors, without duplicates.
        has_read_everything: Whether all records were read. Initially True, and set to False when
            collecting stops early.
    """

    def __init__(self, seconds: float = 20.0) -> None:
        super().__init__()
        self.errors: list[UserError] = []
        self.has_read_everything = True
        self._until = time.monotonic() + seconds

    def skip_record(self, error: UserError) -> None:
        """Collect the error of a bad record, unless the same error was collected before.

        Raises:
            EnoughErrors: If enough errors have been collected, or if the time limit has passed.
        """
        if str(error) not in self._seen:
            self._seen.add(str(error))
            self.errors.append(error)
        self.raise_if_enough()

    def raise_if_enough(self) -> None:
        """Stop reading records if enough errors were collected, or if the time limit has passed.

        Before this method raises, it sets ``has_read_everything`` to False.

        Raises:
            EnoughErrors: If reading should stop.
        """
        if len(self.errors) >= _MOST_COLLECTED or time.monotonic() > self._until:
            self.has_read_everything = False
            raise EnoughErrors

    @property
    def count_by_kind(self) -> Counter[str]:
        """Number of errors of each kind, keyed by a description of the kind."""
        return Counter(_describe_error_kind(str(error)) for error in self.errors)

    def to_error(self, name: str) -> UserError:
        """Build the error that lists the first bad records and counts the errors of each kind.

        At least one error must have been collected.

        Args:
            name: Name of the source, used in the error message.

        Returns:
            A :class:`RecordError` with the message of the error and a remedy if only one error was
            collected. Otherwise, a :class:`MultipleMistakesError` that lists at most 10 records and
            at most 5 kinds.
        """
        lines = list(map(str, self.errors))
        remedy = "or set data.on_bad_record to skip"
        if len(lines) == 1:
            separator = ", " if "; " in lines[0] else "; correct or remove the record, "
            return RecordError(f"{lines[0]}{separator}{remedy}")
        kinds = self.count_by_kind
        counts = ", ".join(f"{count:,} x {kind}" for kind, count in kinds.most_common(_MOST_KINDS))
        more = ", ..." if len(kinds) > _MOST_KINDS else ""
        total = f"{'' if self.has_read_everything else 'at least '}{len(lines):,} bad records"
        summary = f"data.source: {name}: {total} ({counts}{more}); correct or remove these records, {remedy}"
        return MultipleMistakesError([*lines[:_MOST_NAMED], summary])


class EnoughErrors(Exception):  # noqa: N818  (a signal)
    """Raised to stop reading a source when enough errors have been collected."""


def _describe_error_kind(line: str) -> str:
    """Shorten an error message to the kind of its error, so that equal errors can be counted together.

    The result has no location of the record, no remedy (the text after the semicolon) and no text
    in parentheses. Quoted values become ``'...'``, and numbers become ``N``. For example,
    ``data.source: a.jsonl:3: field 'x' has 5 values; use one`` becomes ``field '...' has N
    values``.
    """
    kind = _LOCATION_PATTERN.sub("", line).partition(";")[0]
    kind = re.sub(r"'[^']*'", "'...'", kind)
    return re.sub(r"\d[\d,]*", "N", re.sub(r" ?\([^()]*\)", "", kind)).strip()


@dataclass(frozen=True)
class Fields:
    """Names of the columns to read from a record, and settings for reading records.

    The name of a column is None if the task does not use it. The ``repr`` of this class is part
    of cache keys, so renaming or adding an attribute would invalidate all token caches, unless
    the attribute is declared with ``repr=False``.
    """

    text: str = "text"
    """Column of the text."""
    target: str | None = None
    """Column of the target text for seq2seq."""
    label: str | None = None
    """Column of the labels for classification."""
    text_split: TextSplit = "file"
    """Unit into which a ``.txt`` file is split."""
    pair: str | None = None
    """Column of the second text for classification of text pairs."""
    prefix: str = ""
    """Text that is prepended to every text."""
    columns: tuple[str, ...] = ()
    """Additional numeric columns from ``data.columns``."""
    bad: BadRecords | None = field(default=None, repr=False, compare=False)
    """Counter or collector of records that cannot be read. None if a bad record ends the run."""
    blank: BlankRecords = field(default_factory=BlankRecords, repr=False, compare=False)
    """Counter of records whose text or target is blank."""
    format: RecordFormat | None = "text"
    """Format of the records. None if each source detects it from its first record."""
    renamed: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Fields renamed by ``data.columns``: pairs of the name that the format expects and the name in
    the records."""
    roles: frozenset[str] = field(default=DEFAULT_TRAINED_ROLES, repr=False)
    """Roles whose messages contribute to the loss in conversations."""

    def skip_record_or_raise(self, error: UserError) -> None:
        """Count a bad record as skipped, or raise an error if the settings do not allow bad records.

        Args:
            error: Error of the record.

        Raises:
            RecordError: If bad records are not allowed. It has the same message as ``error``.
            EnoughErrors: If ``bad`` is a :class:`CollectedErrors` that stops collecting.
        """
        if self.bad is None:
            raise RecordError(str(error)) from error.__cause__
        self.bad.skip_record(error)

    @property
    def cache_key(self) -> str:
        """String for cache keys, with all settings that affect how a record becomes documents.

        If the format of the records has not been detected yet, the string contains the format
        ``text``.
        """
        roles = () if self.roles == DEFAULT_TRAINED_ROLES else sorted(self.roles)
        kinds = () if self.label is None else ("whole numbers are classes",)
        renamed = (self.renamed,) if self.renamed else ()
        settings = (replace(self, format=self.format or "text"), self.bad is None)
        return repr((*settings, *roles, *kinds, *renamed))


def parse_record(row: Mapping[str, Any], fields: Fields, location: str) -> list[Document]:
    """Convert a record to documents.

    Args:
        row: Values of the record, keyed by field.
        fields: Names of the columns to read, and settings for reading them.
        location: Location of the record in its source, used in error messages.

    Returns:
        One document. For a preference, two documents: the chosen one and the rejected one. Empty if
        the text or target is blank, or if the record is skipped. Blank records are counted in
        ``fields.blank``.

    Raises:
        RecordError: If the record cannot be read, and ``fields`` does not allow bad records.
        EnoughErrors: If ``fields.bad`` is a :class:`CollectedErrors` that stops collecting.
    """
    try:
        row = rename_fields(row, fields, location)
        columns = tuple(_parse_number_field(row, name, location) for name in fields.columns)
        if fields.format not in (None, "text"):
            return parse_documents(row, fields.format, location, fields.roles, columns)
        pairs = fields.label is not None and fields.pair is None
        text = _parse_text_field(row, "text_field", fields.text, location, pairs=pairs)
        target = (
            None if fields.target is None else _parse_text_field(row, "target_field", fields.target, location)
        )
        label = None if fields.label is None else _parse_label_field(row, fields.label, location)
        pair = (
            None if fields.pair is None else _parse_text_field(row, "text_pair_field", fields.pair, location)
        )
    except UserError as error:
        fields.skip_record_or_raise(error)
        return []
    except Exception as error:  # JSON may contain numbers that no type can represent, such as 400 digits
        reason = f"{type(error).__name__}: {to_one_line(error)[:200]}"
        refusal = UserError(
            f"data.source: {location}: cannot use this record ({reason}); correct or remove the record"
        )
        refusal.__cause__ = error
        fields.skip_record_or_raise(refusal)
        return []
    if not text.strip() or (target is not None and not target.strip()):
        fields.blank.num_skipped += 1
        return []
    return [Document(fields.prefix + text, target, label, pair_text=pair, extra_columns=columns)]


def rename_fields(row: Mapping[str, Any], fields: Fields, location: str) -> Mapping[str, Any]:
    """Rename the fields of a record to the names that its format requires, according to ``data.columns``.

    Returns:
        A copy with the new names, or the record itself if ``data.columns`` does not rename fields.

    Raises:
        UserError: If the record lacks a field that ``data.columns`` renames.
    """
    if not fields.renamed:
        return row
    values = {name: _get_required_field(row, "columns", source, location) for name, source in fields.renamed}
    sources = {source for _, source in fields.renamed}
    return {**{name: value for name, value in row.items() if name not in sources}, **values}


def _parse_text_field(
    row: Mapping[str, Any], key: str, name: str, location: str, *, pairs: bool = False
) -> str:
    """Read a field that must be a string, and replace its lone surrogates.

    Args:
        row: Values of the record, keyed by field.
        key: Setting that names the field, such as ``text_field`` for ``data.text_field``. Used in
            error messages.
        name: Name of the field.
        location: Location of the record in its source, used in error messages.
        pairs: Whether the error message may also suggest ``data.text_pair_field``.

    Raises:
        UserError: If the field is missing or is not a string.
    """
    value = _get_required_field(row, key, name, location, pairs=pairs)
    if not isinstance(value, str):
        raise UserError(
            f"data.{key}: {location}: {name!r} is {describe_type(value)}, not a string; "
            + (
                f"choose a nested field, such as {name}.{next(iter(value))}"
                if isinstance(value, dict) and value
                else "choose a column of text, or convert the column"
            )
        )
    return replace_surrogates(value)


def _parse_number_field(row: Mapping[str, Any], name: str, location: str) -> float:
    """Read a number from an additional column of ``data.columns``.

    Booleans are converted to 0 or 1. Cells of .csv files are parsed as numbers. Strings in records
    of other formats are rejected, even if they contain a number.

    Raises:
        UserError: If the field is missing or is not a finite number.
    """
    value = _get_required_field(row, "columns", name, location)
    if isinstance(value, CsvCell):
        value = float(value) if _NUMBER.fullmatch(value.strip()) else value.strip() or None
        value = int(value) if isinstance(value, float) and is_whole(value) else value
    if not isinstance(value, int | float) or not math.isfinite(value):
        description = value if isinstance(value, float) else describe_type(value)
        raise UserError(
            f"data.columns: {location}: {name!r} is {description}, not a number; convert the value to a "
            "number"
        )
    return int(value) if isinstance(value, bool) else value


def _parse_label_field(row: Mapping[str, Any], name: str, location: str) -> Label:
    """Read the label of a record.

    Returns:
        A class (an integer or a string), a number, or a tuple if the field is a list. A single
        boolean, or a float without a fraction, is converted to int. In a tuple, booleans are
        converted to float, and other items are unchanged. A cell of a .csv file remains a
        :class:`CsvCell`, even if it contains a number.

    Raises:
        UserError: If the field is missing, if a label is neither a class nor a finite number, or if
            a label is an integer of more than 64 bits.
    """
    value = _get_required_field(row, "label_field", name, location)
    if isinstance(value, list | tuple):
        # A list of booleans marks the classes that apply to a text, so its items are numbers instead of
        # classes.
        return tuple(
            float(item) if isinstance(item, bool) else _validate_label(item, name, location) for item in value
        )
    label = _validate_label(value, name, location)
    # If a label is missing, pandas stores the integers of the column as floats.
    return int(label) if isinstance(label, float) and is_whole(label) else label


def _validate_label(value: Any, name: str, location: str) -> int | float | str:
    """Check a single label, and convert booleans to integers.

    Args:
        value: A label, or an item of a list of labels.
        name: Name of the field, used in error messages.
        location: Location of the record in its source, used in error messages.

    Raises:
        UserError: If the label is neither a class (an integer or a string) nor a finite number, or
            if it is an integer of more than 64 bits. A blank cell of a .csv file is also rejected,
            but an empty string from another format is a valid class.
    """
    if isinstance(value, CsvCell) and not value.strip():
        value = None
    if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        description = value if isinstance(value, float) else describe_type(value)
        raise UserError(
            f"data.label_field: {location}: {name!r} is {description}, not a class (an integer or a string), "
            "a number or a list of these; choose a column of labels"
        )
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise UserError(
            f"data.label_field: {location}: {name!r} does not fit into a signed 64-bit integer; use "
            "smaller integers"
        )
    return int(value) if isinstance(value, bool) else value


_MISSING = object()


def _get_required_field(
    row: Mapping[str, Any], key: str, name: str, location: str, *, pairs: bool = False
) -> Any:
    """Return the value of a field that a record must have.

    Args:
        row: Values of the record, keyed by field.
        key: Setting that names the field, such as ``text_field`` for ``data.text_field``. Used in
            error messages.
        name: Name of the field. A dotted name such as ``a.b`` may refer to a nested field.
        location: Location of the record in its source, used in error messages.
        pairs: Whether the error message may also suggest ``data.text_pair_field``.

    Raises:
        UserError: If the record has no such field.
    """
    value = get_field_value(row, name, _MISSING)
    if value is not _MISSING:
        return value
    fields = list(iter_field_names(row))
    near = find_similar_names(name, fields)
    remedy = (
        f"correct data.{key} (did you mean {near[0]!r}?)" if near else f"set data.{key} to the field to read"
    )
    if pairs and not near and sum(isinstance(get_field_value(row, field), str) for field in fields) > 1:
        remedy += ", and for pairs of texts, set data.text_pair_field to the field of the second text"
    raise UserError(
        f"data.{key}: {location}: there is no field {name!r} (the fields are "
        f"{format_name_list(fields) or 'none'}); {remedy}"
    )


def refuse_columns(fields: Fields, subject: str) -> None:
    """Check that the settings do not refer to columns, because a source of plain text has none.

    Args:
        fields: Names of the columns to read, and the format of the records.
        subject: Description of the source, used in the error message.

    Raises:
        UserError: If the settings refer to a column, or to a format other than text.
    """
    if fields.format not in (None, "text"):
        raise UserError(
            f"data.format: {fields.format} needs records with fields, but {subject} have no fields; use a "
            "data.source with records (.jsonl, .json, .csv, .parquet or a hub dataset)"
        )
    for key, name in (
        ("columns", fields.columns[0] if fields.columns else None),
        ("target_field", fields.target),
        ("label_field", fields.label),
        ("text_pair_field", fields.pair),
    ):
        if name is not None:
            raise UserError(
                f"data.{key}: {name!r} is the name of a field, but {subject} have no fields; use a "
                "data.source that has this field (.jsonl, .json, .csv, .parquet or a hub dataset)"
            )
