"""The keys of a DeepSpeed JSON that are settings here, have no effect, or are refused.

All other keys that DeepSpeed knows are passed on to it, in ``deepspeed.config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.importing.rows import NoCounterpart, Row, free, refused
from portable.config.origins import shown

if TYPE_CHECKING:
    from portable.config.importing.rows import File, Rows

AUTO = "auto"
SHARED = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "fp16.initial_scale_power": "fp16.initial_scale_power",
    "fp16.loss_scale_window": "fp16.loss_scale_window",
    "fp16.hysteresis": "fp16.hysteresis",
    "fp16.min_loss_scale": "fp16.min_loss_scale",
    "zero_optimization.offload_optimizer.device": "memory.offload_optimizer",
    "zero_optimization.offload_param.device": "memory.offload_params",
}
"""Keys with one meaning in both."""
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
OPTIMIZER = {
    "lr": "train.learning_rate",
    "betas": "train.betas",
    "eps": "train.eps",
    "weight_decay": "train.weight_decay",
}
SCHEDULER = {
    "warmup_num_steps": "train.warmup_steps",
    "total_num_steps": "train.steps",
    "cos_min_ratio": "train.min_learning_rate_ratio",
    "warmup_max_lr": "train.learning_rate",
    "cycle_max_lr": "train.learning_rate",
    "lr_range_test_min_lr": "train.learning_rate",
}
RECOMPUTE = ("cpu_checkpointing", "partition_activations", "contiguous_memory_optimization")
"""The keys of ``activation_checkpointing`` that enable recomputation; the others only configure it."""
NO_EFFECT = {
    "partition_activations": "it shards activations over model-parallel ranks, and there is only one",
    "contiguous_memory_optimization": "it arranges what partition_activations shards",
    "number_checkpoints": "it sizes the buffer of contiguous_memory_optimization",
    "synchronize_checkpoint_boundary": "layers are recomputed without a host sync",
    "profile": "use portable-train --profile, which records the time of each layer",
}
"""Keys of DeepSpeed's own activation checkpointing, and why they have no effect here."""
NEEDED = {
    "bf16.check_grad_overflow": "non-finite updates would go unnoticed",
    "zero_optimization.compute_grad_norm": "the gradient norm is needed for clipping and metrics",
    "managed_gradient_accumulation": "DeepSpeed must know where a step ends",
}
"""Switches that must not be off, and why."""
UNSUPPORTED: dict[str, Any] = {
    "zero_optimization.zenflow": None,
    "zero_optimization.offload_optimizer.super_offload": False,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "tensor_parallel": None,
    "expert_parallel": None,
    "hybrid_engine.enabled": False,
    "compile.deepcompile": False,
    "checkpoint.writer": None,
    "datastates_ckpt": None,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.bf16_master_weights_and_grads": False,
    "torch_autocast.enabled": False,
    "data_efficiency.enabled": False,
    "weight_quantization": None,
    "gradient_allreduce_op": "mean",
}
"""Switches to another engine, layout or computation, with the value that changes nothing."""


def _given(value: Any, _: File) -> Any:
    return None if value in (None, AUTO) else value


def _stage(value: Any, _: File) -> str | None:
    if value is True or value is False:  # the form before stages existed
        return "zero1" if value else "no_shard"
    names = {0: "no_shard", 1: "zero1", 2: "zero2", 3: "zero3"}
    if value not in (None, AUTO) and value not in names:
        raise NoCounterpart(f"{shown(value)} has no counterpart; use one of 0, 1, 2, 3")
    return names.get(value)


def _optimizer(value: Any, _: File) -> str | None:
    if value is not None and str(value).lower() not in OPTIMIZERS:
        raise NoCounterpart(f"{shown(value)} has no counterpart: use AdamW, Adam or SGD")
    return OPTIMIZERS.get(str(value).lower())


def _recompute(value: Any, file: File) -> str | None:
    why = NO_EFFECT.get(file.path[-1])
    if value is True and why is not None:
        file.note(file.path, f"means recomputation alone: {why}")
    return "full" if value is True else None


def _needed(why: str) -> Row:
    return refused(f"{why}; remove it", True, AUTO)


ROWS: Rows = {
    **{name: Row(key, _given) for name, key in SHARED.items() if name != "gradient_clipping"},
    "gradient_clipping": Row(
        "train.max_grad_norm", lambda value, _: None if value == AUTO else value or None
    ),
    "gradient_accumulation_steps": Row(how=lambda value, _: None, why="train.global_batch_size"),
    "bf16.enabled": Row("precision", lambda value, _: "bf16" if value is True else None),
    "bfloat16.enabled": Row("precision", lambda value, _: "bf16" if value is True else None),
    "fp16.enabled": Row("precision", lambda value, _: "fp16" if value is True else None),
    "zero_optimization.stage": Row("strategy", _stage),
    "optimizer.type": Row("train.optimizer", _optimizer),
    **{f"optimizer.params.{name}": Row(key, _given) for name, key in OPTIMIZER.items()},
    "scheduler.type": Row("train.schedule", _given),
    **{f"scheduler.params.{name}": Row(key, _given) for name, key in SCHEDULER.items()},
    **{f"activation_checkpointing.{name}": free(why) for name, why in NO_EFFECT.items()},
    **{
        f"activation_checkpointing.{name}": Row("memory.activation_checkpointing", _recompute)
        for name in RECOMPUTE
    },
    **{path: _needed(why) for path, why in NEEDED.items()},
    **{path: refused("leave it out", value, AUTO) for path, value in UNSUPPORTED.items()},
    "steps_per_print": free(),
}


def passed_on(file: File, value: Any) -> None:
    """Put a key that only DeepSpeed knows into ``deepspeed.config``."""
    if any(part.startswith(("_", "//")) for part in file.path):  # a comment
        return
    first = "deepspeed.config" not in file.result.values
    inside = file.result.values.setdefault("deepspeed.config", {})
    if first:
        file.put(file.path, "deepspeed.config", inside)
    for part in file.path[:-1]:
        inside = inside.setdefault(part, {})
    inside[file.path[-1]] = value
