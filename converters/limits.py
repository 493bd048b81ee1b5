"""Upper limits of the numbers and sizes in the files of a checkpoint, far above those that programs write.

Other modules define the limits that depend on the size of a file, and the limits of a format, such as the
number of dimensions in torch.
"""

from __future__ import annotations

# Numbers of ranks, rows and layers, sizes of a model, the rank of an adapter, and a block size in KiB. Code
# iterates over these numbers or multiplies them, even if the file is small.
MAX_COUNT = 1 << 20
MAX_LAYERS = 1 << 17
# Number of experts in a layer. Each expert becomes a tensor.
MAX_EXPERTS = 1 << 16

# Lengths of names: modules, classes and storages in a pickle; tensors and patterns, because the time to match
# a name is quadratic in its length; paths in a database. The last limit is the number of patterns.
MAX_NAME = 1024
MAX_TENSOR_NAME = MAX_PATTERN = 4096
MAX_PATH_NAME = 8192
MAX_PATTERNS = 10_000

# Nesting depths: containers in a pickle; keys of a nested state dict; containers around a state dict in the
# checkpoint of another program.
MAX_DEPTH = 200
MAX_PATH = 64
MAX_CONTAINER_DEPTH = 16

# Size of an integer in a pickle in bytes. No size, step or seed is longer, and converting long integers is
# slow.
MAX_INT_BYTES = 32
# Values of integer keys in a dict, and number of keys that are tuples. Python does not randomize the hashes
# of numbers, so larger integers and tuples can be chosen to collide. Building a dict of n colliding keys
# takes n * n comparisons.
MAX_KEY = 1 << 60
MAX_TUPLE_KEYS = 10_000
MAX_KEY_IN_PATH = 1 << 31

# Numbers of values: in the parameter groups of an optimizer; in one tensor of the groups; in the settings of
# a file; in a tree of the state of another program. Numbers of optimizers in a run, of their states, and of
# pairs of tied names.
MAX_GROUP_VALUES = 10_000_000
MAX_GROUP_TENSOR = 16
MAX_SETTINGS = 50_000_000
MAX_VALUES = 5_000_000
MAX_OPTIMIZERS = 64
MAX_STATES = 100_000
MAX_TIED_PAIRS = 1000

# Numbers of comparisons, which take a few seconds: shapes with orders of parameters, and pieces with flat
# parameters.
MAX_ORDER_WORK = 10_000_000
MAX_FLAT_WORK = 2_000_000

# Sizes in bytes: the header of a safetensors file (the limit of its library); the header of a zarr array; the
# list of a tree; JSON in a tensor; a tokenizer file (a larger `.model` contains something else); a
# decompressed node (the limit of Orbax is 100 MB).
MAX_HEADER = 100_000_000
MAX_ARRAY_HEADER = 1 << 20
MAX_TREE_LIST = 64 << 20
MAX_JSON_TENSOR = 1 << 16
MAX_TOKENIZER_FILE = 1 << 30
MAX_NODE = 128 << 20
# Memory that a tree of nodes may use, in bytes.
MAX_TREE = 4 << 30

# Number of chunks of an array that are files. Number of chunks of all arrays that are stored inside other
# chunks, or are not stored.
MAX_CHUNKS, MAX_CHUNKS_BEYOND = 1 << 22, 1 << 18
