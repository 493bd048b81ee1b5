"""Data: sources, tokenizer, token cache, data sets, their order, and the loaders that feed the loop."""

from portable.data.build import TASKS, Data, DataSettings, DataSizes, build_data, inspect_data
from portable.data.loader import BatchIterator, EvalLoader, TrainLoader
from portable.data.order import Permutation, locate, permutation
from portable.data.samples import IGNORED, Batch, Samples

__all__ = [
    "IGNORED",
    "TASKS",
    "Batch",
    "BatchIterator",
    "Data",
    "DataSettings",
    "DataSizes",
    "EvalLoader",
    "Permutation",
    "Samples",
    "TrainLoader",
    "build_data",
    "inspect_data",
    "locate",
    "permutation",
]
