"""Apply the values in a DeepSpeed JSON to the config of a run.

Some settings exist in both: batch sizes, precision, optimizer, schedule, clipping and offloading. A
value in the JSON replaces a default of the run. If the user has set the run's setting, both values
must be equal.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from portable.checks import check_config
from portable.config import keys
from portable.config.origins import format_short_value
from portable.config.validation import find_setting_mistake
from portable.errors import UserError, require
from portable.gpu.zero.config.document import CONFIG_KEY, DeepSpeedDocument
from portable.importing.deepspeed import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config import RunConfig

# Package that each of DeepSpeed's monitors imports.
_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
# Switches of ZeRO++ whose kernels exist only for GPUs.
_GPU_KERNELS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


def apply_document(config: RunConfig, document: DeepSpeedDocument, world_size: int) -> RunConfig:
    """Replace defaults in a config with values from the DeepSpeed JSON.

    The global batch size or the micro-batch size is computed if the other batch sizes determine it.

    Args:
        config: Config of the run.
        document: DeepSpeed JSON of the run, which is stored in the returned config.
        world_size: Number of ranks, used to check the batch sizes.

    Raises:
        UserError: If the JSON contains a key without a counterpart in this trainer, if it
            contradicts a setting that the user has set, if it contradicts itself, if it enables
            ``checkpoint.use_node_local_storage`` in a run with several nodes, or if the resulting
            config is invalid.
    """
    imported = document.imported.raise_first_refusal()
    values: dict[str, Any] = {}

    def set_value(key: str, value: Any, origin: str) -> None:
        current_value = config.get(key)
        if (
            config.is_set(key)
            and current_value != AUTO
            and keys.to_plain_value(current_value) != keys.to_plain_value(value)
        ):
            raise UserError(
                f"{origin} sets {key} to {format_short_value(value)}, but {key} is "
                f"{format_short_value(current_value)}; set only one of the two, or set the value in the "
                "JSON to auto"
            )
        values[key] = value

    precision = imported.values.get("precision", config.precision)
    skipped_keys = {
        "deepspeed.config": True,
        "precision": (precision, config.precision) == ("fp32", "tf32"),
        # Selective checkpointing recomputes activations as well, so it agrees with the JSON.
        "memory.activation_checkpointing": config.memory.activation_checkpointing == "selective",
    }
    for key, value in imported.values.items():
        if skipped_keys.get(key) or (key.startswith("fp16.") and precision != "fp16"):
            continue
        origin = imported.origins[key].text
        if (mistake := find_setting_mistake(type(config), key, value)) is not None:
            raise UserError(f"{origin}: {mistake}")
        if key not in imported.assumed_keys:
            set_value(key, value, origin)
        elif not config.is_set(key):
            values[key] = value
    _reconcile_batch(config, document, world_size, set_value)
    several_nodes = world_size > int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    path = "checkpoint.use_node_local_storage"
    require(
        not (several_nodes and document.get_value(path)),
        f"{document.name}: {path} is true, but a run can only resume if every node can read the complete "
        "checkpoint; remove the key, and set output_dir to shared storage",
    )
    try:
        adopted = config.replaced(values)
        check_config(adopted, with_location=False)
        return adopted.with_document(CONFIG_KEY, document)
    except UserError as error:
        line = str(error).replace("train.schedule_params", "scheduler.params")
        raise UserError(f"{document.name}: {line}") from error


def check_installed(document: DeepSpeedDocument, device_type: str) -> None:
    """Check that this machine has the packages and devices required by the DeepSpeed JSON.

    Args:
        document: DeepSpeed JSON of the run.
        device_type: Type of the run's devices, such as ``cuda``.

    Raises:
        UserError: If the package of an enabled monitor is not installed, or if the JSON enables a
            GPU-only feature but the devices are CPUs.
    """
    for monitor, package in _MONITOR_PACKAGES.items():
        require(
            not document.get_value(f"{monitor}.enabled") or find_spec(package) is not None,
            f"{document.name}: {monitor}.enabled is true, but {package} is not installed; run: pip install "
            f"{package}, or set {monitor}.enabled to false, and log with log.trackers instead",
        )
    for switch in _GPU_KERNELS:
        path = f"zero_optimization.{switch}"
        require(
            not document.get_value(path) or device_type != "cpu",
            f"{document.name}: {path} is true, but DeepSpeed has quantization kernels only for GPUs; "
            f"remove {switch}, or set backend to cuda",
        )


def _reconcile_batch(
    config: RunConfig,
    document: DeepSpeedDocument,
    world_size: int,
    set_value: Callable[[str, Any, str], None],
) -> None:
    """Check that batch size = micro-batch x accumulation x ranks, and compute missing settings.

    Values in the JSON have priority over the run settings. The number of accumulation steps comes
    only from the JSON. Without it, one step is assumed in two cases:

    - The JSON sets the micro-batch size, but no batch size is known.
    - The JSON sets the batch size, which is divisible by the number of ranks, and neither the JSON
      nor the run settings contain a micro-batch size.

    If the number of steps is known, ``train.micro_batch_size`` is always computed, and
    ``train.global_batch_size`` is computed if no batch size is known. Otherwise, nothing is
    computed.

    Args:
        config: Config of the run.
        document: DeepSpeed JSON of the run.
        world_size: Number of ranks.
        set_value: Callback that receives a setting, its computed value, and a description of its
            origin. It raises UserError if the user has set a different value.

    Raises:
        UserError: If the values contradict each other.
    """
    origin = f"{document.name}: gradient_accumulation_steps"
    total = document.get_value("train_batch_size")
    micro = document.get_value("train_micro_batch_size_per_gpu")
    steps = document.get_value("gradient_accumulation_steps")
    if micro is None:
        micro = config.train.micro_batch_size
    if total is None and config.is_set("train.global_batch_size"):
        total = config.train.global_batch_size
    if micro == AUTO:
        micro = None  # computed from the other two values, or searched
        total = config.train.global_batch_size if total is None else total
    sets_micro_batch = document.get_value("train_micro_batch_size_per_gpu") is not None
    is_micro_batch_set = sets_micro_batch or config.is_set("train.micro_batch_size")
    other_batch_keys = {
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    } & document.values.keys()
    sets_only_batch_size = (
        document.get_value("train_batch_size") is not None and not other_batch_keys and not is_micro_batch_set
    )
    if steps is None and (
        (sets_micro_batch and total is None) or (sets_only_batch_size and total % world_size == 0)
    ):
        steps = 1  # DeepSpeed does not accumulate by default, and does not split a batch
    total_name = (
        "train.global_batch_size" if document.get_value("train_batch_size") is None else "train_batch_size"
    )
    micro_name = "train_micro_batch_size_per_gpu" if sets_micro_batch else "train.micro_batch_size"
    if steps is None:
        if sets_micro_batch and total % (micro * world_size):
            raise UserError(
                f"{document.name}: {total_name} {total} is not divisible by train_micro_batch_size_per_gpu x "
                f"the number of ranks ({micro} x {world_size}); set train_micro_batch_size_per_gpu to auto"
            )
        return
    if total is None:
        total = micro * steps * world_size
        set_value("train.global_batch_size", total, origin)
    matching_micro_batch, remainder = divmod(total, steps * world_size)
    if remainder:
        raise UserError(
            f"{document.name}: {total_name} {total} is not divisible by gradient_accumulation_steps x the "
            f"number of ranks ({steps} x {world_size}); set gradient_accumulation_steps to auto"
        )
    if is_micro_batch_set and micro not in (None, matching_micro_batch):
        raise UserError(
            f"{document.name}: {total_name} {total} does not equal {micro_name} x "
            f"gradient_accumulation_steps x the number of ranks ({micro} x {steps} x {world_size}); set "
            f"{micro_name} to auto"
        )
    set_value("train.micro_batch_size", matching_micro_batch, origin)
