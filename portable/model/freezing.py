"""Frozen parameters: which of a model's parameters are trained, and the dtype of those that are not.

A frozen parameter has no gradient and no optimizer state. Its dtype on the meta device is the dtype in which
an engine stores it; a trained parameter is fp32.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError
from portable.model.parameters import tied_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn

    from portable.config import TrainConfig

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The compute type by ``precision``; fp32 where it is not listed."""
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16}


def freeze(model: nn.Module, names: Collection[str], dtype: torch.dtype | Mapping[str, torch.dtype]) -> None:
    """Freeze the parameters ``names`` of ``model``, on the meta device. Tied parameters stay tied.

    Args:
        model: on the meta device; its other parameters stay as they are.
        names: any name of a tied parameter stands for all of them.
        dtype: in which engines store the parameters; one for all, or by name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameter = parameters[name]
        parameter.requires_grad_(False)
        parameter.grad = None
        # In place: the parameter remains the same object, so ties and attributes remain.
        parameter.data = parameter.data.to(dtype if isinstance(dtype, torch.dtype) else dtype[name])


def frozen_names(model: nn.Module) -> list[str]:
    """The frozen parameters, tied ones by their first name."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_by_pattern(model: nn.Module, settings: TrainConfig, dtype: torch.dtype) -> None:
    """Freeze what ``train.trainable`` and ``train.frozen`` leave out of training.

    Args:
        model: on the meta device.
        settings: the section ``train``.
        dtype: in which engines store the frozen parameters.

    Raises:
        UserError: if a pattern is not a regular expression or matches no parameter, or nothing is trained.
    """
    if not settings.freezes:
        return
    names = {first: [first, *others] for first, others in tied_names(model).items()}
    chosen = set(names)
    if settings.trainable is not None:
        chosen = matching("train.trainable", settings.trainable, names)
    chosen -= matching("train.frozen", settings.frozen, names)
    if not chosen:
        key = "train.frozen" if settings.frozen else "train.trainable"
        raise UserError(f"{key}: nothing is left to train; let at least one parameter be trained")
    freeze(model, [name for name in names if name not in chosen], dtype)


def tie_notes(model: nn.Module, settings: TrainConfig) -> list[str]:
    """Notes for the user on tied parameters of which the patterns name only one."""

    def named(one: str) -> tuple[bool, ...]:
        both = (settings.trainable or (), settings.frozen)
        return tuple(any(re.search(pattern, one) for pattern in patterns) for patterns in both)

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        f"{' and '.join([name, *others])} are tied, so both are {'trained' if name in trained else 'frozen'}"
        for name, others in tied_names(model).items()
        if len({named(one) for one in (name, *others)}) > 1
    ]


def matching(key: str, patterns: Sequence[str], names: Mapping[str, Sequence[str]]) -> set[str]:
    """The parameters that one of ``patterns`` matches.

    Args:
        key: of the setting, for messages.
        patterns: regular expressions, searched in names.
        names: all names of each parameter, by its first one.

    Raises:
        UserError: for a pattern that is not a regular expression or matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        expression = compiled(key, pattern)
        hits = {first for first, every in names.items() if any(expression.search(one) for one in every)}
        if not hits:
            raise UserError(f"{key}: {pattern!r} matches no parameter{nearest(pattern, names)}")
        found |= hits
    return found


def compiled(key: str, pattern: str) -> re.Pattern[str]:
    """Compile ``pattern``; raise UserError if it is not a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{key}: {pattern!r} is not a regular expression ({error})") from error


def nearest(pattern: str, names: Collection[str]) -> str:
    """The end of a message: the parts of ``names`` that are most like ``pattern``."""
    words = dict.fromkeys(word for name in names for word in name.split(".") if not word.isdigit())
    wanted = re.findall(r"\w*[a-z]\w*", pattern, re.IGNORECASE)
    near = [near for word in wanted for near in difflib.get_close_matches(word, words, n=2) if near != word]
    if near:
        return f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    return f"; parameters are named like {list(names)[-1]}"


def keep_as_stored(model: nn.Module, tensors: Mapping[str, Any], precision: str) -> None:
    """Give each frozen parameter the dtype in which an engine keeps its values exactly.

    It is the compute type if ``tensors`` have it, otherwise fp32.

    Args:
        model: on the meta device.
        tensors: the values to come, by name; whatever has no ``dtype`` counts as fp32.
        precision: of the run.
    """
    compute = COMPUTE.get(precision, torch.float32)
    tied = tied_names(model)
    dtypes = {}
    for name in frozen_names(model):
        source = next((tensors[one] for one in (name, *tied[name]) if one in tensors), None)
        same = _STORED.get(getattr(source, "dtype", "")) == compute
        dtypes[name] = compute if same else torch.float32
    freeze(model, list(dtypes), dtypes)
