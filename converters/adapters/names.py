"""peft's names of an adapter's tensors: in a live model, and in the file that peft saves.

A live parameter holds the adapter's name, `model.layers.0.self_attn.q_proj.lora_A.default.weight`; the saved
one does not, and begins with `base_model.model.`. A module in `modules_to_save` is saved under its own name.

Source: peft/utils/save_and_load.py (`get_peft_model_state_dict`), peft/tuners/lora/model.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

PEFT_PREFIX = "base_model.model."
BASE_LAYER = "base_layer"
MAGNITUDE, TOKENS = "lora_magnitude_vector", "trainable_tokens_delta"
TENSOR_KINDS = frozenset(
    {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", MAGNITUDE, "ia3_l", TOKENS}
)
_MODULES_TO_SAVE, _ORIGINAL, _TOKEN_ADAPTER = "modules_to_save", "original_module", "token_adapter"
_LEAVES = ("weight", "bias")
_ADAPTER_MARK = re.compile("|".join([*sorted(TENSOR_KINDS), _MODULES_TO_SAVE]))
FINGERPRINT_KEY = "base_fingerprint"
"""The key in the header of a safetensors file."""
# What peft saves whole where the adapter targets it, since its rows may have been resized.
_RESIZABLE_TABLES = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class AdapterTensorName:
    """One tensor of an adapter.

    Attributes:
        module: the module in the live model, without what peft wraps around it.
        num_wrappers: how many wrappers of peft lie between the module and this tensor.
        kind: one of `TENSOR_KINDS`; or `""` for a tensor that replaces one of the base, called `leaf`.
        leaf: `weight`, `bias`, or for a replaced tensor its name in the module; `""` for a bare parameter.
        saved_name: its name in peft's file.
        adapter_name: the adapter's name; None in a saved file.
    """

    module: str
    num_wrappers: int
    kind: str
    leaf: str
    saved_name: str
    adapter_name: str | None = None

    @property
    def replaced_name(self) -> str:
        """The name in the live model of the tensor that this one replaces."""
        return f"{self.module}.{self.leaf}" if self.module else self.leaf


def parse_adapter_name(name: str) -> AdapterTensorName | None:
    """The adapter's tensor that a live or saved name means; None for a name that only a model has."""
    if _ADAPTER_MARK.search(name) is None:  # most names of a model: it may have 100,000
        return None
    path = name.removeprefix(PEFT_PREFIX).split(".")
    for index, kind in enumerate(path):
        if kind == _ORIGINAL:
            return None
        if kind == _MODULES_TO_SAVE and len(path) > index + 2:
            plain = [*path[:index], *path[index + 2 :]]
            return AdapterTensorName(
                ".".join(plain[:-1]), 0, "", plain[-1], _to_saved_name(plain), path[index + 1]
            )
        if kind in TENSOR_KINDS:
            adapter, leaf = _split_adapter_and_leaf(path[index + 1 :])
            if adapter == "":
                return None
            module, wraps = _strip_wrappers(path[:index])
            # Saved as it was when the magnitude was a parameter and not a module.
            end = [leaf] if leaf and kind != MAGNITUDE else []
            return AdapterTensorName(
                module, wraps, kind, leaf, _to_saved_name([*path[: index + 1], *end]), adapter
            )
    return None


def _to_saved_name(path: list[str]) -> str:
    return PEFT_PREFIX + ".".join(path)


def _split_adapter_and_leaf(tail: list[str]) -> tuple[str | None, str]:
    """(adapter's name or None, leaf) of what follows a kind; `""` as the name where it is neither."""
    if not tail:
        return None, ""
    if len(tail) == 1:
        return (None, tail[0]) if tail[0] in _LEAVES else (tail[0], "")
    return (tail[0], tail[1]) if len(tail) == 2 and tail[1] in _LEAVES else ("", "")


class _WrappedModule(NamedTuple):
    module: str
    num_wrappers: int


