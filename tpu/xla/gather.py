"""Parameters of a layer, gathered as a whole before anything is computed with them.

A product with a shard makes the compiler gather the shard. Forwards and backwards it sees other shapes of the
same matrix, such as ``[heads, width, hidden size]``, and gathers each of them. A copy that is marked as whole
is gathered once, in the shape of the parameter, and used by all products of a pass.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from tpu.xla.calling import Caller
from tpu.xla.layout import constrain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def gathered(layer: nn.Module, places: Mapping[str, tuple[Any, Any]], *, alone: bool) -> None:
    """Make ``layer`` compute with gathered copies of its parameters.

    Args:
        layer: its ``forward`` is replaced.
        places: for the parameters to gather, the sharding of the copy and that of the gradient, in the
            bindings' form.
        alone: see :func:`tpu.xla.layout.constrain`.
    """
    forward = layer.forward
    caller = Caller(layer)

    @functools.wraps(forward)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        # An adapter on stacked experts renames them while it computes; those are gathered by the compiler.
        parameters = dict(layer.named_parameters())
        here = {name: to for name, to in places.items() if name in parameters}
        copies = {
            f"module.{name}": constrain(parameters[name], *to, alone=alone) for name, to in here.items()
        }
        return torch.func.functional_call(caller, copies, (functools.partial(forward, *args, **kwargs),))

    layer.forward = gathering
