"""The values that an adapter starts with, computed layer by layer when they are read."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from portable.model.initialize import derive_named_seed
from portable.model.parameter_groups import CONVOLUTIONS
from portable.model.weight_sources import ComputedTensor, to_numpy, to_torch
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from portable.model.weight_sources import Index, ReadableTensor

NAME = "default"
"""What peft calls the adapter inside a model; its files leave it out."""
_ROWS = 1024
"""Of a weight whose lengths are computed, in memory at a time."""


class BaseDependentValue(NamedTuple):
    """A value of the adapter that is computed from a weight of the base model.

    Attributes:
        value: Function of the weight: DoRA's magnitudes, or the rows of trained tokens.
        base_name: Name of the weight in the base model.
    """

    value: DoraLengths | TrainedTokenRows
    base_name: str


class InitialValues(NamedTuple):
    """Initial values of an adapter, keyed by parameter name.

    Attributes:
        values: Values that do not depend on the base model.
        base_dependent: Values that are computed from a weight of the base model.
    """

    values: dict[str, ReadableTensor]
    base_dependent: dict[str, BaseDependentValue]


def compute_initial_values(
    model: nn.Module, config: Any, seed: int, base: Mapping[str, str]
) -> InitialValues:
    """Describe the values that peft initializes in each of its layers, without computing them.

    Args:
        model: with its adapter, on the meta device.
        config: peft's.
        seed: of the run.
        base: the base model's names of its tensors.

    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    from portable.private import peft_internals

    values: dict[str, ReadableTensor] = {}
    lengths: dict[str, BaseDependentValue] = {}
    init = getattr(config, "init_lora_weights", True)
    for prefix, module in model.named_modules():
        if peft_internals.is_trainable_tokens_layer(module):
            if module.tied_adapter is None:
                rows, name = (
                    TrainedTokenRows(module.token_indices[NAME]),
                    f"{prefix}.trainable_tokens_delta.{NAME}",
                )
                lengths[name] = BaseDependentValue(rows, base[f"{prefix}.base_layer.weight"])
        elif isinstance(module, BaseTunerLayer):
            layer = _PeftLayer(module, init, derive_named_seed(seed, prefix))
            values |= {
                f"{prefix}.{name}": ComputedTensor(shape, partial(layer.get_value, name))
                for name, shape in layer.shapes.items()
            }
            if getattr(module, "lora_magnitude_vector", None):
                name = f"{prefix}.lora_magnitude_vector.{NAME}.weight"
                magnitudes = DoraLengths(layer, module)
                lengths[name] = BaseDependentValue(magnitudes, base[f"{prefix}.base_layer.weight"])
    return InitialValues(values, lengths)


class _PeftLayer:
    """One of peft's layers without the module that it adapts; initialized by peft's own code."""

    # The layer that was computed last: its tensors are mostly read one after the other.
    _latest: tuple[_PeftLayer, dict[str, torch.Tensor]] | None = None

    def __init__(self, module: Any, init: Any, seed: int) -> None:
        self._init, self._seed = init, seed
        self._module = _copy_without_base(module)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._module.named_parameters()}

    def compute_values(self) -> dict[str, torch.Tensor]:
        if _PeftLayer._latest is None or _PeftLayer._latest[0] is not self:
            _PeftLayer._latest = (self, self._initialize())
        return _PeftLayer._latest[1]

    def get_value(self, name: str) -> torch.Tensor:
        return self.compute_values()[name]

    def _initialize(self) -> dict[str, torch.Tensor]:
        parts = {name: copy.deepcopy(child) for name, child in self._module.named_children()}
        module = torch_internals.copy_with_children(self._module, parts)
        for child in parts.values():
            child.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)
            with torch.no_grad():
                _reset(module, self._init)
        return {name: p.detach() for name, p in module.named_parameters()}


def _reset(module: Any, init: Any) -> None:
    """Initialize the parameters of one of peft's layers."""
    if hasattr(module, "reset_ia3_parameters"):
        module.reset_ia3_parameters(NAME)
        return
    for child in module.modules():  # what peft leaves as it was made
        if isinstance(child, (nn.Linear, *CONVOLUTIONS)):
            child.reset_parameters()
    for holder in (module.lora_embedding_A, module.lora_embedding_B):
        for parameter in holder.values():
            nn.init.normal_(parameter)
    if init == "orthogonal" and module.lora_A:
        module.orthogonal_init(NAME)
    elif init == "orthogonal":
        module.reset_lora_parameters(NAME, True)
    elif init:
        module.reset_lora_parameters(NAME, init)


class _Nothing(nn.Module):
    """In place of the module that is adapted: peft asks it for the dtype."""

    weight = torch.zeros(())


def _copy_without_base(module: Any) -> Any:
    """A copy of one of peft's layers, on the meta device, around nothing."""
    children = {
        name: copy.deepcopy(child)
        for name, child in module.named_children()
        if name not in ("base_layer", "lora_magnitude_vector")
    }
    return torch_internals.copy_with_children(module, {**children, "base_layer": _Nothing()})


class TrainedTokenRows:
    """The rows of trained tokens at the start: those of the base."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def compute_from_base(self, weight: ReadableTensor) -> ReadableTensor:
        """Those of ``weight``, ``[tokens, hidden]``."""
        width = slice(0, weight.shape[1])
        return ComputedTensor.from_tensor(
            torch.cat([to_torch(weight.read((slice(token, token + 1), width))) for token in self.tokens])
        )


class DoraLengths:
    """DoRA's lengths at the start: of each output's row of the base weight plus what the adapter adds."""

    def __init__(self, layer: _PeftLayer, module: Any) -> None:
        self._layer = layer
        self._scale = module.scaling[NAME]
        self._table = bool(module.lora_embedding_A)
        # Weights that are stored as [in, out], and tables, have their outputs along the second dim.
        self._across = self._table or bool(module.fan_in_fan_out)
        self.dtype = torch.float32
        """Of the base weight in training."""

    def compute_from_base(self, weight: ReadableTensor) -> _DoraLengthsTensor:
        return _DoraLengthsTensor(self, weight)

    def compute_lengths(self, weight: ReadableTensor, rows: slice | None) -> torch.Tensor:
        """The lengths, fp32 ``[out]``; of a part of the outputs."""
        layer_values = self._layer.compute_values()
        if self._table:
            down, up = layer_values[f"lora_embedding_A.{NAME}"], layer_values[f"lora_embedding_B.{NAME}"]
        else:
            down, up = layer_values[f"lora_A.{NAME}.weight"], layer_values[f"lora_B.{NAME}.weight"]
        first, last = (0, weight.shape[0]) if rows is None or self._across else (rows.start, rows.stop)
        squares = []
        for start in range(first, last, _ROWS):
            part = slice(start, min(start + _ROWS, last))
            stored = to_torch(weight.read((part, slice(0, weight.shape[1])))).to(self.dtype).float()
            if self._across:
                squares.append((stored + self._scale * (up @ down[:, part]).t()).square().sum(dim=0))
            else:
                squares.append((stored + self._scale * (up[part] @ down)).square().sum(dim=1))
        totals = torch.stack(squares).sum(dim=0) if self._across else torch.cat(squares)
        lengths = totals.sqrt()
        return lengths[rows] if self._across and rows is not None else lengths


class _DoraLengthsTensor:
    """A tensor of lengths, computed on reading."""

    def __init__(self, lengths: DoraLengths, weight: ReadableTensor) -> None:
        self._lengths, self._weight = lengths, weight

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._weight.shape[1 if self._lengths._across else 0],)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        return to_numpy(self._lengths.compute_lengths(self._weight, None if index is None else index[0]))
