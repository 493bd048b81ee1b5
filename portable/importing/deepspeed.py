"""The keys of a DeepSpeed JSON that are settings here, have no effect, or are refused.

All other keys are passed on to DeepSpeed, in ``deepspeed.config``. DeepSpeed itself judges them when a run
starts (:mod:`portable.gpu.zero.config`), so this module works without DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from portable.config.origins import format_short_value
from portable.converters.similar_names import suggest_name
from portable.errors import UserError, require, to_one_line
from portable.importing.foreign_file import ForeignKey, NoCounterpart, NoEffect, Settings
from portable.importing.foreign_keys import (
    IgnoredKey,
    MultiSettingKey,
    NeverFalseKey,
    RefusedKey,
    SettingKey,
    WordSettingKey,
    choose,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.importing.foreign_file import ForeignFile, ForeignKeys
    from portable.importing.foreign_keys import Convert

AUTO = "auto"
RATES = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""Params of schedulers that set the learning rate."""
TORCHS_WEIGHT_DECAY = 0.01
"""The default of torch's AdamW, which ``torch_adam`` selects."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "adam": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 0.001, "momentum": 0, "weight_decay": 0.0},
}
"""Optimizers that are supported, with DeepSpeed's defaults for the params that are settings here."""
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 1000},
    "WarmupDecayLR": {"warmup_num_steps": 1000, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {"warmup_num_steps": 1000, "cos_min_ratio": 0.0001},
    "OneCycle": {},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001},
}
"""Schedulers, with DeepSpeed's defaults for the params that are settings here."""
OTHER_UPDATE = "another update of the weights is not supported; remove it"
JUDGED_LATER = (
    "The keys in deepspeed.config are passed on. The installed DeepSpeed checks them when the run starts."
)
_BOOLEAN = TypeAdapter(bool)


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON, or Hjson, as DeepSpeed does: with comments and trailing commas.

    Args:
        text: Text of the file.
        name: Name of the file, used in error messages.

    Raises:
        UserError: If the text is neither, is empty, is not a mapping, or has a key twice.
    """
    require(bool(text.strip()), f"{name}: is empty; write {{}} for a DeepSpeed JSON that changes nothing")
    problem = ""
    parsed: Any = None
    for package in ("json", "hjson"):  # the second comes with DeepSpeed
        if parsed is None and find_spec(package) is not None:
            try:
                load = import_module(package).loads
                parsed = load(text, object_pairs_hook=lambda pairs: _build_unique_dict(pairs, name))
            except (ValueError, RecursionError) as error:
                problem = problem or str(error)
    if problem and not isinstance(parsed, dict):  # a single word is valid Hjson, too
        raise UserError(to_one_line(f"{name}: invalid JSON: {problem}"))
    require(isinstance(parsed, dict), f"{name}: a DeepSpeed JSON must be a mapping")
    values: dict[str, Any] = parsed
    return values


def _build_unique_dict(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    keys = [key for key, _ in pairs if not _is_comment(key)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    require(twice is None, f"{name}: duplicate key {twice}; remove one")
    return dict(pairs)


def _remove_comments_and_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Copy ``values`` without the keys that serve as comments, and without keys whose value is null."""
    return {
        key: _remove_comments_and_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None and not _is_comment(key)
    }


def _is_comment(key: object) -> bool:
    return str(key).startswith(("_", "//"))


def prepare(file: ForeignFile) -> None:
    """Rename deprecated keys that DeepSpeed's models do not rename themselves.

    Args:
        file: A file whose keys have not been converted.
    """
    file.values = values = _remove_comments_and_nulls(file.values)
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


def read_switch(value: Any) -> Any:
    """Return the boolean that DeepSpeed's models, which are pydantic's, read; other values as they are."""
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return value


def read_stage(file: ForeignFile) -> Any:
    """Return the ZeRO stage of a file."""
    return file.get("zero_optimization.stage")


