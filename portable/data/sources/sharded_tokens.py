"""Sources of tokens in Mosaic Streaming (MDS) and litdata shards, and in ``save_to_disk`` datasets.

A Mosaic Streaming or litdata shard starts with the number of samples and the offset of each sample,
followed by the offset of the end. An ``index.json`` in the same folder describes the samples. Each
sample is a document.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from portable.converters.storage.path_or_url import is_in_store
from portable.data.sources.compression import check_decompression_ratio
from portable.data.sources.datasets_library import import_datasets
from portable.data.sources.documents import compute_text_digest, format_name_list
from portable.data.sources.files import compute_file_digest
from portable.data.sources.hub_dataset import HubDataset
from portable.data.sources.listing import find_folder_with_file
from portable.data.sources.source import DataSource, SourceSettings, SourceShard, TokenChunk, TokenSource
from portable.data.sources.token_files import check_token_ids
from portable.errors import RunError, UserError, to_one_line
from portable.paths import (
    check_folder_files,
    convert_storage_errors,
    open_file,
    read_json_file,
    validate_relative_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from portable.converters.storage.path_or_url import AnyPath

_TOKEN_COLUMNS = ("tokens", "input_ids")
_RECORD_COLUMNS = ("messages", "conversations", "completion", "output", "chosen")
"""Columns that occur only in records of conversations, completions or preferences."""
_LITDATA_DTYPES = {
    11: "u1",
    12: "i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
    16: "<i4",
    17: "<i8",
    18: "<i8",
    20: "<u2",
}
"""NumPy dtype, keyed by litdata's number of the torch dtype."""
_DOCUMENTS_PER_BATCH = 1000  # documents of a saved dataset read at a time


class ShardedFolder(NamedTuple):
    """Folder of token shards and its index.

    Attributes:
        folder: Path or URL of the folder.
        index_content: Content of the folder's ``index.json``.
    """

    folder: AnyPath
    index_content: dict[str, Any]


class ShardLayout(TypedDict, total=False):
    """Layout of one token shard, as described in ``index.json``. Its ``repr`` identifies the shard.

    The fields depend on the format of the shards:

    - All shards have ``file``, ``dtype`` and ``bytes``.
    - Only litdata shards have ``heads`` and ``before``. They are not read, and exist only to keep
      the ``repr`` of these shards unchanged.
    - Only Mosaic Streaming shards have ``compression``, ``shaped``, ``sizes``, ``column`` and
      ``hashes``.
    """

    file: str
    """Path of the shard relative to the folder."""
    dtype: str
    """Data type of the tokens, such as ``<i4``."""
    bytes: int | None
    """Size of the decompressed shard in bytes. None if the index does not contain it."""
    heads: int
    """Not read. It is kept so that the ``repr`` of litdata shards, which identifies them, does not change."""
    before: int
    """Not read. It is kept for the same reason as ``heads``."""
    compression: str | None
    """Compression of the file, such as ``zstd:7``. None if the file is not compressed."""
    shaped: bool
    """Whether the index contains the shape of the arrays. If not, each array starts with its shape."""
    sizes: list[int | None]
    """Size in bytes of one value of each column. None if the values of the column differ in size."""
    column: int
    """Index of the column that contains the tokens."""
    hashes: dict[str, str]
    """Hex digests of the decompressed shard, keyed by algorithm."""


def find_sharded_folder(name: str) -> ShardedFolder | None:
    """Find token shards in a folder that Mosaic Streaming or litdata has written.

    Args:
        name: Path or URL.

    Returns:
        The folder and its index. None if ``name`` is not such a folder, or if its
        ``index.json`` cannot be read or is not JSON.

    Raises:
        UserError: If the URL is not valid, or if the object store reports an error.
        RunError: If the object store cannot be reached after all retries.
    """
    if (folder := find_folder_with_file(name, "index.json")) is None:
        return None
    try:
        with convert_storage_errors("data.source"):
            index = read_json_file(folder / "index.json")
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or not ("shards" in index or "chunks" in index):
        return None
    return ShardedFolder(folder, index)


