"""Look up the tensors that a transformers model class requires, in `expected_tensors.json`.

`python -m tests.expected_tensors` generates the file. For this, it builds many variants of every
text model in transformers. The file contains only facts that hold in all variants, so it never
contradicts a valid checkpoint.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TABLE = Path(__file__).with_name("expected_tensors.json")
_LAYER = re.compile(r"(?P<stack>(?:[^.]+\.)*?[^.\d][^.]*)\.(?P<number>\d{1,6})\.(?P<rest>.+)")
_KEYS = {
    "V": ("vocab_size",),
    "E": ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim"),
    "M": ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
    "X": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"),
    "S": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "N": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_routed_experts",
        "n_experts",
    ),
    "H": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "K": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "D": ("head_dim", "d_kv", "attention_head_size"),
    "P": ("max_position_embeddings", "n_positions"),
    "Q": ("q_lora_rank",),
    "R": ("kv_lora_rank",),
    "Y": ("d_ff", "encoder_ffn_dim"),
    "Z": ("decoder_ffn_dim",),
    "L": ("num_labels",),
    "B": ("embedding_size", "word_embed_proj_dim", "vocab_size_per_layer_input"),
    "G": ("global_head_dim",),
}
SIZE_KEYS = frozenset(key for letter, keys in _KEYS.items() if letter not in "LP" for key in keys)
"""Config keys of sizes. The numbers of labels and positions are excluded, because they may be negative."""
SIZES = (
    *_KEYS,
    "HD",
    "KD",
    "HD2",
    "E2",
    "E3",
    "E4",
    "M2",
    "X2",
    "S2",
)
"""Formulas for the size of a dimension.

Each letter is a size from the config, as listed in `_KEYS`. Two letters are a product, such as `HD` for the
number of heads times the head size. A letter and a digit are a multiple, such as `E3`.
"""


def compute_formula_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Compute the values of the size formulas in `SIZES` from the settings in a config.

    For example, the formula `HD` is the number of heads times the size of a head. If the config has
    a `text_config`, only the settings in it are used. Without a setting for it, the head size is the
    hidden size divided by the number of heads, the number of key-value heads is the number of
    heads, and the number of labels is the length of `id2label`.

    Args:
        config: Content of the `config.json`.

    Returns:
        The values, keyed by formula. A formula is omitted if the config lacks a setting that it
        needs, or has two settings that contradict each other.
    """
    text = config.get("text_config")
    # Ignore the top level of a composite config, because it may have default values that do not apply to the
    # language model.
    values = text if isinstance(text, dict) and text else config
    sizes: dict[str, int] = {}
    for letter, keys in _KEYS.items():
        numbers = [values[key] for key in keys if type(values.get(key)) is int and values[key] > 0]
        if len(set(numbers)) == 1:
            sizes[letter] = numbers[0]
    heads, width = sizes.get("H"), sizes.get("E")
    no_heads = all(values.get(key) is None for key in _KEYS["D"])
    if no_heads and heads and width and width % heads == 0:
        sizes["D"] = width // heads
    if all(values.get(key) is None for key in _KEYS["K"]) and heads:
        sizes["K"] = heads
    if all(values.get(key) is None for key in _KEYS["L"]) and isinstance(values.get("id2label"), dict):
        sizes["L"] = len(values["id2label"])
    for formula in SIZES:
        if formula in _KEYS:
            continue
        factors = [int(part) if part.isdigit() else sizes.get(part) for part in formula]
        if None not in factors:
            product = 1
            for factor in factors:
                product *= factor or 0
            sizes[formula] = product
    return sizes


