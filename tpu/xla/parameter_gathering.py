"""Gather a layer's parameters once per pass, before the layer computes.

If an operand of a matrix product is sharded, the compiler gathers it. The products in the forward
and backward passes use a matrix in different shapes, such as ``[heads, width, hidden size]``, and
the compiler would gather it once per shape. Therefore, this module creates a copy of the parameter
that is annotated as replicated. The copy is gathered once, in the shape of the parameter, and used
by all products in a pass.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable.tpu.xla.functional_call import FunctionalCaller
from portable.tpu.xla.layout import constrain_with_gradient

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from portable.tpu.xla.layout import MeshLayout, Spec


def gather_layer_parameters(
    layer: nn.Module, layer_name: str, get_spec: Callable[[str, Tensor], Spec], layout: MeshLayout
) -> None:
    """Make a layer gather its sharded parameters once, when its forward pass begins.

    The layer then computes with the gathered copies. Their gradients are sharded like the
    parameters. Embedding tables are not gathered. The layer is not changed if it has no other
    sharded parameters.

    Args:
        layer: Layer to modify. Its ``forward`` is replaced.
        layer_name: Name of the layer in the model.
        get_spec: Function that returns the spec for a parameter name and tensor.
        layout: Placement of tensors on the devices.
    """
    op_shardings: dict[str, tuple[Any, Any]] = {}
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            spec = get_spec(f"{layer_name}.{name}", parameter)
            # Embedding tables are not gathered: a lookup works on the shards.
            if any(spec) and not isinstance(module, nn.Embedding):
                unsharded = layout.to_op_sharding(layout.get_replicated_spec(parameter.dim()))
                op_shardings[name] = unsharded, layout.to_op_sharding(spec)
    if not op_shardings:
        return
    forward = layer.forward
    caller = FunctionalCaller(layer)

    @functools.wraps(forward)
    def gather_and_forward(*args: Any, **kwargs: Any) -> Any:
        # An adapter on stacked experts renames parameters during its computation, so they are missing here.
        # The compiler gathers them.
        parameters = dict(layer.named_parameters())
        present_shardings = {name: to for name, to in op_shardings.items() if name in parameters}
        copies = {
            f"module.{name}": constrain_with_gradient(
                parameters[name], *to, isolate_gradient=layout.reduces_gradients_unsharded
            )
            for name, to in present_shardings.items()
        }
        return torch.func.functional_call(caller, copies, (functools.partial(forward, *args, **kwargs),))

    layer.forward = gather_and_forward
