"""Choose the modules that FSDP2 shards as units, and configure how their all-gathers are prefetched."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

from portable.errors import UserError
from portable.model.layers import find_layers_without_hooks, find_transformer_layers
from portable.model.unused_parameters import get_unreached_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.fsdp import FSDPModule

    from portable.config import RunConfig


def find_fsdp_units(model: nn.Module, config: RunConfig) -> list[nn.Module]:
    """Find the modules that FSDP2 shards as units, according to the section ``fsdp``.

    The first setting that applies selects the units:

    - If ``auto_wrap_policy`` is ``no_wrap``, there are no units.
    - If ``min_num_params`` is set, the units are modules with at least this number of parameters.
    - If ``transformer_layer_cls_to_wrap`` is set, the units are all modules of these classes.
    - Otherwise, the units are the transformer layers. FSDP gathers parameters in forward hooks, so
      a layer that runs without its hooks is excluded.

    A module that shares a parameter with another part of the model does not become a unit. Its
    parameters then belong to the enclosing unit, which gathers the shared parameter for both
    modules.

    Args:
        model: The model. It is not modified.
        config: Config of the run.

    Returns:
        Modules in the order of the model, without the model itself. Empty for ``no_wrap``.

    Raises:
        UserError: If the model has no module of a class in
            ``fsdp.transformer_layer_cls_to_wrap``.
    """
    fsdp = config.fsdp
    if fsdp.auto_wrap_policy == "no_wrap":
        return []
    if fsdp.min_num_params is not None:
        return _find_large_modules(model, fsdp.min_num_params)
    if fsdp.transformer_layer_cls_to_wrap is not None:
        selected_modules = _find_modules_by_class(model, fsdp.transformer_layer_cls_to_wrap)
    else:
        # FSDP gathers parameters in hooks, so a layer that never calls its hooks cannot be a unit. The
        # exception are layers that text does not reach: they never run, so they can stay sharded.
        unhooked = find_layers_without_hooks(model) - {name for name, _ in find_unreached_layers(model)}
        selected_modules = [layer for name, layer in find_transformer_layers(model) if name not in unhooked]
    total_uses = _count_parameter_uses(model)
    return [
        module
        for module in selected_modules
        if module is not model and not _has_shared_parameters(module, total_uses)
    ]


def find_unreached_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the layers that never run in training on text, such as the layers of a vision tower.

    A layer counts as unreached if :func:`get_unreached_names` returns all of its parameters.

    Args:
        model: The model.

    Returns:
        Names and modules of the layers.
    """
    unreached = get_unreached_names(model)
    return [
        (name, layer)
        for name, layer in find_transformer_layers(model)
        if unreached.issuperset(f"{name}.{parameter}" for parameter, _ in layer.named_parameters())
    ]


def _find_modules_by_class(model: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """Find the modules whose class name is in ``class_names``.

    Raises:
        UserError: If one of the class names matches no module of the model.
    """
    present_classes = {type(module).__name__ for module in model.modules()}
    for name in class_names:
        if name not in present_classes:
            layers = sorted({type(layer).__name__ for _, layer in find_transformer_layers(model)})
            raise UserError(
                f"fsdp.transformer_layer_cls_to_wrap: {type(model).__name__} has no module of the class "
                f"{name}; use one of {', '.join(layers)}"
            )
    return [module for module in model.modules() if type(module).__name__ in class_names]


def _find_large_modules(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Find the modules with at least ``min_num_params`` parameters, like FSDP's size-based wrap policy.

    The parameters of a selected module no longer count toward the modules that contain it. Module
    lists, the model itself, and modules that share parameters with other modules are not selected.
    """
    selected: set[nn.Module] = set()
    total_uses = _count_parameter_uses(model)

    def count_outside_units(module: nn.Module) -> int:
        direct = sum(p.numel() for p in module.parameters(recurse=False))
        size = direct + sum(count_outside_units(child) for child in module.children())
        # A module list is never called, so its hooks would never gather its parameters.
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if size < min_num_params or listed or module is model or _has_shared_parameters(module, total_uses):
            return size
        selected.add(module)
        return 0

    count_outside_units(model)
    return [module for module in model.modules() if module in selected]


def _count_parameter_uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Count how often each parameter is registered in a module and its submodules."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _has_shared_parameters(module: nn.Module, total_uses: Counter[nn.Parameter]) -> bool:
    """Return whether a parameter of a module is also registered outside of the module.

    Args:
        module: Module of the model.
        total_uses: Result of :func:`_count_parameter_uses` for the complete model.
    """
    return any(total_uses[parameter] > uses for parameter, uses in _count_parameter_uses(module).items())


def configure_prefetching(units: Sequence[FSDPModule], config: RunConfig) -> None:
    """Apply the settings ``fsdp.forward_prefetch`` and ``fsdp.backward_prefetch``.

    In the forward pass, FSDP2 by default starts to gather a unit when the host reaches the unit.
    This is usually before the device reaches it. With ``forward_prefetch``, the unit is gathered
    one unit earlier, during the forward pass of the previous unit.

    In the backward pass, FSDP2 by default gathers the next unit before the gradients of the current
    unit are computed (``backward_pre``). With ``backward_post`` or ``no_prefetch``, it gathers the
    next unit after they are computed.

    Args:
        units: FSDP modules in the order of the forward pass, beginning with the model itself.
        config: Config of the run.
    """
    if config.fsdp.forward_prefetch:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    if config.fsdp.backward_prefetch in ("backward_post", "no_prefetch"):
        # If each unit only prefetches itself, the next unit is gathered after the gradients of this unit.
        for unit in units:
            unit.set_modules_to_backward_prefetch([unit])
