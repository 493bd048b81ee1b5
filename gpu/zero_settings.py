"""The DeepSpeed configuration that a run's own settings come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.plan import BatchPlan


def settings_for(config: RunConfig, plan: BatchPlan, device_type: str) -> dict[str, Any]:
    """What to give ``deepspeed.initialize`` as its config."""
    zero: dict[str, Any] = {"stage": int(config.strategy[-1]), "log_trace_cache_warnings": False}
    pinned = device_type == "cuda"  # page-locked memory is for copies to a GPU
    memory = config.memory
    if memory.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": memory.offload_optimizer, "pin_memory": pinned}
    if memory.offload_params != "none":
        zero["offload_param"] = {"device": memory.offload_params, "pin_memory": pinned}
    for key, device in (
        ("offload_optimizer", memory.offload_optimizer),
        ("offload_param", memory.offload_params),
    ):
        if device == "nvme":
            zero[key]["nvme_path"] = memory.nvme_path
    settings: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": config.train.max_grad_norm or 0.0,
        "zero_optimization": zero,
        # Our optimizers are torch's fused ones, which keep the update the same under every strategy.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if config.precision in ("bf16", "fp16"):
        settings[config.precision] = {"enabled": True}
        # Gradients are summed over ranks, and over micro-batches where each rank keeps its share, in fp32.
        settings["communication_data_type"] = "fp32"
        if zero["stage"] > 1:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
