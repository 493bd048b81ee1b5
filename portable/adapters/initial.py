"""Compute the initial values of an adapter lazily, one layer at a time.

peft's own code initializes each layer, on the CPU and with a seed derived from the layer's name.
All ranks therefore compute the same values, and no rank keeps the values of all layers in memory.
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
"""Name under which peft registers the adapter in the modules of a model. Tensor names in peft's files
do not contain it."""
_BLOCK_ROWS = 1024
"""Number of rows of a base weight that are in memory at a time while DoRA's magnitudes are computed."""


class BaseDependentValue(NamedTuple):
    """Initial value of an adapter tensor, computed from a weight of the base model.

    Attributes:
        value: Object whose method ``build_tensor`` computes the value from the weight.
        base_name: Name of the weight in the base model.
    """

    value: DoraMagnitudes | TrainedTokenRows
    base_name: str


class InitialValues(NamedTuple):
    """Initial values of an adapter, keyed by parameter name.

    Attributes:
        values: Values that do not depend on the base model. Each value is computed when it is read.
        base_dependent: Values that are computed from a weight of the base model: the magnitudes of
            DoRA, and the rows of trainable tokens.
    """

    values: dict[str, ReadableTensor]
    base_dependent: dict[str, BaseDependentValue]


def build_initial_values(
    model: nn.Module, config: Any, seed: int, base_names: Mapping[str, str]
) -> InitialValues:
    """Build the initial values of all peft layers, without computing the values yet.

    The trained copies of ``modules_to_save`` are not included, because they get the values of the
    base model.

    Args:
        model: Model with the adapter, on the meta device.
        config: peft's config.
        seed: Seed of the run.
        base_names: Names of the base weights before the injection, keyed by their names in
            ``model``.
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
    """Copy of a peft layer that computes the initial adapter weights on the CPU.

    The copy does not include the module that the layer adapts. peft's own code initializes the
    weights.

    Args:
        module: peft layer in the model, on the meta device.
        init: Value of ``init_lora_weights`` in peft's config.
        seed: Random seed for the weights of this layer.

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
        """Return the initial values of all parameters of this layer, keyed by name.

        The values are cached until the values of another layer are computed.
        """
        if _DetachedPeftLayer._latest_values is None or _DetachedPeftLayer._latest_values[0] is not self:
            _DetachedPeftLayer._latest_values = (self, self._initialize_on_cpu())
        return _DetachedPeftLayer._latest_values[1]

    def compute_value(self, name: str) -> torch.Tensor:
        """Return the initial value of one parameter. Initializes the layer unless its values are cached."""
        return self.compute_all_values()[name]

    def _initialize_on_cpu(self) -> dict[str, torch.Tensor]:
        """Initialize a copy of the layer on the CPU, and return its parameters, keyed by name.

        Uses the layer's seed, and does not change torch's global random state.
        """
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
    """Initialize the parameters of a peft layer in place, with torch's default random generator.

    All linear and convolution layers in ``module`` are reset, so it must not contain the base layer
    that it adapts. See :func:`_copy_layer_without_base`.

    Args:
        module: LoRA or IA3 layer of peft without its base layer, with parameters on the CPU.
        init: Value of ``init_lora_weights`` in peft's config. If False, LoRA weights get the default
            initialization of their modules. IA3 layers ignore it.
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
    """Stub for the adapted module in a copied peft layer. peft reads only its dtype."""

    weight = torch.zeros(())


def _copy_layer_without_base(module: Any) -> Any:
    """Copy a peft layer, and replace the base module that it adapts with a stub.

    The other submodules are deep-copied and stay on the meta device. DoRA's magnitudes are omitted,
    because they depend on the base weight. peft reads only the dtype of the stub.
    """
    children = {
        name: copy.deepcopy(child)
        for name, child in module.named_children()
        if name not in ("base_layer", "lora_magnitude_vector")
    }
    return torch_internals.copy_with_submodules(module, {**children, "base_layer": _BaseLayerStub()})


class TrainedTokenRows:
    """Initial values of the trained rows of an embedding, copied from the base weight.

    ``adapter.trainable_token_indices`` selects the rows.

    Args:
        tokens: Token ids of the rows.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.token_indices = tokens

    def build_tensor(self, weight: ReadableTensor) -> ReadableTensor:
        """Read the initial values of the trained rows from a base weight.

        Args:
            weight: Base weight, ``[vocabulary, hidden]``.

        Returns:
            The rows of the trained tokens, ``[tokens, hidden]``.
        """
        width = slice(0, weight.shape[1])
        return ComputedTensor.from_tensor(
            torch.cat(
                [to_torch(weight.read((slice(token, token + 1), width))) for token in self.token_indices]
            )
        )


class DoraMagnitudes:
    """Initial magnitudes of DoRA: for each output, the norm of the adapted weight.

    The adapted weight is the base weight plus the initial LoRA update.

    Args:
        layer: Copy of ``module`` without its base layer. The copy computes the initial LoRA
            factors.
        module: LoRA layer of the model, created by peft.
    """

    def __init__(self, layer: _DetachedPeftLayer, module: Any) -> None:
        self._layer = layer
        self._scale = module.scaling[ADAPTER_NAME]
        self._is_embedding = bool(module.lora_embedding_A)
        # Embeddings and weights that are stored as [inputs, outputs] have their outputs in dim 1.
        self._outputs_in_columns = self._is_embedding or bool(module.fan_in_fan_out)
        self.dtype = torch.float32
        """Dtype of the base weight during training. The stored weight is cast to it before the norms
        are computed."""

    def build_tensor(self, weight: ReadableTensor) -> _DoraMagnitudesTensor:
        """Return the magnitudes for a base weight as a tensor that is computed when it is read."""
        return _DoraMagnitudesTensor(self, weight)

    def compute_magnitudes(self, weight: ReadableTensor, rows: slice | None) -> torch.Tensor:
        """Compute the DoRA magnitudes of a base weight.

        The magnitude of an output is the norm of its adapted weights: the base weights plus the
        initial LoRA update.

        Args:
            weight: The base weight.
            rows: Slice with start and stop that selects a range of the outputs. None selects all
                outputs.

        Returns:
            fp32 magnitudes, ``[outputs in the range]``.
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
    """DoRA magnitudes for one base weight, computed when the tensor is read.

    There is one magnitude per output: the norm of its weights after the LoRA update has been added
    to the base weight.

    Args:
        lengths: Object that computes the magnitudes from the base weight.
        weight: Base weight.
    """

    def __init__(self, lengths: DoraMagnitudes, weight: ReadableTensor) -> None:
        self._magnitudes, self._weight = lengths, weight

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the magnitudes, ``(outputs,)``."""
        return (self._weight.shape[1 if self._magnitudes._outputs_in_columns else 0],)

    def read(self, index: Index | None = None) -> NDArray[Any]:
        """Compute the magnitudes in the slice ``index[0]``, or all magnitudes if ``index`` is None."""
        return to_numpy(
            self._magnitudes.compute_magnitudes(self._weight, None if index is None else index[0])
        )
