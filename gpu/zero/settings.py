"""The DeepSpeed configuration that a run's own settings and its DeepSpeed JSON come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu.zero import nvme
from gpu.zero.buckets import swap_buffer
from gpu.zero.config import document as deepspeed_json

if TYPE_CHECKING:
    from torch import nn

    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig


@dataclass(frozen=True)
class ModelSizes:
    """What of a model decides on the size of buckets and buffers, in elements."""

    hidden: int
    largest_parameter: int

    @classmethod
    def of(cls, model: nn.Module) -> ModelSizes:
        text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        largest = max(parameter.numel() for parameter in model.parameters())
        return cls(int(getattr(text, "hidden_size", 1024)), largest)


def settings_for(
    config: RunConfig,
    plan: BatchPlan,
    sizes: ModelSizes,
    document: deepspeed_json.Document | None,
    device_type: str,
) -> dict[str, Any]:
    """What to give ``deepspeed.initialize`` as its config."""
    settings = _own_settings(config, plan)
    if document is not None:
        settings = deepspeed_json.merged(settings, document, sizes.hidden)
    zero = settings["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        if part in zero and device_type == "cpu":
            zero[part]["pin_memory"] = False  # page-locked memory is for copies to a GPU
    if zero.get("offload_param", {}).get("device") == "nvme":
        zero["offload_param"]["buffer_size"] = swap_buffer(sizes.largest_parameter, plan.world_size)
        # A parameter has a buffer for as long as it is gathered. Those that stay so, to be used again soon,
        # would take all of them, and the run would end for want of one.
        zero["stage3_max_reuse_distance"] = 0
    return settings


def _own_settings(config: RunConfig, plan: BatchPlan) -> dict[str, Any]:
    memory = config.memory
    zero: dict[str, Any] = {"stage": int(config.strategy[-1]), "log_trace_cache_warnings": False}
    for part, device in (
        ("offload_optimizer", memory.offload_optimizer),
        ("offload_param", memory.offload_params),
    ):
        if device != "none":
            zero[part] = {"device": device, "pin_memory": True}
        if device == "nvme":
            zero[part]["nvme_path"] = str(nvme.run_folder(config))
    settings: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": config.train.max_grad_norm or 0.0,
        "zero_optimization": zero,
        # Of what these two refuse, gpu/zero/optimizer.py has taken care.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if nvme.in_use(config):
        settings["aio"] = dict(nvme.AIO_DEFAULTS)
    if config.precision in ("bf16", "fp16"):
        search = config.fp16.model_dump() if config.precision == "fp16" else {}
        settings[config.precision] = {"enabled": True, **search}
        # Gradients are summed over ranks, and over micro-batches where each rank keeps its share, in fp32.
        settings["communication_data_type"] = "fp32"
        if zero["stage"] > 1:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
