"""Read .parquet files one row group at a time, and only the required columns."""

from __future__ import annotations

import io
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from portable.data.sources.compression import check_decompression_ratio
from portable.data.sources.records import LocatedRow
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from portable.data.sources.records import Fields

_ROWS, _FEWEST, _BATCH_BYTES = 1024, 8, 128 << 20
"""Maximum and minimum number of rows per batch, and the target size of a batch in bytes."""


@contextmanager
def open_parquet(raw: io.RawIOBase, name: object, *, pre_buffer: bool = False) -> Iterator[Any]:
    """Open a ``ParquetFile`` that verifies the checksums of the pages, if there are any.

    Args:
        raw: The opened file.
        name: Name of the file, used in error messages.
        pre_buffer: Whether to read the required bytes in a few large requests.

    Raises:
        UserError: If the file is not a valid .parquet file, or if its decompressed contents are
            excessively large. For the limit, see
            :func:`portable.data.sources.compression.check_decompression_ratio`. Arrow exceptions
            within the context, for example when rows are read, are also converted.
        OSError: If the file cannot be read, or if the checksum of a page does not match. The
            caller must convert this error to a UserError.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(raw, pre_buffer=pre_buffer, page_checksum_verification=True) as file:
            expanded = sum(
                map(
                    _get_decompressed_bytes, map(file.metadata.row_group, range(file.metadata.num_row_groups))
                )
            )
            check_decompression_ratio(expanded, raw.seek(0, io.SEEK_END), name)
            yield file
    except pyarrow.ArrowException as error:  # pyarrow raises OSErrors if reading fails
        raise UserError(
            f"data.source: {name}: is not a readable .parquet file ({to_one_line(error)}); copy the "
            "file again"
        ) from error


def _get_decompressed_bytes(group: Any) -> int:
    """Return the decompressed size of a row group in bytes.

    In a dictionary-encoded column, a value that many rows contain counts only once.
    """
    return int(group.total_byte_size)


def iter_parquet_rows(file: Any, groups: Iterable[int], name: object, fields: Fields) -> Iterator[LocatedRow]:
    """Yield the rows of the given row groups, with their locations.

    Nulls in nested mappings are removed, see :func:`drop_nested_nulls`. Bad rows are left out if
    ``fields`` allows bad records.

    Args:
        file: The opened ``ParquetFile``.
        groups: Indices of the row groups.
        name: Name of the file, used in locations.
        fields: Names of the columns to read, and whether bad records are skipped.

    Raises:
        RecordError: If a row cannot be converted and bad records are not skipped.
    """
    columns = _select_columns(file.schema_arrow.names, fields)
    groups = list(groups)
    sizes = (file.metadata.row_group(group).num_rows for group in range(max(groups, default=0)))
    starts = [0, *accumulate(sizes)]
    for group in groups:
        row = starts[group]
        # Even one value of a dictionary may be as large as the row group, and all rows may repeat this value.
        rows = max(
            _FEWEST,
            min(_ROWS, _BATCH_BYTES // max(1, _get_decompressed_bytes(file.metadata.row_group(group)))),
        )
        for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
            for values in _iter_batch_rows(batch, row, name, fields):
                row += 1
                if values is not None:
                    yield LocatedRow(f"{name}: row {row}", drop_nested_nulls(values))


def _select_columns(names: list[str], fields: Fields) -> list[str] | None:
    """Select which columns of a file to read.

    Args:
        names: Columns of the file.
        fields: Names of the columns that the task uses.

    Returns:
        Names of the columns. None if all columns must be read: the records are not plain text, fields
        are renamed, or a column is missing or nested.
    """
    if fields.format != "text" or fields.renamed:
        return None
    wanted = [fields.text, fields.target, fields.label, fields.pair, *fields.columns]
    columns = [name for name in wanted if name is not None]
    return columns if set(columns) <= set(names) else None


def _iter_batch_rows(
    batch: Any, num_rows_before: int, name: object, fields: Fields
) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a batch. Yields None for a bad row that is skipped.

    Args:
        batch: Arrow ``RecordBatch``.
        num_rows_before: Number of rows in the file before the batch, used in error messages.
        name: Name of the file, used in error messages.
        fields: Settings for reading records. They determine whether bad records are skipped.

    Raises:
        RecordError: If a row cannot be converted and bad records are not skipped.
    """
    try:
        values = batch.to_pylist()
    except (ValueError, OverflowError):
        values = None
    if values is not None:
        yield from values
        return
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else to_one_line(error)
            refusal = UserError(
                f"data.source: {name}: row {num_rows_before + number + 1}: cannot be read ({reason}); "
                "correct or remove the row"
            )
            refusal.__cause__ = error
            fields.skip_record_or_raise(refusal)
            yield None


def drop_nested_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls from the mappings nested in a row's values. Top-level nulls are kept.

    Arrow gives a nested mapping the same keys in every row. If a key is absent from a record, Arrow
    fills it with null. If these nulls were kept, each tool call would contain the argument names of
    all tools.
    """

    def drop_inner_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: drop_inner_nulls(inner) for key, inner in value.items() if inner is not None}
        if isinstance(value, list) and value and isinstance(value[0], dict | list):
            return [drop_inner_nulls(inner) for inner in value]
        return value

    return {key: drop_inner_nulls(value) for key, value in row.items()}
