"""The keys of a DeepSpeed JSON that are settings here, have no effect, or are refused.

All other keys that DeepSpeed knows are passed on to it, in ``deepspeed.config``.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from converters.similar_names import suggest_name
from portable.config.importing.rows import (
    NoCounterpart,
    NoEffect,
    cells,
    choose,
    table,
)
from portable.config.origins import shown
from portable.config.yaml_text import parse_value
from portable.errors import UserError, one_line, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config.importing.rows import File, How

AUTO = "auto"
_RATES = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
TORCHS_WEIGHT_DECAY = 0.01
"""The default of torch's AdamW, which ``torch_adam`` selects."""
DEFAULTS: dict[str, dict[str, Any]] = {
    name: parse_value(params)
    for names, params in cells("Defaults of DeepSpeed")
    for name in re.findall("`(.+?)`", names)
}
"""The values of ``type`` that are supported, with the params of DeepSpeed's classes that are settings."""
OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULERS = tuple(name for name in DEFAULTS if name not in OPTIMIZERS)
_BOOLEAN = TypeAdapter(bool)


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON, or Hjson, as DeepSpeed does: with comments and trailing commas.

    Args:
        text: of the file.
        name: of the file, for messages.

    Raises:
        UserError: if it is neither, is empty or no mapping, or has a key twice.
    """
    require(bool(text.strip()), f"{name}: is empty; write {{}} for a DeepSpeed JSON that changes nothing")
    problem = ""
    found: Any = None
    for package in ("json", "hjson"):  # the second comes with DeepSpeed
        if found is None and find_spec(package) is not None:
            try:
                read = import_module(package).loads
                found = read(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, name))
            except (ValueError, RecursionError) as error:
                problem = problem or str(error)
    if problem and not isinstance(found, dict):  # a single word is valid Hjson, too
        raise UserError(one_line(f"{name}: invalid JSON: {problem}"))
    require(isinstance(found, dict), f"{name}: a DeepSpeed JSON must be a mapping")
    values: dict[str, Any] = found
    return values


def _without_repeats(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    keys = [key for key, _ in pairs if not _is_comment(key)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    require(twice is None, f"{name}: duplicate key {twice}; remove one")
    return dict(pairs)


def _without_comments_and_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Copy ``values`` without the keys that serve as comments, and without keys whose value is null."""
    return {
        key: _without_comments_and_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None and not _is_comment(key)
    }


def _is_comment(key: object) -> bool:
    return str(key).startswith(("_", "//"))


def prepare(file: File) -> None:
    """Bring the file into its present form, where DeepSpeed's models do not rename keys themselves."""
    file.values = values = _without_comments_and_nulls(file.values)
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):  # the form before stages existed
        zero = values["zero_optimization"] = {"stage": int(zero)}
        size = values.pop("allgather_size", None)
        if size is not None and zero["stage"]:
            zero["allgather_bucket_size"] = size
        file.note(
            ("zero_optimization",), "true or false is deprecated: read as zero_optimization.stage 1 or 0"
        )
    if isinstance(zero, dict) and "aio" in zero:
        values.setdefault("aio", zero.pop("aio"))
        file.note(("aio",), "in zero_optimization is deprecated: moved to the top level")
    if isinstance(aio := values.get("aio"), dict):
        for old in ("thread_count", "num_threads"):  # DeepSpeed 0.16's name, and the one ds_nvme_tune prints
            if old in aio:
                aio.setdefault("intra_op_parallelism", aio.pop(old))
                file.note(("aio", old), "is deprecated: read as aio.intra_op_parallelism")
        # ds_nvme_tune prints strings, all of which are true to DeepSpeed
        for switch in ("single_submit", "overlap_events"):
            aio |= {switch: aio[switch] == "true"} if aio.get(switch) in ("true", "false") else {}
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("params") and not optimizer.get("type"):
        del optimizer["params"]
        file.note(("optimizer", "params"), "has no effect without optimizer.type, as in DeepSpeed")


def switched(value: Any) -> Any:
    """The boolean that DeepSpeed's models, which are pydantic's, read ``value`` as; others as they are."""
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return value


def _stage_of(file: File) -> Any:
    return file.get("zero_optimization.stage")


def _given(value: Any, _: File) -> Any:
    return None if value in (None, AUTO) else value


