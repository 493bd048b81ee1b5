"""Rows of .parquet files, a row group at a time and only the columns that are read."""

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


@contextmanager
def open_parquet(raw: io.RawIOBase, name: object, *, pre_buffer: bool = False) -> Iterator[Any]:
    """The ``ParquetFile`` of an open file, which checks the checksums of pages that have one.

    Args:
        name: of the file, for messages.
        pre_buffer: read what is needed in few large requests.

    Raises:
        UserError: if it is damaged.
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
    except pyarrow.ArrowException as error:  # its errors of reading are OSErrors
        raise UserError(
            f"data.source: {name}: not a readable .parquet file ({to_one_line(error)}); copy it again"
        ) from error


def _get_decompressed_bytes(group: Any) -> int:
    """What a row group comes to, before a value that is stored once is repeated."""
    return int(group.total_byte_size)


def iter_parquet_rows(file: Any, groups: Iterable[int], name: object, fields: Fields) -> Iterator[LocatedRow]:
    """Yield the place and the columns of the rows of some row groups."""
    columns = _select_columns(file.schema_arrow.names, fields)
    groups = list(groups)
    sizes = (file.metadata.row_group(group).num_rows for group in range(max(groups, default=0)))
    starts = [0, *accumulate(sizes)]
    for group in groups:
        row = starts[group]
        # A value of a dictionary, as large as the group, may be that of every row.
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
    """The columns to read; None for all."""
    if fields.format != "text" or fields.renamed:
        return None
    wanted = [fields.text, fields.target, fields.label, fields.pair, *fields.columns]
    columns = [name for name in wanted if name is not None]
    return columns if set(columns) <= set(names) else None


def _iter_batch_rows(
    batch: Any, num_rows_before: int, name: object, fields: Fields
) -> Iterator[dict[str, Any] | None]:
    """The rows of a batch; None for one that cannot be read and is left out."""
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
                f"data.source: {name}: row {num_rows_before + number + 1}: {reason}; correct or remove it, "
                "or set data.on_bad_record to skip"
            )
            refusal.__cause__ = error
            fields.skip_record_or_raise(refusal)
            yield None


def drop_nested_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the nulls inside its values.

    Arrow gives each record the keys of all others, as null. A tool's argument would have those of all tools.
    """

    def drop_inner_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: drop_inner_nulls(inner) for key, inner in value.items() if inner is not None}
        if isinstance(value, list) and value and isinstance(value[0], dict | list):
            return [drop_inner_nulls(inner) for inner in value]
        return value

    return {key: drop_inner_nulls(value) for key, value in row.items()}
