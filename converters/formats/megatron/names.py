"""Megatron's GPT models with the names and the rows of transformers.

Megatron keeps the query, key and value rows of each query group together, and the gate and up rows of a gated
MLP in one matrix; it pads the vocabulary. `args`, pickled with every checkpoint, says which model it is:
rotary embeddings, RMSNorm and a gated MLP make a Llama (also Mistral, Qwen2 and 3), learned positions and
LayerNorm a GPT-2.

Source: Megatron-LM's megatron/core/transformer/attention.py (`get_query_key_value_tensors`), mlp.py,
tools/checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.converters.containers.pickle_reader import Instance, format_value
from portable.converters.errors import CheckpointError
from portable.converters.formats.megatron.settings import check_args
from portable.converters.limits import MAX_LAYERS
from portable.converters.storage.safe_open import read_small_table
from portable.converters.tensors.tensor import Tensor
from portable.converters.tensors.tensor_ops import (
    concat_tensors,
    place_region,
    slice_tensor,
    transpose_matrix,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.storage.path_or_url import Place

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
# Names within a layer; the others of a Llama are split below.
_LLAMA = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc2": "mlp.down_proj",
}
_LLAMA_AROUND = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_GPT2 = {
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    _QKV: "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    _FC1: "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_GPT2_AROUND = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class MegatronShape:
    """What `args` says of the model.

    Attributes:
        heads, groups: of the attention; `head` rows each.
        layers: of the whole model.
        gated: whether the MLP's first matrix holds gate and up rows.
        gpt2: whether it is GPT-2-shaped, else Llama-shaped.
        vocabulary: the number of tokens without padding, None where unknown.
    """

    heads: int
    groups: int
    head: int
    layers: int
    gated: bool
    gpt2: bool
    vocabulary: int | None


def get_args(content: dict[str, Any]) -> Any:
    """The pickled settings of a checkpoint; a table, if it has any."""
    args = content.get("args")
    return args.state if isinstance(args, Instance) else args


def read_shape(fields: Any, config: Place | None, location: str) -> MegatronShape:
    """The shape that `get_args` describe.

    Raises:
        CheckpointError: no `args`, or a model that is neither Llama- nor GPT-2-shaped, or a setting that may
            change what it computes; the setting is named.
    """
    if not isinstance(fields, dict):
        raise CheckpointError(f"{location}: holds no args, which say what model it is")

    def read_number(name: str, default: Any = None) -> int:
        value = fields.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= MAX_LAYERS:
            raise CheckpointError(f"{location}: its args have no {name}")
        return value

    check_args(fields, config, location)
    gated = fields.get("swiglu") is True
    position, norm = fields.get("position_embedding_type"), fields.get("normalization", "LayerNorm")
    llama = gated and position == "rope" and norm == "RMSNorm"
    if not llama and (gated or position != "learned_absolute" or norm != "LayerNorm"):
        raise CheckpointError(
            f"{location}: a Megatron model with swiglu={gated}, {format_value(position)} positions and "
            f"{format_value(norm)} is neither Llama- nor GPT-2-shaped"
        )
    heads = read_number("num_attention_heads")
    groups = read_number("num_query_groups", heads) if fields.get("group_query_attention") is True else heads
    head = read_number("kv_channels", read_number("hidden_size") // heads)
    if heads % groups:
        raise CheckpointError(f"{location}: damaged, {heads} heads in {groups} query groups")
    vocab_size = fields.get("vocab_size")
    words = _read_vocabulary_size(config) or (vocab_size if type(vocab_size) is int else None)
    if type(vocab_size) is int and words is not None and words < vocab_size:
        raise CheckpointError(
            f"{location}: has vocab_size={vocab_size} in its args, vocab_size={words} in {config}"
        )
    return MegatronShape(heads, groups, head, read_number("num_layers"), gated, not llama, words)


def _read_vocabulary_size(config: Place | None) -> int | None:
    count = read_small_table(config).get("vocab_size")
    return count if type(count) is int and count > 0 else None


def to_local_key(key: str) -> str:
    """A key of Transformer Engine's modules as that of the local ones."""
    for fused, separate in _FUSED.items():
        if key.endswith(fused):
            return key.removesuffix(fused) + separate
    return key


