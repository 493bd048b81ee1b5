"""The keys of a DeepSpeed JSON that are settings here, have no effect, or are refused.

All other keys that DeepSpeed knows are passed on to it, in ``deepspeed.config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.importing.rows import NoCounterpart, NoEffect, Row, free, refused
from portable.config.origins import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config.importing.rows import File, Path, Rows

AUTO = "auto"
SHARED = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "zero_optimization.offload_optimizer.device": "memory.offload_optimizer",
    "zero_optimization.offload_param.device": "memory.offload_params",
    "optimizer.params.betas": "train.betas",
    "optimizer.params.eps": "train.eps",
    "optimizer.params.weight_decay": "train.weight_decay",
}
"""Keys with one meaning in both."""
FP16 = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
SCHEDULED = {
    "warmup_num_steps": "train.warmup_steps",
    "total_num_steps": "train.steps",
    "cos_min_ratio": "train.min_learning_rate_ratio",
    "warmup_max_lr": "train.learning_rate",
    "cycle_max_lr": "train.learning_rate",
    "lr_range_test_min_lr": "train.learning_rate",
}
"""Params of schedulers that are settings; the others are ``train.schedule_params``."""
_RATES = [name for name, key in SCHEDULED.items() if key == "train.learning_rate"]
_ADAM = {
    "lr": 0.001,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "amsgrad": False,
    "maximize": False,
    "adamw_mode": True,
    "adam_w_mode": True,
    "fp32_optimizer_states": True,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": {
        "lr": 0.001,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    },
}
"""The values of ``optimizer.type`` that are supported, with the defaults of DeepSpeed's classes for them."""
EQUIVALENT = ("torch_adam", "fused", "foreach", "set_grad_none", "capturable", "differentiable")
"""Params that select another implementation of the same update."""
TORCHS_WEIGHT_DECAY = 0.01
"""The default of torch's AdamW, which ``torch_adam`` selects."""
_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, "warmup_max_lr": 0.001, "total_num_steps": None},
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}
"""The same for ``scheduler.type``; None: there is no default."""
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


def is_comment(key: object) -> bool:
    """Whether a key of a JSON is a remark."""
    return str(key).startswith(("_", "//"))


def modernise(values: dict[str, Any], note: Callable[[Path, str], None]) -> None:
    """Move what DeepSpeed's models do not rename themselves to its present name and place.

    Args:
        values: the configuration, changed in place.
        note: is called with the path of each change, and with what it is.
    """
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):  # the form before stages existed
        zero = values["zero_optimization"] = {"stage": int(zero)}
        size = values.pop("allgather_size", None)
        if size is not None and zero["stage"]:
            zero["allgather_bucket_size"] = size
        note(("zero_optimization",), "true or false is deprecated: read as zero_optimization.stage 1 or 0")
    if isinstance(zero, dict) and "aio" in zero:
        values.setdefault("aio", zero.pop("aio"))
        note(("aio",), "in zero_optimization is deprecated: moved to the top level")
    if isinstance(aio := values.get("aio"), dict):
        for old in ("thread_count", "num_threads"):  # DeepSpeed 0.16's name, and the one ds_nvme_tune prints
            if old in aio:
                aio.setdefault("intra_op_parallelism", aio.pop(old))
                note(("aio", old), "is deprecated: read as aio.intra_op_parallelism")
        # ds_nvme_tune prints strings, all of which are true to DeepSpeed
        for switch in ("single_submit", "overlap_events"):
            aio |= {switch: aio[switch] == "true"} if aio.get(switch) in ("true", "false") else {}
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))


def prepare(file: File) -> None:
    """Bring the file into its present form, without what DeepSpeed ignores at its stage."""
    modernise(file.values, file.note)
    zero, stage = file.values.get("zero_optimization"), _stage_of(file)
    if not isinstance(zero, dict) or stage in (None, 3):
        return
    if stage == 0:
        file.values["zero_optimization"] = {k: v for k, v in zero.items() if not k.startswith("offload_")}
        return
    zero = file.values["zero_optimization"] = dict(zero)
    if file.get(device := "zero_optimization.offload_param.device", "none") != "none":
        path = tuple(device.split("."))[:-1]
        file.note(path, f"has no effect at stage {stage}: only stage 3 offloads parameters")
    zero.pop("offload_param", None)
    if file.get(device := "zero_optimization.offload_optimizer.device") == "nvme":
        zero["offload_optimizer"] = {**zero["offload_optimizer"], "device": "cpu"}
        told = f"nvme is read as cpu at stage {stage}: only stage 3 offloads to disk"
        file.note(tuple(device.split(".")), told)