def parse_shard_layouts(index: dict[str, Any], name: str) -> list[ShardLayout]:
    """Parse the layouts of all shards from the content of ``index.json``.

    The index is in the format of Mosaic Streaming (with the key ``shards``) or litdata (with the
    keys ``chunks`` and ``config``). Data of litdata must not be compressed or encrypted. Mosaic's
    shards may be compressed with ``zstd`` or ``gz``.

    Args:
        index: Content of ``index.json``.
        name: Name of the source, used in error messages.

    Raises:
        UserError: If the shards do not contain tokens or have an unsupported encoding, or if the index
            is damaged.
    """
    try:
        if not index.get("shards", index.get("chunks")):
            raise ValueError("the file lists no shards")
        if "shards" in index:
            return [_parse_mosaic_shard(shard, name) for shard in index["shards"]]
        config = index["config"]
        kind = str(config["data_format"][0])
        if len(config["data_format"]) != 1 or not kind.startswith("no_header_tensor:"):
            raise UserError(
                f"data.source: {name} contains litdata samples of type "
                f"{format_name_list(map(str, config['data_format']))}, but only tokens are supported; write "
                "the dataset with litdata's TokensLoader"
            )
        if config.get("compression") or config.get("encryption"):
            raise UserError(
                f"data.source: {name} is compressed or encrypted; write the data without compression and "
                "encryption"
            )
        dtype = _LITDATA_DTYPES[int(kind.partition(":")[2])]
        return [
            {
                "file": validate_relative_name(chunk["filename"]),
                "dtype": dtype,
                "heads": 0,
                "before": 0,
                "bytes": None,
            }
            for chunk in index["chunks"]
        ]
    except UserError:
        raise
    except Exception as error:  # the file may contain any values
        raise UserError(
            f"data.source: {name}/index.json: cannot be read ({to_one_line(error)}); copy the file again"
        ) from error


def _parse_mosaic_shard(shard: dict[str, Any], name: str) -> ShardLayout:
    """Parse the layout of a Mosaic Streaming shard.

    The tokens are in the column ``tokens`` or, if this column does not exist, ``input_ids``. The
    encoding of the column must be ``ndarray`` with a dtype, or ``bytes`` with int64 tokens. The
    shard may be compressed with ``zstd`` or ``gz``.

    Args:
        shard: Entry of the shard in ``index.json``.
        name: Name of the source, used in error messages.

    Raises:
        UserError: If the shard has no token column, or if its encoding or compression is not
            supported. A damaged entry can raise any other exception, so the caller must convert all
            exceptions.
    """
    names: list[str] = shard["column_names"]
    column = next((candidate for candidate in _TOKEN_COLUMNS if candidate in names), None)
    if shard["format"] != "mds" or column is None:
        raise UserError(
            f"data.source: {name}: expected an MDS shard with a column {_TOKEN_COLUMNS[0]} or "
            f"{_TOKEN_COLUMNS[1]}, but found the columns {format_name_list(names)} in format "
            f"{shard['format']}; convert the data to .jsonl or .parquet"
        )
    column_index = names.index(column)
    encoding, _, rest = str(shard["column_encodings"][column_index]).partition(":")
    dtype, _, shape = rest.partition(":")
    if encoding == "bytes":
        dtype, shape = "int64", "any"  # LLM Foundry writes int64 tokens as bytes
    elif encoding != "ndarray" or not dtype:
        raise UserError(
            f"data.source: {name}: the column {column} has the encoding "
            f"{shard['column_encodings'][column_index]}, not ndarray with an integer dtype; write "
            "the tokens as arrays of integers"
        )
    packed, raw = shard.get("zip_data"), shard["raw_data"]
    if packed is not None and shard["compression"].partition(":")[0] not in ("zstd", "gz"):
        raise UserError(
            f"data.source: {name} is compressed with {shard['compression']}, which is not supported; use "
            "zstd or gz"
        )
    return {
        "file": validate_relative_name((packed or raw)["basename"]),
        "compression": shard["compression"] if packed else None,
        "dtype": np.dtype(dtype).newbyteorder("<").str,
        "shaped": bool(shape),
        "sizes": shard["column_sizes"],
        "column": column_index,
        "bytes": int(raw["bytes"]),
        "hashes": raw.get("hashes") or {},
    }


