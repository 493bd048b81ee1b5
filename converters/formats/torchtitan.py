"""Convert the tensor names of torchtitan and Meta to published names.

torchtitan names its parameters as Meta's Llama does. For Llama and Mistral, the row order also
differs: the rotary embedding of torchtitan and Meta pairs adjacent rows of a head, and
transformers' rotary embedding pairs the first half of a head with the second half. Therefore, the
rows of the query and key projections, and of their optimizer state, are permuted. torchtitan stacks
the corresponding weights of all experts of a layer in one tensor. Such a stack is split into one
tensor per expert. The stacks of gpt-oss are kept, but the last two dimensions of their weights are
swapped.

Source: `state_dict_adapter.py` in torchtitan/models/llama3, qwen3, deepseek_v3 and gpt_oss;
"RoFormer", arXiv:2104.09864, section 3.4.2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import Checkpoint, OptimizerState
from portable.converters.errors import (
    CheckpointError,
    OptimizerStateError,
    UnsupportedCheckpointError,
    to_printable,
)
from portable.converters.limits import MAX_COUNT, MAX_EXPERTS
from portable.converters.tensors.tensor import Tensor
from portable.converters.tensors.tensor_ops import permute_dims, permute_split_dims, select_index

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.checkpoint import Aliases, ParamGroups, Scalar
    from portable.converters.tensors.tensor import Shape

_LAYER = re.compile(r"(mtp_)?layers\.(\d{1,6})\.(.+)")
_OUTSIDE_LAYERS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
_EMBEDDING = "tok_embeddings.weight"
# Frequencies of the rotary embedding. They are not converted, because transformers computes them.
_FREQUENCIES = re.compile(r"freqs_cis|rope\.(freqs|cache)")

_ATTENTION = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
}
_FEED_FORWARD = {
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LLAMA = {**_ATTENTION, **_FEED_FORWARD, **_NORMS}
_QWEN3 = {
    **_LLAMA,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "moe.router.gate": "mlp.gate",
}
_DEEPSEEK = {
    **_FEED_FORWARD,
    **_NORMS,
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "moe.router.gate": "mlp.gate",
    **{f"moe.shared_experts.{name}": f"mlp.shared_experts.{value}" for name, value in _EXPERTS.items()},
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "mtp_norm": "shared_head.norm",
}
_GPT_OSS = {**_ATTENTION, **_NORMS, "moe.router.gate": "mlp.router"}
_NAMES_BY_MODEL_TYPE = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": _GPT_OSS,
}
"""For each model type, the published names of the modules in a layer, keyed by their torchtitan names."""
# Model types for which query and key rows are permuted, because transformers pairs the rows of a head
# differently.
_PERMUTED = ("llama", "mistral")
# Names in older versions of torchtitan have fewer levels, and no letters for the dimensions.
_EXPERT = re.compile(r"moe\.(?:routed_experts\.)?(?:inner_)?experts\.(w[123])(?:_[A-Z]{3})?")
_SINGLE_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+\.weight")
_GPT_OSS_EXPERT = re.compile(
    r"moe\.(?:routed_experts\.)?(?:inner_)?experts\.mlp([12])_(weight|bias)(?:_[A-Z]+)?"
)
_WHOLE_NAMES = {
    "moe.expert_bias": "mlp.gate.e_score_correction_bias",
    "moe.expert_bias_E": "mlp.gate.e_score_correction_bias",
    "attention.sinks": "self_attn.sinks",
}


def rename_from_torchtitan(checkpoint: Checkpoint, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Rename tensors from the names of torchtitan or Meta to the names of the published model.

    The published names are the names in the model's checkpoint on the Hugging Face Hub. For
    example, `tok_embeddings.weight` becomes `model.embed_tokens.weight`. Some tensors also change
    their layout. For example, a stack of experts is split into one tensor per expert.

    Args:
        checkpoint: Checkpoint of any format.
        config: The model's `config.json`. If None, the `config.json` of the checkpoint is read.

    Returns:
        A new `Checkpoint`, whose tensors are read lazily. If the tensors have other names, or if
        the model type is not supported, `checkpoint` is returned unchanged.

    Raises:
        CheckpointError: If the config lacks a needed number, such as the number of heads, or if this
            number does not fit the tensors. Also raised if two tensors would get the same name, or if a
            stack contains too many experts.
    """
    if _EMBEDDING not in checkpoint.tensors:
        return checkpoint
    conversion = _TorchtitanConversion(checkpoint, checkpoint.read_config() if config is None else config)
    if conversion.module_names is None:
        return checkpoint
    tensors: dict[str, Tensor] = {}
    sources: dict[str, str] = {}

    def check_new_name(new_name: str, name: str) -> None:
        if (other := sources.setdefault(new_name, name)) != name:
            raise CheckpointError(
                f"{checkpoint.root}: {to_printable(other)} and {to_printable(name)} would both get the "
                f"name {to_printable(new_name)}; remove one of the two tensors from the checkpoint"
            )

    for name, tensor in checkpoint.tensors.items():
        for new_name, converted in conversion.convert_tensor(name, tensor).items():
            check_new_name(new_name, name)
            tensors[new_name] = converted
    aliases: dict[str, str] = {}
    for alias, owner in checkpoint.aliases.items():
        new_alias, new_owner = (conversion.to_published_name(name) for name in (alias, owner))
        # Two names of a tied tensor may get the same new name, such as output.weight and lm_head.weight.
        if new_alias != new_owner and aliases.get(new_alias) != new_owner:
            check_new_name(new_alias, alias)
            aliases[new_alias] = new_owner
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}

    def load_optimizer(_: Aliases) -> OptimizerState | None:
        state = checkpoint.optimizer
        return None if state is None else _convert_optimizer(state, conversion, shapes)

    return checkpoint.with_names("stored", tensors, aliases, load_optimizer)


