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
"""Maximum number of elements that are updated at once, unless a row has more. This limits the memory of the
fp32 copies.
"""


class AdamWBf16(AdamW8bit):
    """AdamW with bf16 parameters and gradients, and with bf16 or 8-bit moments.

    A step processes a few rows of a parameter at a time. It converts the parameter and the moments
    to fp32, and updates them. Values that are stored in bf16 are then rounded stochastically, and
    8-bit moments are quantized again. The state has the same entries as in :class:`AdamW8bit`,
    except that moments that are not quantized have the dtype bf16.

    Args:
        groups: Parameter groups, as for ``torch.optim.AdamW``.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term added to the denominator of an update.
        names: Name of each parameter in ``groups``.
        seed: Seed of the random bits. The bits of an element depend only on the seed, the name of
            the parameter, the step and the index of the element. The rounding is therefore the
            same with any sharding and after a resume.
        unquantized_parameters: Parameters with bf16 moments. Parameters for which
            :func:`portable.optim.block_size.choose_block_size` returns None, such as vectors and
            small parameters, also have bf16 moments. All other parameters have 8-bit moments.
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
            parameter: Parameter, a DTensor if it is sharded. It must have a gradient. A bf16
                gradient is not modified.
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
                    # Use different halves of the bits for parameters and moments, so that their rounding
                    # errors are independent.
                    bits = random_bits if key == "parameter" else random_bits >> 16
                    # Rounding keeps an unchanged value, because it is already a bf16 value.
                    stored[key].copy_(round_stochastically(value, bits.view(value.shape)))