class ShardedTokens(TokenSource):
    """Source of tokens in Mosaic Streaming or litdata shards, which are read in order.

    Args:
        folder: Folder or URL of the shards.
        layouts: Layouts from :func:`parse_shard_layouts`.
        settings: Settings of the source.
    """

    def __init__(self, folder: AnyPath, layouts: Sequence[ShardLayout], settings: SourceSettings) -> None:
        super().__init__(str(folder) if len(layouts) > 1 else str(folder / layouts[0]["file"]), settings)
        self.downloads_to_read = is_in_store(folder)
        self._place = folder
        self._pieces = tuple(layouts)

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> ShardedTokens | None:
        """Open the shards if Mosaic Streaming or litdata has written the folder or URL.

        Returns:
            The source. None if the name is not such a folder, if there are several names, or if
            ``data.max_samples`` is set.

        Raises:
            UserError: If the shards do not contain tokens or have an unsupported encoding, if the
                index is damaged, or if a link leaves the folder. Also raised if the URL is not
                valid, or if the object store reports an error.
            RunError: If the object store cannot be reached after all retries.
        """
        if len(names) > 1 or settings.data.max_samples is not None:
            return None
        sharded = find_sharded_folder(names[0])
        if sharded is None:
            return None
        if isinstance(sharded.folder, Path):
            check_folder_files("data.source", str(sharded.folder), max_files=None)
        return cls(sharded.folder, parse_shard_layouts(sharded.index_content, names[0]), settings)

    def compute_digest(self) -> str:
        """Compute a digest of the shards' layouts and of the contents of their files.

        For remote files, uses the sizes and versions instead of the contents, so nothing is downloaded.
        """
        digest = hashlib.blake2b(repr(self._pieces).encode(), digest_size=16)
        for piece in self._pieces:
            path = self._place / piece["file"]
            if not is_in_store(path):
                digest.update(compute_file_digest(path, self.settings))
            else:
                with self._convert_read_errors(piece), convert_storage_errors("data.source"):
                    digest.update(repr(path.fetch_status()).encode())
        return digest.hexdigest()

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Yield one :class:`SourceShard` for each shard of the folder.

        Shards are not divided further, so ``part_bytes`` is ignored.
        """
        for piece in self._pieces:
            yield SourceShard(
                partial(ShardedTokens, self._place, [piece]), repr(piece), int(piece["bytes"] or 0)
            )

    def check_readable(self) -> None:
        """Check that the first shard is intact. Does nothing if the shards are remote.

        Raises:
            UserError: If the shard cannot be read or is damaged.
        """
        if not self.downloads_to_read:
            self._read_decompressed_shard(self._pieces[0])

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        for piece in self._pieces:
            with self._convert_read_errors(piece):
                documents = _parse_shard_documents(self._read_decompressed_shard(piece), piece)
            lengths = [len(document) for document in documents]
            if documents:
                tokens = np.concatenate(documents)
                check_token_ids(tokens, vocab_size, self._place / piece["file"])
                yield TokenChunk(tokens, lengths)

    def _read_decompressed_shard(self, piece: ShardLayout) -> bytes:
        """Read a shard, decompress it if necessary, and verify its size and checksums.

        The size and the checksums are verified only if the index contains them. Checksums of
        algorithms that ``hashlib`` does not support are ignored.

        Raises:
            UserError: If the shard cannot be read or is damaged.
        """
        with self._convert_read_errors(piece), convert_storage_errors("data.source"):
            path = self._place / piece["file"]
            if isinstance(path, Path):
                with open_file(path, Path(str(self._place))) as file:
                    data = file.read()
            else:
                data = path.read_bytes()
            if (compression := piece.get("compression")) is not None:
                import pyarrow

                kind = {"zstd": "zstd", "gz": "gzip"}[compression.partition(":")[0]]
                assert piece["bytes"] is not None
                check_decompression_ratio(piece["bytes"], len(data), path)
                data = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), kind).read(
                    piece["bytes"] + 1
                )
            if piece["bytes"] is not None and len(data) != piece["bytes"]:
                raise ValueError(
                    f"the file has {len(data):,} bytes, but index.json lists {piece['bytes']:,} bytes"
                )
            for kind, digest in piece.get("hashes", {}).items():
                if kind in hashlib.algorithms_available and hashlib.new(kind, data).hexdigest() != digest:
                    raise ValueError(f"the {kind} checksum does not match index.json")
            return data

    @contextmanager
    def _convert_read_errors(self, piece: ShardLayout) -> Iterator[None]:
        """Convert exceptions within this context to UserErrors that name the shard's file.

        UserErrors, RunErrors and MemoryErrors are passed on unchanged.
        """
        try:
            yield
        except (UserError, RunError, MemoryError):
            raise
        except Exception as error:  # the index may contain any values
            path = self._place / piece["file"]
            raise UserError(
                f"data.source: {path}: cannot be read ({to_one_line(error)}); copy the file again"
            ) from error


def _parse_shard_documents(data: bytes, piece: ShardLayout) -> list[npt.NDArray[Any]]:
    """Parse the tokens of each sample in a shard.

    Args:
        data: Decompressed content of the shard.
        piece: Layout of the shard.

    Returns:
        One read-only array per sample. Each array has a copy of the sample's bytes.

    Raises:
        ValueError: If the offsets or sizes are inconsistent.
        IndexError: If a sample lacks the header with the shape of its array.
    """
    count = int(np.frombuffer(data, "<u4", 1)[0])
    offsets = np.frombuffer(data, "<u4", count + 1, offset=4).astype(np.int64)
    if (np.diff(offsets) < 0).any() or offsets[-1] > len(data):
        raise ValueError("the sample offsets are not increasing, or exceed the file size")
    sizes = piece.get("sizes")
    if sizes is None:
        return [np.frombuffer(data[start:stop], piece["dtype"]) for start, stop in pairwise(offsets)]
    if any(size is not None and (type(size) is not int or size < 0) for size in sizes):
        raise ValueError(f"the column sizes {sizes} are invalid")
    column = piece["column"]
    # Fixed column sizes are added up once for all samples, because the index may list any number of columns.
    heads, heads_before = (sum(size is None for size in part) for part in (sizes, sizes[:column]))
    fixed, fixed_before = (sum(size or 0 for size in part) for part in (sizes, sizes[:column]))
    documents = []
    for start, stop in pairwise(offsets.tolist()):
        lengths = np.frombuffer(data, "<u4", heads, offset=start).astype(np.int64)
        begin = start + 4 * heads
        if begin + fixed + int(lengths.sum()) != stop:
            raise ValueError("the length of a sample differs from the length of its columns")
        begin += fixed_before + int(lengths[:heads_before].sum())
        length = sizes[column] if sizes[column] is not None else int(lengths[heads_before])
        value = data[begin : begin + length]
        # Skip the header, which contains the number of dimensions, the type of their sizes, and the sizes.
        if not piece["shaped"]:
            value = value[1 + (value[0] >> 2) * (1 << (value[0] & 3)) :]
        documents.append(np.frombuffer(value, piece["dtype"]))
    return documents


def find_saved_dataset_folder(name: str, split: str) -> Path | None:
    """Find the folder of a dataset that was saved with ``save_to_disk``.

    Args:
        name: Path of the folder.
        split: Name of the split to select if the dataset has several splits.

    Returns:
        The folder, or its subfolder for ``split`` if the dataset has several splits. None if ``name``
        is not the folder of a saved dataset.

    Raises:
        UserError: If the dataset has several splits, but not ``split``.
    """
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file():
            if not (folder / split).is_dir():
                split_names = format_name_list(
                    sorted(path.name for path in folder.iterdir() if path.is_dir())
                )
                raise UserError(f"data.split: {name} has no split {split!r}; use one of {split_names}")
            folder = folder / split
        is_saved = all((folder / file).is_file() for file in ("state.json", "dataset_info.json"))
    except (OSError, ValueError):
        return None
    return folder if is_saved else None


def _build_not_saved_error(folder: object, error: Exception) -> UserError:
    return UserError(
        f"data.source: {folder}: cannot be read as a dataset saved with save_to_disk "
        f"({to_one_line(error)[:200]}); save the dataset again"
    )


def _load_saved_dataset(folder: str) -> Any:
    """Load a dataset saved with ``save_to_disk``, after checking that it refers only to its own files.

    Raises:
        UserError: If the metadata refers to other files, or if the dataset cannot be loaded.
    """
    datasets = import_datasets(f"reading {folder}")
    try:
        for file in read_json_file(Path(folder) / "state.json")["_data_files"]:
            validate_relative_name(file["filename"])
        check_folder_files("data.source", folder, max_files=None)
        return datasets.load_from_disk(folder)
    except UserError:
        raise
    except Exception as error:
        raise _build_not_saved_error(folder, error) from error


def _compute_saved_dataset_digest(folder: str, settings: SourceSettings) -> bytes:
    """Compute a digest of all files of a saved dataset."""
    digest = hashlib.blake2b(b"saved", digest_size=16)
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            digest.update(path.name.encode() + compute_file_digest(path, settings))
    return digest.digest()


class SavedDataset(HubDataset):
    """Source of the records of a dataset saved with ``save_to_disk``.

    The source cannot be streamed. If the dataset is to be opened as tokens, :meth:`from_names`
    returns a :class:`SavedTokenDataset` instead.
    """

    downloads_to_open = False
    downloads_to_read = False

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> DataSource | None:  # type: ignore[override]
        """Open a dataset that was saved with ``save_to_disk``, either as records or as tokens.

        The dataset is opened as records if ``data.max_samples`` is set. It is also opened as
        records if it has no token column (``tokens`` or ``input_ids``) and at least one of these
        conditions holds:

        - ``data.format`` is neither ``auto`` nor ``text``.
        - The dataset has the column of ``data.text_field``, a column with a conventional name such
          as ``messages``, or a column that ``data.columns`` renames.

        In all other cases, the dataset is opened as tokens.

        Returns:
            Source of records or tokens. None if ``names`` does not refer to a single saved dataset.

        Raises:
            UserError: If the metadata of the dataset cannot be read, or if the dataset has several
                splits but not the selected split.
        """
        if len(names) > 1 or (folder := find_saved_dataset_folder(names[0], settings.split)) is None:
            return None
        try:
            columns = set(read_json_file(folder / "dataset_info.json")["features"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _build_not_saved_error(folder, error) from error
        fields = settings.fields
        renamed = {name.partition(".")[0] for _, name in fields.renamed}
        records = fields.format not in (None, "text") or columns & {fields.text, *_RECORD_COLUMNS, *renamed}
        of_records = settings.data.max_samples is not None or (records and not columns & set(_TOKEN_COLUMNS))
        return (cls if of_records else SavedTokenDataset)(str(folder), settings)

    @cached_property
    def _dataset(self) -> Any:
        return _load_saved_dataset(self.name)

    def _load_dataset(self) -> Any:
        return self._dataset

    def compute_digest(self) -> str:
        """Compute a digest of all files of the dataset and of the settings for reading the records."""
        saved = _compute_saved_dataset_digest(self.name, self.settings)
        return compute_text_digest(repr((saved, self.fields.cache_key, self.settings.data.max_samples)))

    @property
    def stored_bytes(self) -> int:
        """Always 0. The size is only used to divide a stream, and a saved dataset cannot be streamed."""
        return 0

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Raise UserError, because a saved dataset cannot be streamed."""
        raise _build_not_streamed_error(self)


