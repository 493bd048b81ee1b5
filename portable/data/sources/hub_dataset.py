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
    """Source for a dataset on the Hugging Face Hub, downloaded to the cache of the ``datasets`` library."""

    downloads_to_open = True
    downloads_to_read = True

    # Each dataset is loaded once per process, because the cache key, the tokenizer and the tokens need it.
    _datasets_by_key: ClassVar[dict[tuple[str, str | None, str], Any]] = {}

    @classmethod
    def from_names(cls, names: Sequence[str], settings: SourceSettings) -> HubDataset:
        """Open the dataset with the first name. Accepts any name, because this class is tried last."""
        return cls(names[0], settings)

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

            # The other ranks read a pickle of the dataset. It contains the paths of its files. They do not
            # load it offline, because the library would then choose among cached revisions.
            self._datasets_by_key[dataset_key] = compute_once_per_node(f"dataset {dataset_key}", load)
        return self._datasets_by_key[dataset_key]

    def compute_digest(self) -> str:
        """Compute a digest of the library's fingerprint and of the settings for reading the records."""
        most = self.settings.data.max_samples
        return compute_text_digest(
            repr((get_dataset_fingerprint(self._load_dataset()), self.fields.cache_key, most))
        )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Class names of the label column, if it is a ``ClassLabel`` feature. None otherwise."""
        features = getattr(self._load_dataset(), "features", None) or {}
        feature = features.get(self.fields.label)
        for part in () if feature is not None else (self.fields.label or "").split("."):
            features = feature = features.get(part) if isinstance(features, Mapping) else None
        if isinstance(feature, list) and len(feature) == 1:  # a text has several classes
            feature = feature[0]
        names = getattr(getattr(feature, "feature", feature), "names", None)
        return None if names is None else tuple(map(str, names))

    def _read_rows(self) -> Iterator[LocatedRow]:
        for number, row in enumerate(iter_dataset_rows(self._load_dataset()), start=1):
            yield LocatedRow(f"{self.name}: row {number}", drop_nested_nulls(row))

    @cached_property
    def _files(self) -> RecordFiles:
        """Source for the files of the split. A stream reads them instead of the loaded dataset."""
        settings = self.settings
        return RecordFiles(
            self.name, list_hub_split_files(self.name, settings.data.config_name, settings.split), settings
        )

    @property
    def stored_bytes(self) -> int:
        """Total size of the split's files in bytes."""
        return self._files.stored_bytes

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        """Yield the files of the split as shards of a stream. See :meth:`DataSource.iter_shards`.

        Files that are divided into parts are read with range requests, not downloaded.
        """
        return self._files.iter_shards(part_bytes)
