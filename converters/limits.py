"""Define upper limits for counts and sizes in checkpoint files, far above the values in real files.

Files are untrusted. Without these limits, a small file could declare counts that make a reader use
all memory or run for hours. Limits that depend on the size of a file, and limits of a format, such
as the number of dimensions in torch, are defined in other modules.
"""

from __future__ import annotations

MAX_COUNT = 1 << 20
"""Number of ranks or rows, size of a model dimension, rank of an adapter, or block size in KiB."""
MAX_LAYERS = 1 << 17
"""Number of layers of a model."""
MAX_EXPERTS = 1 << 16
"""Number of experts in a layer. Each expert becomes a tensor."""

MAX_NAME = 1024
"""Length of the name of a module, class or storage in a pickle."""
MAX_TENSOR_NAME = MAX_PATTERN = 4096
"""Length of a tensor name, and of a pattern of names. The time to match a name is quadratic in its length."""
MAX_PATH_NAME = 8192
"""Length of a path in an OCDBT database."""
MAX_PATTERNS = 10_000
"""Number of patterns in the config of an adapter."""

MAX_DEPTH = 200
"""Nesting depth of the containers in a pickle."""
MAX_PATH = 64
"""Number of nested keys from which a key of a DCP state dict was flattened."""
MAX_CONTAINER_DEPTH = 16
"""Number of containers around a state dict in a checkpoint written by another program."""

MAX_INT_BYTES = 32
"""Size of an integer in a pickle in bytes.

Real sizes, steps, and seeds are shorter, and long integers are slow.
"""
MAX_KEY = 1 << 60
"""Absolute value of an integer that is a dict key in a pickle.

Python does not randomize the hashes of numbers, so larger integers can be chosen to collide. Building a dict
of n colliding keys takes n * n comparisons.
"""
MAX_TUPLE_KEYS = 10_000
"""Number of dict keys in a pickle that are tuples. Like integers, tuples can be chosen to collide."""
MAX_KEY_IN_PATH = 1 << 31
"""Absolute value of an integer key on the path to a state dict in a checkpoint written by another program."""

MAX_GROUP_VALUES = 10_000_000
"""Number of values in the parameter groups of an optimizer."""
MAX_GROUP_TENSOR = 16
"""Number of elements of a tensor in the parameter groups of an optimizer."""
MAX_SETTINGS = 50_000_000
"""Number of values in the settings that a DeepSpeed checkpoint with tensor parallelism contains."""
MAX_VALUES = 5_000_000
"""Number of values that are searched for state dicts in a checkpoint written by another program."""
MAX_OPTIMIZERS = 64
"""Number of optimizers in a checkpoint."""
MAX_STATES = 100_000
"""Number of search states while optimizer states are assigned to parameters in order."""
MAX_TIED_PAIRS = 1000
"""Number of pairs of names that may be tied."""

MAX_ORDER_WORK = 10_000_000
"""Number of shape comparisons while parameter orders are matched. They take a few seconds."""
MAX_FLAT_WORK = 2_000_000
"""Number of comparisons of pieces with flat parameters. They take a few seconds."""

MAX_HEADER = 100_000_000
"""Size of the header of a safetensors file in bytes. The library safetensors has the same limit."""
MAX_ARRAY_HEADER = 1 << 20
"""Size of the metadata of a zarr array in bytes."""
MAX_TREE_LIST = 64 << 20
"""Size of the file that lists the tree of an Orbax checkpoint in bytes."""
MAX_JSON_TENSOR = 1 << 16
"""Size of a tensor that contains JSON in bytes."""
MAX_TOKENIZER_FILE = 1 << 30
"""Size of a tokenizer file in bytes. A larger `.model` file is not a tokenizer."""
MAX_NODE = 128 << 20
"""Size of a decompressed node of an OCDBT tree in bytes. The limit of Orbax is 100 MB."""
MAX_TREE = 4 << 30
"""Memory that the nodes of an OCDBT tree may use, in bytes."""

MAX_CHUNKS, MAX_CHUNKS_BEYOND = 1 << 22, 1 << 18
"""Number of chunks of a zarr array that are files.

The second limit is the number of chunks of all arrays that are stored inside other chunks, or are not stored.
"""
