"""Dynamic loss scaling for fp16: metrics, checkpoints, and the error at the lowest scale.

The search for the scale follows DeepSpeed's rule under every strategy. The scale is doubled after
``loss_scale_window`` updates without an overflow. At the start of the run and after each doubling,
the first ``hysteresis - 1`` overflows leave the scale unchanged. Every further overflow halves it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from portable.errors import RunError, UserError, to_one_line
from portable.paths import read_json_file, write_durably

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from portable.converters.storage.path_or_url import AnyPath

_FILE = "loss_scale.json"
STATE_NAMES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""DeepSpeed's names for the values that make up the state of the search."""


class LossScaleSearch(ABC):
    """Dynamic search for the fp16 loss scale.

    An overflow skips the update and may lower the scale. It counts as a failure only at the lowest
    scale.

    Attributes:
        min_scale: Lowest scale of the search.
    """

    min_scale: float

    @abstractmethod
    def read_state(self) -> dict[str, float]:
        """Return the values of :data:`STATE_NAMES`, and the number of skipped updates as ``overflows``.

        Triggers a host-device sync.
        """

    @abstractmethod
    def restore_state(self, state: Mapping[str, float]) -> None:
        """Set the state of the search to the values that :meth:`read_state` returned."""

    def get_metrics(self) -> dict[str, float]:
        """Return the metrics ``overflows`` and ``loss_scale``. Triggers a host-device sync."""
        state = self.read_state()
        return {"overflows": int(state["overflows"]), "loss_scale": float(state["cur_scale"])}

    def build_exhausted_error(self) -> RunError:
        """Build the error for gradients that overflow even at the lowest scale."""
        return RunError(
            f"precision: fp16 gradients overflow even at the lowest loss scale ({self.min_scale:g}); "
            "use precision bf16 or fp32, a lower fp16.min_loss_scale, or a lower train.learning_rate"
        )

    def save_state(self, folder: Path) -> None:
        """Write the state of the search into the folder of a checkpoint. Called only on rank 0."""
        write_durably(folder / _FILE, json.dumps(self.read_state()) + "\n")

    def load_state(self, folder: AnyPath) -> None:
        """Restore the state of the search from the folder of a checkpoint.

        Does nothing if the checkpoint was not written by an fp16 run.

        Raises:
            UserError: If the state file is damaged.
        """
        path = folder / _FILE
        if not path.exists():
            return
        try:
            stored = {"overflows": 0, **read_json_file(path)}  # files of older versions have no "overflows"
            state = {name: float(stored[name]) for name in (*STATE_NAMES, "overflows")}
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise UserError(f"{path}: is damaged ({to_one_line(error)}); use an older checkpoint") from error
        self.restore_state(state)