def pass_on(file: ForeignFile, value: Any) -> None:
    """Put the key that is being converted into ``deepspeed.config``.

    Raises:
        NoCounterpart: For a param of the optimizer or the scheduler, which DeepSpeed does not build here.
    """
    if file.path[0] in ("optimizer", "scheduler"):
        raise NoCounterpart(f"{format_short_value(value)} is not supported; remove it")
    is_first = "deepspeed.config" not in file.result.values
    section = file.result.values.setdefault("deepspeed.config", {})
    if is_first:
        file.put(file.path, "deepspeed.config", section)
    for part in file.path[:-1]:
        section = section.setdefault(part, {})
    section[file.path[-1]] = value


@dataclass(frozen=True)
class PassedOnKey(ForeignKey):
    """A key of DeepSpeed that is passed on, except for some values.

    Attributes:
        check: Raises for a value that is not passed on.
        text: Text in docs/wild.md.
    """

    check: Callable[[Any, ForeignFile], None]
    text: str
    reads_every_value: bool = field(default=True, kw_only=True)

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return False, because DeepSpeed interprets the value."""
        return False

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Pass the value on."""
        self.check(value, file)
        pass_on(file, value)
        return {}

    @property
    def remedy(self) -> str:
        """Text in docs/wild.md."""
        return self.text


def read_shared(value: Any, _: ForeignFile) -> Any:
    """Return the value of a key that is a setting here, too."""
    return value


def read_precision(value: Any, file: ForeignFile) -> str | None:
    """Read the type that is on; fp32 if one is off, and the other is neither on nor left to the run."""
    sections = [section for section in ("bf16", "fp16") if isinstance(file.get(section), dict)]
    switches = [read_switch(file.get(f"{section}.enabled")) for section in sections]
    if switches == [True, True]:
        raise NoCounterpart("bf16 and fp16 are both enabled; choose one")
    if read_switch(value) is True:
        return file.path[0]
    is_off = read_switch(value) is False and True not in switches and AUTO not in switches
    return "fp32" if is_off else None


def read_loss_scaling(value: Any, file: ForeignFile) -> Any:
    """Read a param of the dynamic loss scale. It is passed on unless fp16 is certain to be on."""
    is_on = read_switch(file.get("fp16.enabled", False))
    if is_on is not True:
        pass_on(file, value)
    return None if is_on is False else value


def check_loss_scale(value: Any, file: ForeignFile) -> None:
    """Note that a fixed loss scale has no effect without ZeRO."""
    if value and read_switch(file.get("fp16.enabled")) is True and read_stage(file) == 0:
        raise NoEffect("has no effect without ZeRO: the loss scale is dynamic")


