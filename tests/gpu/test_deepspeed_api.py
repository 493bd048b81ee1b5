"""The installed DeepSpeed has the private APIs that ``gpu/zero/private_api.py`` uses."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from functools import cache
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

RELIED_ON: Mapping[str, Mapping[str, tuple[str, ...] | None]] = {
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": {
        "invalidate_secondary_tensor": (),
        "_swappable_optimizer_subgroup": ("sub_group_id",),
        "_optimizer_states_and_gradient_swap_in": ("sub_group_id", "timer_names"),
        "_optimizer_states_and_gradient_swap_out": ("sub_group_id", "timer_names"),
        "_reassign_or_swap_out_partitioned_parameters": (),  # a decorator hides its parameters
    },
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper": {
        "param_id_to_buffer_id": None,
        "swap_in": ("params", "async_op", "swap_in_buffers"),
        "swap_out_and_release": ("params", "async_op", "force_buffer_release"),
        "synchronize_reads": (),
        "remove_partition_and_release_buffers": ("params",),
    },
    "deepspeed.ops.adam:DeepSpeedCPUAdam": {"ds_opt_adam": None, "opt_id": None},
}
"""By ``module:class``, attributes (None) and methods (their parameters after ``self``) that must exist.

Those alone that need a compiled op or a GPU: the tests of the engines run the others.
"""


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    return zero_runtime.import_deepspeed("cpu")


source_of = cache(inspect.getsource)


def difference(kind: type, name: str, parameters: tuple[str, ...] | None) -> str | None:
    """How ``kind.name`` differs from what is relied on; None if it does not."""
    if parameters is None:
        sources = [source_of(base) for base in kind.__mro__ if base.__module__.startswith("deepspeed")]
        # Many attributes exist on instances only: look for their assignment, by themselves or in a tuple.
        assigned = re.compile(rf"\b(self|Init)\.{name}\b\s*(:[^=\n]+)?=[^=]")
        there = hasattr(kind, name) or any(assigned.search(source) for source in sources)
        return None if there else "is gone"
    method = getattr(kind, name, None)
    if method is None:
        return "is gone"
    found = tuple(inspect.signature(method).parameters)[1:]
    return None if found[: len(parameters)] == parameters else f"takes {found}, not {parameters}"


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in RELIED_ON.items() for name in names]
)
def test_what_is_relied_on_is_there(path: str, name: str, deepspeed: Any) -> None:
    module, _, kind = path.partition(":")
    found = difference(getattr(importlib.import_module(module), kind), name, RELIED_ON[path][name])
    assert found is None, (
        f"DeepSpeed {deepspeed.__version__}: {path}.{name} {found}; gpu/zero/private_api.py was written for "
        f"{private_api.PACKAGE.seen}"
    )


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
