"""Dynamic loss scaling for fp16, as DeepSpeed does it: what it counts, and how it goes on after a break."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from portable.checkpointing import write_durably
from portable.errors import RunError, UserError, one_line

if TYPE_CHECKING:
    from pathlib import Path

_FILE = "loss_scale.json"
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """The scaler of a ZeRO optimizer.

    Attributes:
        dynamic: whether it looks for the scale by itself, so that an overflow is part of the search and not
            a failure.
        overflows: updates left out since the start for it.
    """

    def __init__(self, zero_optimizer: Any) -> None:
        self._scaler = zero_optimizer.loss_scaler
        self.dynamic = bool(self._scaler.dynamic)
        self.overflows = 0

    def figures(self) -> dict[str, float]:
        """For the metrics."""
        if not self.dynamic:
            return {}
        return {"overflows": self.overflows, "loss_scale": float(self._scaler.cur_scale)}

    def translated(self, error: Exception) -> Exception:
        """What to raise in place of ``error``, which may mean that no scale is small enough."""
        if not (self.dynamic and "loss scale already at minimum" in str(error)):
            return error
        return RunError(
            f"precision: fp16 gradients overflow even at the lowest loss scale ({self._scaler.min_scale:g}); "
            "use precision bf16 or fp32, a larger fp16.initial_scale_power in deepspeed.config, or a lower "
            "train.learning_rate"
        )

    def save(self, folder: Path) -> None:
        """Write where the search stands; on the first rank."""
        if self.dynamic:
            state = {name: getattr(self._scaler, name) for name in _STATE}
            write_durably(folder / _FILE, json.dumps(state) + "\n")

    def load(self, folder: Path) -> None:
        """Go on with the search where ``folder`` left it, if it was written in fp16."""
        path = folder / _FILE
        if not self.dynamic or not path.exists():
            return
        try:
            state = {name: float(json.loads(path.read_text("utf-8"))[name]) for name in _STATE}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}: damaged ({one_line(error)}); use an older checkpoint") from error
        for name, value in state.items():
            setattr(self._scaler, name, value if name == "cur_scale" else int(value))