def _stage_of(file: File) -> Any:
    return file.get("zero_optimization.stage")


def _given(value: Any, _: File) -> Any:
    return None if value in (None, AUTO) else value


def _stage(value: Any, _: File) -> str | None:
    names = {0: "no_shard", 1: "zero1", 2: "zero2", 3: "zero3"}
    if value not in (None, AUTO) and (value not in names or isinstance(value, bool)):
        raise NoCounterpart(f"{shown(value)} has no counterpart; use one of 0, 1, 2, 3")
    return names.get(value)


def _precision(value: Any, file: File) -> str | None:
    """The type that is on; fp32 where one is off, and the other is neither on nor left to the run."""
    kinds = [file.get(f"{kind}.enabled") for kind in ("bf16", "fp16") if isinstance(file.get(kind), dict)]
    if kinds == [True, True]:
        raise NoCounterpart("bf16 and fp16 are both enabled; choose one")
    off = value is False and True not in kinds and AUTO not in kinds
    return file.path[0] if value is True else "fp32" if off else None


def _scale(value: Any, file: File) -> Any:
    return _given(value, file) if file.get("fp16.enabled") is not False else None


def _loss_scale(value: Any, file: File) -> None:
    if value and file.get("fp16.enabled") is True and _stage_of(file) == 0:
        raise NoEffect("has no effect without ZeRO: the loss scale is dynamic")
    passed_on(file, value)


def clipping(value: Any, _: File) -> dict[str, Any]:
    """The norm to clip to, where 0 is none."""
    return {} if value in (None, AUTO) else {"train.max_grad_norm": float(value) or None}


def _nvme(value: Any, file: File) -> None:
    """A folder on a disk, which differs between machines: it yields to the run's."""
    if _given(value, file) and file.get(".".join((*file.path[:-1], "device"))) == "nvme":
        file.default("memory.nvme_path", str(value), file.origin(file.path).text)


def _optimizer(value: Any, _: File) -> str | None:
    if value is None:
        return None
    if (kind := str(value).lower()) not in OPTIMIZERS:
        why = "it scales updates by norms of whole tensors, which ZeRO's flat partitions do not have; "
        raise NoCounterpart(
            f"{shown(value)} has no counterpart: {why * (kind == 'lamb')}use AdamW, Adam or SGD"
        )
    return "sgd" if kind == "sgd" else "adamw"


def _optimizers_rate(value: Any, file: File) -> Any:
    if value not in (None, AUTO) and (rate := _rate_of(file)) is not None:
        raise NoEffect(f"has no effect: scheduler.params.{rate} sets the learning rate")
    return _given(value, file)


def _rate_of(file: File) -> str | None:
    """The scheduler's param that sets the learning rate; None if the optimizer sets it."""
    defaults = SCHEDULERS.get(str(file.get("scheduler.type")), {})
    given = {**defaults, **_params(file, "scheduler")}
    names = [name for name in _RATES if name in defaults]
    return next((name for name in names if given[name] not in (None, AUTO)), None)


def _params(file: File, block: str) -> dict[str, Any]:
    found = file.get(f"{block}.params")
    return found if isinstance(found, dict) else {}


def _optimizers_param(value: Any, file: File) -> None:
    """A param that is no setting: it must be as it is by default."""
    kind, name = str(file.get("optimizer.type", "adam")).lower(), file.path[-1]
    adam = name == "adam_w_mode" and kind == "adamw"  # DeepSpeed treats Adam as AdamW unless it is off
    if not adam and value not in (AUTO, OPTIMIZERS.get(kind, {}).get(name)):
        raise NoCounterpart(f"{shown(value)} is not supported; remove it")


