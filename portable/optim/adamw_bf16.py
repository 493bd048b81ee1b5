"""AdamW for weights in bf16, with fp32 arithmetic and stochastic rounding (``train.master_dtype: bf16``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.optim.adamw_8bit import AdamW8bit
from portable.optim.local_shards import to_local
from portable.optim.stochastic_rounding import (
    compute_rounding_key,
    compute_step_key,
    draw_random_bits,
    list_element_indices,
    round_stochastically,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor, nn

MAX_CHUNK_ELEMENTS = 2**24
"""Largest number of elements that are updated at once, unless a row has more. It limits the fp32 copies."""


class AdamWBf16(AdamW8bit):
    """AdamW whose parameters and gradients are bf16, and whose moments are bf16 or have 8 bits.

    Parameters and moments are converted to fp32, updated, and rounded stochastically, a few rows at a time.
    The names of the state are those of :class:`AdamW8bit`. Entries that are fp32 there are bf16.

    Args:
        groups: Parameter groups, as for ``torch.optim.AdamW``.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term that is added to the denominator of an update.
        names: Name of each parameter.
        seed: Seed of the random bits.
        unquantized_parameters: Parameters with bf16 moments. The others have 8-bit moments, unless they are
            small.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        names: Mapping[nn.Parameter, str],
        seed: int,
        unquantized_parameters: Collection[nn.Parameter],
    ) -> None:
        super().__init__(
            groups, lr=lr, betas=betas, eps=eps, full_precision_parameters=unquantized_parameters
        )
        self._rounding_keys = {
            id(parameter): compute_rounding_key(seed, name) for parameter, name in names.items()
        }

    def _update_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update the local shard of a parameter and its state, unless ``found_inf`` is 1.

        Args:
            parameter: Parameter, a DTensor if it is sharded. Its gradient is set to 0 if ``found_inf`` is 1.
            group: Parameter group.
        """
        assert parameter.grad is not None
        is_skipped = self.found_inf
        applied: Tensor | float = 1.0 if is_skipped is None else 1 - is_skipped
        state = {key: to_local(value) for key, value in self.state[parameter].items()}
        step = state.pop("step")
        step += applied
        step_key = compute_step_key(self._rounding_keys[id(parameter)], step)
        first_indices, offsets = list_element_indices(parameter)
        values, gradient = torch.atleast_1d(to_local(parameter)), torch.atleast_1d(to_local(parameter.grad))
        state = {key: torch.atleast_1d(value) for key, value in state.items()}
        num_rows = max(1, MAX_CHUNK_ELEMENTS // max(1, len(offsets)))
        for start in range(0, len(values), num_rows):
            rows = slice(start, start + num_rows)
            stored = {"parameter": values[rows]} | {key: value[rows] for key, value in state.items()}
            updated = {
                key: value.float() if value.dtype == torch.bfloat16 else value
                for key, value in stored.items()
            }
            chunk_gradient = gradient[rows].float()
            if is_skipped is not None:
                chunk_gradient.masked_fill_(is_skipped > 0, 0.0)
            new_parameter = updated.pop("parameter")
            self._update_values(new_parameter, chunk_gradient, {**updated, "step": step}, group, applied)
            random_bits = draw_random_bits(first_indices[rows, None] + offsets, step_key)
            for key, value in {"parameter": new_parameter, **updated}.items():
                if stored[key].dtype == torch.bfloat16:
                    # Parameters and moments use different halves of the bits.
                    bits = random_bits if key == "parameter" else random_bits >> 16
                    # A value that does not change is a bf16 value, so it is not rounded.
                    stored[key].copy_(round_stochastically(value, bits.view(value.shape)))
