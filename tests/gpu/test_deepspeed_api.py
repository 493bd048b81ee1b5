"""The installed DeepSpeed has what ``gpu/zero/private_api.py`` changes for a process, and our tables say.

What else is used of it, the tests of the engines run.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from gpu.zero import private_api
from gpu.zero import runtime as zero_runtime
from portable.config.importing.deepspeed import (
    EQUIVALENT,
    NEEDED,
    OPTIMIZERS,
    PARAMS,
    SCHEDULED,
    SCHEDULERS,
    TORCHS_WEIGHT_DECAY,
    UNSUPPORTED,
)


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    return zero_runtime.import_deepspeed("cpu")


def test_process_wide_state_is_there(deepspeed: Any) -> None:
    """What ``release_models`` passes over in silence, and the others change."""
    assert isinstance(deepspeed.ops.__compatible_ops__, dict)
    assert hasattr(deepspeed.comm.comm, "cdb")
    zero = deepspeed.runtime.zero
    assert isinstance(zero.parameter_offload.FWD_MODULE_STACK, list)
    register = zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module
    assert isinstance(register.__defaults__[0], list)
    coordinator = zero.partitioned_param_coordinator.PartitionedParameterCoordinator
    cached = coordinator._PartitionedParameterCoordinator__params_to_release
    assert callable(inspect.getclosurevars(cached).nonlocals["func"].cache_clear)


def test_the_configuration_is_there(deepspeed: Any) -> None:
    assert {"bf16", "fp16", "zero_optimization", "wandb"} <= private_api.config_models().keys()
    assert private_api.config_classes()
    assert private_api.removed_key_error({"nebula": {}}) is not None
    assert private_api.removed_key_error({}) is None


def defaults(kind: type) -> dict[str, Any]:
    """The params of an optimizer or a scheduler; None where there is no default."""
    found = {
        name: None if one.default is inspect.Parameter.empty else one.default
        for name, one in inspect.signature(kind.__init__).parameters.items()  # type: ignore[misc]
        if name not in ("self", "params", "model_params", "optimizer")
        and one.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def test_what_optimizers_take_is_in_the_table(deepspeed: Any) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import config
    from torch.optim import SGD, AdamW

    theirs = defaults(DeepSpeedCPUAdam) | defaults(FusedAdam)
    switches = {config.TORCH_ADAM_PARAM: False, config.ADAM_W_MODE: config.ADAM_W_MODE_DEFAULT}
    for name, found in {"adamw": {**defaults(AdamW), **theirs, **switches}, "sgd": defaults(SGD)}.items():
        assert found.keys() | {*EQUIVALENT.split()} == {*PARAMS[name].split()}
        for param, value in found.items():
            path = f"optimizer.params.{param}"
            if param in OPTIMIZERS[name]:
                assert value == OPTIMIZERS[name][param]
            elif path in UNSUPPORTED:
                assert value == UNSUPPORTED[path]
            elif path in NEEDED or param == "adam_w_mode":
                assert value is True
            else:
                assert param in EQUIVALENT.split()
    assert OPTIMIZERS["adam"] == OPTIMIZERS["adamw"]
    assert PARAMS["adam"] == PARAMS["adamw"]
    assert defaults(AdamW)["weight_decay"] == TORCHS_WEIGHT_DECAY


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_what_schedulers_take_is_in_the_table(kind: str, deepspeed: Any) -> None:
    from deepspeed.runtime import lr_schedules

    found = defaults(getattr(lr_schedules, kind))
    assert found.keys() == {*PARAMS[kind].split()}
    ours = {name: value for name, value in found.items() if name in SCHEDULED and value is not None}
    assert ours == SCHEDULERS[kind]
    assert set(lr_schedules.VALID_LR_SCHEDULES) == set(SCHEDULERS)