def to_transformers(tensors: Mapping[str, Tensor], shape: MegatronShape, location: str) -> dict[str, Tensor]:
    """Merged tensors by Megatron-Core's names (`decoder.layers.<i>...`) -> transformers' names and rows.

    Raises:
        CheckpointError: a tensor has no place in the model, or not its size.
    """
    weights: dict[str, Tensor] = {}
    layers: set[int] = set()
    around = _GPT2_AROUND if shape.gpt2 else _LLAMA_AROUND
    inside = _GPT2.keys() if shape.gpt2 else {*_LLAMA, _QKV, _FC1}
    for key, tensor in tensors.items():
        if key in around:
            weights[around[key]] = _remove_padding(tensor, shape, location) if key in _VOCABULARY else tensor
            continue
        match = _LAYER.fullmatch(key)
        if match is None or match[2] not in inside:
            raise CheckpointError(
                f"{location}: {format_value(key)} has no place in a GPT-2- or Llama-shaped model"
            )
        if int(match[1]) >= shape.layers:
            raise CheckpointError(f"{location}: holds layer {match[1]}, its args say {shape.layers} layers")
        conversion = (
            _convert_gpt2(match[2], match[3], tensor, shape, location)
            if shape.gpt2
            else _convert_llama(match[2], tensor, shape, location)
        )
        prefix = f"transformer.h.{match[1]}." if shape.gpt2 else f"model.layers.{match[1]}."
        for name, value in conversion.items():
            weights[f"{prefix}{name}.{match[3]}"] = value
        layers.add(int(match[1]))
    lost = next((i for i in range(shape.layers) if i not in layers), None)
    if lost is not None:
        raise CheckpointError(f"{location}: the tensors of layer {lost} are missing")
    return weights


def _convert_llama(module: str, tensor: Tensor, shape: MegatronShape, location: str) -> dict[str, Tensor]:
    if module == _QKV:
        names = [f"self_attn.{projection}_proj" for projection in "qkv"]
        return dict(zip(names, _split_qkv(tensor, shape, location), strict=True))
    if module == _FC1:
        half = tensor.shape[0] // 2
        if tensor.shape[0] % 2:
            raise CheckpointError(f"{location}: {tensor.name} has an odd number of rows for a gated MLP")
        return {
            "mlp.gate_proj": slice_tensor(tensor, 0, 0, half),
            "mlp.up_proj": slice_tensor(tensor, 0, half, half),
        }
    return {_LLAMA[module]: tensor}


def _convert_gpt2(
    module: str, kind: str, tensor: Tensor, shape: MegatronShape, location: str
) -> dict[str, Tensor]:
    if module == _QKV:
        tensor = concat_tensors(tensor.name, _split_qkv(tensor, shape, location), 0)
    matrix = kind == "weight" and len(tensor.shape) == 2
    return {_GPT2[module]: transpose_matrix(tensor) if matrix else tensor}


def _split_qkv(tensor: Tensor, shape: MegatronShape, location: str) -> list[Tensor]:
    """Query, key and value of rows that lie group by group: its queries, its key, its value."""
    queries = shape.heads // shape.groups
    each = (queries + 2) * shape.head
    if not tensor.shape or tensor.shape[0] != shape.groups * each:
        raise CheckpointError(
            f"{location}: {tensor.name} is {list(tensor.shape)}, not of {shape.heads} heads of {shape.head} "
            f"rows in {shape.groups} groups"
        )
    rest = tensor.shape[1:]
    parts = []
    for first, count in ((0, queries), (queries, 1), (queries + 1, 1)):
        rows = count * shape.head
        boxes = [
            place_region(
                tensor,
                [i * rows, *[0] * len(rest)],
                [i * each + first * shape.head, *[0] * len(rest)],
                [rows, *rest],
            )
            for i in range(shape.groups)
        ]
        parts.append(Tensor(tensor.name, tensor.dtype, (shape.groups * rows, *rest), boxes))
    return parts


def _remove_padding(tensor: Tensor, shape: MegatronShape, location: str) -> Tensor:
    count = shape.vocabulary
    if count is None or not tensor.shape or count == tensor.shape[0]:
        return tensor
    if count > tensor.shape[0]:
        raise CheckpointError(f"{location}: {tensor.name} has {tensor.shape[0]} rows for {count} tokens")
    return slice_tensor(tensor, 0, 0, count)
