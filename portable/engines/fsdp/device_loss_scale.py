"""Dynamic fp16 loss scaling on the device, without host-device syncs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portable.engines.loss_scale import STATE_NAMES, LossScaleSearch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from portable.config.sections import Fp16Config


class DeviceLossScale(LossScaleSearch):
    """Dynamic loss scale whose state consists of device tensors.

    Args:
        settings: Settings of the dynamic loss scale.
        device: Device of the tensors.
    """

    def __init__(self, settings: Fp16Config, device: torch.device) -> None:
        self.min_scale = settings.min_loss_scale
        self._window = settings.loss_scale_window
        self._hysteresis = settings.hysteresis
        start = [2.0**settings.initial_scale_power, 0, -1, settings.hysteresis]
        # The values are in the order of STATE_NAMES. Integers and powers of two are exact in float64.
        self._state = torch.tensor(start, dtype=torch.float64, device=device)
        self._overflows = torch.zeros((), device=device)
        self.scale = self._state[0].float()
        """Factor by which the loss is multiplied, an fp32 scalar on the device."""

    def update(self, overflow: Tensor) -> Tensor:
        """Update the loss scale for a step. Does not trigger a host-device sync.

        See :mod:`portable.engines.loss_scale` for the rule. Must be called once per step, after the
        gradients have been unscaled with the previous scale.

        Args:
            overflow: Whether the loss or any gradient on any rank was not finite, a bool scalar on
                the device.

        Returns:
            Whether the scale would have to be lowered but is already at its minimum, a bool scalar
            on the device. An overflow that the hysteresis tolerates does not count.
        """
        scale, count, last, patience = self._state
        lower = overflow & (patience <= 1)
        exhausted: Tensor = lower & (scale <= self.min_scale)
        stable = count - last - 1
        grow = ~overflow & (stable > 0) & (stable % self._window == 0)
        scale = torch.where(lower, (scale / 2).clamp(min=self.min_scale), torch.where(grow, scale * 2, scale))
        patience = torch.where(overflow & ~lower, patience - 1, patience)
        patience = torch.where(grow, self._hysteresis, patience)
        self._state = torch.stack([scale, count + 1, torch.where(overflow, count, last), patience])
        self._overflows += overflow
        self.scale = scale.float()
        return exhausted

    def read_state(self) -> dict[str, float]:
        """Read the state of the loss scale from the device. Triggers a host-device sync."""
        return {
            **dict(zip(STATE_NAMES, self._state.tolist(), strict=True)),
            "overflows": int(self._overflows),
        }

    def restore_state(self, state: Mapping[str, float]) -> None:
        """Set the state of the loss scale to values that :meth:`read_state` has returned."""
        self._state.copy_(torch.tensor([state[name] for name in STATE_NAMES], dtype=torch.float64))
        self._overflows.fill_(state["overflows"])
        self.scale = self._state[0].float()