def _scheduler(value: Any, _: File) -> str | None:
    from portable.config.suggest import did_you_mean

    if value not in (None, *SCHEDULERS):
        remedy = did_you_mean(str(value), SCHEDULERS) or "; remove it and set train.schedule"
        raise NoCounterpart(f"{shown(value)} is not supported{remedy}")
    return value  # type: ignore[no-any-return]


def _scheduled(value: Any, file: File) -> dict[str, Any]:
    """A scheduler's param: a setting, or one of ``train.schedule_params``."""
    if isinstance(value, list):
        raise NoCounterpart("a list with a value per parameter group is not supported; give one number")
    if value in (None, AUTO):
        return {}
    if (key := SCHEDULED.get(file.path[-1])) is not None:
        return {key: value}
    params = file.result.values.get("train.schedule_params", {})
    return {"train.schedule_params": {**params, file.path[-1]: value}}


def _recompute(value: Any, file: File) -> str | None:
    name = file.path[-1]
    if value is True and name in NO_EFFECT:
        file.note(file.path, f"has no effect: {NO_EFFECT[name]}")
    elif value is True and _stage_of(file) == 0:
        file.note(file.path, "has no effect without ZeRO: the inputs of recomputed layers stay on the device")
    return "full" if value is True else None


def _gathered(value: Any, file: File) -> None:
    if value is True and _stage_of(file) == 3:
        raise NoEffect(
            "has no effect: final/ always has the full weights, in fp32 (16 bits: portable-convert --dtype)"
        )
    passed_on(file, value)


def _scaled(value: Any, file: File) -> None:
    """Divisions of gradients before they are summed."""
    reduces = _stage_of(file) != 0 and file.get("zero_optimization.reduce_scatter") is not False
    if reduces and (value is True or value not in (None, AUTO, False, 1)):
        raise NoCounterpart(
            f"{shown(value)} needs zero_optimization.reduce_scatter false under ZeRO; remove it, or set "
            "reduce_scatter to false"
        )
    passed_on(file, value)


def _accumulated(value: Any, file: File) -> None:
    if value == "fp32" and _stage_of(file) == 1 and file.get("bf16.enabled") is True:
        raise NoCounterpart(
            "fp32 is supported at stages 2 and 3, where gradients are sharded; use zero_optimization.stage 2"
        )
    passed_on(file, value)


def _needed(why: str) -> Row:
    def take(value: Any, file: File) -> None:
        if value is False:
            raise NoCounterpart(f"false: {why}; remove it")

    return Row(how=take, why=f"{why}; remove it")


