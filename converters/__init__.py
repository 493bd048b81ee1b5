"""How checkpoint formats lie on disk, and one logical view of them all.

from converters import open_checkpoint

checkpoint = open_checkpoint("runs/quickstart")
checkpoint.tensors["model.embed_tokens.weight"].read((slice(0, 16),))
"""

from __future__ import annotations

from converters.checkpoint import Checkpoint, OptimizerState
from converters.dcp_writer import write_dcp
from converters.errors import CheckpointError
from converters.opening import open_checkpoint
from converters.safetensors_writer import write_safetensors
from converters.tensor import Tensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "OptimizerState",
    "Tensor",
    "open_checkpoint",
    "write_dcp",
    "write_safetensors",
]
