"""Initial weights, equal to those of transformers' ``from_config``.

transformers builds the model once per part: parameters of the other parts move to the meta device as soon as
they are created. Constructors, ``_init_weights`` and weight tying run unchanged and in order, so every
architecture initializes as it does in transformers.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.deterministic
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from portable.model.build import changed
from portable.model.layers import transformer_layers
from portable.model.parameters import state_tensors
from portable.model.tensors import ComputedTensor, ReadableTensor
from portable.private.of_torch import constructors_replaced
from portable.private.of_transformers import from_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

# Smaller models are built at once. For larger ones, this much is in memory, or the largest unit.
PART_BYTES = 512 << 20
_REST = ""  # the unit of everything outside the layers


@dataclass(frozen=True)
class InitialWeights:
    """The unsharded model on the meta device, from which initial weights are computed.

    Attributes:
        model: of the run, without an adapter.
        function: ``model.function``, which has changed it; None without one.
    """

    model: PreTrainedModel
    function: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, function: str | None = None) -> InitialWeights:
        return cls(copy.deepcopy(model), function)

    def initial_weights(
        self, seed: int, *, part_bytes: int = PART_BYTES
    ) -> Iterator[dict[str, ReadableTensor]]:
        """Yield the weights of ``from_config`` part by part, computed lazily.

        They depend only on the seed and the model, not on the world size or the strategy. Up to
        ``part_bytes`` they equal those of ``from_config`` after ``torch.manual_seed``. In a larger model each
        part has its own generator.
        """
        units = _Units(self.model)
        parts = _parts(units.sizes(), part_bytes)
        if len(parts) == 1:
            yield _readable(state_tensors(self._built(seed)))
            return
        made_for = self._units_by_construction(units)
        left = set(state_tensors(self.model))
        for number, part in enumerate(parts):
            real = {layer for layer, unit in enumerate(made_for) if unit in part}
            with _made_in_part(units.classes, real, _REST in part):
                model = self._built(seed if number == 0 else derived_seed(seed, part[0]))
            buffers = dict(model.named_buffers())
            chosen = {
                name: tensor
                for name, tensor in state_tensors(model).items()
                if (units.of(name) in part if name in buffers else name in left and not tensor.is_meta)
            }
            del model, buffers
            left -= set(chosen)
            yield _readable(chosen)
        if left:
            raise RuntimeError(f"no initial values for {', '.join(sorted(left))}")

    def _built(self, seed: int) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]), _nothing_left_to_chance():
            torch.default_generator.manual_seed(seed)
            model = from_config(type(self.model), copy.deepcopy(self.model.config), dtype=torch.float32)
            if self.function is not None:
                model = changed(model, self.function)
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.detach().nan_to_num_(nan=0.0)  # values that the architecture does not initialize
        return model

    def _units_by_construction(self, units: _Units) -> list[str]:
        """The unit of each layer, in construction order."""
        with _made_in_part(units.classes, set(), False) as made:
            model = self._built(0)
        names = {id(module): name for name, module in model.named_modules()}
        return [units.of(names.get(id(layer), _REST)) for layer in made]


class _Units:
    """The units of initialization: each layer of a model, and one for everything else."""

    def __init__(self, model: nn.Module) -> None:
        layers = transformer_layers(model)
        self._model = model
        self._names = {name for name, _ in layers}
        self.classes = {type(layer) for _, layer in layers}

    def of(self, name: str) -> str:
        """The unit of a tensor or module."""
        while name and name not in self._names:
            name = name.rpartition(".")[0]
        return name

    def sizes(self) -> dict[str, int]:
        """Bytes per unit, in order."""
        sizes = {_REST: 0, **{name: 0 for name, _ in transformer_layers(self._model)}}
        for name, tensor in state_tensors(self._model).items():
            sizes[self.of(name)] += tensor.numel() * tensor.element_size()
        return sizes


def _parts(sizes: dict[str, int], part_bytes: int) -> list[list[str]]:
    """Group consecutive units into parts of up to ``part_bytes``, with at least one unit each."""
    parts: list[list[str]] = [[]]
    taken = 0
    for unit, size in sizes.items():
        if parts[-1] and taken + size > part_bytes:
            parts.append([])
            taken = 0
        parts[-1].append(unit)
        taken += size
    return parts


@contextmanager
def _made_in_part(
    classes: set[type[nn.Module]], real_layers: set[int], rest_is_real: bool
) -> Iterator[list[nn.Module]]:
    """Within this context, create parameters on the meta device, except those of the chosen layers.

    Args:
        classes: the classes of the layers.
        real_layers: indices of the chosen layers, in construction order.
        rest_is_real: whether parameters outside the layers are created.

    Yields:
        the list of constructed layers, which grows.
    """
    made: list[nn.Module] = []
    inside: list[int] = []  # the index of the outermost layer under construction
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        real = inside[0] in real_layers if inside else rest_is_real
        if parameter is None or real or parameter.is_meta:
            return None  # as it is
        meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        meta.__dict__.update(parameter.__dict__)
        return meta

    def following(construct: Callable[..., None]) -> Callable[..., None]:
        @wraps(construct)
        def constructor(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if inside:
                construct(module, *args, **kwargs)
                return
            inside.append(len(made))
            made.append(module)
            deterministic.fill_uninitialized_memory = inside[0] in real_layers
            try:
                construct(module, *args, **kwargs)
            finally:
                inside.pop()
                deterministic.fill_uninitialized_memory = rest_is_real

        return constructor

    hook = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
    try:
        deterministic.fill_uninitialized_memory = rest_is_real
        with constructors_replaced(classes, following):
            yield made
    finally:
        deterministic.fill_uninitialized_memory = filled
        hook.remove()


@contextmanager
def _nothing_left_to_chance() -> Iterator[None]:
    """Within this context, fill uninitialized memory with NaN."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def derived_seed(seed: int, name: str) -> int:
    """A seed that depends on ``seed`` and ``name`` only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _readable(tensors: dict[str, torch.Tensor]) -> dict[str, ReadableTensor]:
    return {name: ComputedTensor.of(tensor) for name, tensor in tensors.items()}
