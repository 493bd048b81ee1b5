"""Source for a dataset on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from portable.data.sources.datasets_library import (
    build_dataset_load_error,
    import_datasets,
    iter_dataset_rows,
)
from portable.data.sources.documents import compute_text_digest
from portable.data.sources.files import RecordFiles
from portable.data.sources.hub_files import check_hub_card, list_hub_split_files
from portable.data.sources.parquet_rows import drop_nested_nulls
from portable.data.sources.records import LocatedRow
from portable.data.sources.source import DataSource, SourceSettings, SourceShard
from portable.node_folder import compute_once_per_node
from portable.private.datasets_internals import get_dataset_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class HubDataset(DataSource):
    """Source for a dataset on the Hugging Face Hub.

    The ``datasets`` library downloads the dataset to its cache when the digest, the class names or
    the records are first needed. A stream does not load the dataset, but reads the files of the
    split directly.
    """

    downloads_to_open = True
    downloads_to_read = True

    # Each dataset is loaded only once per process, although the cache key, the tokenizer and the tokens all
    # require it.
    _datasets_by_key: ClassVar[dict[tuple[str, str | None, str], Any]] = {}

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> DataSource:
        """Open the dataset on the Hub that is named by the first item of ``names``.

        Any name is accepted, because this class is the last kind of source that is tried. The
        dataset is not loaded yet, so the error for a wrong name is raised later.

        Returns:
            The dataset. For the evaluation data of a stream, a source that reads the files of the
            split directly, because the ``datasets`` library would download all splits.

        Raises:
            UserError: For the evaluation data of a stream, if the files of the split cannot be
                listed.
        """
        source = cls(names[0], settings)
        return source._files if settings.is_evaluation and settings.data.stream else source

    def _load_dataset(self) -> Any:
        """Return the dataset. It is loaded once per process, and downloaded once per machine.

        Raises:
            UserError: If the dataset cannot be loaded.
        """
        dataset_key = (self.name, self.settings.data.config_name, self.settings.split)
        if dataset_key not in self._datasets_by_key:
            datasets = import_datasets(f"the hub dataset {self.name!r}")

            def load() -> Any:
                check_hub_card(self.name)
                try:
                    return datasets.load_dataset(dataset_key[0], dataset_key[1], split=dataset_key[2])
                except Exception as error:
                    raise build_dataset_load_error(dataset_key, error) from error

            # The other ranks read a pickle of the dataset, which contains the paths of its files. They do not
            # load the dataset offline, because the library would then choose among the cached revisions.
            self._datasets_by_key[dataset_key] = compute_once_per_node(f"dataset {dataset_key}", load)
        return self._datasets_by_key[dataset_key]

    def compute_digest(self) -> str:
        """Compute a digest of the dataset and of the settings for reading the records.

        The fingerprint of the dataset comes from the ``datasets`` library, so the dataset is
        loaded, and downloaded if necessary.

        Raises:
            UserError: If the dataset cannot be loaded.
        """
        most = self.settings.data.max_samples
        return compute_text_digest(
            repr((get_dataset_fingerprint(self._load_dataset()), self.fields.cache_key, most))
        )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Class names of the label column, if it is a ``ClassLabel`` feature or a list of them.

        None for all other features.

        Raises:
            UserError: If the dataset cannot be loaded.
        """
        features = getattr(self._load_dataset(), "features", None) or {}
        feature = features.get(self.fields.label)
        for part in () if feature is not None else (self.fields.label or "").split("."):
            features = feature = features.get(part) if isinstance(features, Mapping) else None
        if isinstance(feature, list) and len(feature) == 1:  # for texts with several classes
            feature = feature[0]
        names = getattr(getattr(feature, "feature", feature), "names", None)
        return None if names is None else tuple(map(str, names))

    def _read_rows(self) -> Iterator[LocatedRow]:
        for number, row in enumerate(iter_dataset_rows(self._load_dataset()), start=1):
            yield LocatedRow(f"{self.name}: row {number}", drop_nested_nulls(row))

    @cached_property
    def _files(self) -> RecordFiles:
        """Data source that reads the files of the split directly, without loading the dataset.

        Used for streaming, and for the size of the split in bytes.
        """
        settings = self.settings
        return RecordFiles(
            self.name, list_hub_split_files(self.name, settings.data.config_name, settings.split), settings
        )

    @property
    def stored_bytes(self) -> int:
        """Total size of the split's files in bytes.

        The first access lists the files on the Hub, and raises UserError if the files cannot be
        listed or streamed.
        """
        return self._files.stored_bytes

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Yield the files of the split as shards of a stream. See :meth:`DataSource.iter_shards`.

        Uncompressed .jsonl files and .parquet files are read with range requests instead of being
        downloaded, even if they have only one part. Other files are downloaded when they are read.

        Raises:
            UserError: If the files cannot be listed or streamed.
        """
        return self._files.iter_shards(part_bytes)
