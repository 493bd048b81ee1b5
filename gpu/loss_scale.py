"""Dynamic loss scaling for fp16: how the scale is searched for, counted, and kept over a break.

The rule is DeepSpeed's, so that the search goes on alike under every strategy: an overflow halves the scale
(the first ``hysteresis - 1`` of a kind are let pass), ``loss_scale_window`` updates without one double it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from portable.checkpoint.store import write_durably
from portable.errors import RunError, UserError, one_line

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from portable.config import Fp16Config
    from portable.paths import Place

_FILE = "loss_scale.json"
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeviceScaler:
    """A search that never waits for the device.

    Args:
        settings: of the search.
        device: where it goes on.
    """

    dynamic = True

    def __init__(self, settings: Fp16Config, device: torch.device) -> None:
        self.min_scale = settings.min_loss_scale
        self._window = settings.loss_scale_window
        self._hysteresis = settings.hysteresis
        start = [2.0**settings.initial_scale_power, 0, -1, settings.hysteresis]
        # Whole numbers and powers of two, all exact.
        self._state = torch.tensor(start, dtype=torch.float64, device=device)
        self._overflows = torch.zeros((), device=device)
        self.scale = self._state[0].float()
        """What losses are multiplied by, an fp32 scalar on the device."""

    def update(self, overflow: Tensor) -> Tensor:
        """Take account of one update.

        Args:
            overflow: whether its gradients were not finite on any rank, a scalar on the device.

        Returns:
            whether they overflowed at the lowest scale, a scalar on the device.
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

    @property
    def overflows(self) -> int:
        """Updates left out since the start of the run; waits for the device."""
        return int(self._overflows)

    @overflows.setter
    def overflows(self, count: int) -> None:
        self._overflows.fill_(count)

    def __getattr__(self, name: str) -> Any:
        if name not in _STATE:
            raise AttributeError(name)
        return float(self._state[_STATE.index(name)])  # waits for the device

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _STATE:
            self._state[_STATE.index(name)] = value
            self.scale = self._state[0].float()
        else:
            super().__setattr__(name, value)


class LossScale:
    """The search for a loss scale in the metrics, in checkpoints, and at its end.

    Attributes:
        dynamic: whether there is a search at all, in which an overflow is no failure.

    Args:
        scaler: DeepSpeed's or a :class:`DeviceScaler`, which have the same attributes; or None.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self.dynamic = bool(getattr(scaler, "dynamic", False))
        if self.dynamic and not hasattr(scaler, "overflows"):
            scaler.overflows = 0

    def count_overflow(self) -> None:
        """Count an update that the search has left out."""
        self._scaler.overflows += 1

    def figures(self) -> dict[str, float]:
        """For the metrics."""
        if not self.dynamic:
            return {}
        return {"overflows": self._scaler.overflows, "loss_scale": float(self._scaler.cur_scale)}

    def exhausted(self) -> RunError:
        """What to raise where no scale is small enough."""
        return RunError(
            f"precision: fp16 gradients overflow even at the lowest loss scale ({self._scaler.min_scale:g}); "
            "use precision bf16 or fp32, a lower fp16.min_loss_scale, or a lower train.learning_rate"
        )

    def translated(self, error: Exception) -> Exception:
        """What to raise in place of DeepSpeed's ``error``, which may mean that no scale is small enough."""
        if self.dynamic and "loss scale already at minimum" in str(error):
            return self.exhausted()
        return error

    def save(self, folder: Path) -> None:
        """Write where the search stands; on the first rank."""
        if self.dynamic:
            state = {name: getattr(self._scaler, name) for name in (*_STATE, "overflows")}
            write_durably(folder / _FILE, json.dumps(state) + "\n")

    def load(self, folder: Place) -> None:
        """Go on with the search where ``folder`` left it, if it was written in fp16."""
        path = folder / _FILE
        if not self.dynamic or not path.exists():
            return
        try:
            stored = {"overflows": 0, **json.loads(path.read_text("utf-8"))}  # which older ones do not count
            state = {name: float(stored[name]) for name in (*_STATE, "overflows")}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}: damaged ({one_line(error)}); use an older checkpoint") from error
        for name, value in state.items():
            setattr(self._scaler, name, value if name == "cur_scale" else int(value))
