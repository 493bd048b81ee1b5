"""The values that an adapter starts with, computed layer by layer when they are read."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from portable.model.initialize import derive_named_seed
from portable.model.parameter_groups import CONVOLUTION_CLASSES
from portable.model.weight_sources import ComputedTensor, to_numpy, to_torch
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from portable.model.weight_sources import Index, ReadableTensor

ADAPTER_NAME = "default"
"""What peft calls the adapter inside a model; its files leave it out."""
_BLOCK_ROWS = 1024
"""Of a weight whose lengths are computed, in memory at a time."""


class BaseDependentValue(NamedTuple):
    """A value of the adapter that is computed from a weight of the base model.

    Attributes:
        value: Function of the weight: DoRA's magnitudes, or the rows of trained tokens.
        base_name: Name of the weight in the base model.
    """

    value: DoraMagnitudes | TrainedTokenRows
    base_name: str


class InitialValues(NamedTuple):
    """Initial values of an adapter, keyed by parameter name.

    Attributes:
        values: Values that do not depend on the base model.
        base_dependent: Values that are computed from a weight of the base model.
    """

    values: dict[str, ReadableTensor]
    base_dependent: dict[str, BaseDependentValue]


def build_initial_values(
    model: nn.Module, config: Any, seed: int, base_names: Mapping[str, str]
) -> InitialValues:
    """Describe the values that peft initializes in each of its layers, without computing them.

    Args:
        model: with its adapter, on the meta device.
        config: peft's.
        seed: of the run.
        base_names: the base model's names of its tensors.

    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    from portable.private import peft_internals

    values: dict[str, ReadableTensor] = {}
    base_dependent: dict[str, BaseDependentValue] = {}
    init = getattr(config, "init_lora_weights", True)
    for prefix, module in model.named_modules():
        if peft_internals.is_trainable_tokens_layer(module):
            if module.tied_adapter is None:
                rows, name = (
                    TrainedTokenRows(module.token_indices[ADAPTER_NAME]),
                    f"{prefix}.trainable_tokens_delta.{ADAPTER_NAME}",
                )
                base_dependent[name] = BaseDependentValue(rows, base_names[f"{prefix}.base_layer.weight"])
        elif isinstance(module, BaseTunerLayer):
            layer = _DetachedPeftLayer(module, init, derive_named_seed(seed, prefix))
            values |= {
                f"{prefix}.{name}": ComputedTensor(shape, partial(layer.compute_value, name))
                for name, shape in layer.shapes.items()
            }
            if getattr(module, "lora_magnitude_vector", None):
                name = f"{prefix}.lora_magnitude_vector.{ADAPTER_NAME}.weight"
                magnitudes = DoraMagnitudes(layer, module)
                base_dependent[name] = BaseDependentValue(
                    magnitudes, base_names[f"{prefix}.base_layer.weight"]
                )
    return InitialValues(values, base_dependent)


class _DetachedPeftLayer:
    """One of peft's layers without the module that it adapts; initialized by peft's own code."""

    # The layer that was computed last: its tensors are mostly read one after the other.
    _latest_values: tuple[_DetachedPeftLayer, dict[str, torch.Tensor]] | None = None

    def __init__(self, module: Any, init: Any, seed: int) -> None:
        self._init, self._seed = init, seed
        self._module = _copy_layer_without_base(module)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._module.named_parameters()}

    def compute_all_values(self) -> dict[str, torch.Tensor]:
        if _DetachedPeftLayer._latest_values is None or _DetachedPeftLayer._latest_values[0] is not self:
            _DetachedPeftLayer._latest_values = (self, self._initialize_on_cpu())
        return _DetachedPeftLayer._latest_values[1]

    def compute_value(self, name: str) -> torch.Tensor:
        return self.compute_all_values()[name]

    def _initialize_on_cpu(self) -> dict[str, torch.Tensor]:
        parts = {name: copy.deepcopy(child) for name, child in self._module.named_children()}
        module = torch_internals.copy_with_submodules(self._module, parts)
        for child in parts.values():
            child.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)
            with torch.no_grad():
                _initialize_parameters(module, self._init)
        return {name: p.detach() for name, p in module.named_parameters()}


