"""Adafactor (Shazeer and Stern, 2018) for sharded and unsharded parameters.

:class:`AdafactorRule` contains the formulas. The optimizer in this module applies them on torch
devices, and sums over shards with all-reduces. :mod:`portable.tpu.xla.optim` applies the same
formulas to XLA's lazy tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from portable.optim.local_shards import create_sharded_zeros, get_shard_group, to_local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BETA2_DECAY, MIN_PARAMETER_RMS, MAX_UPDATE_RMS = -0.8, 1e-3, 1.0
"""Decay exponent of the second moments, lower bound of a parameter's RMS, and upper bound of an update's RMS.
The values are the defaults of torch and transformers.
"""


@dataclass(frozen=True)
class AdafactorRule:
    """Formulas of Adafactor, as implemented by torch or transformers.

    :data:`ADAFACTOR_RULES` contains the rule for each value of ``train.adafactor_rule``. The
    methods accept both tensors on torch devices and lazy tensors of XLA.

    Attributes:
        scales_learning_rate: Whether the learning rate is limited to ``steps ** -0.5`` and then
            multiplied by the RMS of the parameter.
        gradient_epsilon: Constant that is added to each squared gradient.
        min_row_mean: Lower bound on the mean of the row moments, which is used as a divisor.
        min_variance: Lower bound on the second moments, to avoid a division by 0.
    """

    scales_learning_rate: bool
    gradient_epsilon: float
    min_row_mean: float
    min_variance: float

    def compute_new_gradient_share(self, steps: Tensor) -> Tensor:
        """Return the weight of the newest squared gradient in the second moments.

        The weight is ``steps ** BETA2_DECAY``. It is 1 in the first step, so the first squared
        gradient replaces the initial zeros.

        Args:
            steps: Number of steps of the parameter, starting at 1.
        """
        return steps**BETA2_DECAY

    def square_gradient(self, gradient: Tensor) -> Tensor:
        """Return the squared gradient plus ``gradient_epsilon``.

        The averages of the second moments are computed from this value.
        """
        return gradient.square().add_(self.gradient_epsilon)

    def limit_learning_rate(self, rate: Tensor, steps: Tensor) -> Tensor:
        """Return the learning rate, limited to ``steps ** -0.5`` if ``scales_learning_rate`` is True.

        Args:
            rate: Learning rate of the schedule.
            steps: Number of steps of the parameter, starting at 1.
        """
        return torch.minimum(rate, steps**-0.5) if self.scales_learning_rate else rate

    def scale_learning_rate(self, rate: Tensor, parameter_rms: Tensor) -> Tensor:
        """Return the learning rate, multiplied by the RMS if ``scales_learning_rate`` is True.

        Args:
            rate: Learning rate.
            parameter_rms: RMS of the parameter. Values below ``MIN_PARAMETER_RMS`` are raised to
                this minimum.
        """
        return rate * parameter_rms.clamp(min=MIN_PARAMETER_RMS) if self.scales_learning_rate else rate

    def estimate_second_moments(self, rows: Tensor, columns: Tensor, mean: Tensor) -> Tensor:
        """Estimate the second moments of all elements of a matrix from the means of its rows and columns.

        Args:
            rows: Mean second moment of each row, ``[..., rows, 1]``.
            columns: Mean second moment of each column, ``[..., 1, columns]``.
            mean: Mean of ``rows``, which normalizes the product.

        Returns:
            A new tensor ``[..., rows, columns]``.
        """
        return rows / mean.clamp(min=self.min_row_mean) * columns

    def replace_by_inverse_root(self, variance: Tensor) -> Tensor:
        """Replace second moments by their reciprocal square roots in place.

        Returns:
            ``variance``, which is now the factor that converts the gradient to the update.
        """
        return variance.clamp_(min=self.min_variance).rsqrt_()


def compute_update_divisor(update_rms: Tensor) -> Tensor:
    """Return the divisor that limits the RMS of an update to ``MAX_UPDATE_RMS``.

    Args:
        update_rms: RMS of the update before the division.
    """
    return (update_rms / MAX_UPDATE_RMS).clamp(min=1.0)


def get_moment_shapes(shape: Sequence[int], num_stack_dims: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a parameter's second moments, keyed by name.

    Args:
        shape: Shape of the parameter, or of a stack of parameters.
        num_stack_dims: Number of leading dimensions of ``shape`` that belong to the stack.

    Returns:
        Shapes of ``row_var`` and ``col_var`` if the parameter has two or more dimensions, otherwise the
        shape of ``variance``.
    """
    if len(shape) - num_stack_dims < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


