"""Read and change settings in a `config.json`, and compare its sizes with the tensors.

The compared sizes are the vocabulary size, the hidden size, and the number of layers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError
from portable.converters.limits import MAX_COUNT
from portable.converters.names.tied_weights import EMBEDDING_NAMES, HEAD_NAMES, ends_with_name
from portable.converters.tensors.dtypes import QUANTIZED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.tensors.tensor import Tensor

_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?(?:layers|layer|h|blocks|block))\.(?P<number>\d{1,6})\..+")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def override_config_settings(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Override model settings in place, including settings in nested configs.

    A setting is changed in each part of the config that contains the setting. The parts are the top
    level and the objects directly below it. If no part contains the setting, it is added to the top
    level.

    Args:
        config: Content of a `config.json`.
        overrides: New values. None removes a setting.
    """
    for key, value in overrides.items():
        parts = [part for part in config.values() if isinstance(part, dict) and key in part]
        for part in [part for part in (config, *parts) if key in part] or [config]:
            part[key] = value
            if value is None:
                del part[key]


def parse_llama_sizes(config: Mapping[str, Any], location: str) -> dict[str, int]:
    """Parse the sizes of a model with the architecture of Llama.

    Args:
        config: Content of a `config.json`.
        location: Path of the checkpoint, used in error messages.

    Returns:
        The sizes, keyed by letter: number of layers (`L`), hidden size (`E`), number of attention
        heads (`H`), number of key-value heads (`K`), size of a head (`D`), size of the MLP (`M`),
        and size of the vocabulary (`V`). If the config does not contain them, `K` is `H` and `D` is
        `E // H`.

    Raises:
        CheckpointError: If another size is missing, or if a size is not an integer from 1 to
            `MAX_COUNT`.
    """

    def read_size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= MAX_COUNT:
            raise CheckpointError(
                f"{location}: config.json has no valid {name}; set {name} in config.json to a positive "
                "integer"
            )
        return value

    layers, heads, hidden = map(read_size, ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    return {
        "L": layers,
        "E": hidden,
        "H": heads,
        "K": read_size("num_key_value_heads", heads),
        "D": read_size("head_dim", hidden // heads),
        "M": read_size("intermediate_size"),
        "V": read_size("vocab_size"),
    }


def check_config_fits_tensors(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], config_path: str
) -> None:
    """Check that the sizes in a config match the shapes of the tensors.

    Only compares sizes that can be inferred unambiguously from the tensors. The vocabulary size and
    the hidden size are compared if there is exactly one input embedding that is not quantized. The
    vocabulary size may also be the number of rows of an output head. The number of layers is
    compared if there is exactly one stack. It may include the layers for multi-token prediction.

    Args:
        tensors: Tensors of the checkpoint, keyed by name.
        config: Content of the `config.json`. The settings in its `text_config` take precedence.
        config_path: Path of the config, used in error messages.

    Raises:
        CheckpointError: If the vocabulary size, the hidden size, or the number of layers differs.
    """
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, dict) else {})}
    sizes = {key: value for key, value in values.items() if type(value) is int}
    embeddings = [
        (name, tensor.shape)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2
        and ends_with_name(name, EMBEDDING_NAMES)
        and tensor.dtype not in QUANTIZED_DTYPES  # packed values have fewer columns
    ]
    heads = [
        shape[0]
        for name, tensor in tensors.items()
        if ends_with_name(name, HEAD_NAMES) and (shape := tensor.shape)
    ]
    mismatches: list[tuple[str, set[int], set[int], str]] = []
    if len(embeddings) == 1:
        name, (rows, columns) = embeddings[0]
        width = next((key for key in _WIDTHS if key in sizes), "")
        # Embeddings may have a size that differs from the hidden size, and more rows than the output head.
        widths = {sizes[key] for key in sizes if key == width or "emb" in key}
        mismatches = [
            ("vocab_size", {sizes.get("vocab_size", rows)}, {rows, *heads}, f"{name!r} has {rows:,} rows"),
            (width, widths if width else {columns}, {columns}, f"{name!r} has {columns:,} columns"),
        ]
    stacks: dict[str, int] = {}
    for name in tensors:
        if match := _LAYER.fullmatch(name):
            stacks[match["stack"]] = max(stacks.get(match["stack"], 0), int(match["number"]) + 1)
    depths = {key: sizes[key] for key in _DEPTHS if key in sizes}
    runs_layers_repeatedly = any("recurren" in key for key in values)  # Some models run layers several times.
    if len(stacks) == 1 and depths and not runs_layers_repeatedly:
        (count,) = stacks.values()
        extra = sizes.get("num_nextn_predict_layers", 0)  # These layers are stored after the other layers.
        allowed = {*depths.values(), *(depth + extra for depth in depths.values())}
        mismatches.append(
            (next(iter(depths)), allowed, {count}, f"the number of layers in the checkpoint is {count:,}")
        )
    for key, allowed, actual, description in mismatches:
        if not allowed & actual:
            raise CheckpointError(
                f"{config_path}: {key} is {sizes[key]:,}, but {description}; specify the model's own "
                "config.json"
            )