def _precision(value: Any, file: File) -> str | None:
    """The type that is on; fp32 where one is off, and the other is neither on nor left to the run."""
    kinds = [switched(file.get(f"{k}.enabled")) for k in ("bf16", "fp16") if isinstance(file.get(k), dict)]
    if kinds == [True, True]:
        raise NoCounterpart("bf16 and fp16 are both enabled; choose one")
    off = switched(value) is False and True not in kinds and AUTO not in kinds
    return file.path[0] if switched(value) is True else "fp32" if off else None


def _scale(value: Any, file: File) -> Any:
    on = switched(file.get("fp16.enabled", False))
    if on is not True:
        passed_on(file, value)
    return None if on is False else _given(value, file)


def _loss_scale(value: Any, file: File) -> None:
    if value and switched(file.get("fp16.enabled")) is True and _stage_of(file) == 0:
        raise NoEffect("has no effect without ZeRO: the loss scale is dynamic")
    passed_on(file, value)


def clipping(value: Any, _: File) -> dict[str, Any]:
    """The norm to clip to, where 0 is none."""
    return {} if value in (None, AUTO) else {"train.max_grad_norm": float(value) or None}


def offload(part: str, stage: Callable[[File], Any], *, switch: bool = False) -> How:
    """The device that ``optimizer`` or ``params`` go to, at the ZeRO stage of a file.

    Args:
        part: of the state.
        stage: the stage of a file.
        switch: whether true stands for cpu, as in the key that was there before devices.
    """

    def take(value: Any, file: File) -> str | None:
        if switch:
            value = "cpu" if switched(value) is True else AUTO
        if value == AUTO:
            return None
        device = choose(value, {"none": "none", "cpu": "cpu", "nvme": "nvme"}) or "none"
        if device != "none" and stage(file) in ((0,) if part == "optimizer" else (0, 1, 2)):
            raise NoEffect(f"{device} has no effect at ZeRO stage {stage(file)}, as in DeepSpeed")
        if device == "nvme" and stage(file) in (1, 2):
            file.note(
                file.path, f"nvme is read as cpu at ZeRO stage {stage(file)}: only stage 3 offloads to disk"
            )
            return "cpu"
        return str(device)

    return take


def nvme_path(device: str, stage: Callable[[File], Any]) -> How:
    """The folder of a disk, if the key ``device`` says so. It differs between machines: the run's counts."""

    def take(value: Any, file: File) -> None:
        if value in (None, "", "none", AUTO) or str(file.get(device)).lower() != "nvme":
            return
        if file.result.values.get("memory.nvme_path", str(value)) != str(value):
            raise NoCounterpart("differs from the other nvme_path; use one folder for both")
        if stage(file) in (None, 3, AUTO):
            file.put(file.path, "memory.nvme_path", str(value))
            file.result.assumed.add("memory.nvme_path")

    return take


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
    given = {**DEFAULTS.get(str(file.get("scheduler.type")), {}), **_params(file, "scheduler")}
    return next((name for name in _RATES if given.get(name) not in (None, AUTO)), None)


def _params(file: File, block: str) -> dict[str, Any]:
    found = file.get(f"{block}.params")
    return found if isinstance(found, dict) else {}


def _adam_w_mode(value: Any, file: File) -> None:
    if (
        switched(value) is False and str(file.get("optimizer.type")).lower() != "adamw"
    ):  # which it does not change
        raise NoCounterpart(f"{shown(value)}: another update of the weights is not supported; remove it")


def _scheduler(value: Any, _: File) -> str | None:
    if value not in (None, *SCHEDULERS):
        remedy = suggest_name(str(value), SCHEDULERS) or "; remove it and set train.schedule"
        raise NoCounterpart(f"{shown(value)} is not supported{remedy}")
    return value  # type: ignore[no-any-return]


def _scheduled(value: Any, file: File) -> Any:
    """A scheduler's param: a setting, or one of ``train.schedule_params``."""
    if isinstance(value, list):
        raise NoCounterpart("a list with a value per parameter group is not supported; give one number")
    if value in (None, AUTO) or file.row.to:
        return None if value == AUTO else value
    params = file.result.values.get("train.schedule_params", {})
    return {"train.schedule_params": {**params, file.path[-1]: value}}


def _recompute(value: Any, file: File) -> str | None:
    if value is True and file.row.why:
        file.note(file.path, f"has no effect: {file.row.why}")
    elif value is True and _stage_of(file) == 0:
        file.note(file.path, "has no effect without ZeRO: the inputs of recomputed layers stay on the device")
    return "full" if value is True else None


