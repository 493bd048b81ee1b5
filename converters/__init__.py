"""Read training checkpoints of many formats through one logical view, and convert them.

Example:
    >>> from portable.converters import open_checkpoint
    >>> checkpoint = open_checkpoint("runs/quickstart")
    >>> rows = checkpoint.tensors["model.embed_tokens.weight"].read((slice(0, 16),))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.converters.lazy_imports import build_lazy_getattr

if TYPE_CHECKING:
    from portable.converters.adapters.adapter import StoredAdapter, find_adapter
    from portable.converters.adapters.merging import merge
    from portable.converters.checkpoint import Checkpoint, OptimizerState
    from portable.converters.convert_checkpoint import Conversion, convert
    from portable.converters.errors import CheckpointError
    from portable.converters.fingerprints import compute_fingerprint
    from portable.converters.formats.dcp.checksums import read_item_checksums, write_shard_checksums
    from portable.converters.manifest import check_manifest, compute_manifest_entries, format_manifest
    from portable.converters.opening import open_checkpoint, read_pickled
    from portable.converters.quantization.dequantize import (
        can_dequantize,
        dequantize_checkpoint,
        read_quantization_config,
    )
    from portable.converters.quantization.quantize import (
        quantize_checkpoint,
        quantize_like_base,
        read_writable_config,
    )
    from portable.converters.tensors.tensor import Tensor
    from portable.converters.writers.safetensors_writer import write_adapter
    from portable.converters.writers.targets import write_checkpoint, write_dcp, write_safetensors

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Conversion",
    "OptimizerState",
    "StoredAdapter",
    "Tensor",
    "can_dequantize",
    "check_manifest",
    "compute_fingerprint",
    "compute_manifest_entries",
    "convert",
    "dequantize_checkpoint",
    "find_adapter",
    "format_manifest",
    "merge",
    "open_checkpoint",
    "quantize_checkpoint",
    "quantize_like_base",
    "read_item_checksums",
    "read_pickled",
    "read_quantization_config",
    "read_writable_config",
    "write_adapter",
    "write_checkpoint",
    "write_dcp",
    "write_safetensors",
    "write_shard_checksums",
]

__getattr__ = build_lazy_getattr(__name__)
