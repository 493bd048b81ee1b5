"""Convert Megatron's GPT models to the tensor names and row order of transformers.

Megatron stores the query, key and value rows of each query group together, and the gate and up rows
of a gated MLP in one matrix. It also pads the vocabulary. Every checkpoint contains pickled `args`,
which define the model. A model with rotary embeddings, RMSNorm and a gated MLP is converted to the
names of Llama, which Mistral, Qwen2 and Qwen3 share. A model with learned positions and LayerNorm
is converted to the names of GPT-2.

Source: `get_query_key_value_tensors` in Megatron-LM's megatron/core/transformer/attention.py,
mlp.py, tools/checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.converters.containers.pickle_reader import PickledInstance, format_untrusted_value
from portable.converters.errors import CheckpointError, DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.formats.megatron.settings import check_megatron_args
from portable.converters.limits import MAX_LAYERS
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors.tensor import Tensor
from portable.converters.tensors.tensor_ops import (
    build_region_box,
    concat_tensors,
    slice_tensor,
    transpose_matrix,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.storage.path_or_url import AnyPath

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
# transformers' names of the modules in a layer. `_convert_llama_tensor` splits the other tensors of a Llama
# layer.
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
    """Sizes and type of a model, read from `args` and `config.json`.

    Attributes:
        num_heads: Number of attention heads.
        num_query_groups: Number of query groups.
        head_dim: Size of each attention head, which is its number of rows in a projection.
        num_layers: Number of layers of the complete model.
        is_gated: Whether the first matrix of the MLP contains gate and up rows.
        is_gpt2: Whether the model is a GPT-2 instead of a Llama.
        vocab_size: Number of tokens in the vocabulary, without padding. The number in `config.json`
            takes precedence over the number in `args`. None if it is not known.
    """

    num_heads: int
    num_query_groups: int
    head_dim: int
    num_layers: int
    is_gated: bool
    is_gpt2: bool
    vocab_size: int | None


def get_megatron_args(content: dict[str, Any]) -> Any:
    """Return the settings (`args`) of a Megatron checkpoint.

    Args:
        content: Content of a rank's file, or of the `common.pt` of a Megatron-Core checkpoint.

    Returns:
        Dict of the settings, keyed by name. If `args` is missing, the result is None. If `args` is
        invalid, the result may be any other value, so the caller must check its type.
    """
    args = content.get("args")
    return args.state if isinstance(args, PickledInstance) else args


def read_model_shape(args: Any, config: AnyPath | None, location: str) -> MegatronShape:
    """Read the type and the sizes of a model from Megatron's `args`.

    A model with `swiglu`, rotary embeddings and RMSNorm is a Llama. A model with learned positions
    and LayerNorm, and without `swiglu`, is a GPT-2.

    Args:
        args: Result of `get_megatron_args`.
        config: Path of the model's `config.json`, or None.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If there are no `args`, if the model is neither a Llama nor a GPT-2, if a
            setting is missing or invalid, or if a setting contradicts `config.json`. Also raised,
            with the name of the setting, if a setting might make the outputs of transformers differ
            from Megatron's.
    """
    if not isinstance(args, dict):
        raise UnsupportedCheckpointError(
            f"{location}: contains no args (the Megatron settings that describe the model)"
        )

    def read_number(name: str, default: Any = None) -> int:
        value = args.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= MAX_LAYERS:
            raise UnsupportedCheckpointError(f"{location}: the checkpoint's args have no valid {name}")
        return value

    check_megatron_args(args, config, location)
    gated = args.get("swiglu") is True
    position, norm = args.get("position_embedding_type"), args.get("normalization", "LayerNorm")
    llama = gated and position == "rope" and norm == "RMSNorm"
    if not llama and (gated or position != "learned_absolute" or norm != "LayerNorm"):
        raise UnsupportedCheckpointError(
            f"{location}: the model is neither a Llama nor a GPT-2 model, because the checkpoint's args "
            f"have swiglu={gated}, position_embedding_type={format_untrusted_value(position)} and "
            f"normalization={format_untrusted_value(norm)}"
        )
    heads = read_number("num_attention_heads")
    groups = read_number("num_query_groups", heads) if args.get("group_query_attention") is True else heads
    head = read_number("kv_channels", read_number("hidden_size") // heads)
    if heads % groups:
        raise DamagedCheckpointError(
            f"{location}: damaged: {heads} attention heads cannot be divided evenly into {groups} query "
            "groups"
        )
    vocab_size = args.get("vocab_size")
    num_tokens = _read_vocabulary_size(config) or (vocab_size if type(vocab_size) is int else None)
    if type(vocab_size) is int and num_tokens is not None and num_tokens < vocab_size:
        raise CheckpointError(
            f"{location}: vocab_size is {vocab_size} in the checkpoint's args, but only {num_tokens} in "
            f"{config}; specify the config.json of this model with --config-from"
        )
    return MegatronShape(heads, groups, head, read_number("num_layers"), gated, not llama, num_tokens)


def _read_vocabulary_size(config: AnyPath | None) -> int | None:
    """Read the vocabulary size from `config.json`, or return None if the file or a valid size is missing."""
    count = read_json_object_or_empty(config).get("vocab_size")
    return count if type(count) is int and count > 0 else None


def to_local_module_key(key: str) -> str:
    """Convert a key of Transformer Engine's fused modules to the key of the separate module.

    For example, `self_attention.linear_qkv.layer_norm_weight` becomes `input_layernorm.weight`. Other
    keys are returned unchanged.
    """
    for fused, separate in _FUSED.items():
        if key.endswith(fused):
            return key.removesuffix(fused) + separate
    return key


def convert_to_transformers(
    tensors: Mapping[str, Tensor], shape: MegatronShape, location: str
) -> dict[str, Tensor]:
    """Convert Megatron-Core tensors to transformers' names and row order.

    Megatron-Core's names of the tensors in a layer have the form `decoder.layers.<i>...`.

    Args:
        tensors: Tensors of the complete model, merged from all ranks.
        shape: Shape of the model.
        location: Path of the checkpoint, used in error messages.

    Returns:
        Tensors, keyed by transformers' names.

    Raises:
        CheckpointError: If a tensor does not belong to the model or has the wrong size, or if a
            layer has no tensors. Other missing tensors are not detected.
    """
    weights: dict[str, Tensor] = {}
    layers: set[int] = set()
    around = _GPT2_AROUND if shape.is_gpt2 else _LLAMA_AROUND
    inside = _GPT2.keys() if shape.is_gpt2 else {*_LLAMA, _QKV, _FC1}
    for key, tensor in tensors.items():
        if key in around:
            weights[around[key]] = (
                _remove_vocabulary_padding(tensor, shape, location) if key in _VOCABULARY else tensor
            )
            continue
        match = _LAYER.fullmatch(key)
        if match is None or match[2] not in inside:
            raise UnsupportedCheckpointError(
                f"{location}: the tensor {format_untrusted_value(key)} does not belong to a "
                f"{'GPT-2' if shape.is_gpt2 else 'Llama'} model"
            )
        if int(match[1]) >= shape.num_layers:
            raise DamagedCheckpointError(
                f"{location}: contains a layer with index {match[1]}, but num_layers is {shape.num_layers} "
                "in the checkpoint's args"
            )
        conversion = (
            _convert_gpt2_tensor(match[2], match[3], tensor, shape, location)
            if shape.is_gpt2
            else _convert_llama_tensor(match[2], tensor, shape, location)
        )
        prefix = f"transformer.h.{match[1]}." if shape.is_gpt2 else f"model.layers.{match[1]}."
        for name, value in conversion.items():
            weights[f"{prefix}{name}.{match[3]}"] = value
        layers.add(int(match[1]))
    missing_layer = next((i for i in range(shape.num_layers) if i not in layers), None)
    if missing_layer is not None:
        raise DamagedCheckpointError(f"{location}: the tensors of layer {missing_layer} are missing")
    return weights


def _convert_llama_tensor(
    module: str, tensor: Tensor, shape: MegatronShape, location: str
) -> dict[str, Tensor]:
    """Convert a tensor of a Llama layer to transformers' names. Split fused matrices.

    Args:
        module: Name of the module within Megatron-Core's layer, such as `mlp.linear_fc1`.
        tensor: Weight or bias of the module.
        shape: Shape of the model.
        location: Path of the checkpoint, used in error messages.

    Returns:
        Tensors, keyed by the name of the module in transformers' layer.

    Raises:
        CheckpointError: If a fused matrix cannot be split.
    """
    if module == _QKV:
        names = [f"self_attn.{projection}_proj" for projection in "qkv"]
        return dict(zip(names, _split_fused_qkv(tensor, shape, location), strict=True))
    if module == _FC1:
        gate, up = split_gate_and_up(tensor, location)
        return {"mlp.gate_proj": gate, "mlp.up_proj": up}
    return {_LLAMA[module]: tensor}


def split_gate_and_up(tensor: Tensor, location: str) -> tuple[Tensor, Tensor]:
    """Split the fused matrix or bias of a gated MLP into gate and up projection.

    Args:
        tensor: Fused tensor, or the shard of one tensor-parallel rank. The gate rows come first.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If the tensor does not have an even number of rows.
    """
    if not tensor.shape or tensor.shape[0] % 2:
        raise DamagedCheckpointError(
            f"{location}: {tensor.name} has shape {list(tensor.shape)}, but a gated MLP needs an even number "
            "of rows"
        )
    half = tensor.shape[0] // 2
    return slice_tensor(tensor, 0, 0, half), slice_tensor(tensor, 0, half, half)


def _convert_gpt2_tensor(
    module: str, kind: str, tensor: Tensor, shape: MegatronShape, location: str
) -> dict[str, Tensor]:
    """Convert a tensor of a GPT-2 layer to transformers' name and layout.

    Matrices are transposed, because transformers' GPT-2 stores them as `[inputs, outputs]`. The
    fused QKV tensor stays fused, but is reordered: all queries, then all keys, then all values.

    Args:
        module: Name of the module within Megatron-Core's layer.
        kind: `weight` or `bias`.
        tensor: Tensor to convert.
        shape: Shape of the model.
        location: Path of the checkpoint, used in error messages.

    Returns:
        The tensor, keyed by the name of the module in transformers' layer.

    Raises:
        CheckpointError: If the number of QKV rows does not match the heads.
    """
    if module == _QKV:
        tensor = concat_tensors(tensor.name, _split_fused_qkv(tensor, shape, location), 0)
    matrix = kind == "weight" and len(tensor.shape) == 2
    return {_GPT2[module]: transpose_matrix(tensor) if matrix else tensor}


def _split_fused_qkv(tensor: Tensor, shape: MegatronShape, location: str) -> list[Tensor]:
    """Split a fused QKV weight or bias into query, key and value.

    The rows are ordered by query group. Each group contains its queries first, then its key and its
    value.

    Raises:
        CheckpointError: If the number of rows does not match the heads.
    """
    queries = shape.num_heads // shape.num_query_groups
    group_rows = (queries + 2) * shape.head_dim
    if not tensor.shape or tensor.shape[0] != shape.num_query_groups * group_rows:
        raise DamagedCheckpointError(
            f"{location}: {tensor.name} has shape {list(tensor.shape)}, but num_attention_heads "
            f"{shape.num_heads}, head size {shape.head_dim} and num_query_groups {shape.num_query_groups} "
            f"need {shape.num_query_groups * group_rows} rows"
        )
    rest = tensor.shape[1:]
    parts = []
    for first, count in ((0, queries), (queries, 1), (queries + 1, 1)):
        rows = count * shape.head_dim
        boxes = [
            build_region_box(
                tensor,
                [i * rows, *[0] * len(rest)],
                [i * group_rows + first * shape.head_dim, *[0] * len(rest)],
                [rows, *rest],
            )
            for i in range(shape.num_query_groups)
        ]
        parts.append(Tensor(tensor.name, tensor.dtype, (shape.num_query_groups * rows, *rest), boxes))
    return parts


def _remove_vocabulary_padding(tensor: Tensor, shape: MegatronShape, location: str) -> Tensor:
    """Remove the padding rows after the last row of the vocabulary.

    If the vocabulary size is not known, `tensor` is returned unchanged.

    Raises:
        CheckpointError: If the tensor has fewer rows than the vocabulary.
    """
    count = shape.vocab_size
    if count is None or not tensor.shape or count == tensor.shape[0]:
        return tensor
    if count > tensor.shape[0]:
        raise CheckpointError(
            f"{location}: {tensor.name} has only {tensor.shape[0]} rows, but the vocabulary has {count} "
            "tokens; specify the config.json of this model with --config-from"
        )
    return slice_tensor(tensor, 0, 0, count)
