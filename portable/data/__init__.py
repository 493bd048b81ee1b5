"""Data: sources, tokenizer, token cache, data sets, sample order and loaders."""

from portable.data.classes import Classes, KnownClasses
from portable.data.dataset import TASKS, Data, DataSizes, build_data, inspect_data, recognise_format
from portable.data.loader import BatchIterator, EvalLoader, TrainLoader
from portable.data.order import Permutation, locate, permutation
from portable.data.samples import IGNORED, Batch, Samples
from portable.data.tasks import LAST_LABEL
from portable.data.tokenize import Frame

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