class _TorchtitanConversion:
    """Conversion of a checkpoint's tensors to the names and layout that published models use.

    Args:
        checkpoint: Checkpoint with the names of torchtitan or Meta.
        config: The model's `config.json`.

    Attributes:
        module_names: Published names of the modules in a layer, keyed by their names in torchtitan.
            None if the model type is unknown.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        self._root = checkpoint.root
        self._config = config
        self._model_type = config.get("model_type")
        self.module_names = (
            _NAMES_BY_MODEL_TYPE.get(self._model_type) if isinstance(self._model_type, str) else None
        )

    def _get_config_count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer from `config.json`.

        Raises:
            CheckpointError: If the key is missing and there is no default, or if the value is not a
                positive integer.
        """
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= MAX_COUNT:
            raise CheckpointError(
                f"{self._root}: config.json has no valid {key}, which is needed to convert the tensor names "
                "of torchtitan or Meta; specify the config.json of this model with --config-from"
            )
        return value

    def to_published_name(self, name: str) -> str:
        """Return the published name of a tensor.

        Unknown tensors keep their names, and so do stacks of experts, except in gpt-oss.

        Raises:
            CheckpointError: If the tensor belongs to a layer for multi-token prediction, and the config
                has no valid `num_hidden_layers`.
        """
        match = _LAYER.fullmatch(name)
        if match is None:
            return _OUTSIDE_LAYERS.get(name, name)
        rest = match[3].replace("qkv_linear.", "")
        module, _, kind = rest.rpartition(".")
        new_name = _WHOLE_NAMES.get(rest)
        if new_name is None and self.module_names is not None and module in self.module_names:
            new_name = f"{self.module_names[module]}.{kind}"
        if new_name is None and (expert := _GPT_OSS_EXPERT.fullmatch(rest)) is not None:
            parameter = "gate_up_proj" if expert[1] == "1" else "down_proj"
            new_name = f"mlp.experts.{parameter}{'_bias' if expert[2] == 'bias' else ''}"
        return name if new_name is None else f"model.layers.{self._get_layer_index(match)}.{new_name}"

    def _get_layer_index(self, match: re.Match[str]) -> int:
        """Return the index of a layer. The layers for multi-token prediction come last."""
        return int(match[2]) + (self._get_config_count("num_hidden_layers") if match[1] else 0)

    def list_published_names(self, name: str, shape: Shape) -> list[str]:
        """List the published names of a tensor.

        Args:
            name: Name of the tensor in torchtitan.
            shape: Shape of the tensor.

        Returns:
            One name for most tensors. One name per expert for stacked experts, and an empty list
            for rotary frequencies.

        Raises:
            CheckpointError: If the stack contains more than `MAX_EXPERTS` experts, or if the name cannot
                be converted (`to_published_name`).
        """
        if _FREQUENCIES.fullmatch(name):
            return []
        match = _LAYER.fullmatch(name)
        expert = None if match is None else _EXPERT.fullmatch(match[3])
        if match is None or expert is None or len(shape) != 3:
            return [self.to_published_name(name)]
        if shape[0] > MAX_EXPERTS:
            raise UnsupportedCheckpointError(
                f"{to_printable(name)}: has {shape[0]} experts, but at most {MAX_EXPERTS} are supported"
            )
        prefix = f"model.layers.{self._get_layer_index(match)}.mlp.experts"
        return [f"{prefix}.{i}.{_EXPERTS[expert[1]]}.weight" for i in range(shape[0])]

    def convert_tensor(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Convert a torchtitan tensor to the names and the layout of the published model.

        A stack of experts is split into one tensor per expert. The stacks of gpt-oss are instead kept,
        and the last two dimensions of their weights are swapped. The rows of the query and key weights and
        biases are reordered for Llama and Mistral. Other tensors are only renamed.

        Args:
            name: Name of the tensor in torchtitan.
            tensor: Tensor to convert. It can also be an optimizer state that has the shape of the
                named tensor.

        Returns:
            The tensors, keyed by published name. If only the name changes, the value is `tensor`
            itself. Other results are lazy. Empty for rotary frequencies, which are not published.

        Raises:
            CheckpointError: If the name cannot be converted, or if the number of heads in the config is
                missing or does not fit the rows.
        """
        new_names = self.list_published_names(name, tensor.shape)
        if not self.is_rearranged(name, tensor.shape):
            return dict.fromkeys(new_names, tensor)
        (new_name, *others) = new_names
        if others or _SINGLE_EXPERT.fullmatch(new_name):
            return {new_name: select_index(tensor, 0, i) for i, new_name in enumerate(new_names)}
        if len(tensor.shape) == 3:
            return {new_name: permute_dims(tensor, (0, 2, 1))}
        heads = self._get_config_count("num_attention_heads")
        if ".k_proj." in new_name:
            heads = self._get_config_count("num_key_value_heads", heads)
        return {new_name: _permute_rotary_rows(tensor, heads)}

    def is_rearranged(self, name: str, shape: Shape) -> bool:
        """Return whether a tensor is split or its values are reordered, rather than only renamed."""
        new_names = self.list_published_names(name, shape)
        if len(new_names) != 1 or new_names == [name]:
            return len(new_names) > 1
        (new_name,) = new_names
        if new_name.endswith((".experts.gate_up_proj", ".experts.down_proj")) and len(shape) == 3:
            return True
        module, _, kind = new_name.rpartition(".")
        is_permuted = (
            self._model_type in _PERMUTED
            and module.endswith((".q_proj", ".k_proj"))
            and (kind, len(shape)) in (("weight", 2), ("bias", 1))
        )
        return _SINGLE_EXPERT.fullmatch(new_name) is not None or is_permuted


def _convert_optimizer(
    optimizer: OptimizerState, conversion: _TorchtitanConversion, shapes: Mapping[str, Shape]
) -> OptimizerState:
    """Convert the optimizer state in the same way as the parameters.

    Args:
        optimizer: Optimizer state with torchtitan's parameter names.
        conversion: Conversion that was applied to the parameters.
        shapes: Shapes of the parameters, keyed by torchtitan's name. A state that has the shape of
            its parameter is converted like the parameter. Other states, such as `step`, are copied to
            each new name.

    Raises:
        OptimizerStateError: If the conversion rearranges a parameter, and a state tensor of the
            parameter has several elements, but not the parameter's shape.
    """
    new_names = {name: conversion.list_published_names(name, shape) for name, shape in shapes.items()}
    state: dict[str, dict[str, Tensor | Scalar]] = {}
    for name, values in optimizer.state.items():
        for key, value in values.items():
            converted: Mapping[str, Tensor | Scalar]
            if isinstance(value, Tensor) and value.shape and value.shape == shapes.get(name):
                converted = conversion.convert_tensor(name, value)
            elif (
                isinstance(value, Tensor)
                and value.numel > 1
                and conversion.is_rearranged(name, shapes.get(name, ()))
            ):
                raise OptimizerStateError(
                    f"{to_printable(name)}: the optimizer state {to_printable(key)} does not have the shape "
                    "of the parameter"
                )
            else:
                converted = dict.fromkeys(new_names.get(name, [conversion.to_published_name(name)]), value)
            for new_name, new_value in converted.items():
                state.setdefault(new_name, {})[key] = new_value

    def load_param_groups() -> ParamGroups:
        return [
            {
                **group,
                "params": [
                    new_name
                    for name in group.get("params", ())
                    for new_name in new_names.get(name, [conversion.to_published_name(name)])
                ],
            }
            for group in optimizer.param_groups
        ]

    return OptimizerState(state, load_param_groups)


def _permute_rotary_rows(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from adjacent pairs to two halves.

    The first half contains the first row of each pair, and the second half contains the second row of
    each pair.

    Args:
        tensor: Query or key projection, or an optimizer state of its shape.
        heads: Number of heads.

    Raises:
        CheckpointError: If the rows cannot be divided into heads with an even number of rows.
    """
    rows, *rest = tensor.shape
    if rows % (2 * heads):
        raise CheckpointError(
            f"{to_printable(tensor.name)}: {rows} rows cannot be divided into {heads} heads with an even "
            "number of rows each; specify the config.json of this model with --config-from"
        )
    return permute_split_dims(
        tensor, (heads, rows // heads // 2, 2, *rest), (0, 2, 1, *range(3, 3 + len(rest)))
    )
