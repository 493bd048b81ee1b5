"""What the files of a checkpoint may claim at most. Nothing that programs write comes near.

Bounds that follow from a file's size, and those of formats (torch's dimensions), are where they are checked.
"""

from __future__ import annotations

# Ranks, rows and layers of a model, its sizes, an adapter's rank, a block in KiB: what is counted out or
# multiplied, whatever the size of the file.
MAX_COUNT = 1 << 20
MAX_LAYERS = 1 << 17
# Experts of a layer, each of which becomes a tensor.
MAX_EXPERTS = 1 << 16

# Names: of modules, classes and storages in a pickle; of tensors and patterns (work on a name is quadratic in
# its length); of paths in a database.
MAX_NAME = 1024
MAX_TENSOR_NAME = MAX_PATTERN = 4096
MAX_PATH_NAME = 8192
MAX_PATTERNS = 10_000

# Nesting: of a pickle's containers; of the keys of a state dict, and of it in another program's.
MAX_DEPTH = 200
MAX_PATH = 64
MAX_CONTAINER_DEPTH = 16

# Numbers in a pickle, in bytes: no size, step or seed is longer; it keeps conversions of integers cheap.
MAX_INT_BYTES = 32
# Python does not randomize the hash of numbers: larger ones, and tuples of numbers, can be chosen to collide,
# and a dict of n colliding keys takes n * n comparisons.
MAX_KEY = 1 << 60
MAX_TUPLE_KEYS = 10_000
MAX_KEY_IN_PATH = 1 << 31

# Values: in the groups of an optimizer, and in one tensor of them; in a file's own settings; in a tree of
# other programs' states; of optimizers in a run, of their states, of pairs of tied names.
MAX_GROUP_VALUES = 10_000_000
MAX_GROUP_TENSOR = 16
MAX_SETTINGS = 50_000_000
MAX_VALUES = 5_000_000
MAX_OPTIMIZERS = 64
MAX_STATES = 100_000
MAX_TIED_PAIRS = 1000

# Comparisons: of shapes with orders of parameters, of pieces with flat parameters. A few seconds.
MAX_ORDER_WORK = 10_000_000
MAX_FLAT_WORK = 2_000_000

# Bytes: of headers (safetensors' own limit; zarr's), of a tree's list, of JSON in a tensor, of a tokenizer's
# file (a larger `.model` is something else), of a decompressed node (Orbax's own limit is 100 MB).
MAX_HEADER = 100_000_000
MAX_ARRAY_HEADER = 1 << 20
MAX_TREE_LIST = 64 << 20
MAX_JSON_TENSOR = 1 << 16
MAX_TOKENIZER_FILE = 1 << 30
MAX_NODE = 128 << 20
# What a tree of nodes may cost in memory.
MAX_TREE = 4 << 30

# Chunks of an array that are files; chunks of all arrays that lie within others, or are not stored.
MAX_CHUNKS, MAX_CHUNKS_BEYOND = 1 << 22, 1 << 18
