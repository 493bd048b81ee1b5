"""Define upper limits for counts and sizes in checkpoint files, far above the values in real files.

Files are untrusted. Without these limits, a small file could declare counts that make a reader use
all memory or run for hours. Limits that depend on the size of a file, and limits of a format, such
as the number of dimensions in torch, are defined in other modules.
"""

from __future__ import annotations

MAX_COUNT = 1 << 20
"""Maximum number of ranks, size of a model dimension, or rank or scale of an adapter.

Some checks also reject the maximum itself.
"""
MAX_LAYERS = 1 << 17
"""Maximum number of layers of a Megatron model."""
MAX_EXPERTS = 1 << 16
"""Maximum number of experts in a stack. Each expert becomes a tensor."""

MAX_NAME = 1024
"""Maximum number of characters in the name of a module, class or storage in a pickle."""
MAX_TENSOR_NAME = MAX_PATTERN = 4096
"""Maximum number of characters in a tensor name or a pattern of names.

The time to match a name is quadratic in its length.
"""
MAX_PATH_NAME = 8192
"""Maximum length in bytes of a path in an OCDBT database."""
MAX_PATTERNS = 10_000
"""Maximum number of patterns in one setting of an adapter."""

MAX_DEPTH = 200
"""Maximum nesting depth of the containers in a pickle."""
MAX_PATH = 64
"""Maximum number of components in the nested path of a DCP key."""
MAX_CONTAINER_DEPTH = 16
"""Maximum nesting depth of a state dict in a checkpoint written by another program."""

MAX_INT_BYTES = 32
"""Maximum size in bytes of an integer in a pickle.

Real sizes, steps, and seeds are shorter, and long integers are slow.
"""
MAX_KEY = 1 << 60
"""Exclusive upper limit for the absolute value of an integer that is a dict key in a pickle.

Python does not randomize the hashes of numbers, so larger integers can be chosen to collide.
Building a dict of n colliding keys takes n * n comparisons.
"""
MAX_TUPLE_KEYS = 10_000
"""Maximum number of tuples that are dict keys in a pickle. Like integers, tuples can be chosen to
collide.
"""
MAX_KEY_IN_PATH = 1 << 31
"""Maximum absolute value of an integer key on the path to a state dict written by another program."""

MAX_GROUP_VALUES = 10_000_000
"""Maximum number of values in the parameter groups of an optimizer. The other values are replaced with
`"..."`.
"""
MAX_GROUP_TENSOR = 16
"""Maximum number of elements of a tensor in the parameter groups of an optimizer."""
MAX_SETTINGS = 50_000_000
"""Maximum number of values in the settings of a DeepSpeed checkpoint with tensor parallelism. The other
values are replaced with `"..."`.
"""
MAX_VALUES = 5_000_000
"""Maximum number of values to search for state dicts in a checkpoint written by another program."""
MAX_OPTIMIZERS = 64
"""Maximum number of optimizers in a checkpoint."""
MAX_STATES = 100_000
"""Maximum number of search states when optimizer states are assigned to parameters in order."""
MAX_TIED_PAIRS = 1000
"""Maximum number of pairs of tensors that may be tied according to their names and shapes."""

MAX_ORDER_WORK = 10_000_000
"""Maximum number of shape comparisons to match parameter orders. This many take a few seconds."""
MAX_FLAT_WORK = 2_000_000
"""Maximum number of comparisons of pieces with flat parameters. This many take a few seconds."""

MAX_HEADER = 100_000_000
"""Maximum size in bytes of the header of a safetensors or GGUF file, or of a `metadata.pkl`.

The library safetensors has the same limit.
"""
MAX_ARRAY_HEADER = 1 << 20
"""Maximum size in bytes of the metadata of a zarr array."""
MAX_TREE_LIST = 64 << 20
"""Maximum size in bytes of the file that lists the tree of an Orbax checkpoint."""
MAX_JSON_TENSOR = 1 << 16
"""Maximum size in bytes of a tensor that contains JSON."""
MAX_TOKENIZER_FILE = 1 << 30
"""Maximum size in bytes of a tokenizer file. A larger `.model` file is not a tokenizer."""
MAX_NODE = 128 << 20
"""Maximum size in bytes of a decompressed node of an OCDBT tree. The limit of Orbax is 100 MB."""
MAX_TREE = 4 << 30
"""Maximum number of bytes of memory for the nodes of an OCDBT tree."""

MAX_CHUNKS, MAX_CHUNKS_BEYOND = 1 << 22, 1 << 18
"""Maximum numbers of chunks in zarr arrays.

The first limit applies to each array whose chunks are separate files. The second limit applies to
all arrays together, and counts the chunks that are stored inside other chunks or are not stored.
"""
