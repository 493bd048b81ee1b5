"""Save and restore the state of DeepSpeed's dynamic fp16 loss scaler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.engines.loss_scale import STATE_NAMES, LossScaleSearch

if TYPE_CHECKING:
    from collections.abc import Mapping


class DeepSpeedLossScale(LossScaleSearch):
    """Wrapper around DeepSpeed's dynamic fp16 loss scaler that saves and restores its state.

    Args:
        scaler: DeepSpeed's dynamic loss scaler.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._overflows = 0
        self.min_scale = float(scaler.min_scale)

    def count_overflow(self) -> None:
        """Count an update that was skipped because of an overflow. DeepSpeed does not count these updates."""
        self._overflows += 1

    def read_state(self) -> dict[str, float]:
        """Return the state of DeepSpeed's loss scaler.

        The key ``overflows`` contains the number of overflows so far.
        """
        return {**{name: getattr(self._scaler, name) for name in STATE_NAMES}, "overflows": self._overflows}

    def restore_state(self, state: Mapping[str, float]) -> None:
        """Restore the state of DeepSpeed's loss scaler and the number of overflows.

        Args:
            state: Values returned by :meth:`read_state`, keyed by name.
        """
        for name in STATE_NAMES:
            setattr(self._scaler, name, state[name] if name == "cur_scale" else int(state[name]))
        self._overflows = int(state["overflows"])
