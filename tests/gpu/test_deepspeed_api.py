"""The parameters of the installed DeepSpeed's optimizers and schedulers match our tables."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from portable.gpu.zero import private_api
from portable.gpu.zero import runtime as zero_runtime
from portable.importing.deepspeed import (
    KEYS,
    OPTIMIZER_DEFAULTS,
    SCHEDULER_DEFAULTS,
    TORCH_ADAMW_WEIGHT_DECAY,
)
from portable.importing.foreign_keys import IgnoredKey, RefusedKey


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    return zero_runtime.import_deepspeed("cpu")


def defaults(kind: type) -> dict[str, Any]:
    """Return the parameters of an optimizer or a scheduler with their defaults, or None without a default."""
    found = {
        name: None if one.default is inspect.Parameter.empty else one.default
        for name, one in inspect.signature(kind.__init__).parameters.items()  # type: ignore[misc]
        if name not in ("self", "params", "model_params", "optimizer")
        and one.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def test_deepspeed_optimizer_params_match_table(deepspeed: Any) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from torch.optim import SGD, AdamW

    assert defaults(AdamW)["weight_decay"] == TORCH_ADAMW_WEIGHT_DECAY
    theirs = {
        "adamw": defaults(AdamW) | defaults(DeepSpeedCPUAdam) | defaults(FusedAdam),
        "sgd": defaults(SGD),
    }
    for name, found in theirs.items():
        assert found.keys() <= private_api.list_type_params(name)
        for param in private_api.list_type_params(name):
            key = KEYS[f"optimizer.params.{param}"]
            if param in OPTIMIZER_DEFAULTS[name]:
                assert found[param] == OPTIMIZER_DEFAULTS[name][param]
            elif isinstance(key, RefusedKey):  # except for the default
                assert found[param] in (False, *key.unless)
            else:
                assert isinstance(key, IgnoredKey) or found.get(param, True) is True


@pytest.mark.parametrize("kind", SCHEDULER_DEFAULTS)
def test_deepspeed_scheduler_params_match_table(kind: str, deepspeed: Any) -> None:
    from deepspeed.runtime import lr_schedules

    found = defaults(getattr(lr_schedules, kind))
    assert found.keys() == private_api.list_type_params(kind)
    settings = {
        name
        for name in found
        if f"scheduler.params.{name}" in KEYS and KEYS[f"scheduler.params.{name}"].targets
    }
    assert {name: found[name] for name in settings if found[name] is not None} == SCHEDULER_DEFAULTS[kind]
    assert set(lr_schedules.VALID_LR_SCHEDULES) == set(SCHEDULER_DEFAULTS)
