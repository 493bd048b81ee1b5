"""Data: sources, tokenizer, token cache, data sets, sample order and loaders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.data.dataset import Data, build_data, inspect_data
    from portable.data.samples.base import IGNORED, Batch, Samples
    from portable.data.samples.classes import Classes, KnownClasses
    from portable.data.samples.loader import BatchIterator, EvalLoader, TrainLoader
    from portable.data.samples.order import Permutation, locate, permutation
    from portable.data.samples.tasks import LAST_LABEL
    from portable.data.sizes import DataSizes
    from portable.data.sources.opening import recognise_format
    from portable.data.sources.source import TASKS
    from portable.data.tokens.tokenize import Frame

# Imported at the first use (PEP 562): the processes that tokenize need neither data sets nor torch.
_HOMES = {
    "Batch": "portable.data.samples.base",
    "BatchIterator": "portable.data.samples.loader",
    "Classes": "portable.data.samples.classes",
    "Data": "portable.data.dataset",
    "DataSizes": "portable.data.sizes",
    "EvalLoader": "portable.data.samples.loader",
    "Frame": "portable.data.tokens.tokenize",
    "IGNORED": "portable.data.samples.base",
    "KnownClasses": "portable.data.samples.classes",
    "LAST_LABEL": "portable.data.samples.tasks",
    "Permutation": "portable.data.samples.order",
    "Samples": "portable.data.samples.base",
    "TASKS": "portable.data.sources.source",
    "TrainLoader": "portable.data.samples.loader",
    "build_data": "portable.data.dataset",
    "inspect_data": "portable.data.dataset",
    "locate": "portable.data.samples.order",
    "permutation": "portable.data.samples.order",
    "recognise_format": "portable.data.sources.opening",
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
