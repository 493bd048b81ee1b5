"""The run: configuration, launch, data, model, optimizer, the training loop, checkpoints.

from portable import load_config, train

result = train(load_config("run.yaml", {"train.steps": 20}))
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from converters import Checkpoint, CheckpointError, Conversion, convert, open_checkpoint, write_checkpoint
    from portable.api import Result, plan, train
    from portable.callbacks import Callback, Run
    from portable.command_line import load_config
    from portable.config import RunConfig
    from portable.errors import RunError, UserError
    from portable.evaluation.metrics import Metric
    from portable.model.training_loss import Loss, Outputs
    from portable.optim.user_optimizer import MakesOptimizer
    from portable.planner.tables import Plan

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "Conversion",
    "Loss",
    "MakesOptimizer",
    "Metric",
    "Outputs",
    "Plan",
    "Result",
    "Run",
    "RunConfig",
    "RunError",
    "UserError",
    "convert",
    "load_config",
    "open_checkpoint",
    "plan",
    "train",
    "write_checkpoint",
]

# torch would load the package of every installed device, which takes seconds, in each process that imports
# it; a backend loads its own.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

SIBLINGS = ("converters", "gpu", "tpu")
"""The packages that lie beside this one."""
_BESIDE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib is slow)


class _Beside:
    """Finds :data:`SIBLINGS` here, where the current folder or PYTHONPATH has such names, too."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_BESIDE]) if name in SIBLINGS else None


def is_beside(place: str) -> bool:
    """Whether a file or folder lies in the folder that holds this package and :data:`SIBLINGS`."""
    folder = os.path.dirname(place.removesuffix(f"{os.sep}__init__.py"))  # noqa: PTH120
    return os.path.realpath(folder) == os.path.realpath(_BESIDE)


def _refuse_others() -> None:
    for name in SIBLINGS:
        module = sys.modules.get(name)
        place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if place is not None and not is_beside(place):
            raise ImportError(
                f"{name} is a package of portable-trainer, and {place} was imported under that name before; "
                "rename that module",
                name=name,
            )


_refuse_others()
sys.meta_path.insert(0, _Beside)


from converters.lazy import make_lazy_getattr  # noqa: E402  (of the folder beside this one)

__getattr__ = make_lazy_getattr(__name__)