_EPS = torch.finfo(torch.float32).eps
ADAFACTOR_RULES = {
    "torch": AdafactorRule(
        scales_learning_rate=True, gradient_epsilon=0.0, min_row_mean=_EPS, min_variance=_EPS**2
    ),
    # This rule corresponds to scale_parameter and relative_step being false, as in transformers' Trainer.
    "transformers": AdafactorRule(
        scales_learning_rate=False, gradient_epsilon=1e-30, min_row_mean=1e-30, min_variance=1e-30
    ),
}


class _ParameterStatistics(NamedTuple):
    """Scalar statistics of a parameter in a step, computed over all of its shards.

    Attributes:
        rms: Root mean square of the parameter.
        row_mean: Mean of the optimizer state ``row_var``, which contains the second moment of each
            row. None if the parameter does not have two dimensions.
    """

    rms: Tensor
    row_mean: Tensor | None = None


class Adafactor(torch.optim.Optimizer):
    """Adafactor with a choice of update rules: the rule of torch or the rule of transformers.

    The state has the layout of ``torch.optim.Adafactor``. The state of a parameter consists of
    ``step`` and the second moments, in fp32. A parameter with two or more dimensions has the
    moments ``row_var`` (``[..., rows, 1]``) and ``col_var`` (``[..., 1, columns]``). Other
    parameters have ``variance``, with the shape of the parameter.

    Column sums and RMS values are computed over all shards of a parameter. For this purpose, each
    step does two all-reduces for the entire model. They transfer only a few numbers per matrix
    column, and need no host sync. A step overwrites the gradients.

    Args:
        groups: Parameter groups, as for ``torch.optim.Optimizer``. Either no parameter is sharded,
            or all parameters are sharded along dimension 0, over the same ranks.
        lr: Learning rate of groups that do not set one.
        rule: Formulas of the update, from ``ADAFACTOR_RULES``.
    """

    found_inf: Tensor | None = None
    """Flag on the device of the parameters, an fp32 scalar. If it is 1, the step does not change anything."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, rule: AdafactorRule = ADAFACTOR_RULES["torch"]
    ) -> None:
        self._rule = rule
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the zero-valued state of ``parameter`` before the first step.

        Moments are sharded like the parameter, except for the ``col_var`` of a matrix, which is replicated
        on every rank.
        """
        state = {"step": torch.zeros((), device=parameter.device)}
        for name, shape in get_moment_shapes(parameter.shape).items():
            # A scalar cannot be sharded. The column moments of a matrix are sums over its sharded dimension,
            # so they are replicated.
            sharded = parameter.dim() > 0 and not (name == "col_var" and parameter.dim() == 2)
            state[name] = (
                create_sharded_zeros(parameter, shape)
                if sharded
                else torch.zeros(shape, device=parameter.device)
            )
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update, in place, all parameters that have a gradient. All ranks have to call this method.

        Gradients are overwritten. If ``found_inf`` is 1, parameters and state do not change. A parameter's
        state is created at its first step.
        """
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        for parameter, _ in trained:
            if not self.state[parameter]:
                self.state[parameter] = self.build_initial_state(parameter)
        parameters = [parameter for parameter, _ in trained]
        states = [self.state[parameter] for parameter in parameters]
        gradients = [to_local(parameter.grad) for parameter in parameters]
        applied = torch.ones((), device=parameters[0].device)
        if self.found_inf is not None:
            applied = 1 - self.found_inf
            # A learning rate of zero is not enough, because zero times a non-finite gradient is NaN.
            for gradient in gradients:
                gradient.masked_fill_(self.found_inf > 0, 0.0)
        # Compute one value per parameter for all parameters at once, because this needs fewer kernel
        # launches.
        steps = torch.stack([state["step"] for state in states]) + applied
        for state, count in zip(states, steps.unbind(), strict=True):
            state["step"].copy_(count)
        positive_steps = steps.clamp(min=1)
        new_shares = (self._rule.compute_new_gradient_share(positive_steps) * applied).unbind()
        rates = torch.stack([torch.full_like(applied, group["lr"]) for _, group in trained])
        rates = self._rule.limit_learning_rate(rates, positive_steps)
        statistics = self._update_moments(parameters, gradients, states, new_shares)
        update_rms = self._replace_gradients_by_updates(parameters, gradients, states, statistics)
        rates = self._rule.scale_learning_rate(rates, torch.stack([each.rms for each in statistics]))
        rates = rates / compute_update_divisor(torch.stack(update_rms)) * applied
        for (parameter, group), gradient, rate in zip(trained, gradients, rates.unbind(), strict=True):
            local_parameter = to_local(parameter)
            local_parameter.mul_(1 - applied * (group["lr"] * group["weight_decay"]))
            local_parameter.sub_(gradient.mul_(rate))

    def _update_moments(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        new_shares: tuple[Tensor, ...],
    ) -> list[_ParameterStatistics]:
        """Update the second moments with the gradients, in place.

        Args:
            parameters: Parameters with a gradient.
            gradients: Local shard of each gradient.
            states: State of each parameter.
            new_shares: Weight of the new squared gradient in the moments of each parameter. 0 to leave the
                moments unchanged.

        Returns:
            Statistics of each parameter for the rest of the step.
        """
        sums = []
        for parameter, gradient, state, weight in zip(parameters, gradients, states, new_shares, strict=True):
            sums.append(to_local(parameter).square().sum())
            squares = self._rule.square_gradient(gradient)
            if parameter.dim() < 2:
                to_local(state["variance"]).lerp_(squares, weight)
                continue
            rows = to_local(state["row_var"])
            rows.lerp_(squares.mean(dim=-1, keepdim=True), weight)
            if parameter.dim() == 2:
                sums += [rows.sum(), squares.sum(dim=0)]
            else:
                to_local(state["col_var"]).lerp_(squares.mean(dim=-2, keepdim=True), weight)
        totals = iter(_sum_over_shards(sums, parameters[0]))
        statistics = []
        for parameter, state, weight in zip(parameters, states, new_shares, strict=True):
            rms = (next(totals) / parameter.numel()).sqrt()
            if parameter.dim() == 2:
                mean = next(totals) / parameter.shape[0]
                state["col_var"].lerp_(next(totals).view(1, -1) / parameter.shape[0], weight)
                statistics.append(_ParameterStatistics(rms, mean))
            else:
                statistics.append(_ParameterStatistics(rms))
        return statistics

    def _replace_gradients_by_updates(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        statistics: list[_ParameterStatistics],
    ) -> list[Tensor]:
        """Divide each gradient in place by the root of its second moments, to get the unclipped update.

        Args:
            parameters: Parameters with a gradient.
            gradients: Local shard of each gradient, which is overwritten by the update.
            states: State of each parameter, with updated moments.
            statistics: Result of :meth:`_update_moments`.

        Returns:
            RMS of each update over all shards.
        """
        sums = []
        for parameter, gradient, state, each in zip(parameters, gradients, states, statistics, strict=True):
            if parameter.dim() < 2:
                variance = to_local(state["variance"]).clone()
            else:
                rows, columns = to_local(state["row_var"]), to_local(state["col_var"])
                mean = rows.mean(dim=-2, keepdim=True) if each.row_mean is None else each.row_mean
                variance = self._rule.estimate_second_moments(rows, columns, mean)
            gradient.mul_(self._rule.replace_by_inverse_root(variance))
            sums.append(gradient.square().sum())
        return [
            (total / parameter.numel()).sqrt()
            for total, parameter in zip(_sum_over_shards(sums, parameters[0]), parameters, strict=True)
        ]


def _sum_over_shards(parts: list[Tensor], parameter: Tensor) -> list[Tensor]:
    """Sum tensors over the ranks of the parameters' sharding group, in one all-reduce.

    Args:
        parts: Tensors of any shape, whose values differ between ranks.
        parameter: Any parameter, which determines the sharding group.

    Returns:
        The sums in the same order. ``parts`` itself, without a collective, if the parameters are not
        sharded.
    """
    group = get_shard_group(parameter)
    if group is None:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
