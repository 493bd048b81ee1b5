"""Read .csv files and datasets with the optional ``datasets`` library, which is imported when needed."""

from __future__ import annotations

import copy
import csv
import glob
import io
import logging
import warnings
from itertools import count
from typing import TYPE_CHECKING, Any

from portable.data.sources.parquet_rows import drop_nested_nulls
from portable.data.sources.records import CsvCell, EnoughErrors, LocatedRow
from portable.errors import UserError, to_one_line
from portable.paths import open_file
from portable.temporary_folder import create_scratch_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from portable.data.sources.records import BadRecords, Fields


def import_datasets(purpose: str) -> Any:
    """Import the ``datasets`` library.

    Args:
        purpose: Verb phrase for the error message, such as "reading a.csv".

    Raises:
        UserError: If the library is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data.source: {purpose} needs the datasets library; run: pip install datasets "
            "(.txt, .jsonl, .json and .parquet files do not need it)"
        ) from error
    return datasets


def iter_csv_rows(path: Path, name: str, fields: Fields) -> Iterator[LocatedRow]:
    """Stream the rows of a .csv file without caching it. Yields nothing for an empty file.

    All cells are read as strings, because a text may look like a number. Cells such as ``NA`` are
    not treated as missing values, because ``NA`` may be the name of a class. Cells in the label
    column and in the columns of ``data.columns`` may be converted to numbers later, so they are
    instances of :class:`CsvCell`. Reading a file disables the log messages of the ``datasets``
    library in this process, except for critical messages.

    Args:
        path: Path of the local file.
        name: Name of the file, used in locations.
        fields: Settings for reading records. If ``fields.bad`` is set, lines that cannot be parsed
            are skipped and added to it.

    Raises:
        UserError: If the file cannot be read or is not comma-separated, or if the ``datasets``
            library is not installed.
        EnoughErrors: If ``fields.bad`` has collected enough errors.
    """
    datasets = import_datasets(f"reading {name}")
    datasets.logging.set_verbosity(logging.CRITICAL)  # logged errors are also raised
    with create_scratch_folder("portable-rows") as scratch:
        try:
            with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
                # pandas skips the blank lines before the header.
                header = next((row for row in csv.reader(file) if "".join(row).strip() or len(row) > 1), None)
            if header is None:
                return
            _check_comma_separated(header, name)
            marked = {fields.label, *fields.columns}
            rows = iter(
                datasets.load_dataset(
                    "csv",
                    data_files=[glob.escape(str(path))],
                    split="train",
                    streaming=True,
                    cache_dir=str(scratch),
                    # By position, because pandas renames columns without a name or with the same name.
                    converters=dict.fromkeys(range(len(header)), str),
                    keep_default_na=False,
                    on_bad_lines="error" if fields.bad is None else "warn",
                )
            )
            for number in count(1):
                row = next(rows, None) if fields.bad is None else _read_next_valid_row(rows, name, fields.bad)
                if row is None:
                    return
                row = {
                    key: CsvCell(value) if key in marked and isinstance(value, str) else value
                    for key, value in row.items()
                }
                yield LocatedRow(f"{name}: row {number}", drop_nested_nulls(row))
        except (UserError, EnoughErrors):
            raise
        except Exception as error:
            raise UserError(
                f"data.source: {name}: is not a readable .csv file ({describe_root_cause(error)}); "
                "correct the file"
            ) from error


def _check_comma_separated(header: list[str], name: str) -> None:
    """Check that the columns are separated by commas.

    Raises:
        UserError: If the header has a single column whose name contains a tab, a semicolon or a
            ``|``, because this character is then probably the separator.
    """
    if len(header) == 1 and (other := next((sign for sign in "\t;|" if sign in header[0]), None)):
        raise UserError(
            f"data.source: {name}: the columns are separated by {other!r}, not by commas; convert the "
            "file, for example to .jsonl"
        )


def _read_next_valid_row(rows: Iterator[Any], name: str, bad_records: BadRecords) -> Any:
    """Read the next row of a .csv file.

    Lines with too many cells, which pandas skips with a warning, are added to ``bad_records``.

    Returns:
        The row. None at the end of the file.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = next(rows, None)
    for line in (line for warning in caught for line in str(warning.message).splitlines() if "line" in line):
        bad_records.skip_record(UserError(f"data.source: {name}: {line.removeprefix('Skipping ')}"))
    return row


def iter_dataset_rows(dataset: Any) -> Iterator[Any]:
    """Yield the rows of a ``datasets`` dataset without decoding its images.

    Each image is a dict with the keys ``bytes`` and ``path``. There is one exception: if the
    dataset stores only the path of an image, the image is decoded.

    Args:
        dataset: A ``datasets.Dataset``.
    """
    datasets = import_datasets("images")
    features = dataset.features or {}
    if not _has_images(features, datasets.Image):
        yield from dataset
        return
    raw_features = datasets.Features(
        {name: _disable_image_decoding(feature, datasets.Image) for name, feature in features.items()}
    )

    def decode_paths(value: Any) -> Any:
        if isinstance(value, list):
            return [decode_paths(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"bytes", "path"} and value["bytes"] is None and value["path"] is not None:
            return datasets.Image().decode_example(value)
        return {key: decode_paths(item) for key, item in value.items()}

    for row in dataset.to_iterable_dataset().cast(raw_features):
        yield decode_paths(row)


def _has_images(feature: Any, image_class: type) -> bool:
    """Return whether a feature of a dataset is an image or contains images."""
    if isinstance(feature, dict):
        return any(_has_images(inner, image_class) for inner in feature.values())
    if isinstance(feature, list):
        return any(_has_images(inner, image_class) for inner in feature)
    return isinstance(feature, image_class) or (
        hasattr(feature, "feature") and _has_images(feature.feature, image_class)
    )


def _disable_image_decoding(feature: Any, image_class: type) -> Any:
    """Return a copy of a ``datasets`` feature in which image decoding is disabled.

    Args:
        feature: Feature, or a dict or list of features. Nested image features are changed as well.
        image_class: The class ``datasets.Image``.
    """
    if isinstance(feature, dict):
        return {name: _disable_image_decoding(inner, image_class) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_disable_image_decoding(inner, image_class) for inner in feature]
    changed = copy.copy(feature)
    if isinstance(feature, image_class):
        changed.decode = False
    elif hasattr(feature, "feature"):
        changed.feature = _disable_image_decoding(feature.feature, image_class)
    return changed


def build_dataset_load_error(names: Iterable[str | None], error: BaseException) -> UserError:
    """Build the error for a dataset on the Hub or in a local folder that cannot be loaded.

    Args:
        names: Name, configuration and split of the dataset. None and empty values are ignored.
        error: Exception of the ``datasets`` or ``huggingface_hub`` library.
    """
    parts = ", ".join(str(part) for part in names if part)
    return UserError(
        f"data.source: cannot load {parts} as a local file or from the hub "
        f"({describe_root_cause(error)}); check the name, data.config_name, data.split and the network, "
        "or use local files"
    )


def describe_root_cause(error: BaseException) -> str:
    """Describe the root cause of a chained exception in one line of at most 200 characters.

    The root cause is the last exception in the chain of ``__cause__`` attributes. The result is its
    message, or the name of its type if the message is empty.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    text = to_one_line(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
