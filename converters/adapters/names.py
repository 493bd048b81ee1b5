"""Parse the names that peft gives to an adapter's tensors, in a live model and in a saved file.

A live name contains the name of the adapter:
`model.layers.0.self_attn.q_proj.lora_A.default.weight`. The saved name does not, and it has the
prefix `base_model.model.`. A module in `modules_to_save` is saved under its own name.

Source: `get_peft_model_state_dict` in peft/utils/save_and_load.py, peft/tuners/lora/model.py.
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
"""Key of the base model's fingerprint in the header of a safetensors file."""
_RESIZABLE_TABLES = ("embed_tokens", "lm_head")
"""Modules that peft saves completely if the adapter targets them, because they may have been resized."""


@dataclass(frozen=True)
class AdapterTensorName:
    """Parsed name of an adapter tensor.

    Attributes:
        module: Name of the module in the live model, without peft's wrappers.
        num_wrappers: Number of peft's wrappers between the module and this tensor.
        kind: One of `TENSOR_KINDS`, such as `lora_A`. `""` for a tensor that replaces a tensor of
            the base model.
        leaf: Last component of the name, `weight` or `bias`. `""` if the tensor is a bare
            parameter, as in `embed_tokens.lora_embedding_A`. If `kind` is `""`, name of the
            replaced tensor in its module.
        saved_name: Name of the tensor in the file that peft writes.
        adapter_name: Name of the adapter. None if the parsed name does not contain it. This
            applies to all names in peft's file and, in memory, to replaced biases and resized
            embeddings of the base model.
    """

    module: str
    num_wrappers: int
    kind: str
    leaf: str
    saved_name: str
    adapter_name: str | None = None

    @property
    def replaced_name(self) -> str:
        """Name of the replaced base-model tensor, for example `lm_head.weight`.

        This is the name in the live model, that is, in memory after transformers has loaded the
        model. The value is meaningless if `kind` is not `""`, because no tensor is replaced then.
        """
        return f"{self.module}.{self.leaf}" if self.module else self.leaf


def parse_adapter_name(name: str) -> AdapterTensorName | None:
    """Parse the name of an adapter tensor, from peft's file or from a model in memory.

    An example from a file is `base_model.model.q_proj.lora_A.weight`. In memory, the same name
    also contains the name of the adapter: `base_model.model.q_proj.lora_A.default.weight`.

    Returns:
        The parsed name, or None if this is not the name of an adapter tensor. Also None for a
        tensor in peft's file that replaces a tensor of the base model, such as
        `base_model.model.lm_head.weight`, because its name does not differ from a base model's
        name. See `parse_replaced_name`.
    """
    if _ADAPTER_MARK.search(name) is None:  # fast path, because a model may have 100,000 names
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
            # peft saves the magnitude without the leaf, because it was a parameter instead of a module in
            # earlier versions.
            end = [leaf] if leaf and kind != MAGNITUDE else []
            return AdapterTensorName(
                module, wraps, kind, leaf, _to_saved_name([*path[: index + 1], *end]), adapter
            )
    return None


def _to_saved_name(path: list[str]) -> str:
    """Join name components into the tensor name that peft uses in its file.

    For example, `["lm_head", "weight"]` becomes `base_model.model.lm_head.weight`.
    """
    return PEFT_PREFIX + ".".join(path)


def _split_adapter_and_leaf(tail: list[str]) -> tuple[str | None, str]:
    """Split the end of a tensor name into the name of the adapter and the leaf.

    The leaf is the last component, `weight` or `bias`. For example, the name
    `q_proj.lora_A.default.weight` consists of the module `q_proj`, the kind of tensor `lora_A`, the
    adapter name `default`, and the leaf `weight`. Some names lack the adapter name or the leaf.

    Args:
        tail: Components after the kind, for example `["default", "weight"]`.

    Returns:
        Adapter name and leaf. The adapter name is None if the components do not contain one, and
        `""` if the components are not valid. The leaf is `""` if the components do not contain one.
    """
    if not tail:
        return None, ""
    if len(tail) == 1:
        return (None, tail[0]) if tail[0] in _LEAVES else (tail[0], "")
    return (tail[0], tail[1]) if len(tail) == 2 and tail[1] in _LEAVES else ("", "")


