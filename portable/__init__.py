"""Train Hugging Face models on CPUs, GPUs and TPUs from one YAML file.

Example:
    Train for 20 steps with the settings in a file::

        from portable import load_config, train

        result = train(load_config("run.yaml", {"train.steps": 20}))
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from portable.api import Result, plan, train
    from portable.callbacks import Callback, Run
    from portable.command_line import load_config
    from portable.config import RunConfig
    from portable.converters import (
        Checkpoint,
        CheckpointError,
        Conversion,
        convert,
        open_checkpoint,
        write_checkpoint,
    )
    from portable.errors import RunError, UserError
    from portable.evaluation.metrics import Metric
    from portable.model.training_loss import Loss, Outputs
    from portable.optim.custom_optimizer import MakesOptimizer
    from portable.planner.plan_tables import Plan

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

# By default, importing torch also imports the packages of all installed device backends, which takes seconds.
# Disable this, because each backend of this project imports the package that it needs.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from portable.converters.lazy_imports import build_lazy_getattr

__getattr__ = build_lazy_getattr(__name__)
