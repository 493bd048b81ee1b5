"""The values of the samples of `make_orbax.py`. Each value follows from its name."""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, tuple[str, tuple[int, ...], tuple[str | None, ...]]]

STEP = 7
# name -> dtype, shape, the axes of the mesh (of 2 x 2) that shard it
ODD: Arrays = {
    "layers.0.both": ("bfloat16", (6, 4), ("fsdp", "tensor")),
    "layers.0.last": ("float32", (3, 5, 4), (None, None, "tensor")),
    "layers.1.whole": ("float16", (7,), ()),
    "layers.1.number": ("float32", (), ()),
    "layers.1.large": ("int32", (300, 2), ("fsdp",)),
    "layers.1.truth": ("bool", (4,), ("tensor",)),
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def pattern(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return numbers in [-1, 1), spread by a multiplication. The numbers of second moments are positive."""
    count = int(np.prod(shape))
    bits = (np.arange(count, dtype=np.uint64) + zlib.crc32(name.encode())) * 2654435761 % 2**32
    values = bits.astype(np.float64) / 2**31 - 1
    if name.startswith("nu."):
        values = values**2
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    if kind.kind in "ib":
        return (bits % 2 if kind.kind == "b" else bits >> 4).astype(kind).reshape(shape)
    return values.astype(np.float32).astype(kind).reshape(shape)


# The dimensions of MaxText's parameters, of a llama and of others, and the names in transformers.
KERNELS = {
    "self_attention.query.kernel": ("EHD", "self_attn.q_proj"),
    "self_attention.key.kernel": ("EKD", "self_attn.k_proj"),
    "self_attention.value.kernel": ("EKD", "self_attn.v_proj"),
    "self_attention.out.kernel": ("HDE", "self_attn.o_proj"),
    "mlp.wi_0.kernel": ("EM", "mlp.gate_proj"),
    "mlp.wi_1.kernel": ("EM", "mlp.up_proj"),
    "mlp.wo.kernel": ("ME", "mlp.down_proj"),
}
LLAMA_NORMS = {
    "pre_self_attention_layer_norm.scale": ("E", "input_layernorm"),
    "post_self_attention_layer_norm.scale": ("E", "post_attention_layernorm"),
}
AROUND = {
    "token_embedder.embedding": "PE",
    "decoder.decoder_norm.scale": "E",
    "decoder.logits_dense.kernel": "EP",
}
SIZES = {"E": 8, "H": 4, "K": 2, "D": 6, "M": 12, "V": 10, "P": 12, "L": 3}
AXES = {"E": "fsdp", "H": "tensor", "K": "tensor", "M": "tensor", "P": "tensor"}


def maxtext_llama() -> Arrays:
    """Return the parameters of `LLAMA` below `params.params`, with scanned layers and a padded vocabulary."""
    layers = {name: f"{sizes[0]}L{sizes[1:]}" for name, (sizes, _) in {**KERNELS, **LLAMA_NORMS}.items()}
    named = {**AROUND, **{f"decoder.layers.{name}": sizes for name, sizes in layers.items()}}
    return {
        name: ("bfloat16", tuple(SIZES[size] for size in sizes), tuple(AXES.get(size) for size in sizes))
        for name, sizes in named.items()
    }