def read_clipping(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Read the gradient norm to clip to. Zero means not to clip."""
    return {} if value in (None, AUTO) else {"train.max_grad_norm": float(value) or None}


def read_offload_device(part: str, read_zero_stage: Callable[[ForeignFile], Any]) -> Convert:
    """Return the conversion of the device that the state is offloaded to.

    Args:
        part: The offloaded part of the state: ``optimizer`` or ``params``.
        read_zero_stage: Function that returns the ZeRO stage of a file.
    """

    def read(value: Any, file: ForeignFile) -> str | None:
        if value == AUTO:
            return None
        device = choose(value, {"none": "none", "cpu": "cpu", "nvme": "nvme"})
        stage = read_zero_stage(file)
        if device != "none" and stage in ((0,) if part == "optimizer" else (0, 1, 2)):
            raise NoEffect(f"{device} has no effect at ZeRO stage {stage}, as in DeepSpeed")
        if device == "nvme" and stage in (1, 2):
            file.note(file.path, f"nvme is read as cpu at ZeRO stage {stage}: only stage 3 offloads to disk")
            return "cpu"
        return str(device)

    return read


def read_cpu_offload(part: str) -> Convert:
    """Return the conversion of the switch that DeepSpeed had before devices.

    Args:
        part: The offloaded part of the state: ``optimizer`` or ``params``.
    """
    read_device = read_offload_device(part, read_stage)
    return lambda value, file: read_device("cpu" if read_switch(value) is True else AUTO, file)


def read_nvme_path(
    device: str, read_zero_stage: Callable[[ForeignFile], Any]
) -> Callable[[Any, ForeignFile], None]:
    """Return the conversion of the folder of a disk.

    The setting is only assumed, because folders differ between machines.

    Args:
        device: Key of the device, which must be nvme.
        read_zero_stage: Function that returns the ZeRO stage of a file.
    """

    def read(value: Any, file: ForeignFile) -> None:
        if value in ("none", AUTO) or str(file.get(device)).lower() != "nvme":
            return
        if file.result.values.get("memory.nvme_path", str(value)) != str(value):
            raise NoCounterpart("differs from the other nvme_path; use one folder for both")
        if read_zero_stage(file) in (None, 3, AUTO):
            file.put(file.path, "memory.nvme_path", str(value))
            file.result.assumed.add("memory.nvme_path")

    return read


def read_optimizer(value: Any, _: ForeignFile) -> str:
    """Read the type of the optimizer, in any case."""
    kind = str(value).lower()
    if kind not in OPTIMIZERS:
        reason = "it scales updates by norms of whole tensors, which ZeRO's flat partitions do not have; "
        raise NoCounterpart(
            f"{format_short_value(value)} has no counterpart: {reason if kind == 'lamb' else ''}use AdamW, "
            "Adam or SGD"
        )
    return "sgd" if kind == "sgd" else "adamw"


def read_rate_of_optimizer(value: Any, file: ForeignFile) -> Any:
    """Read the learning rate of the optimizer, unless the scheduler sets it."""
    rate = find_rate_of_scheduler(file)
    if rate is not None:
        raise NoEffect(f"has no effect: scheduler.params.{rate} sets the learning rate")
    return value


def find_rate_of_scheduler(file: ForeignFile) -> str | None:
    """Return the param of the scheduler that sets the learning rate; None if the optimizer sets it."""
    params = {**SCHEDULERS.get(str(file.get("scheduler.type")), {}), **get_params(file, "scheduler")}
    return next((name for name in RATES if params.get(name) not in (None, AUTO)), None)


def get_params(file: ForeignFile, section: str) -> dict[str, Any]:
    """Return the params of the optimizer or the scheduler."""
    params = file.get(f"{section}.params")
    return params if isinstance(params, dict) else {}


def read_momentum(value: Any, _: ForeignFile) -> list[Any]:
    """Return both betas: the momentum of SGD is the first one."""
    return [value, 0.95]


def check_adam_w_mode(value: Any, file: ForeignFile) -> None:
    """Refuse Adam with L2 regularization. The switch does not change AdamW."""
    if read_switch(value) is False and str(file.get("optimizer.type")).lower() != "adamw":
        raise NoCounterpart(f"{format_short_value(value)}: {OTHER_UPDATE}")


def read_scheduler(value: Any, _: ForeignFile) -> Any:
    """Read the type of the scheduler."""
    if value not in SCHEDULERS:
        remedy = suggest_name(str(value), SCHEDULERS) or "; remove it and set train.schedule"
        raise NoCounterpart(f"{format_short_value(value)} is not supported{remedy}")
    return value


def read_scheduler_param(value: Any, _: ForeignFile) -> Any:
    """Read a param of the scheduler that is a setting here."""
    if isinstance(value, list):
        raise NoCounterpart("a list with a value per parameter group is not supported; give one number")
    return value


def add_schedule_param(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Add a param of the scheduler to ``train.schedule_params``."""
    params = file.result.values.get("train.schedule_params", {})
    return {"train.schedule_params": {**params, file.path[-1]: read_scheduler_param(value, file)}}


def read_recomputation(value: Any, file: ForeignFile) -> str | None:
    """Read whether layers are recomputed."""
    if value is True and read_stage(file) == 0:
        file.note(file.path, "has no effect without ZeRO: the inputs of recomputed layers stay on the device")
    return "full" if value is True else None


def read_recomputation_without(reason: str) -> Convert:
    """Return the conversion of a switch that recomputes layers and whose own effect there is not here.

    Args:
        reason: Why its own effect is missing.
    """

    def read(value: Any, file: ForeignFile) -> str | None:
        if value is True:
            file.note(file.path, f"has no effect: {reason}")
        return "full" if value is True else None

    return read


def note_full_weights(value: Any, file: ForeignFile) -> None:
    """Note that the full weights are written anyway."""
    if value is True and read_stage(file) == 3:
        file.note(
            file.path,
            "has no effect: final/ always has the full weights, in fp32 (16 bits: portable-convert --dtype)",
        )


def check_accumulation_steps(value: Any, _: ForeignFile) -> None:
    """Refuse a number of accumulation steps that is not a count. The batch is computed from it later."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NoCounterpart(f"must be a whole number from 1, or auto, not {format_short_value(value)}")


def check_gradient_scaling(value: Any, file: ForeignFile) -> None:
    """Refuse to divide gradients before they are summed, if ZeRO reduces and scatters them."""
    scatters = read_stage(file) != 0 and file.get("zero_optimization.reduce_scatter") is not False
    if scatters and (value is True or value not in (None, AUTO, False, 1)):
        raise NoCounterpart(
            f"{format_short_value(value)} needs zero_optimization.reduce_scatter false under ZeRO; remove "
            "it, or set reduce_scatter to false"
        )


def check_accumulation_dtype(value: Any, file: ForeignFile) -> None:
    """Refuse to accumulate gradients in fp32 at stage 1."""
    if value == "fp32" and read_stage(file) == 1 and read_switch(file.get("bf16.enabled")) is True:
        raise NoCounterpart(
            "fp32 is supported at stages 2 and 3, where gradients are sharded; use zero_optimization.stage 2"
        )


KEYS: ForeignKeys = {
    # The batch and gradients
    "train_batch_size": SettingKey("train.global_batch_size", read_shared, reads_every_value=True),
    "train_micro_batch_size_per_gpu": SettingKey(
        "train.micro_batch_size", read_shared, reads_every_value=True
    ),
    "gradient_accumulation_steps": MultiSettingKey(
        (), check_accumulation_steps, reads_every_value=True, hint="train.global_batch_size"
    ),
    "managed_gradient_accumulation": NeverFalseKey("DeepSpeed must know where a step ends; remove it"),
    "gradient_clipping": MultiSettingKey(("train.max_grad_norm",), read_clipping, reads_every_value=True),
    "gradient_allreduce_op": RefusedKey("leave it out", unless=("mean",)),
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"),
        PassedOnKey(check_gradient_scaling, "passed on, with reduce_scatter false"),
    ),
    "data_types.grad_accum_dtype": PassedOnKey(check_accumulation_dtype, "passed on; fp32 at stages 2 and 3"),
    # Precision
    **dict.fromkeys(
        ("bf16.enabled", "fp16.enabled"), SettingKey("precision", read_precision, reads_every_value=True)
    ),
    "bf16.check_grad_overflow": NeverFalseKey("non-finite updates would go unnoticed; remove it"),
    "fp16.initial_scale_power": SettingKey(
        "fp16.initial_scale_power", read_loss_scaling, reads_every_value=True
    ),
    "fp16.loss_scale_window": SettingKey("fp16.loss_scale_window", read_loss_scaling, reads_every_value=True),
    "fp16.hysteresis": SettingKey("fp16.hysteresis", read_loss_scaling, reads_every_value=True),
    "fp16.min_loss_scale": SettingKey("fp16.min_loss_scale", read_loss_scaling, reads_every_value=True),
    "fp16.loss_scale": PassedOnKey(check_loss_scale, "passed on; dynamic without ZeRO"),
    **dict.fromkeys(
        (
            "fp16.fp16_master_weights_and_grads",
            "bf16.bf16_master_weights_and_grads",
            "torch_autocast.enabled",
        ),
        RefusedKey("leave it out"),
    ),
    # ZeRO
    "zero_optimization.stage": WordSettingKey(
        "strategy", {"0": "no_shard", "1": "zero1", "2": "zero2", "3": "zero3", "auto": None}
    ),
    "zero_optimization.offload_optimizer.device": SettingKey(
        "memory.offload_optimizer", read_offload_device("optimizer", read_stage)
    ),
    "zero_optimization.cpu_offload": SettingKey("memory.offload_optimizer", read_cpu_offload("optimizer")),
    "zero_optimization.offload_optimizer.nvme_path": MultiSettingKey(
        ("memory.nvme_path",), read_nvme_path("zero_optimization.offload_optimizer.device", read_stage)
    ),
    "zero_optimization.offload_optimizer.ratio": RefusedKey("leave it out", unless=(1.0,)),
    "zero_optimization.offload_param.device": SettingKey(
        "memory.offload_params", read_offload_device("params", read_stage)
    ),
    "zero_optimization.cpu_offload_param": SettingKey("memory.offload_params", read_cpu_offload("params")),
    "zero_optimization.offload_param.nvme_path": MultiSettingKey(
        ("memory.nvme_path",), read_nvme_path("zero_optimization.offload_param.device", read_stage)
    ),
    "zero_optimization.cpu_offload_use_pin_memory": IgnoredKey("DeepSpeed has removed it"),
    "zero_optimization.compute_grad_norm": NeverFalseKey(
        "the gradient norm is needed for clipping and metrics; remove it"
    ),
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        PassedOnKey(note_full_weights, "no effect at stage 3: final/ always has the full weights"),
    ),
    **dict.fromkeys(
        ("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
        RefusedKey("leave it out"),
    ),
    # The optimizer
    "optimizer.type": SettingKey("train.optimizer", read_optimizer),
    "optimizer.params.lr": SettingKey("train.learning_rate", read_rate_of_optimizer),
    "optimizer.params.betas": SettingKey("train.betas", read_shared),
    "optimizer.params.momentum": SettingKey("train.betas", read_momentum, hint="the first of train.betas"),
    "optimizer.params.eps": SettingKey("train.eps", read_shared),
    "optimizer.params.weight_decay": SettingKey("train.weight_decay", read_shared),
    "optimizer.params.adam_w_mode": MultiSettingKey(
        (),
        check_adam_w_mode,
        reads_every_value=True,
        hint="never false for Adam: another update of the weights is not supported",
    ),
    **dict.fromkeys(
        (
            "optimizer.params.bias_correction",
            "optimizer.params.adamw_mode",
            "optimizer.params.fp32_optimizer_states",
        ),
        NeverFalseKey(OTHER_UPDATE),
    ),
    **dict.fromkeys(
        ("optimizer.params.amsgrad", "optimizer.params.maximize", "optimizer.params.nesterov"),
        RefusedKey("leave it out"),
    ),
    "optimizer.params.dampening": RefusedKey("leave it out", unless=(0,)),
    "optimizer.legacy_fusion": IgnoredKey(),
    **dict.fromkeys(
        ("optimizer.params.torch_adam", "optimizer.params.fused", "optimizer.params.foreach"), IgnoredKey()
    ),
    **dict.fromkeys(
        (
            "optimizer.params.set_grad_none",
            "optimizer.params.capturable",
            "optimizer.params.differentiable",
        ),
        IgnoredKey(),
    ),
    # The scheduler
    "scheduler.type": SettingKey("train.schedule", read_scheduler),
    **dict.fromkeys(
        (
            "scheduler.params.warmup_max_lr",
            "scheduler.params.cycle_max_lr",
            "scheduler.params.lr_range_test_min_lr",
        ),
        SettingKey("train.learning_rate", read_scheduler_param),
    ),
    "scheduler.params.warmup_num_steps": SettingKey("train.warmup_steps", read_scheduler_param),
    "scheduler.params.total_num_steps": SettingKey("train.steps", read_scheduler_param),
    "scheduler.params.cos_min_ratio": SettingKey("train.min_learning_rate_ratio", read_scheduler_param),
    "scheduler.params.last_batch_iteration": RefusedKey(
        "a run starts at its first step, and resumes at its checkpoint's; remove it", unless=(-1,)
    ),
    "scheduler.params.*": MultiSettingKey(
        ("train.schedule_params",), add_schedule_param, reads_every_value=True
    ),
    # Recomputation
    "activation_checkpointing.cpu_checkpointing": SettingKey(
        "memory.activation_checkpointing", read_recomputation
    ),
    "activation_checkpointing.partition_activations": SettingKey(
        "memory.activation_checkpointing",
        read_recomputation_without("it shards activations over model-parallel ranks, and there is only one"),
    ),
    "activation_checkpointing.contiguous_memory_optimization": SettingKey(
        "memory.activation_checkpointing",
        read_recomputation_without("it arranges what partition_activations shards"),
    ),
    "activation_checkpointing.number_checkpoints": IgnoredKey(
        "it sizes the buffer of contiguous_memory_optimization"
    ),
    "activation_checkpointing.synchronize_checkpoint_boundary": IgnoredKey(
        "layers are recomputed without a host sync"
    ),
    "activation_checkpointing.profile": IgnoredKey(
        "use portable-train --profile, which records the time of each layer"
    ),
    # Other sections
    "sequence_parallel_size": RefusedKey("set context_parallel_size", unless=(1,)),
    **dict.fromkeys(
        ("tensor_parallel", "expert_parallel", "weight_quantization", "datastates_ckpt"),
        RefusedKey("leave it out"),
    ),
    **dict.fromkeys(
        ("hybrid_engine.enabled", "compile.deepcompile", "checkpoint.writer", "data_efficiency.enabled"),
        RefusedKey("leave it out"),
    ),
}
REFUSED_KEYS = {name for name, key in KEYS.items() if isinstance(key, RefusedKey)}
"""Keys and sections of DeepSpeed that cannot be used."""


def finish(file: ForeignFile, devices: int) -> None:
    """Add DeepSpeed's defaults and the batch, and note which sections are idle without ZeRO.

    Args:
        file: A file whose keys have been converted.
        devices: Number of devices that a batch is spread over; 0 if it is not known.
    """
    reason = "default of DeepSpeed"
    kind, scheduler = str(file.get("optimizer.type", "")).lower(), str(file.get("scheduler.type"))
    params = get_params(file, "optimizer")
    defaults = OPTIMIZERS.get(kind, {})
    if read_switch(params.get("torch_adam")) is True:
        defaults = {**defaults, "weight_decay": TORCHS_WEIGHT_DECAY}
    for name in defaults.keys() - params.keys():
        if name == "momentum":
            file.put_default("train.betas", [defaults[name], 0.95], reason)
        elif not (name == "lr" and find_rate_of_scheduler(file)):
            (target,) = KEYS[f"optimizer.params.{name}"].targets
            file.put_default(target, defaults[name], reason)
    for name in SCHEDULERS.get(scheduler, {}).keys() - get_params(file, "scheduler").keys():
        (target,) = KEYS[f"scheduler.params.{name}"].targets
        file.put_default(target, SCHEDULERS[scheduler][name], reason)
    if scheduler == "OneCycle" and kind == "sgd":  # which has no betas that it could move
        schedule_params = file.result.values.get("train.schedule_params", {})
        without_momentum = {**schedule_params, "cycle_momentum": False}
        file.put(("scheduler", "type"), "train.schedule_params", without_momentum)
    passed_on = file.result.values.get("deepspeed.config", {})
    if passed_on:
        file.result.differences.append(JUDGED_LATER)
    never_idle = ("fp16", "bf16", "zero_allow_untested_optimizer", "steps_per_print")
    idle = [key for key, value in passed_on.items() if key not in never_idle and _is_on(value)]
    if read_stage(file) == 0:
        file.note(
            ("zero_optimization",),
            "no ZeRO stage: the run uses torch's DDP (strategy no_shard) instead of DeepSpeed's engine"
            + (f"; no effect: {', '.join(idle)}" if idle else ""),
        )
    file.put_global_batch(devices)


def _is_on(value: Any) -> bool:
    """Return whether a value turns something on."""
    if isinstance(value, dict):
        return _is_on(value["enabled"]) if "enabled" in value else any(map(_is_on, value.values()))
    return value not in (None, False, 0, AUTO)
