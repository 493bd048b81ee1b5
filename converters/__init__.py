"""Read training checkpoints of many formats through one logical view, and convert them.

from converters import open_checkpoint

checkpoint = open_checkpoint("runs/quickstart")
checkpoint.tensors["model.embed_tokens.weight"].read((slice(0, 16),))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.adapters.adapter import Adapter, find_adapter
    from converters.checkpoint import Checkpoint, OptimizerState
    from converters.errors import CheckpointError
    from converters.fingerprints import fingerprint
    from converters.formats.dcp.checksums import item_checksums, write_shard_checksums
    from converters.manifest import check_manifest, manifest_entries, manifest_text
    from converters.opening import open_checkpoint, read_pickled
    from converters.quantization.dequantize import dequantized, dequantizes
    from converters.tensors.tensor import Tensor
    from converters.writers.safetensors_writer import write_adapter, write_merged
    from converters.writers.targets import write_checkpoint, write_dcp, write_safetensors

__all__ = [
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "OptimizerState",
    "Tensor",
    "check_manifest",
    "dequantized",
    "dequantizes",
    "find_adapter",
    "fingerprint",
    "item_checksums",
    "manifest_entries",
    "manifest_text",
    "open_checkpoint",
    "read_pickled",
    "write_adapter",
    "write_checkpoint",
    "write_dcp",
    "write_merged",
    "write_safetensors",
    "write_shard_checksums",
]

# Imported at the first use (PEP 562): importing numpy takes longer than converting a small checkpoint, and
# neither `portable-convert --help` nor a mistyped option needs it.
_MODULES = {
    "Adapter": "converters.adapters.adapter",
    "Checkpoint": "converters.checkpoint",
    "CheckpointError": "converters.errors",
    "OptimizerState": "converters.checkpoint",
    "Tensor": "converters.tensors.tensor",
    "check_manifest": "converters.manifest",
    "dequantized": "converters.quantization.dequantize",
    "dequantizes": "converters.quantization.dequantize",
    "find_adapter": "converters.adapters.adapter",
    "fingerprint": "converters.fingerprints",
    "item_checksums": "converters.formats.dcp.checksums",
    "manifest_entries": "converters.manifest",
    "manifest_text": "converters.manifest",
    "open_checkpoint": "converters.opening",
    "read_pickled": "converters.opening",
    "write_adapter": "converters.writers.safetensors_writer",
    "write_checkpoint": "converters.writers.targets",
    "write_dcp": "converters.writers.targets",
    "write_merged": "converters.writers.safetensors_writer",
    "write_safetensors": "converters.writers.targets",
    "write_shard_checksums": "converters.formats.dcp.checksums",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
