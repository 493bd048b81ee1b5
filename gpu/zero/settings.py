"""Build the configuration for ``deepspeed.initialize`` from the run settings and the DeepSpeed JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.gpu.zero import config as deepspeed_json
from portable.gpu.zero import nvme
from portable.gpu.zero.buckets import compute_swap_buffer_elements

if TYPE_CHECKING:
    from torch import nn

    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig


@dataclass(frozen=True)
class ModelElementCounts:
    """Model sizes that determine DeepSpeed's buckets and buffers.

    Attributes:
        hidden_size: Hidden size of the model.
        largest_parameter: Number of elements in the largest parameter.
    """

    hidden_size: int
    largest_parameter: int

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelElementCounts:
        """Read the hidden size and the size of the largest parameter from a model.

        The model may be on the meta device. If its config has no hidden size, 1024 is used.
        """
        text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        largest = max(parameter.numel() for parameter in model.parameters())
        return cls(int(getattr(text, "hidden_size", 1024)), largest)


def build_deepspeed_config(
    config: RunConfig,
    plan: BatchPlan,
    sizes: ModelElementCounts,
    document: deepspeed_json.DeepSpeedDocument | None,
    device_type: str,
) -> dict[str, Any]:
    """Build the argument ``config`` for ``deepspeed.initialize``.

    Values in the DeepSpeed JSON that have no equivalent run setting are merged into the result. On
    a CPU, ``pin_memory`` is always false. If parameters are offloaded to NVMe, this function
    overwrites ``offload_param.buffer_size`` and ``stage3_max_reuse_distance``.

    Args:
        config: Config of the run.
        plan: Batch plan of the run.
        sizes: Hidden size and largest parameter of the model. They determine the sizes of
            DeepSpeed's buckets and buffers.
        document: DeepSpeed JSON of the run, or None.
        device_type: Type of the run's devices, such as ``cuda``.
    """
    deepspeed_config = _build_base_deepspeed_config(config, plan)
    if document is not None:
        deepspeed_config = deepspeed_json.build_merged_config(deepspeed_config, document, sizes.hidden_size)
    zero = deepspeed_config["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        if part in zero and device_type == "cpu":
            zero[part]["pin_memory"] = False  # without a GPU, pinned memory has no benefit
    if zero.get("offload_param", {}).get("device") == "nvme":
        zero["offload_param"]["buffer_size"] = compute_swap_buffer_elements(
            sizes.largest_parameter, plan.world_size * plan.sequence_part.num_parts
        )
        # Each gathered parameter occupies a swap buffer. Parameters that are kept for reuse would occupy all
        # buffers, and the run would fail.
        zero["stage3_max_reuse_distance"] = 0
    return deepspeed_config


def _build_base_deepspeed_config(config: RunConfig, plan: BatchPlan) -> dict[str, Any]:
    """Build DeepSpeed's configuration from the run settings, without the user's DeepSpeed JSON.

    :func:`build_deepspeed_config` merges the JSON in ``deepspeed.config`` into the result.
    """
    memory = config.memory
    zero: dict[str, Any] = {"stage": int(config.strategy[-1]), "log_trace_cache_warnings": False}
    for part, device in (
        ("offload_optimizer", memory.offload_optimizer),
        ("offload_param", memory.offload_params),
    ):
        if device != "none":
            zero[part] = {"device": device, "pin_memory": True}
        if device == "nvme":
            zero[part]["nvme_path"] = str(nvme.get_swap_folder(config))
    settings: dict[str, Any] = {
        "train_batch_size": plan.padded_batch_size
        * plan.sequence_part.num_parts,  # DeepSpeed counts each part as a sequence
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": config.train.max_grad_norm or 0.0,
        "zero_optimization": zero,
        # gpu/zero/optimizer.py has already checked the optimizer, so disable DeepSpeed's two checks.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if nvme.is_swapping_to_disk(config):
        settings["aio"] = dict(nvme.AIO_DEFAULTS)
    if config.precision in ("bf16", "fp16"):
        search = config.fp16.model_dump() if config.precision == "fp16" else {}
        settings[config.precision] = {"enabled": True, **search}
        # Sum gradients over ranks in fp32. With stages 2 and 3, also sum them over micro-batches in fp32.
        settings["communication_data_type"] = "fp32"
        if zero["stage"] > 1:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
