"""torchtitan's Llama with the names and the row order of transformers.

torchtitan names its parameters differently, and its rotary embedding pairs adjacent rows of a head, where
transformers pairs the first half with the second. So the rows of the query and key projections, and of their
optimizer state, are permuted.

Source: torchtitan/models/llama3/state_dict_adapter.py; "RoFormer", arXiv:2104.09864, section 3.4.2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from converters.checkpoint import Aliases, Checkpoint, OptimizerState
from converters.errors import CheckpointError
from converters.tensors.rearranged import permuted
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.checkpoint import Scalar

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_AROUND = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}


def is_torchtitan_llama(checkpoint: Checkpoint) -> bool:
    """Whether the tensors have torchtitan's Llama names."""
    return "tok_embeddings.weight" in checkpoint.tensors


def as_transformers_llama(checkpoint: Checkpoint, *, heads: int, key_value_heads: int) -> Checkpoint:
    """The same checkpoint with transformers' names and row order, read lazily.

    Args:
        heads, key_value_heads: of the attention; the checkpoint does not record them.

    Raises:
        CheckpointError: the heads do not divide the rows.
    """
    names = {name: _transformers_name(name) for name in (*checkpoint.tensors, *checkpoint.aliases)}

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not tensor.shape or not names.get(name, name).endswith((".q_proj.weight", ".k_proj.weight")):
            return tensor
        return _in_halves(tensor, heads if ".q_proj." in names[name] else key_value_heads)

    def optimizer(_: Aliases) -> OptimizerState | None:
        found = checkpoint.optimizer
        if found is None:
            return None
        state: Mapping[str, Mapping[str, Tensor | Scalar]] = {
            name: {
                what: convert(name, value) if isinstance(value, Tensor) else value
                for what, value in values.items()
            }
            for name, values in found.state.items()
        }
        turned = OptimizerState(state, lambda: found.param_groups)
        return turned.renamed(lambda name: names.get(name, name))

    return Checkpoint(
        format=checkpoint.format,
        root=checkpoint.root,
        tensors={names[name]: convert(name, tensor) for name, tensor in checkpoint.tensors.items()},
        aliases={names[alias]: names[owner] for alias, owner in checkpoint.aliases.items()},
        optimizer=optimizer,
        metadata=checkpoint.metadata,
        companions=checkpoint.companions,
        counters=lambda: checkpoint.counters,
    )


def _transformers_name(name: str) -> str:
    """transformers' name for a tensor of torchtitan; an unknown name is returned unchanged."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return _AROUND.get(name, name)
    module, _, kind = match[2].replace("qkv_linear.", "").rpartition(".")
    return f"model.layers.{match[1]}.{_IN_LAYER[module]}.{kind}" if module in _IN_LAYER else name


def _in_halves(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: the first of every pair, then the second of every pair."""
    rows, *rest = tensor.shape
    if rows % (2 * heads):
        raise CheckpointError(f"{tensor.name}: {rows} rows cannot be split into {heads} heads")
    return permuted(tensor, (heads, rows // heads // 2, 2, *rest), (0, 2, 1, *range(3, 3 + len(rest))))
