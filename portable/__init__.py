"""The run: configuration, launch, data, model, optimizer, the training loop, checkpoints.

from portable import load_config, train

result = train(load_config("run.yaml", {"train.steps": 20}))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.api import Result, train
    from portable.config import RunConfig, load_config
    from portable.errors import RunError, UserError
    from portable.evaluation.metrics import Metric
    from portable.model.training_loss import Loss, Outputs
    from portable.optim.own import MakesOptimizer
    from portable.run.callbacks import Callback, Run

__all__ = [
    "Callback",
    "Loss",
    "MakesOptimizer",
    "Metric",
    "Outputs",
    "Result",
    "Run",
    "RunConfig",
    "RunError",
    "UserError",
    "load_config",
    "train",
]

# Imported at the first use (PEP 562): every module of the package passes here, and few need all of it.
_HOMES = {
    "Callback": "portable.run.callbacks",
    "Loss": "portable.model.training_loss",
    "MakesOptimizer": "portable.optim.own",
    "Metric": "portable.evaluation.metrics",
    "Outputs": "portable.model.training_loss",
    "Run": "portable.run.callbacks",
    "Result": "portable.api",
    "RunConfig": "portable.config",
    "RunError": "portable.errors",
    "UserError": "portable.errors",
    "load_config": "portable.config",
    "train": "portable.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