class SavedTokenDataset(TokenSource):
    """Source of tokens from a column of a dataset saved with ``save_to_disk``.

    Each row is a document. The column is ``input_ids`` or, if the dataset does not have this
    column, ``tokens``. The source cannot be streamed.
    """

    def compute_digest(self) -> str:
        """Compute a digest of all files of the dataset."""
        return _compute_saved_dataset_digest(self.name, self.settings).hex()

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Raise UserError, because a saved dataset cannot be streamed."""
        raise _build_not_streamed_error(self)

    def check_readable(self) -> None:
        """Check that the dataset can be loaded and has a token column.

        Raises:
            UserError: If the dataset cannot be loaded or has no token column.
        """
        self._open_token_column()

    def _open_token_column(self) -> tuple[Any, str]:
        """Open the token column.

        Returns:
            The dataset with only this column and in Arrow format, and the name of the column.

        Raises:
            UserError: If the dataset cannot be loaded or has no token column.
        """
        dataset = _load_saved_dataset(self.name)
        column = next(
            (candidate for candidate in reversed(_TOKEN_COLUMNS) if candidate in dataset.column_names), None
        )
        if column is None:
            raise UserError(
                f"data.source: {self.name} has the columns {format_name_list(dataset.column_names)}, but "
                f"neither {_TOKEN_COLUMNS[1]} nor {_TOKEN_COLUMNS[0]}; to use a dataset without "
                "token ids, save it with to_parquet or to_json instead of save_to_disk"
            )
        return dataset.select_columns([column]).with_format("arrow"), column

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        rows, column = self._open_token_column()
        for table in rows.iter(_DOCUMENTS_PER_BATCH):
            values = table[column].combine_chunks()
            lengths = values.value_lengths().to_numpy(zero_copy_only=False).tolist()
            tokens = values.flatten().to_numpy(zero_copy_only=False)
            if not np.issubdtype(tokens.dtype, np.integer):
                raise UserError(
                    f"data.source: {self.name}: the column {column} does not contain integers; save token "
                    "ids in this column"
                )
            if len(tokens):
                check_token_ids(tokens, vocab_size, self.name)
                yield TokenChunk(tokens, lengths)


def _build_not_streamed_error(source: DataSource) -> UserError:
    """Build the error for streaming a dataset that was saved with ``save_to_disk``.

    Such a dataset cannot be used with ``data.stream``.
    """
    return UserError(
        f"data.stream: {source.name} was saved with save_to_disk and cannot be streamed; set data.stream: "
        "false"
    )
