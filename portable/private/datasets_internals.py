"""Read private attributes of the datasets package."""

from __future__ import annotations

from typing import Any

from portable.private import GuardedPackage

_datasets = GuardedPackage("datasets", "5.2.0")


@_datasets.explain_missing_names("data.source: a dataset on the Hub")
def get_dataset_fingerprint(rows: Any) -> str:
    """Return a dataset's fingerprint, which identifies its repository, revision, configuration and split.

    Args:
        rows: ``Dataset`` object of the datasets package.
    """
    return str(rows._fingerprint)
