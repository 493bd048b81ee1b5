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
        settings: Settings of the loss scale search.
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
        """Factor of the loss, an fp32 scalar on the device."""

    def update(self, overflow: Tensor) -> Tensor:
        """Update the loss scale after an optimizer step. Does not trigger a host-device sync.

        Args:
            overflow: Whether gradients on any rank were not finite, as a bool scalar on the device.

        Returns:
            Whether gradients overflowed at the minimum scale, as a bool scalar on the device.
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
        """Read the state of the search from the device. Triggers a host-device sync."""
        return {
            **dict(zip(STATE_NAMES, self._state.tolist(), strict=True)),
            "overflows": int(self._overflows),
        }

    def restore_state(self, state: Mapping[str, float]) -> None:
        """Set the state of the search to the values that :meth:`read_state` returned."""
        self._state.copy_(torch.tensor([state[name] for name in STATE_NAMES], dtype=torch.float64))
        self._overflows.fill_(state["overflows"])
        self.scale = self._state[0].float()
