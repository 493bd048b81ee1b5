"""Build and restore the optimizer that ZeRO wraps: the optimizer of the run, or DeepSpeed's CPU version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.engines.engine_interface import COMPUTE_DTYPES
from portable.errors import UserError, require, to_one_line
from portable.gpu.zero import private_api
from portable.gpu.zero.op_builds import wait_for_op_build
from portable.optim import custom_optimizer
from portable.optim.optimizers import build_optimizer, build_parameter_groups
from portable.optim.stored_state import restore_custom_group_values
from portable.optim.weight_average import install_weight_average
from portable.plugins import is_plugin_name
from portable.terminal import discard_native_stdout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from portable.config import RunConfig
    from portable.config.sections import TrainConfig
    from portable.converters.checkpoint import OptimizerState
    from portable.gpu.zero.config import DeepSpeedDocument
    from portable.optim.optimizers import OptimizerGroup

_KEY = "zero_force_ds_cpu_optimizer"


def check_zero_optimizer(config: RunConfig, document: DeepSpeedDocument | None) -> None:
    """Check that the DeepSpeed JSON is compatible with the optimizer of the run.

    If ``zero_allow_untested_optimizer`` is false, ``train.optimizer`` must be ``adamw``. If the
    optimizer is offloaded and ``zero_force_ds_cpu_optimizer`` is true, the JSON requires
    DeepSpeed's CPU optimizer. In this case, ``train.optimizer`` must also be ``adamw``, and the C++
    code of the CPU optimizer is compiled. The first compilation on a machine takes minutes.

    Args:
        config: Config of the run.
        document: DeepSpeed JSON of the run. If None, nothing is checked.

    Raises:
        UserError: If the JSON is incompatible with the optimizer, or if DeepSpeed's CPU optimizer
            cannot be compiled.
    """
    if document is None:
        return
    tested = (
        document.get_value("zero_allow_untested_optimizer") is not False or config.train.optimizer == "adamw"
    )
    require(
        tested,
        f"{document.name}: zero_allow_untested_optimizer is false, but DeepSpeed has not tested "
        f"{config.train.optimizer} with ZeRO; use adamw, or set zero_allow_untested_optimizer to true",
    )
    if not _is_cpu_adam_forced(config, document):
        return
    require(
        config.train.optimizer == "adamw",
        f"{document.name}: {_KEY} is true, but DeepSpeed's CPU optimizer is AdamW, not "
        f"{config.train.optimizer}; set {_KEY} to false",
    )
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        builder = CPUAdamBuilder()
        wait_for_op_build(builder.name)
        with discard_native_stdout():
            builder.load()
    except Exception as error:
        raise UserError(
            f"{document.name}: {_KEY} is true, but DeepSpeed's cpu_adam cannot be built "
            f"({to_one_line(error)}); install a C++ compiler and ninja, or set {_KEY} to false"
        ) from error


def build_zero_optimizer(
    config: RunConfig,
    document: DeepSpeedDocument | None,
    model: nn.Module,
    groups: Mapping[str, OptimizerGroup],
) -> Any:
    """Build the optimizer to pass to ``deepspeed.initialize``.

    This is ``DeepSpeedCPUAdam`` if the optimizer is offloaded and the JSON sets
    ``zero_force_ds_cpu_optimizer`` to true. Otherwise, it is the optimizer in ``train.optimizer``.

    Args:
        config: Config of the run.
        document: DeepSpeed JSON of the run, or None.
        model: Transformers model. Its parameters may already be partitioned.
        groups: Parameter group of each parameter, keyed by parameter name.

    Returns:
        A ``torch.optim.Optimizer``. For a custom optimizer, this is the wrapped optimizer, not the
        :class:`~portable.optim.custom_optimizer.CustomOptimizer`.
    """
    parameters = dict(model.named_parameters())
    if not _is_cpu_adam_forced(config, document):
        compute = COMPUTE_DTYPES[config.precision]
        built = build_optimizer(config.train, parameters, groups, compute_dtype=compute)
        return built.inner if isinstance(built, custom_optimizer.CustomOptimizer) else built
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    train = config.train
    param_groups = build_parameter_groups(parameters, groups, train.learning_rate)
    forced = DeepSpeedCPUAdam(param_groups, lr=train.learning_rate, betas=train.betas, eps=train.eps)
    if train.ema is not None:
        install_weight_average(forced, train.ema)
    return forced


def restore_param_groups(optimizer: Any, train: TrainConfig, stored: OptimizerState | None) -> None:
    """Restore the numbers that a custom optimizer keeps in its parameter groups.

    An example is a step count. Settings of the run, such as the learning rate, are not restored.
    Does nothing for built-in optimizers or without stored state.

    Args:
        optimizer: Optimizer. Its groups are modified in place.
        train: The ``train`` section.
        stored: Optimizer state from a checkpoint, or None.
    """
    if is_plugin_name(train.optimizer):
        restore_custom_group_values(optimizer.param_groups, stored)


def build_state_samples(optimizer: Any, train: TrainConfig) -> dict[str, Any]:
    """Build an example value for each entry of a custom optimizer's state.

    When stored state is restored, each entry is converted to the type of its example.

    Returns:
        Example values, keyed by entry name. Entries without an example are restored as fp32 tensors
        on the device. Scalar tensors, such as the step count, have no example if the
        optimizer is ``fused`` or ``capturable``. Empty for a built-in optimizer.
    """
    if not is_plugin_name(train.optimizer):
        return {}
    on_device = {"fused", "capturable"} & {name for name, value in optimizer.defaults.items() if value}
    samples = custom_optimizer.build_sample_state(train)
    return {k: v for k, v in samples.items() if not (on_device and getattr(v, "shape", None) == ())}


def replay_optimizer_counters(optimizer: Any, steps: int) -> None:
    """Restore the step-dependent numbers that DeepSpeed's CPU optimizer stores outside its state.

    Does nothing for other optimizers.

    Args:
        optimizer: Optimizer that was passed to ``deepspeed.initialize``.
        steps: Number of updates before the checkpoint.
    """
    private_api.replay_cpu_adam_steps(optimizer, steps, [torch.zeros(1) for _ in range(4)])


def _is_cpu_adam_forced(config: RunConfig, document: DeepSpeedDocument | None) -> bool:
    return (
        document is not None
        and document.get_value(_KEY) is True
        and config.memory.offload_optimizer != "none"
    )