def collect_integer_settings(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the integer settings of a config and its text config, keyed by config key.

    If both contain a key, the value in the text config is returned.
    """
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, dict) else {})}
    return {key: value for key, value in values.items() if type(value) is int}


def may_tie_embeddings(config: Mapping[str, Any], *, default: bool) -> bool:
    """Return whether a model may share its output embeddings with its input embeddings.

    This is the case if `tie_word_embeddings` is true in the config or in its `text_config`.

    Args:
        config: Content of the `config.json`.
        default: Result if neither config contains `tie_word_embeddings`.
    """
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    values = [
        part["tie_word_embeddings"] for part in parts if isinstance(part.get("tie_word_embeddings"), bool)
    ]
    return any(values) if values else default


def replace_layer_number(name: str) -> str:
    """Replace the layer index in a tensor name with an asterisk.

    For example, `model.layers.3.mlp.up_proj.weight` becomes `model.layers.*.mlp.up_proj.weight`. The
    layer index is the first number between two dots. A name without such a number is returned
    unchanged.
    """
    match = _LAYER.fullmatch(name)
    return f"{match['stack']}.*.{match['rest']}" if match else name


def group_names_by_layer(names: Iterable[str]) -> dict[str, dict[int, dict[str, str]]]:
    """Group tensor names by layer.

    Args:
        names: Names of tensors.

    Returns:
        Full names, keyed by stack (such as `model.layers`), then by layer index, and then by the name
        within the layer. Names outside of layers are omitted.
    """
    stacks: dict[str, dict[int, dict[str, str]]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            layers = stacks.setdefault(match["stack"], {})
            layers.setdefault(int(match["number"]), {})[match["rest"]] = name
    return stacks


@dataclass(frozen=True)
class LayerStack:
    """Names of the parameters in the layers of a stack, such as `model.layers`.

    The names are relative to the layer, such as `mlp.up_proj.weight`.

    Attributes:
        depth: Name of the config key that contains the number of layers, or None if it is unknown.
        always: Names of the parameters that every layer has.
        groups: Groups of parameter names. A layer has either all parameters of a group or none of
            them.
    """

    depth: str | None
    always: frozenset[str]
    groups: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class ExpectedTensors:
    """Parameters of a model class, under the names that transformers uses in memory.

    In all names, an asterisk replaces the layer index.

    Attributes:
        required: Parameters that the class always has.
        untied: Parameters that the class has if `tie_word_embeddings` is false.
        stacks: Parameters of each stack of layers, keyed by the name of the stack, such as
            `model.layers`.
        shapes: Formula for the size of each dimension, keyed by the name of the parameter. `SIZES`
            lists the formulas. `?` means that the config does not determine the size.
        tied: Default of `tie_word_embeddings`, used if the config does not contain this key.
    """

    required: frozenset[str]
    untied: frozenset[str]
    stacks: Mapping[str, LayerStack]
    shapes: Mapping[str, tuple[str, ...]]
    tied: bool


def _load_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_TABLE.read_bytes())
    return table


@cache
def find_expected_tensors(model_type: str, architecture: str) -> ExpectedTensors | None:
    """Look up the parameters of a model class in the table that is part of this package.

    Results are cached, because each lookup of another class reads the complete table again.

    Args:
        model_type: `model_type` in the model's config.
        architecture: Name of the class, such as `LlamaForCausalLM`.

    Returns:
        The parameters, or None if the table does not contain the class.
    """
    table = _load_table()
    index = table["classes"].get(f"{model_type} {architecture}")
    if index is None:
        return None
    body, strings = table["bodies"][index], table["strings"]

    def format_names(numbers: Iterable[int]) -> frozenset[str]:
        return frozenset(strings[number] for number in numbers)

    stacks = {
        strings[int(number)]: LayerStack(
            layers["depth"], format_names(layers["always"]), tuple(map(format_names, layers["groups"]))
        )
        for number, layers in body["stacks"].items()
    }
    shapes = {strings[int(number)]: tuple(text.split(" ")) for number, text in body["shapes"].items()}
    return ExpectedTensors(
        format_names(body["required"]), format_names(body["untied"]), stacks, shapes, body["tied"]
    )
