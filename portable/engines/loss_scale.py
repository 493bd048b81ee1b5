"""Dynamic loss scaling for fp16: metrics, checkpoints, and the error if the lowest scale overflows.

All strategies change the scale by the same rule, which is DeepSpeed's. The scale is doubled after
``loss_scale_window`` updates without an overflow. An overflow halves the scale, but the first
``hysteresis - 1`` overflows are tolerated and leave it unchanged. For example, with a hysteresis of
2, the first overflow changes nothing, and every further overflow halves the scale. Each doubling
renews the number of tolerated overflows.
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
"""Names of the values of the search state. They are the names that DeepSpeed uses."""


class LossScaleSearch(ABC):
    """Base class of the dynamic search for the fp16 loss scale.

    After an overflow, the update is skipped, and the scale may be lowered. An overflow counts as a
    failure only at the lowest scale. See :mod:`portable.engines.loss_scale` for the rule by which
    the scale changes.

    A subclass stores the state of the search, and implements :meth:`read_state` and
    :meth:`restore_state`. This class provides the metrics, the file ``loss_scale.json`` in a
    checkpoint, and the error for overflows at the lowest scale.

    Attributes:
        min_scale: Lowest scale of the search.
    """

    min_scale: float

    @abstractmethod
    def read_state(self) -> dict[str, float]:
        """Return the state of dynamic loss scaling.

        The result has one value for each name in :data:`STATE_NAMES`. Under the key ``overflows``,
        it also contains the number of updates that were skipped because of an overflow. Reading the
        state triggers a host-device sync.
        """

    @abstractmethod
    def restore_state(self, state: Mapping[str, float]) -> None:
        """Restore the state of the search from values that :meth:`read_state` returned."""

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
        """Write the state of dynamic loss scaling to ``loss_scale.json`` of a checkpoint.

        Called only on rank 0. Triggers a host-device sync.
        """
        write_durably(folder / _FILE, json.dumps(self.read_state()) + "\n")

    def load_state(self, folder: AnyPath) -> None:
        """Restore the state of dynamic loss scaling from the folder of a checkpoint.

        Does nothing if the checkpoint was not written by an fp16 run.

        Raises:
            UserError: If the state file is damaged.
        """
        path = folder / _FILE
        if not path.exists():
            return
        try:
            stored = {"overflows": 0, **read_json_file(path)}  # older versions do not write "overflows"
            state = {name: float(stored[name]) for name in (*STATE_NAMES, "overflows")}
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise UserError(f"{path}: is damaged ({to_one_line(error)}); use an older checkpoint") from error
        self.restore_state(state)