def _gathered(value: Any, file: File) -> None:
    if value is True and _stage_of(file) == 3:
        told = "final/ always has the full weights, in fp32 (16 bits: portable-convert --dtype)"
        file.note(file.path, f"has no effect: {told}")
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
    if value == "fp32" and _stage_of(file) == 1 and switched(file.get("bf16.enabled")) is True:
        raise NoCounterpart(
            "fp32 is supported at stages 2 and 3, where gradients are sharded; use zero_optimization.stage 2"
        )
    passed_on(file, value)


ROWS = table(
    "DeepSpeed JSON",
    {
        "fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale": _scale,
        "fp16.loss_scale": _loss_scale,
        "gradient_clipping": clipping,
        "bf16.enabled fp16.enabled": _precision,
        "zero_optimization.offload_optimizer.device": offload("optimizer", _stage_of),
        "zero_optimization.offload_optimizer.nvme_path": nvme_path(
            "zero_optimization.offload_optimizer.device", _stage_of
        ),
        "zero_optimization.offload_param.device": offload("params", _stage_of),
        "zero_optimization.offload_param.nvme_path": nvme_path(
            "zero_optimization.offload_param.device", _stage_of
        ),
        "zero_optimization.cpu_offload": offload("optimizer", _stage_of, switch=True),
        "zero_optimization.cpu_offload_param": offload("params", _stage_of, switch=True),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save "
        "zero_optimization.gather_16bit_weights_on_model_save "
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": _gathered,
        "optimizer.type": _optimizer,
        "optimizer.params.lr": _optimizers_rate,
        "optimizer.params.momentum": lambda value, _: None if value == AUTO else [value, 0.95],
        "optimizer.params.adam_w_mode": _adam_w_mode,
        "scheduler.type": _scheduler,
        "scheduler.params.warmup_num_steps scheduler.params.total_num_steps scheduler.params.cos_min_ratio "
        "scheduler.params.warmup_max_lr scheduler.params.cycle_max_lr scheduler.params.lr_range_test_min_lr "
        "scheduler.params.*": _scheduled,
        "activation_checkpointing.cpu_checkpointing activation_checkpointing.partition_activations "
        "activation_checkpointing.contiguous_memory_optimization": _recompute,
        "prescale_gradients gradient_predivide_factor": _scaled,
        "data_types.grad_accum_dtype": _accumulated,
    },
    lambda key: _given,
)


def finish(file: File, devices: int) -> None:
    """What several keys say together: the batch, DeepSpeed's defaults, what is idle without ZeRO.

    Args:
        file: whose keys were taken over.
        devices: that the batch is spread over.
    """
    why = "default of DeepSpeed"
    kind, scheduler = str(file.get("optimizer.type", "")).lower(), str(file.get("scheduler.type"))
    params, given = _params(file, "optimizer"), _params(file, "scheduler")
    defaults = DEFAULTS.get(kind, {})
    if switched(params.get("torch_adam")) is True:
        defaults = {**defaults, "weight_decay": TORCHS_WEIGHT_DECAY}
    for name in defaults.keys() - params.keys():
        if name == "momentum":
            file.default("train.betas", [defaults[name], 0.95], why)
        elif (to := ROWS[f"optimizer.params.{name}"].to) and not (name == "lr" and _rate_of(file)):
            file.default(to, defaults[name], why)
    for name, value in DEFAULTS.get(scheduler, {}).items():
        if name not in given:
            file.default(ROWS[f"scheduler.params.{name}"].to, value, why)
    if scheduler == "OneCycle" and kind == "sgd":  # which has no betas that it could move
        more = file.result.values.get("train.schedule_params", {})
        file.put(("scheduler", "type"), "train.schedule_params", {**more, "cycle_momentum": False})
    passed = file.result.values.get("deepspeed.config", {})
    quiet = ("fp16", "bf16", "zero_allow_untested_optimizer", "steps_per_print")
    idle = [key for key, value in passed.items() if key not in quiet and _asks(value)]
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
    if file.path[0] in ("optimizer", "scheduler"):
        raise NoCounterpart(f"{shown(value)} is not supported; remove it")
    first = "deepspeed.config" not in file.result.values
    inside = file.result.values.setdefault("deepspeed.config", {})
    if first:
        file.put(file.path, "deepspeed.config", inside)
    for part in file.path[:-1]:
        inside = inside.setdefault(part, {})
    inside[file.path[-1]] = value