def _initialize_parameters(module: Any, init: Any) -> None:
    """Initialize the parameters of one of peft's layers."""
    if hasattr(module, "reset_ia3_parameters"):
        module.reset_ia3_parameters(ADAPTER_NAME)
        return
    for child in module.modules():  # what peft leaves as it was made
        if isinstance(child, (nn.Linear, *CONVOLUTION_CLASSES)):
            child.reset_parameters()
    for holder in (module.lora_embedding_A, module.lora_embedding_B):
        for parameter in holder.values():
            nn.init.normal_(parameter)
    if init == "orthogonal" and module.lora_A:
        module.orthogonal_init(ADAPTER_NAME)
    elif init == "orthogonal":
        module.reset_lora_parameters(ADAPTER_NAME, True)
    elif init:
        module.reset_lora_parameters(ADAPTER_NAME, init)


class _BaseLayerStub(nn.Module):
    """In place of the module that is adapted: peft asks it for the dtype."""

    weight = torch.zeros(())


def _copy_layer_without_base(module: Any) -> Any:
    """A copy of one of peft's layers, on the meta device, around nothing."""
    children = {
        name: copy.deepcopy(child)
        for name, child in module.named_children()
        if name not in ("base_layer", "lora_magnitude_vector")
    }
    return torch_internals.copy_with_submodules(module, {**children, "base_layer": _BaseLayerStub()})


class TrainedTokenRows:
    """The rows of trained tokens at the start: those of the base."""

    def __init__(self, tokens: list[int]) -> None:
        self.token_indices = tokens

    def build_tensor(self, weight: ReadableTensor) -> ReadableTensor:
        """Those of ``weight``, ``[tokens, hidden]``."""
        width = slice(0, weight.shape[1])
        return ComputedTensor.from_tensor(
            torch.cat(
                [to_torch(weight.read((slice(token, token + 1), width))) for token in self.token_indices]
            )
        )


class DoraMagnitudes:
    """DoRA's lengths at the start: of each output's row of the base weight plus what the adapter adds."""

    def __init__(self, layer: _DetachedPeftLayer, module: Any) -> None:
        self._layer = layer
        self._scale = module.scaling[ADAPTER_NAME]
        self._is_embedding = bool(module.lora_embedding_A)
        # Weights that are stored as [in, out], and tables, have their outputs along the second dim.
        self._outputs_in_columns = self._is_embedding or bool(module.fan_in_fan_out)
        self.dtype = torch.float32
        """Of the base weight in training."""

    def build_tensor(self, weight: ReadableTensor) -> _DoraMagnitudesTensor:
        return _DoraMagnitudesTensor(self, weight)

    def compute_magnitudes(self, weight: ReadableTensor, rows: slice | None) -> torch.Tensor:
        """The lengths, fp32 ``[out]``; of a part of the outputs."""
        layer_values = self._layer.compute_all_values()
        if self._is_embedding:
            down, up = (
                layer_values[f"lora_embedding_A.{ADAPTER_NAME}"],
                layer_values[f"lora_embedding_B.{ADAPTER_NAME}"],
            )
        else:
            down, up = (
                layer_values[f"lora_A.{ADAPTER_NAME}.weight"],
                layer_values[f"lora_B.{ADAPTER_NAME}.weight"],
            )
        first, last = (
            (0, weight.shape[0]) if rows is None or self._outputs_in_columns else (rows.start, rows.stop)
        )
        squares = []
        for start in range(first, last, _BLOCK_ROWS):
            part = slice(start, min(start + _BLOCK_ROWS, last))
            stored = to_torch(weight.read((part, slice(0, weight.shape[1])))).to(self.dtype).float()
            if self._outputs_in_columns:
                squares.append((stored + self._scale * (up @ down[:, part]).t()).square().sum(dim=0))
            else:
                squares.append((stored + self._scale * (up[part] @ down)).square().sum(dim=1))
        totals = torch.stack(squares).sum(dim=0) if self._outputs_in_columns else torch.cat(squares)
        magnitudes = totals.sqrt()
        return magnitudes[rows] if self._outputs_in_columns and rows is not None else magnitudes


class _DoraMagnitudesTensor:
    """A tensor of lengths, computed on reading."""

    def __init__(self, lengths: DoraMagnitudes, weight: ReadableTensor) -> None:
        self._magnitudes, self._weight = lengths, weight

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._weight.shape[1 if self._magnitudes._outputs_in_columns else 0],)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        return to_numpy(
            self._magnitudes.compute_magnitudes(self._weight, None if index is None else index[0])
        )
