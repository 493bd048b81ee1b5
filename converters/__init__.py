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
    from converters.adapters.merging import merge
    from converters.checkpoint import Checkpoint, OptimizerState
    from converters.errors import CheckpointError
    from converters.fingerprints import fingerprint
    from converters.formats.dcp.checksums import item_checksums, write_shard_checksums
    from converters.manifest import check_manifest, manifest_entries, manifest_text
    from converters.opening import open_checkpoint, read_pickled
    from converters.quantization.dequantize import dequantized, dequantizes, quantization_of
    from converters.quantization.quantize import layout_of, quantized, quantized_like
    from converters.tensors.tensor import Tensor
    from converters.writers.safetensors_writer import write_adapter
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
    "layout_of",
    "manifest_entries",
    "manifest_text",
    "merge",
    "open_checkpoint",
    "quantization_of",
    "quantized",
    "quantized_like",
    "read_pickled",
    "write_adapter",
    "write_checkpoint",
    "write_dcp",
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
    "layout_of": "converters.quantization.quantize",
    "manifest_entries": "converters.manifest",
    "manifest_text": "converters.manifest",
    "merge": "converters.adapters.merging",
    "open_checkpoint": "converters.opening",
    "quantization_of": "converters.quantization.dequantize",
    "quantized": "converters.quantization.quantize",
    "quantized_like": "converters.quantization.quantize",
    "read_pickled": "converters.opening",
    "write_adapter": "converters.writers.safetensors_writer",
    "write_checkpoint": "converters.writers.targets",
    "write_dcp": "converters.writers.targets",
    "write_safetensors": "converters.writers.targets",
    "write_shard_checksums": "converters.formats.dcp.checksums",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
