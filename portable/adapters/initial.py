"""Initial values of an adapter, computed layer by layer when they are read.

peft itself initializes each layer, on the CPU and with a seed that depends on the layer's name. So all ranks
compute equal values, and no rank holds the values of all layers.
"""

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
"""peft's name of the adapter in a live model. Files do not contain the name."""
_BLOCK_ROWS = 1024
"""Number of rows of a base weight that are in memory at a time while DoRA's magnitudes are computed."""


class BaseDependentValue(NamedTuple):
    """A value of the adapter that is computed from a weight of the base model.

    Attributes:
        value: DoRA's magnitudes or the trainable token rows, as a function of the weight.
        base_name: Name of the weight in the base model.
    """

    value: DoraMagnitudes | TrainedTokenRows
    base_name: str


class InitialValues(NamedTuple):
    """Initial values of an adapter, keyed by parameter name. They are computed when they are read.

    Attributes:
        values: Values that do not depend on the base model.
        base_dependent: Values that are computed from a weight of the base model.
    """

    values: dict[str, ReadableTensor]
    base_dependent: dict[str, BaseDependentValue]


def build_initial_values(
    model: nn.Module, config: Any, seed: int, base_names: Mapping[str, str]
) -> InitialValues:
    """Build the initial values that peft gives to each of its layers, without computing them yet.

    Args:
        model: Model with the adapter, on the meta device.
        config: peft's config.
        seed: Seed of the run.
        base_names: Names in the base model, keyed by the names in ``model``.
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
    """Copy of one of peft's layers without the adapted module, to be initialized by peft's code.

    Args:
        module: peft's layer in the model.
        init: Kind of initialization, ``init_lora_weights`` of peft's config.
        seed: Seed of this layer.

    Attributes:
        shapes: Shapes of the layer's parameters, keyed by their names in the layer.
    """

    # Cache of the last layer, because the tensors of a layer are usually read one after the other.
    _latest_values: tuple[_DetachedPeftLayer, dict[str, torch.Tensor]] | None = None

    def __init__(self, module: Any, init: Any, seed: int) -> None:
        self._init, self._seed = init, seed
        self._module = _copy_layer_without_base(module)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._module.named_parameters()}

    def compute_all_values(self) -> dict[str, torch.Tensor]:
        """Return the initial values of all parameters of the layer, keyed by name.

        The last layer's values are cached.
        """
        if _DetachedPeftLayer._latest_values is None or _DetachedPeftLayer._latest_values[0] is not self:
            _DetachedPeftLayer._latest_values = (self, self._initialize_on_cpu())
        return _DetachedPeftLayer._latest_values[1]

    def compute_value(self, name: str) -> torch.Tensor:
        """Return the initial value of one parameter."""
        return self.compute_all_values()[name]

    def _initialize_on_cpu(self) -> dict[str, torch.Tensor]:
        """Allocate the parameters on the CPU and initialize them with the layer's seed."""
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
    """Initialize the parameters of one of peft's layers in place.

    IA3 layers have a single initialization. If ``init`` is false, the LoRA weights keep the default
    initialization of their layer types.
    """
    if hasattr(module, "reset_ia3_parameters"):
        module.reset_ia3_parameters(ADAPTER_NAME)
        return
    for child in module.modules():  # peft does not initialize these layers itself
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
    """Stand-in for the adapted module. peft reads the dtype from it."""

    weight = torch.zeros(())


def _copy_layer_without_base(module: Any) -> Any:
    """Copy one of peft's layers on the meta device, with a stub for the adapted module."""
    children = {
        name: copy.deepcopy(child)
        for name, child in module.named_children()
        if name not in ("base_layer", "lora_magnitude_vector")
    }
    return torch_internals.copy_with_submodules(module, {**children, "base_layer": _BaseLayerStub()})


class TrainedTokenRows:
    """Trainable token rows. Their initial values are the rows of the base weight.

    Args:
        tokens: Token ids.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.token_indices = tokens

    def build_tensor(self, weight: ReadableTensor) -> ReadableTensor:
        """Read the rows from a base weight. Returns a tensor ``[tokens, hidden]``."""
        width = slice(0, weight.shape[1])
        return ComputedTensor.from_tensor(
            torch.cat(
                [to_torch(weight.read((slice(token, token + 1), width))) for token in self.token_indices]
            )
        )


class DoraMagnitudes:
    """DoRA's initial magnitudes: the norm of each output's row in the base weight plus the LoRA update.

    Args:
        layer: Layer of the adapter, which computes the LoRA factors.
        module: peft's layer in the model.
    """

    def __init__(self, layer: _DetachedPeftLayer, module: Any) -> None:
        self._layer = layer
        self._scale = module.scaling[ADAPTER_NAME]
        self._is_embedding = bool(module.lora_embedding_A)
        # Embeddings and weights that are stored as [inputs, outputs] have their outputs in dim 1.
        self._outputs_in_columns = self._is_embedding or bool(module.fan_in_fan_out)
        self.dtype = torch.float32
        """Dtype of the base weight in training. The stored weight is rounded to it first."""

    def build_tensor(self, weight: ReadableTensor) -> _DoraMagnitudesTensor:
        """Build the magnitudes of a base weight. They are computed lazily, when they are read."""
        return _DoraMagnitudesTensor(self, weight)

    def compute_magnitudes(self, weight: ReadableTensor, rows: slice | None) -> torch.Tensor:
        """Compute the magnitudes of a base weight.

        Args:
            weight: The base weight.
            rows: Range of outputs. All outputs if None.

        Returns:
            Magnitudes, fp32 ``[outputs]``.
        """
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
    """A tensor of magnitudes that is computed when it is read.

    Args:
        lengths: Magnitudes as a function of the weight.
        weight: Base weight.
    """

    def __init__(self, lengths: DoraMagnitudes, weight: ReadableTensor) -> None:
        self._magnitudes, self._weight = lengths, weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the magnitudes, ``(outputs,)``."""
        return (self._weight.shape[1 if self._magnitudes._outputs_in_columns else 0],)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Compute the magnitudes, or a range of them if there is an index."""
        return to_numpy(
            self._magnitudes.compute_magnitudes(self._weight, None if index is None else index[0])
        )