def _strip_wrappers(path: list[str]) -> _WrappedModule:
    """Remove the wrappers at the end of a module's path, and count those that change a weight."""
    wraps = 0
    while path and path[-1] in (BASE_LAYER, _TOKEN_ADAPTER):
        wraps += path[-1] == BASE_LAYER
        path = path[:-1]
    return _WrappedModule(".".join(path), wraps)


def parse_replaced_name(name: str) -> AdapterTensorName:
    """The tensor of the base that a name in peft's file replaces."""
    module, _, leaf = name.removeprefix(PEFT_PREFIX).rpartition(".")
    module, wraps = _strip_wrappers(module.split("."))
    return AdapterTensorName(module, wraps, "", leaf, _to_saved_name([name.removeprefix(PEFT_PREFIX)]))


class SplitNames(NamedTuple):
    """The tensor names of a checkpoint.

    Attributes:
        adapter: Names of the adapter's tensors, with their meaning.
        base: Names of the base model's tensors.
    """

    adapter: dict[str, AdapterTensorName]
    base: list[str]


def split_tensor_names(
    names: Iterable[str], *, bias: str, adapter_name: str | None, location: object
) -> SplitNames:
    """Sort the tensors of a checkpoint into those of an adapter, and those of its base.

    Args:
        bias: the setting `bias` of the adapter.
        adapter_name: the adapter's name where the checkpoint holds several.

    Raises:
        CheckpointError: several adapters, and none was named; or none of that name.
    """
    names = list(names)
    parts = {name: part for name in names if (part := parse_adapter_name(name)) is not None}
    other_names = [name for name in names if name not in parts]
    adapters = sorted(
        {part.adapter_name for part in parts.values() if part.adapter_name is not None and part.kind}
    )
    if not adapters:
        # peft's own file: what is no part of the adapter replaces a tensor of the base. With `bias: all`,
        # peft also saves the biases of a replaced module under the names that it has in the live model.
        if all(name.startswith(PEFT_PREFIX) for name in names):
            parts = {name: part for name, part in parts.items() if part.kind}
            other_names = [name for name in names if not {_MODULES_TO_SAVE, _ORIGINAL} & set(name.split("."))]
            replaced = {name: parse_replaced_name(name) for name in other_names if name not in parts}
            return SplitNames(parts | replaced, [])
    elif adapter_name is None and len(adapters) > 1:
        raise CheckpointError(
            f"{location}: holds several adapters ({', '.join(adapters)}); choose one with --adapter-name"
        )
    if adapter_name is not None and adapter_name not in adapters:
        raise CheckpointError(
            f"{location}: holds no adapter {adapter_name!r}; it holds {', '.join(adapters) or 'one'}"
        )
    chosen = adapter_name if adapter_name is not None else next(iter(adapters), None)
    parts = {name: part for name, part in parts.items() if part.adapter_name in (None, chosen)}
    modules = {part.module for part in parts.values() if part.kind}
    tokens = any(part.kind == TOKENS for part in parts.values())
    base: list[str] = []
    for name in other_names:
        part = parse_replaced_name(name)
        is_original = _ORIGINAL in name.split(".")
        is_trained_bias = part.leaf == "bias" and (
            bias == "all" or (bias != "none" and part.num_wrappers > 0 and part.module in modules)
        )
        is_saved_table = (
            part.num_wrappers > 0
            and not tokens
            and part.module in modules
            and part.module.rpartition(".")[2] in _RESIZABLE_TABLES
        )
        if not is_original and (is_trained_bias or is_saved_table):
            parts[name] = part
        else:
            base.append(name)
    return SplitNames(parts, base)


def strip_adapter_wrappers(name: str) -> str:
    """The name in the plain model of a tensor of the base in a live adapter model."""
    return ".".join(
        part
        for part in name.removeprefix(PEFT_PREFIX).split(".")
        if part not in (BASE_LAYER, _ORIGINAL, _TOKEN_ADAPTER)
    )
