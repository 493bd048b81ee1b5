"""Utilities for the parameters and buffers of a model.

They allocate or replace tensors, list embeddings and checkpointed tensors, find the names of tied
parameters, and match parameter names against patterns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import nn

from portable.converters.similar_names import find_similar_names
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from transformers import PreTrainedModel


def materialize_model(
    model: nn.Module, device: torch.device, *, storage_device: torch.device | None = None
) -> None:
    """Allocate a model's parameters without initializing them, and move its buffers to ``device``.

    Tied weights stay tied.

    Args:
        model: Model whose parameters are on the meta device.
        device: Device on which the model computes.
        storage_device: Device on which to allocate the parameters. None for ``device``. An engine
            with offloading sets another device, because it copies parameters to ``device`` only
            when they are used.
    """

    def allocate_parameter(_: str, meta: nn.Parameter) -> nn.Parameter:
        parameter_device = storage_device or device
        return nn.Parameter(torch.empty_like(meta, device=parameter_device), requires_grad=meta.requires_grad)

    replace_tensors(model, allocate_parameter, lambda _, buffer: buffer.to(device))


def replace_tensors(
    model: nn.Module,
    replace_parameter: Callable[[str, nn.Parameter], nn.Parameter],
    replace_buffer: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the parameters and buffers of a model. Tied weights stay tied.

    A buffer that several modules share is replaced separately in each module.

    Args:
        model: The model. Modified in place.
        replace_parameter: Function that receives a parameter's name and the parameter, and returns
            its replacement. For tied parameters, it is called only once, with the first of their
            names.
        replace_buffer: Function that receives a buffer's name and the buffer, and returns its
            replacement.
    """
    replacements: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        dotted = f"{prefix}." if prefix else ""
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in replacements:
                replacements[id(old)] = replace_parameter(dotted + name, old)
            setattr(module, name, replacements[id(old)])
        for name, value in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, replace_buffer(dotted + name, value))


def replace_by_fake_tensors(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace all parameters and buffers by fake tensors. Must be called in a fake tensor mode.

    Args:
        model: The model, on the meta device. Modified in place.
        dtype: Dtype of the new floating-point parameters. None to keep the dtypes of the old ones.
    """

    def make_parameter(_: str, meta: nn.Parameter) -> nn.Parameter:
        kind = dtype if dtype is not None and meta.is_floating_point() else meta.dtype
        return nn.Parameter(torch.empty(meta.shape, dtype=kind), requires_grad=meta.requires_grad)

    replace_tensors(model, make_parameter, lambda _, buffer: torch.empty(buffer.shape, dtype=buffer.dtype))


def list_embedding_weights(model: nn.Module) -> list[nn.Parameter]:
    """List the weights of all ``nn.Embedding`` modules.

    The list includes the weight of the output head if that weight is tied to the token embedding.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return [parameter for table in tables for parameter in table.parameters(recurse=False)]


def get_token_embedding(model: PreTrainedModel) -> nn.Parameter | None:
    """Return the token embedding, float ``[vocabulary, hidden]``, or None if the model has none."""
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        return None
    return table if isinstance(table, nn.Parameter) else None


def map_tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each parameter to its other names.

    Only tied parameters have other names. For all other parameters, the list is empty.
    """
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {first: others for first, *others in names.values()}


def get_state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model, keyed by name.

    Unlike ``state_dict``, the result contains a tied parameter only once, under its first name.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
    return tensors


def has_peft_adapter(model: nn.Module) -> bool:
    """Return whether ``model`` has a peft adapter. If it has one, its base weights are frozen."""
    return hasattr(model, "peft_config")


def get_checkpointed_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a run stores in its checkpoints, keyed by name.

    With an adapter, these are only the trained parameters. Otherwise, they are all parameters and
    persistent buffers.
    """
    tensors = get_state_tensors(model)
    return {n: t for n, t in tensors.items() if t.requires_grad} if has_peft_adapter(model) else tensors


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """Compile the regular expression of a setting.

    Args:
        key: Name of the setting, used in the error message.
        pattern: The regular expression.

    Raises:
        UserError: If ``pattern`` is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"{key}: {pattern!r} is not a valid regular expression ({error}); correct the pattern"
        ) from error


def match_parameters(key: str, pattern: str, aliases_by_name: Mapping[str, Sequence[str]]) -> set[str]:
    """Find the parameters whose names match the pattern of a setting.

    Args:
        key: Name of the setting, used in error messages.
        pattern: Regular expression that may match anywhere in a name.
        aliases_by_name: All names of each parameter, keyed by the first of these names. Only tied
            parameters have more than one name.

    Returns:
        First name of each parameter that has a matching name.

    Raises:
        UserError: If ``pattern`` is not a regular expression or matches no parameter.
    """
    expression = compile_pattern(key, pattern)
    matches = {
        first for first, every in aliases_by_name.items() if any(expression.search(name) for name in every)
    }
    if not matches:
        raise UserError(
            f"{key}: {pattern!r} matches no parameter{_suggest_parameter_names(pattern, aliases_by_name)}"
        )
    return matches


def _suggest_parameter_names(pattern: str, names: Collection[str]) -> str:
    """Build the end of the error message for a pattern that matches no parameter.

    Args:
        pattern: The regular expression.
        names: Names of the model's parameters, at least one.

    Returns:
        Text such as ``; did you mean q_proj or k_proj?``. It suggests the components of parameter
        names that are most similar to the words of the pattern. If no component is similar, the
        text contains one parameter name as an example.
    """
    words = dict.fromkeys(word for name in names for word in name.split(".") if not word.isdigit())
    pattern_words = re.findall(r"\w*[a-z]\w*", pattern, re.IGNORECASE)
    similar_words = [
        similar_words
        for word in pattern_words
        for similar_words in find_similar_names(word, words, max_results=2)
        if similar_words != word
    ]
    if similar_words:
        return f"; did you mean {' or '.join(dict.fromkeys(similar_words))}?"
    similar_names = [name for name in names if set(pattern_words) & set(name.split("."))]
    return f"; use a pattern that matches a parameter, such as {(similar_names or list(names))[-1]}"
