"""Run optimizer steps during the backward pass (``train.fused_backward``).

As soon as the gradient of a parameter is complete, the optimizer updates the parameter, and the
gradient is freed. The gradients of all parameters therefore never exist at the same time. The
settings are validated in :mod:`portable.checks.train` and :mod:`portable.engines.fsdp.checks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.errors import RunError
from portable.optim.local_shards import combine_local_norms, to_local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from portable.optim.optimizers import EngineOptimizer


class FusedBackward:
    """Hooks that update each parameter during the backward pass.

    The caller of :meth:`begin_backward` decides whether all updates of a pass are skipped,
    for example because the loss is not finite. If this rank's shard of a gradient is not
    finite, this rank skips the update and all later updates of the backward pass. Other ranks
    only check their own shards. Parameters that have already been updated keep their new
    values.

    Args:
        optimizer: Optimizer whose update of a parameter depends only on this parameter and its
            gradient. Its state and parameter groups are used, so checkpoints are the same as
            without this class.
        names: Names of the trained parameters, used in error messages.
        device: Device of the loss.
    """

    def __init__(self, optimizer: EngineOptimizer, names: Mapping[Tensor, str], device: torch.device) -> None:
        self._optimizer = optimizer
        self._names = names
        self._groups: dict[Tensor, dict[str, Any]] = {
            parameter: group for group in optimizer.param_groups for parameter in group["params"]
        }
        self._norms: dict[Tensor, Tensor] = {}
        self._is_skipped = torch.zeros((), dtype=torch.bool, device=device)
        for parameter in self._groups:
            assert isinstance(parameter, torch.Tensor)
            parameter.register_post_accumulate_grad_hook(self._update_parameter)

    def begin_backward(self, *, is_skipped: Tensor) -> None:
        """Prepare for a backward pass. Must be called after the learning rates of the groups have been set.

        Args:
            is_skipped: Whether to skip all updates, a bool scalar on the device.
        """
        self._norms.clear()
        self._is_skipped = is_skipped

    def compute_grad_norm(self) -> Tensor:
        """Compute the norm of the gradients of the last backward pass.

        If the parameters are DTensors, this is a collective, so all ranks have to call this method.
        """
        norms = [self._norms[parameter] for parameter in self._groups if parameter in self._norms]
        return combine_local_norms(norms, next(iter(self._groups)))

    @torch.no_grad()
    def _update_parameter(self, parameter: Tensor) -> None:
        """Update a parameter, and free its gradient. This hook runs when the gradient is complete.

        Raises:
            RunError: If the parameter has already been updated in this backward pass.
        """
        if parameter in self._norms:
            raise RunError(
                f"train.fused_backward: the backward pass of the model computes the gradient of "
                f"{self._names[parameter]} in several parts; set train.fused_backward to false"
            )
        assert parameter.grad is not None
        norm = torch.linalg.vector_norm(to_local(parameter.grad), dtype=torch.float32)
        self._norms[parameter] = norm
        self._is_skipped = self._is_skipped | ~torch.isfinite(norm)
        optimizer = self._optimizer
        optimizer.found_inf = self._is_skipped.float()
        all_groups = optimizer.param_groups
        # Use a copy of the group with only this parameter, so that the step does not visit all parameters.
        optimizer.param_groups = [{**self._groups[parameter], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = all_groups
        parameter.grad = None
