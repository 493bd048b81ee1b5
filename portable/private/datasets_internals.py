"""Every private name of datasets."""

from __future__ import annotations

from typing import Any

from portable.private import Package

_datasets = Package("datasets", "5.2.0")


@_datasets.guard("data.source: a dataset of the hub")
def get_fingerprint(rows: Any) -> str:
    """What covers the repository, its revision, the configuration and the split of a dataset."""
    return str(rows._fingerprint)
