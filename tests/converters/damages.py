"""Damages of checkpoints that a conversion must reject, and the reasons that it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

State = dict[str, Any]
Damage = Callable[[State, dict[str, Any]], State]
FORMATS = ("dcp", "zero2", "zero3", "fsdp", "safetensors")


class DamagedCheckpoint(NamedTuple):
    """A damaged checkpoint.

    Attributes:
        name: Name of the test and of the folder, without the format.
        model: Model in `make_damaged.MODELS`.
        damage: Function that returns the damaged tensors, and may change the config.
        reason: Text in the error message.
        format: Format of the checkpoint.
    """

    name: str
    model: str
    damage: Damage
    reason: str
    format: str

    @property
    def folder(self) -> str:
        """Name of the folder with the checkpoint."""
        return f"{self.name.replace(' ', '-')}-{self.format}"


def lose(*parts: str) -> Damage:
    """Remove all tensors whose name contains one of the parts."""
    return lambda state, _: {
        name: value for name, value in state.items() if not any(part in name for part in parts)
    }


def change(part: str, function: Callable[[Any], Any]) -> Damage:
    """Replace all tensors whose name contains a part."""
    return lambda state, _: {
        name: function(value.clone()) if part in name else value for name, value in state.items()
    }


def configure(**settings: Any) -> Damage:
    """Change the config."""

    def apply(state: State, config: dict[str, Any]) -> State:
        config.update(settings)
        return state

    return apply


def halve(value: Any) -> Any:
    """Return the first half of the rows."""
    return value[: len(value) // 2].clone()


def lengthen(value: Any) -> Any:
    """Repeat the first rows at the end."""
    return value.new_tensor([*value.tolist(), *value[: len(value) // 2].tolist()])


def empty(value: Any) -> Any:
    """Return a tensor without elements, as ZeRO-3 leaves behind for a parameter."""
    return value.flatten()[:0].clone()


def clear(*experts: int) -> Callable[[Any], Any]:
    """Return a function that sets the experts of a stack to zero."""

    def apply(value: Any) -> Any:
        value[list(experts)] = 0
        return value

    return apply


def repeat(source: int, target: int) -> Callable[[Any], Any]:
    """Return a function that overwrites an expert of a stack with another expert."""

    def apply(value: Any) -> Any:
        value[target] = value[source]
        return value

    return apply


def repeat_experts(source: int, target: int) -> Damage:
    """Overwrite an expert, which has separate tensors, with another expert."""

    def apply(state: State, _: dict[str, Any]) -> State:
        changed = {
            name: state[name.replace(f".experts.{target}.", f".experts.{source}.")].clone()
            for name in state
            if f".experts.{target}." in name
        }
        return state | changed

    return apply


_SHAPE, _LAYERS, _ZERO = "contradict config.json", "layers are missing", "only zeros"
_ROWS: tuple[tuple[str, str, Damage, str], ...] = (
    ("first layer", "llama", lose("layers.0."), _LAYERS),
    ("last layer", "llama", lose("layers.3."), _LAYERS),
    ("two middle layers", "llama", lose("layers.1.", "layers.2."), _LAYERS),
    ("projection of the last layer", "llama", lose("layers.3.self_attn.q_proj"), "layers.3.self_attn.q_proj"),
    ("norms of the first layer", "llama", lose("layers.0.input_layernorm", "layers.0.post_att"), "2 tensors"),
    ("projection of all layers", "llama", lose("up_proj"), "4 tensors are missing"),
    ("embedding", "llama", lose("embed_tokens"), "model.embed_tokens.weight"),
    ("last norm", "llama", lose("model.norm"), "model.norm.weight"),
    ("head", "llama", lose("lm_head"), "lm_head.weight"),
    ("half of a norm", "llama", change("layers.2.input_layernorm", halve), _SHAPE),
    ("tensor-parallel shard of a projection", "llama", change("layers.1.self_attn.k_proj", halve), _SHAPE),
    ("half of the embedding", "llama", change("embed_tokens", halve), _SHAPE),
    ("transposed projection", "llama", change("layers.0.mlp.down_proj", lambda v: v.T.clone()), _SHAPE),
    ("config with fewer layers", "llama", configure(num_hidden_layers=3), "model.layers has 4 layers"),
    ("config with more layers", "llama", configure(num_hidden_layers=5), _LAYERS),
    ("config with other heads", "llama", configure(num_key_value_heads=4), _SHAPE),
    ("config with more words", "llama", configure(vocab_size=300), _SHAPE),
    ("config with another width", "llama", configure(intermediate_size=80), _SHAPE),
    (
        "half of a stack of experts",
        "qwen3_moe",
        change("layers.1.mlp.experts.gate_up", halve),
        "8 experts, but",
    ),
    ("zero experts", "qwen3_moe", change("layers.1.mlp.experts", clear(6, 7)), _ZERO),
    ("repeated expert", "qwen3_moe", change("layers.0.mlp.experts", repeat(1, 3)), "of another expert"),
    ("zero projection of one expert", "qwen3_moe", change("layers.0.mlp.experts.down_proj", clear(0)), _ZERO),
    ("half of a router", "qwen3_moe", change("layers.1.mlp.gate.weight", halve), _SHAPE),
    (
        "stack of experts",
        "qwen3_moe",
        lose("layers.0.mlp.experts.down_proj"),
        "layers.0.mlp.experts.down_proj",
    ),
    ("last expert of a layer", "mixtral", lose("layers.0.block_sparse_moe.experts.3."), "experts has 3"),
    ("expert of all layers", "mixtral", lose("experts.1."), "block_sparse_moe.experts.1"),
    ("projection of one expert", "mixtral", lose("layers.1.block_sparse_moe.experts.2.w2"), "experts.2.w2"),
    ("zero expert", "mixtral", change("layers.1.block_sparse_moe.experts.2.", lambda v: v * 0), _ZERO),
    (
        "transform of the head",
        "bert",
        lose("predictions.transform.dense"),
        "cls.predictions.transform.dense",
    ),
    (
        "position bias",
        "t5",
        lose("decoder.block.0.layer.0.SelfAttention.relative"),
        "relative_attention_bias",
    ),
    ("cross-attention", "t5", lose("decoder.block.1.layer.1.EncDecAttention.k"), "EncDecAttention.k"),
    ("layer of an unknown type", "custom", lose("layers.2."), "in the middle are missing"),
    ("projection of an unknown type", "custom", lose("layers.2.mlp.down_proj"), "layers.2.mlp.down_proj"),
    (
        "embedding of an unknown type",
        "custom",
        lose("embed_tokens"),
        "only one tensor has this number of rows",
    ),
    ("head of an unknown type", "custom", lose("lm_head"), "only one tensor has this number of rows"),
    ("half of a projection of an unknown type", "custom", change("s.1.mlp.down", halve), "a different shape"),
    (
        "projection of two layers",
        "llama",
        lose("layers.1.mlp.down_proj", "layers.2.mlp.down_proj"),
        "2 tensors are missing",
    ),
    (
        "norm of the last two layers",
        "llama",
        lose("layers.2.input_layer", "layers.3.input_layer"),
        "2 tensors",
    ),
    ("all experts of one layer", "qwen3_moe", lose("layers.1.mlp.experts."), "layers.1.mlp.experts"),
    ("router", "qwen3_moe", lose("layers.1.mlp.gate.weight"), "layers.1.mlp.gate.weight"),
    ("config with fewer experts", "qwen3_moe", configure(num_local_experts=4), "4 experts, but"),
    ("config with more experts", "qwen3_moe", configure(num_local_experts=16), "16 experts, but"),
    ("query norms of one layer", "qwen3_moe", lose("layers.0.self_attn.q_norm"), "layers.0.self_attn.q_norm"),
    ("repeated experts of a published layout", "mixtral", repeat_experts(0, 2), "of another expert"),
    ("encoder", "t5", lose("encoder."), "encoder."),
    ("all layers", "llama", lose("layers."), "all layers are missing: model.layers"),
    ("all layers of a decoder", "t5", lose("decoder.block."), "all layers are missing: decoder.block"),
    ("mixtures of all layers", "qwen3_moe", lose(".mlp."), "model.layers.1.mlp"),
    ("last layer of the decoder", "t5", lose("decoder.block.1."), _LAYERS),
    ("last layer of an encoder", "bert", lose("layer.1."), _LAYERS),
    ("flattened projection", "llama", change("layers.1.self_attn.o_proj", lambda v: v.flatten()), _SHAPE),
    ("embedding with more rows", "llama", change("embed_tokens", lengthen), _SHAPE),
    ("tensor-parallel shards of all layers", "llama", change("_proj.weight", halve), _SHAPE),
    ("transposed matrix of GPT-2", "gpt2", change("h.1.attn.c_attn.weight", lambda v: v.T.clone()), _SHAPE),
    ("bias", "gpt2", lose("h.0.mlp.c_fc.bias"), "h.0.mlp.c_fc.bias"),
    ("positions", "gpt2", lose("wpe"), "wpe.weight"),
    ("vision tower", "qwen2_vl", lose("visual."), "visual."),
    ("layer of the vision tower", "qwen2_vl", lose("visual.blocks.1."), "visual.blocks"),
    ("last layer of the vision tower", "qwen2_vl", lose("visual.blocks.31."), "vision_config.depth"),
    ("projector of the vision tower", "qwen2_vl", lose("merger"), "merger"),
    ("language model of a composite", "qwen2_vl", lose("language_model"), "language_model"),
    ("tensors without elements", "llama", change("layers.0.", empty), "without elements"),
)
DAMAGED = tuple(DamagedCheckpoint(*row, format=format) for row in _ROWS for format in FORMATS)
SAMPLED = tuple(
    case for index, case in enumerate(DAMAGED) if index % len(FORMATS) == index // len(FORMATS) % len(FORMATS)
)
"""One format for each damage, for the tests of every run."""
EMPTY = ("empty tensors", "llama", change("layers.0.", empty), "ZeRO-3 leaves such")