class _WrappedModule(NamedTuple):
    """Name of a module after peft's wrappers have been removed from the name.

    Attributes:
        module: Name of the module, without wrappers.
        num_wrappers: Number of removed `base_layer` components. Each one corresponds to a wrapper.
    """

    module: str
    num_wrappers: int


def _strip_wrappers(path: list[str]) -> _WrappedModule:
    """Remove the names of peft's wrappers from the end of a module's path.

    The names are `base_layer` and `token_adapter`. Each `base_layer` that is removed counts as one
    wrapper. For example, `q_proj.base_layer.base_layer` becomes `q_proj` with a count of 2.
    """
    wraps = 0
    while path and path[-1] in (BASE_LAYER, _TOKEN_ADAPTER):
        wraps += path[-1] == BASE_LAYER
        path = path[:-1]
    return _WrappedModule(".".join(path), wraps)


def parse_replaced_name(name: str) -> AdapterTensorName:
    """Parse the name of a tensor that replaces a tensor of the base model.

    The name is from peft's file or from a model in memory. All names are accepted, so the caller
    must make sure that the tensor replaces a tensor of the base model.
    """
    module, _, leaf = name.removeprefix(PEFT_PREFIX).rpartition(".")
    module, wraps = _strip_wrappers(module.split("."))
    return AdapterTensorName(module, wraps, "", leaf, _to_saved_name([name.removeprefix(PEFT_PREFIX)]))


class SplitNames(NamedTuple):
    """Tensor names of a checkpoint, split into adapter names and base model names.

    Attributes:
        adapter: Parsed names of the adapter's tensors, keyed by their names in the checkpoint.
            Includes the tensors that replace tensors of the base model. Other adapters are
            omitted.
        base: Names of the base model's tensors in the checkpoint. Empty for a file that peft
            wrote.
    """

    adapter: dict[str, AdapterTensorName]
    base: list[str]


def split_tensor_names(
    names: Iterable[str], *, bias: str, adapter_name: str | None, location: object
) -> SplitNames:
    """Split the tensor names of a checkpoint into names of an adapter and names of its base model.

    Args:
        names: Names in the checkpoint.
        bias: Setting `bias` of the adapter.
        adapter_name: Name of the adapter, if the checkpoint contains several. None for a file that
            peft wrote, because its tensor names do not contain the name of the adapter.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If there are several adapters and `adapter_name` is None, or if no adapter has
            this name.
    """
    names = list(names)
    parts = {name: part for name in names if (part := parse_adapter_name(name)) is not None}
    other_names = [name for name in names if name not in parts]
    adapters = sorted(
        {part.adapter_name for part in parts.values() if part.adapter_name is not None and part.kind}
    )
    if adapter_name is not None and adapter_name not in adapters:
        raise CheckpointError(
            f"{location}: contains no adapter {adapter_name!r}; specify one of {', '.join(adapters)}"
            if adapters
            else f"{location}: its tensor names contain no adapter name, so the adapter {adapter_name!r} "
            "cannot be chosen; leave out --adapter-name"
        )
    if not adapters:
        # In peft's file, every other tensor replaces a tensor of the base model. With `bias: all`, peft also
        # saves the biases of a replaced module under the names that they have in the live model.
        if all(name.startswith(PEFT_PREFIX) for name in names):
            parts = {name: part for name, part in parts.items() if part.kind}
            other_names = [name for name in names if not {_MODULES_TO_SAVE, _ORIGINAL} & set(name.split("."))]
            replaced = {name: parse_replaced_name(name) for name in other_names if name not in parts}
            return SplitNames(parts | replaced, [])
    elif adapter_name is None and len(adapters) > 1:
        raise CheckpointError(
            f"{location}: contains several adapters ({', '.join(adapters)}); choose one with --adapter-name"
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
    """Convert the name of a base model's tensor in a `PeftModel` to its name in the unwrapped model."""
    return ".".join(
        part
        for part in name.removeprefix(PEFT_PREFIX).split(".")
        if part not in (BASE_LAYER, _ORIGINAL, _TOKEN_ADAPTER)
    )
