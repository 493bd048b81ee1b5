"""Data: sources, tokenizer, token cache, data sets, sample order and loaders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.data.classes import Classes, KnownClasses
    from portable.data.dataset import TASKS, Data, DataSizes, build_data, inspect_data, recognise_format
    from portable.data.loader import BatchIterator, EvalLoader, TrainLoader
    from portable.data.order import Permutation, locate, permutation
    from portable.data.samples import IGNORED, Batch, Samples
    from portable.data.tasks import LAST_LABEL
    from portable.data.tokenize import Frame

# Imported at the first use (PEP 562): the processes that tokenize need neither data sets nor torch.
_HOMES = {
    "Batch": "portable.data.samples",
    "BatchIterator": "portable.data.loader",
    "Classes": "portable.data.classes",
    "Data": "portable.data.dataset",
    "DataSizes": "portable.data.dataset",
    "EvalLoader": "portable.data.loader",
    "Frame": "portable.data.tokenize",
    "IGNORED": "portable.data.samples",
    "KnownClasses": "portable.data.classes",
    "LAST_LABEL": "portable.data.tasks",
    "Permutation": "portable.data.order",
    "Samples": "portable.data.samples",
    "TASKS": "portable.data.dataset",
    "TrainLoader": "portable.data.loader",
    "build_data": "portable.data.dataset",
    "inspect_data": "portable.data.dataset",
    "locate": "portable.data.order",
    "permutation": "portable.data.order",
    "recognise_format": "portable.data.dataset",
}
__all__ = [
    "IGNORED",
    "LAST_LABEL",
    "TASKS",
    "Batch",
    "BatchIterator",
    "Classes",
    "Data",
    "DataSizes",
    "EvalLoader",
    "Frame",
    "KnownClasses",
    "Permutation",
    "Samples",
    "TrainLoader",
    "build_data",
    "inspect_data",
    "locate",
    "permutation",
    "recognise_format",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
