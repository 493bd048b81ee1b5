"""AdamW with 8-bit moments (Dettmers et al., 2021, "8-bit Optimizers via Block-wise Quantization").

Each value is divided by the largest magnitude in its block and rounded to the nearest of 256
levels, which are denser near zero. A block is a part of one row of a parameter, and sharding never
splits a row. Moments, updates and checkpoints are therefore independent of the world size.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.optim.block_size import choose_block_size
from portable.optim.local_shards import create_sharded_zeros, to_local

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor, nn


@cache  # cached, because a copy from the host in every step would be a host sync
def build_quantization_levels(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 levels to which scaled moments are rounded.

    The levels range from 0 to 1 or, if ``signed``, from about -0.993 to 1. Their magnitudes
    span seven decades, and the number of levels doubles from each decade to the next. Zero and
    one are included, but -1 is not. The result is cached, so it must not be modified.

    Args:
        signed: Whether 127 of the levels are negative.
        device: Device of the result.

    Returns:
        Levels, fp32 ``[256]`` in ascending order.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        positive = [10.0 ** (decade - 6) * (0.1 + (i + 0.5) * width) for i in range(count)]
        values += positive + ([-value for value in positive] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


class BlockQuantized(NamedTuple):
    """Values quantized to 8 bits with one scale per block.

    Attributes:
        codes: Index of each value's level in the result of :func:`build_quantization_levels`. A
            uint8 tensor with the shape of the values.
        scales: Largest magnitude in each block, fp32 ``[rows, blocks]``.
    """

    codes: Tensor
    scales: Tensor


def quantize_in_blocks(values: Tensor, block_size: int, *, signed: bool) -> BlockQuantized:
    """Quantize values to 8 bits with one scale per block.

    Unsigned values are never rounded to level 0. Zeros also get the smallest positive level.

    Args:
        values: Values, fp32 ``[rows, ...]``. Must not be empty.
        block_size: Number of consecutive elements of a row that share a scale. Must divide the
            row size.
        signed: Whether the values may be negative. True for first moments, False for second
            moments.

    Returns:
        Codes with the shape of ``values``, and scales ``[rows, blocks]``.
    """
    blocks = values.reshape(values.shape[0], -1, block_size)
    scales = blocks.abs().amax(dim=-1)
    table = build_quantization_levels(signed, values.device)
    midpoints = (table[1:] + table[:-1]) / 2
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
    if not signed:
        # Otherwise a second moment that is rounded to zero would make the next update explode.
        codes.clamp_(min=1)
    return BlockQuantized(codes.view(values.shape), scales)


def dequantize_blocks(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Dequantize codes with their scales. The result differs from the original values by rounding errors.

    Args:
        codes: Codes, uint8 ``[rows, ...]``.
        scales: Scales, fp32 ``[rows, blocks]``.
        signed: Whether the values may be negative.

    Returns:
        Values, fp32 with the shape of ``codes``.
    """
    values = build_quantization_levels(signed, codes.device)[codes.int()]
    if values.numel():  # the shard of a rank may be empty
        values.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
    return values


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments and fp32 arithmetic.

    The state of a parameter consists of ``step`` and two quantized moments. The codes of the
    moments are ``exp_avg_codes`` and ``exp_avg_sq_codes``, uint8 tensors with the shape of the
    parameter. Their scales are ``exp_avg_scales`` and ``exp_avg_sq_scales``, fp32
    ``[rows, blocks]``.

    The moments of some parameters are not quantized. As in AdamW, these moments are ``exp_avg`` and
    ``exp_avg_sq``. This applies to ``full_precision_parameters``, and to vectors, small parameters
    and other parameters for which :func:`portable.optim.block_size.choose_block_size` returns None.

    Args:
        groups: Parameter groups, as for ``torch.optim.AdamW``.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term added to the denominator of an update.
        full_precision_parameters: Parameters with 32-bit moments. Embeddings need them, because the
            gradients of their rows have very different magnitudes.
    """

    found_inf: Tensor | None = None
    """Flag on the device of the parameters, an fp32 scalar. If it is 1, the step does not change anything."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        full_precision_parameters: Collection[nn.Parameter],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._full_precision_ids = {id(parameter) for parameter in full_precision_parameters}

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the initial state of ``parameter``. Its moments are sharded like the parameter."""
        state = {"step": torch.zeros((), device=parameter.device)}
        block = (
            None if id(parameter) in self._full_precision_ids else choose_block_size(tuple(parameter.shape))
        )
        for name in ("exp_avg", "exp_avg_sq"):
            if block is None:
                state[name] = torch.zeros_like(parameter)
            else:
                shape = tuple(parameter.shape)
                blocks = math.prod(shape[1:]) // block
                state[f"{name}_codes"] = create_sharded_zeros(parameter, shape, torch.uint8)
                state[f"{name}_scales"] = create_sharded_zeros(parameter, (shape[0], blocks))
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, unless ``found_inf`` is 1.

        Each rank updates only its shards. A parameter's state is created at its first step.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter] = self.build_initial_state(parameter)
                    self._update_parameter(parameter, group)

    def _update_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update the local shard of a parameter and its state in place.

        If ``found_inf`` is 1, because the step must be skipped, the parameter and its state do not
        change. The gradient is then set to 0.

        Args:
            parameter: Parameter, a DTensor if it is sharded. It must have a gradient.
            group: Parameter group.
        """
        assert parameter.grad is not None
        gradient = to_local(parameter.grad)
        state = {key: to_local(value) for key, value in self.state[parameter].items()}
        applied: Tensor | float = 1.0
        if self.found_inf is not None:
            applied = 1 - self.found_inf
            gradient.masked_fill_(self.found_inf > 0, 0.0)
        state["step"] += applied
        self._update_values(to_local(parameter), gradient, state, group, applied)

    def _update_values(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
        applied: Tensor | float,
    ) -> None:
        """Update a parameter, or some rows of it, and its moments in place.

        Args:
            parameter: Values, fp32.
            gradient: Gradient, fp32. All zeros if ``applied`` is 0.
            state: State of these values. Its moments have the same rows as ``parameter``, and its
                ``step`` already counts this update.
            group: Parameter group.
            applied: 1 to apply the update, or 0 to change nothing. Must be ``1 - found_inf`` if the
                attribute ``found_inf`` is set, because this attribute determines whether 8-bit
                moments are stored.
        """
        beta1, beta2 = group["betas"]
        step = state["step"].clamp(min=1)
        first_moment, second_moment = _read_moment(state, "exp_avg"), _read_moment(state, "exp_avg_sq")
        first_moment.lerp_(gradient, (1 - beta1) * applied)
        second_moment.lerp_(gradient.square(), (1 - beta2) * applied)
        denominator = (second_moment / _compute_bias_correction(beta2, step)).sqrt_().add_(group["eps"])
        rate = group["lr"] / _compute_bias_correction(beta1, step) * applied
        parameter.mul_(1 - group["lr"] * group["weight_decay"] * applied)
        parameter.sub_((first_moment / denominator).mul_(rate))
        self._store_quantized_moment(state, "exp_avg", first_moment)
        self._store_quantized_moment(state, "exp_avg_sq", second_moment)

    def _store_quantized_moment(self, state: dict[str, Tensor], name: str, value: Tensor) -> None:
        """Quantize an updated moment, and store its codes and scales in the state.

        The state does not change if ``found_inf`` is 1. This attribute of the optimizer is 1 if the
        step must be skipped. Does nothing for an fp32 moment, because it was already updated in
        place.

        Args:
            state: Local shards of the state of a parameter.
            name: ``exp_avg`` or ``exp_avg_sq``.
            value: Updated moment, fp32.
        """
        if name in state or not value.numel():
            return
        codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
        quantized = quantize_in_blocks(value, value[0].numel() // scales.shape[1], signed=name == "exp_avg")
        for target, new in zip((codes, scales), quantized, strict=True):
            target.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0, target, new))


def _read_moment(state: dict[str, Tensor], name: str) -> Tensor:
    """Return a moment in fp32: the stored tensor, or a new dequantized tensor for an 8-bit moment."""
    if name in state:
        return state[name]
    return dequantize_blocks(state[f"{name}_codes"], state[f"{name}_scales"], signed=name == "exp_avg")


def _compute_bias_correction(beta: float, step: Tensor) -> Tensor:
    """Compute ``1 - beta ** step`` with ``expm1``, because cancellation would cost 4 digits at beta 0.999."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)