ROWS: Rows = {
    **{name: Row(key, _given) for name, key in SHARED.items()},
    **{f"fp16.{name}": Row(f"fp16.{name}", _scale) for name in FP16},
    "fp16.loss_scale": Row(how=_loss_scale, why="passed on; dynamic without ZeRO"),
    "gradient_clipping": Row(how=clipping, why="train.max_grad_norm"),
    "gradient_accumulation_steps": Row(how=lambda value, _: None, why="train.global_batch_size"),
    "bf16.enabled": Row("precision", _precision),
    "fp16.enabled": Row("precision", _precision),
    "zero_optimization.stage": Row("strategy", _stage),
    "zero_optimization.offload_optimizer.nvme_path": Row(how=_nvme, why="memory.nvme_path"),
    "zero_optimization.offload_param.nvme_path": Row(how=_nvme, why="memory.nvme_path"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Row(
        how=_gathered, why="no effect at stage 3: final/ always has the full weights"
    ),
    "optimizer.type": Row("train.optimizer", _optimizer),
    "optimizer.params.lr": Row("train.learning_rate", _optimizers_rate),
    "optimizer.params.momentum": Row(
        "train.betas", lambda value, _: None if value == AUTO else [value, 0.95], "the first of train.betas"
    ),
    **{f"optimizer.params.{name}": free() for name in EQUIVALENT},
    **{
        f"optimizer.params.{name}": Row(how=_optimizers_param, why="only as it is by default")
        for kind in ("adamw", "sgd")
        for name in OPTIMIZERS[kind]
        if name not in ("lr", "momentum") and f"optimizer.params.{name}" not in SHARED
    },
    "scheduler.type": Row("train.schedule", _scheduler),
    **{
        f"scheduler.params.{name}": Row(how=_scheduled, why=SCHEDULED.get(name, "train.schedule_params"))
        for params in SCHEDULERS.values()
        for name in params
    },
    "scheduler.params.last_batch_iteration": refused(
        "a run starts at its first step, and resumes at its checkpoint's; remove it", -1, AUTO
    ),
    **{f"activation_checkpointing.{name}": free(why) for name, why in NO_EFFECT.items()},
    **{
        f"activation_checkpointing.{name}": Row("memory.activation_checkpointing", _recompute)
        for name in RECOMPUTE
    },
    **{path: _needed(why) for path, why in NEEDED.items()},
    **{path: refused("leave it out", value, AUTO) for path, value in UNSUPPORTED.items()},
    **{
        name: Row(how=_scaled, why="passed on, with reduce_scatter false")
        for name in ("prescale_gradients", "gradient_predivide_factor")
    },
    "data_types.grad_accum_dtype": Row(how=_accumulated, why="passed on; fp32 at stages 2 and 3"),
    "steps_per_print": free(),
    "zero_allow_untested_optimizer": Row(how=lambda value, file: passed_on(file, value), why="passed on"),
}


def finish(file: File, devices: int) -> None:
    """What several keys say together: the batch, DeepSpeed's defaults, what is idle without ZeRO.

    Args:
        file: whose keys were taken over.
        devices: that the batch is spread over.
    """
    why = "default of DeepSpeed"
    kind, scheduler = str(file.get("optimizer.type", "")).lower(), str(file.get("scheduler.type"))
    params, given = _params(file, "optimizer"), _params(file, "scheduler")
    defaults = OPTIMIZERS.get(kind, {})
    if params.get("torch_adam") is True:
        defaults = {**defaults, "weight_decay": TORCHS_WEIGHT_DECAY}
    for name in defaults.keys() - params.keys():
        if name == "momentum":
            file.default("train.betas", [defaults[name], 0.95], why)
        elif (to := ROWS[f"optimizer.params.{name}"].to) and not (name == "lr" and _rate_of(file)):
            file.default(to, defaults[name], why)
    for name, value in SCHEDULERS.get(scheduler, {}).items():
        if name in SCHEDULED and name not in given and value is not None:
            file.default(SCHEDULED[name], value, why)
    if scheduler == "OneCycle" and kind == "sgd":  # which has no betas that it could move
        more = file.result.values.get("train.schedule_params", {})
        file.put(("scheduler", "type"), "train.schedule_params", {**more, "cycle_momentum": False})
    idle = [
        key
        for key, value in file.result.values.get("deepspeed.config", {}).items()
        if key not in ("fp16", "bf16", "zero_allow_untested_optimizer") and _asks(value)
    ]
    if _stage_of(file) == 0:
        file.note(
            ("zero_optimization",),
            "no ZeRO stage: the run uses torch's DDP (strategy no_shard) instead of DeepSpeed's engine"
            + (f"; no effect: {', '.join(idle)}" if idle else ""),
        )
    file.batch(devices)


def _asks(value: Any) -> bool:
    """Whether a value enables something."""
    if isinstance(value, dict):
        return _asks(value["enabled"]) if "enabled" in value else any(map(_asks, value.values()))
    return value not in (None, False, 0, AUTO)


def passed_on(file: File, value: Any) -> None:
    """Put a key that only DeepSpeed knows into ``deepspeed.config``."""
    if any(map(is_comment, file.path)):
        return
    if file.path[0] in ("optimizer", "scheduler"):
        raise NoCounterpart(f"{shown(value)} is not supported; remove it")
    first = "deepspeed.config" not in file.result.values
    inside = file.result.values.setdefault("deepspeed.config", {})
    if first:
        file.put(file.path, "deepspeed.config", inside)
    for part in file.path[:-1]:
        inside = inside.setdefault(part, {})
    inside[file.path[-1]] = value
