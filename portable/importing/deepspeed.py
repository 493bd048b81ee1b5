"""Table of the DeepSpeed JSON keys that correspond to settings, have no effect, or are refused.

All other keys are passed through to DeepSpeed in the setting ``deepspeed.config``. DeepSpeed itself
checks them when a run starts (:mod:`portable.gpu.zero.config`), so this module works without
DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from portable.config.origins import format_short_value
from portable.converters.similar_names import format_name_suggestion
from portable.errors import UserError, require, to_one_line
from portable.importing.foreign_file import ConvertedSettings, ForeignKey, NoCounterpart, NoEffect
from portable.importing.foreign_keys import (
    IgnoredKey,
    MultiSettingKey,
    NeverFalseKey,
    RefusedKey,
    SettingKey,
    WordSettingKey,
    translate_word,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.importing.foreign_file import ForeignFile, ForeignKeys
    from portable.importing.foreign_keys import ValueConverter

AUTO = "auto"
LEARNING_RATE_PARAMS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
"""Params of DeepSpeed's schedulers that set the learning rate."""
TORCH_ADAMW_WEIGHT_DECAY = 0.01
"""Default weight decay of torch's AdamW, which DeepSpeed uses if ``torch_adam`` is true."""
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "adam": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 0.001, "momentum": 0, "weight_decay": 0.0},
}
"""DeepSpeed's defaults for the params that correspond to settings, by supported optimizer in lower case."""
SCHEDULER_DEFAULTS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 1000},
    "WarmupDecayLR": {"warmup_num_steps": 1000, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {"warmup_num_steps": 1000, "cos_min_ratio": 0.0001},
    "OneCycle": {},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001},
}
"""DeepSpeed's defaults for the params that correspond to settings, by supported scheduler."""
UNSUPPORTED_UPDATE = "another update of the weights is not supported; remove the key"
CHECKED_LATER = (
    "The keys in deepspeed.config are passed on. The installed DeepSpeed checks them when the run starts."
)
_BOOLEAN = TypeAdapter(bool)


def parse_deepspeed_json(text: str, file_name: str) -> dict[str, Any]:
    """Parse a DeepSpeed JSON.

    If the package hjson is installed, comments and trailing commas (Hjson) are allowed, as in DeepSpeed.

    Args:
        text: Text of the file.
        file_name: Name of the file, used in error messages.

    Raises:
        UserError: If the text is not valid JSON or Hjson, is empty, is not a mapping, or has a duplicate key.
    """
    require(
        bool(text.strip()), f"{file_name}: is empty; write {{}} for a DeepSpeed JSON that changes nothing"
    )
    problem = ""
    parsed: Any = None
    for package in ("json", "hjson"):  # DeepSpeed installs hjson
        if parsed is None and find_spec(package) is not None:
            try:
                load = import_module(package).loads
                parsed = load(text, object_pairs_hook=lambda pairs: _build_unique_dict(pairs, file_name))
            except (ValueError, RecursionError) as error:
                problem = problem or str(error)
    if problem and not isinstance(parsed, dict):  # a single word is valid Hjson, but is not a mapping
        raise UserError(to_one_line(f"{file_name}: is not valid JSON ({problem}); correct the file"))
    require(isinstance(parsed, dict), f"{file_name}: is not a mapping; specify a DeepSpeed JSON")
    values: dict[str, Any] = parsed
    return values


def _build_unique_dict(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    """Build a dict from the key-value pairs of a JSON object, as a hook of the JSON parser.

    Args:
        pairs: Keys and values of a JSON object.
        name: Name of the file, used in error messages.

    Raises:
        UserError: If a key that is not a comment occurs twice.
    """
    keys = [key for key, _ in pairs if not _is_comment(key)]
    duplicate_key = next((key for key in keys if keys.count(key) > 1), None)
    require(duplicate_key is None, f"{name}: duplicate key {duplicate_key}; remove one of the two")
    return dict(pairs)


def _remove_comments_and_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested mapping without comments and null values."""
    return {
        key: _remove_comments_and_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None and not _is_comment(key)
    }


def _is_comment(key: object) -> bool:
    """Return whether a key is a comment, because it begins with an underscore or two slashes."""
    return str(key).startswith(("_", "//"))


def normalize_deepspeed_file(file: ForeignFile) -> None:
    """Normalize a file in place to the layout that the table of keys expects.

    Removes comments and null values. Renames deprecated keys if DeepSpeed's own config classes do not
    rename them, and adds a note about each renamed key.

    Args:
        file: File whose keys have not been converted yet.
    """
    file.values = values = _remove_comments_and_nulls(file.values)
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):  # the form of DeepSpeed versions without stages
        zero = values["zero_optimization"] = {"stage": int(zero)}
        size = values.pop("allgather_size", None)
        if size is not None and zero["stage"]:
            zero["allgather_bucket_size"] = size
        file.add_note(
            ("zero_optimization",), "true or false is deprecated: read as zero_optimization.stage 1 or 0"
        )
    if isinstance(zero, dict) and "aio" in zero:
        values.setdefault("aio", zero.pop("aio"))
        file.add_note(("aio",), "in zero_optimization is deprecated: moved to the top level")
    if isinstance(aio := values.get("aio"), dict):
        # Names in DeepSpeed 0.16 and in the output of ds_nvme_tune.
        for old in ("thread_count", "num_threads"):
            if old in aio:
                aio.setdefault("intra_op_parallelism", aio.pop(old))
                file.add_note(("aio", old), "is deprecated: read as aio.intra_op_parallelism")
        # Convert the strings that ds_nvme_tune prints, because DeepSpeed treats every string as true.
        for switch in ("single_submit", "overlap_events"):
            aio |= {switch: aio[switch] == "true"} if aio.get(switch) in ("true", "false") else {}
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("params") and not optimizer.get("type"):
        del optimizer["params"]
        file.add_note(("optimizer", "params"), "has no effect without optimizer.type, as in DeepSpeed")


def parse_switch(value: Any) -> Any:
    """Convert a value such as ``"yes"`` or 1 to a boolean, with the pydantic rules that DeepSpeed uses.

    Returns the value unchanged if these rules do not accept it as a boolean.
    """
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return value


def get_zero_stage(file: ForeignFile) -> Any:
    """Return the ZeRO stage in a file, which may be ``auto``, or None if the file does not set it."""
    return file.get_value("zero_optimization.stage")


def pass_key_to_deepspeed(file: ForeignFile, value: Any) -> None:
    """Pass a key through to DeepSpeed, by adding it to ``deepspeed.config`` in the result.

    Args:
        file: File that is being converted. ``file.path`` is the path of the key.
        value: Value of the key.

    Raises:
        NoCounterpart: If the key is in the section ``optimizer`` or ``scheduler``, because the run
            builds both itself instead of passing them to DeepSpeed.
    """
    if file.path[0] in ("optimizer", "scheduler"):
        raise NoCounterpart(f"{format_short_value(value)} is not supported; remove the key")
    is_first = "deepspeed.config" not in file.result.values
    section = file.result.values.setdefault("deepspeed.config", {})
    if is_first:
        file.set_setting(file.path, "deepspeed.config", section)
    for part in file.path[:-1]:
        section = section.setdefault(part, {})
    section[file.path[-1]] = value


@dataclass(frozen=True)
class PassThroughKey(ForeignKey):
    """Key that is passed through to DeepSpeed, except for some values.

    Attributes:
        check_value: Function that raises ``NoEffect`` or ``NoCounterpart`` for values that must not be
            passed through.
        docs_text: Description of the key in docs/keys.md.
    """

    check_value: Callable[[Any, ForeignFile], None]
    docs_text: str
    converts_empty_values: bool = field(default=True, kw_only=True)

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return False, because DeepSpeed interprets the values, so none of them may be ignored."""
        return False

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Add the value to ``deepspeed.config`` in the result, and return no settings.

        Raises:
            NoEffect: If ``check_value`` raises it.
            NoCounterpart: If ``check_value`` raises it.
        """
        self.check_value(value, file)
        pass_key_to_deepspeed(file, value)
        return {}

    @property
    def remedy(self) -> str:
        """Description of the key in docs/keys.md."""
        return self.docs_text


def keep_value(value: Any, _: ForeignFile) -> Any:
    """Return ``value`` unchanged.

    This is the converter for keys whose negative values and ``auto`` must be kept. The default
    converter, :func:`drop_unset_value`, drops them.
    """
    return value


def convert_precision(value: Any, file: ForeignFile) -> str | None:
    """Convert ``bf16.enabled`` or ``fp16.enabled`` to the precision.

    Returns:
        ``bf16`` or ``fp16``, the name of the section, if the section is enabled. ``fp32`` if the
        section is disabled and the other section is neither enabled nor ``auto``. None in all other
        cases.

    Raises:
        NoCounterpart: If both sections are enabled.
    """
    sections = [section for section in ("bf16", "fp16") if isinstance(file.get_value(section), dict)]
    switches = [parse_switch(file.get_value(f"{section}.enabled")) for section in sections]
    if switches == [True, True]:
        raise NoCounterpart("bf16 and fp16 are both enabled; disable one of the two")
    if parse_switch(value) is True:
        return file.path[0]
    is_off = parse_switch(value) is False and True not in switches and AUTO not in switches
    return "fp32" if is_off else None


def convert_loss_scale_param(value: Any, file: ForeignFile) -> Any:
    """Convert a parameter of dynamic loss scaling in the section ``fp16``.

    If ``fp16.enabled`` is not true, the parameter is also passed through to DeepSpeed.

    Returns:
        The value. None if fp16 is disabled or not set.
    """
    is_on = parse_switch(file.get_value("fp16.enabled", False))
    if is_on is not True:
        pass_key_to_deepspeed(file, value)
    return None if is_on is False else value


def check_fixed_loss_scale(value: Any, file: ForeignFile) -> None:
    """Raise ``NoEffect`` for a fixed loss scale at ZeRO stage 0, which always uses a dynamic scale."""
    if value and parse_switch(file.get_value("fp16.enabled")) is True and get_zero_stage(file) == 0:
        raise NoEffect("has no effect without ZeRO: the loss scale is dynamic")


def convert_gradient_clipping(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert the maximum gradient norm to ``train.max_grad_norm``.

    Zero becomes None, which disables clipping. Returns an empty dict for ``auto`` and null.
    """
    return {} if value in (None, AUTO) else {"train.max_grad_norm": float(value) or None}


def build_offload_device_converter(
    offloaded_state: str, stage_getter: Callable[[ForeignFile], Any]
) -> ValueConverter:
    """Build a converter for the device to which the optimizer state or the parameters are offloaded.

    The converter raises ``NoEffect`` if the ZeRO stage of the file does not support this kind of
    offloading. At stages 1 and 2, it converts ``nvme`` to ``cpu``, like DeepSpeed, and adds a note.

    Args:
        offloaded_state: ``optimizer`` or ``params``.
        stage_getter: Function that returns the ZeRO stage of a file.
    """

    def convert_device(value: Any, file: ForeignFile) -> str | None:
        if value == AUTO:
            return None
        device = translate_word(value, {"none": "none", "cpu": "cpu", "nvme": "nvme"})
        stage = stage_getter(file)
        if device != "none" and stage in ((0,) if offloaded_state == "optimizer" else (0, 1, 2)):
            raise NoEffect(f"{device} has no effect at ZeRO stage {stage}, as in DeepSpeed")
        if device == "nvme" and stage in (1, 2):
            file.add_note(
                file.path, f"nvme is read as cpu at ZeRO stage {stage}: only stage 3 offloads to disk"
            )
            return "cpu"
        return str(device)

    return convert_device


def build_cpu_offload_converter(offloaded_state: str) -> ValueConverter:
    """Build a converter for ``cpu_offload`` or ``cpu_offload_param``, boolean keys of old DeepSpeed versions.

    Newer versions specify an offload device instead. The converter returns ``cpu`` if the key is true,
    otherwise None.

    Args:
        offloaded_state: ``optimizer`` or ``params``.
    """
    convert_device = build_offload_device_converter(offloaded_state, get_zero_stage)
    return lambda value, file: convert_device("cpu" if parse_switch(value) is True else AUTO, file)


def build_nvme_path_converter(
    device_key: str, stage_getter: Callable[[ForeignFile], Any]
) -> Callable[[Any, ForeignFile], None]:
    """Build a converter that stores the path of an NVMe disk as ``memory.nvme_path`` in the file's result.

    The converter does nothing unless the offload device is ``nvme`` and the ZeRO stage may be 3. It
    marks the setting as assumed, so that the user's config can override it, because paths differ
    between machines. It raises ``NoCounterpart`` if the file already contains a different NVMe path.

    Args:
        device_key: Dotted key of the offload device in the file.
        stage_getter: Function that returns the ZeRO stage of a file.
    """

    def convert_path(value: Any, file: ForeignFile) -> None:
        if value in ("none", AUTO) or str(file.get_value(device_key)).lower() != "nvme":
            return
        if file.result.values.get("memory.nvme_path", str(value)) != str(value):
            raise NoCounterpart("differs from the other nvme_path; use the same folder for both")
        if stage_getter(file) in (None, 3, AUTO):
            file.set_setting(file.path, "memory.nvme_path", str(value))
            file.result.assumed_keys.add("memory.nvme_path")

    return convert_path


def convert_optimizer_type(value: Any, _: ForeignFile) -> str:
    """Convert the optimizer type to ``adamw`` or ``sgd``, ignoring case.

    Raises:
        NoCounterpart: If the optimizer is not supported.
    """
    kind = str(value).lower()
    if kind not in OPTIMIZER_DEFAULTS:
        reason = "it scales updates by norms of complete tensors, which ZeRO's flat partitions do not have; "
        raise NoCounterpart(
            f"{format_short_value(value)} is not supported: {reason if kind == 'lamb' else ''}use AdamW, "
            "Adam or SGD"
        )
    return "sgd" if kind == "sgd" else "adamw"


def convert_optimizer_rate(value: Any, file: ForeignFile) -> Any:
    """Return the learning rate of the optimizer unchanged.

    Raises:
        NoEffect: If a scheduler parameter overrides the learning rate.
    """
    rate = find_scheduler_rate_param(file)
    if rate is not None:
        raise NoEffect(f"has no effect: scheduler.params.{rate} sets the learning rate")
    return value


def find_scheduler_rate_param(file: ForeignFile) -> str | None:
    """Find the scheduler parameter that sets the learning rate, either explicitly or by its default.

    Returns:
        Name of the parameter. None if the optimizer sets the learning rate.
    """
    params = {
        **SCHEDULER_DEFAULTS.get(str(file.get_value("scheduler.type")), {}),
        **get_params(file, "scheduler"),
    }
    return next((name for name in LEARNING_RATE_PARAMS if params.get(name) not in (None, AUTO)), None)


def get_params(file: ForeignFile, section: str) -> dict[str, Any]:
    """Return the params in the section ``optimizer`` or ``scheduler`` of a file, or an empty dict."""
    params = file.get_value(f"{section}.params")
    return params if isinstance(params, dict) else {}


def convert_momentum_to_betas(value: Any, _: ForeignFile) -> list[Any]:
    """Convert SGD's momentum to ``train.betas``, whose first value is SGD's momentum."""
    return [value, 0.95]


def check_adam_w_mode(value: Any, file: ForeignFile) -> None:
    """Raise ``NoCounterpart`` if ``adam_w_mode`` is false, because Adam with L2 decay is not supported.

    Does nothing if the optimizer type is AdamW, because DeepSpeed then ignores ``adam_w_mode``.
    """
    if parse_switch(value) is False and str(file.get_value("optimizer.type")).lower() != "adamw":
        raise NoCounterpart(f"{format_short_value(value)}: {UNSUPPORTED_UPDATE}")


def convert_scheduler_type(value: Any, _: ForeignFile) -> Any:
    """Return the scheduler type unchanged, because ``train.schedule`` uses the same names.

    Raises:
        NoCounterpart: If the scheduler is not supported.
    """
    if value not in SCHEDULER_DEFAULTS:
        remedy = (
            format_name_suggestion(str(value), SCHEDULER_DEFAULTS)
            or "; remove the key and set train.schedule"
        )
        raise NoCounterpart(f"{format_short_value(value)} is not supported{remedy}")
    return value


def convert_scheduler_param(value: Any, _: ForeignFile) -> Any:
    """Return the value of a scheduler parameter unchanged.

    Raises:
        NoCounterpart: If the value is a list with one element per parameter group.
    """
    if isinstance(value, list):
        raise NoCounterpart("a list with a value per parameter group is not supported; give one number")
    return value


def convert_to_schedule_params(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Add the current scheduler parameter to the parameters that were already converted.

    Returns:
        The setting ``train.schedule_params`` with all parameters converted so far.

    Raises:
        NoCounterpart: If the value is a list with one element per parameter group.
    """
    params = file.result.values.get("train.schedule_params", {})
    return {"train.schedule_params": {**params, file.path[-1]: convert_scheduler_param(value, file)}}


def convert_recomputation(value: Any, file: ForeignFile) -> str | None:
    """Convert ``cpu_checkpointing``, which implies activation checkpointing.

    At ZeRO stage 0, adds a note that nothing is offloaded to the CPU.

    Returns:
        ``full`` if the value is true, otherwise None.
    """
    if value is True and get_zero_stage(file) == 0:
        file.add_note(
            file.path, "has no effect without ZeRO: the inputs of recomputed layers stay on the device"
        )
    return "full" if value is True else None


def build_implied_recomputation_converter(reason: str) -> ValueConverter:
    """Build a converter for a boolean key that implies activation checkpointing and also has another effect.

    If the value is true, the converter returns ``full`` and adds a note that the other effect is not
    supported.

    Args:
        reason: Reason why the other effect is not supported, used in the note.
    """

    def convert_switch(value: Any, file: ForeignFile) -> str | None:
        if value is True:
            file.add_note(file.path, f"has no effect: {reason}")
        return "full" if value is True else None

    return convert_switch


def note_full_weights_export(value: Any, file: ForeignFile) -> None:
    """Add a note at ZeRO stage 3 that the key has no effect, because full weights are always exported."""
    if value is True and get_zero_stage(file) == 3:
        file.add_note(
            file.path,
            "has no effect: final/ always has the full weights, in fp32 (16 bits: portable-convert --dtype)",
        )


def check_is_step_count(value: Any, _: ForeignFile) -> None:
    """Check that the number of gradient accumulation steps is a positive integer.

    The number is not converted here. :meth:`ForeignFile.set_global_batch_size` uses it later.

    Raises:
        NoCounterpart: If the value is not a positive integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NoCounterpart(f"must be a whole number from 1, or auto, not {format_short_value(value)}")


def check_gradient_scaling(value: Any, file: ForeignFile) -> None:
    """Check ``prescale_gradients`` or ``gradient_predivide_factor``.

    Raises:
        NoCounterpart: If the value scales gradients and ZeRO reduces them with reduce-scatter.
    """
    scatters = get_zero_stage(file) != 0 and file.get_value("zero_optimization.reduce_scatter") is not False
    if scatters and (value is True or value not in (None, AUTO, False, 1)):
        raise NoCounterpart(
            f"{format_short_value(value)} needs zero_optimization.reduce_scatter false under ZeRO; remove "
            "the key, or set reduce_scatter to false"
        )


def check_accumulation_dtype(value: Any, file: ForeignFile) -> None:
    """Raise ``NoCounterpart`` for fp32 gradient accumulation in bf16 training at ZeRO stage 1."""
    if value == "fp32" and get_zero_stage(file) == 1 and parse_switch(file.get_value("bf16.enabled")) is True:
        raise NoCounterpart(
            "fp32 is supported at stages 2 and 3, where gradients are sharded; use zero_optimization.stage 2"
        )


KEYS: ForeignKeys = {
    # The batch and gradients
    "train_batch_size": SettingKey("train.global_batch_size", keep_value, converts_empty_values=True),
    "train_micro_batch_size_per_gpu": SettingKey(
        "train.micro_batch_size", keep_value, converts_empty_values=True
    ),
    "gradient_accumulation_steps": MultiSettingKey(
        (), check_is_step_count, converts_empty_values=True, hint="train.global_batch_size"
    ),
    "managed_gradient_accumulation": NeverFalseKey("DeepSpeed must know when a step ends; remove the key"),
    "gradient_clipping": MultiSettingKey(
        ("train.max_grad_norm",), convert_gradient_clipping, converts_empty_values=True
    ),
    "gradient_allreduce_op": RefusedKey("remove the key", unless=("mean",)),
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"),
        PassThroughKey(check_gradient_scaling, "passed on, with reduce_scatter false"),
    ),
    "data_types.grad_accum_dtype": PassThroughKey(
        check_accumulation_dtype, "passed on; fp32 at stages 2 and 3"
    ),
    # Precision
    **dict.fromkeys(
        ("bf16.enabled", "fp16.enabled"),
        SettingKey("precision", convert_precision, converts_empty_values=True),
    ),
    "bf16.check_grad_overflow": NeverFalseKey("non-finite updates would go unnoticed; remove the key"),
    "fp16.initial_scale_power": SettingKey(
        "fp16.initial_scale_power", convert_loss_scale_param, converts_empty_values=True
    ),
    "fp16.loss_scale_window": SettingKey(
        "fp16.loss_scale_window", convert_loss_scale_param, converts_empty_values=True
    ),
    "fp16.hysteresis": SettingKey("fp16.hysteresis", convert_loss_scale_param, converts_empty_values=True),
    "fp16.min_loss_scale": SettingKey(
        "fp16.min_loss_scale", convert_loss_scale_param, converts_empty_values=True
    ),
    "fp16.loss_scale": PassThroughKey(check_fixed_loss_scale, "passed on; dynamic without ZeRO"),
    **dict.fromkeys(
        (
            "fp16.fp16_master_weights_and_grads",
            "bf16.bf16_master_weights_and_grads",
            "torch_autocast.enabled",
        ),
        RefusedKey("remove the key"),
    ),
    # ZeRO
    "zero_optimization.stage": WordSettingKey(
        "strategy", {"0": "no_shard", "1": "zero1", "2": "zero2", "3": "zero3", "auto": None}
    ),
    "zero_optimization.offload_optimizer.device": SettingKey(
        "memory.offload_optimizer", build_offload_device_converter("optimizer", get_zero_stage)
    ),
    "zero_optimization.cpu_offload": SettingKey(
        "memory.offload_optimizer", build_cpu_offload_converter("optimizer")
    ),
    "zero_optimization.offload_optimizer.nvme_path": MultiSettingKey(
        ("memory.nvme_path",),
        build_nvme_path_converter("zero_optimization.offload_optimizer.device", get_zero_stage),
    ),
    "zero_optimization.offload_optimizer.ratio": RefusedKey("remove the key", unless=(1.0,)),
    "zero_optimization.offload_param.device": SettingKey(
        "memory.offload_params", build_offload_device_converter("params", get_zero_stage)
    ),
    "zero_optimization.cpu_offload_param": SettingKey(
        "memory.offload_params", build_cpu_offload_converter("params")
    ),
    "zero_optimization.offload_param.nvme_path": MultiSettingKey(
        ("memory.nvme_path",),
        build_nvme_path_converter("zero_optimization.offload_param.device", get_zero_stage),
    ),
    "zero_optimization.cpu_offload_use_pin_memory": IgnoredKey("DeepSpeed has removed it"),
    "zero_optimization.compute_grad_norm": NeverFalseKey(
        "the gradient norm is needed for clipping and metrics; remove the key"
    ),
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        PassThroughKey(note_full_weights_export, "no effect at stage 3: final/ always has the full weights"),
    ),
    **dict.fromkeys(
        ("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
        RefusedKey("remove the key"),
    ),
    # The optimizer
    "optimizer.type": SettingKey("train.optimizer", convert_optimizer_type),
    "optimizer.params.lr": SettingKey("train.learning_rate", convert_optimizer_rate),
    "optimizer.params.betas": SettingKey("train.betas", keep_value),
    "optimizer.params.momentum": SettingKey(
        "train.betas", convert_momentum_to_betas, hint="the first of train.betas"
    ),
    "optimizer.params.eps": SettingKey("train.eps", keep_value),
    "optimizer.params.weight_decay": SettingKey("train.weight_decay", keep_value),
    "optimizer.params.adam_w_mode": MultiSettingKey(
        (),
        check_adam_w_mode,
        converts_empty_values=True,
        hint="never false for Adam: another update of the weights is not supported",
    ),
    **dict.fromkeys(
        (
            "optimizer.params.bias_correction",
            "optimizer.params.adamw_mode",
            "optimizer.params.fp32_optimizer_states",
        ),
        NeverFalseKey(UNSUPPORTED_UPDATE),
    ),
    **dict.fromkeys(
        ("optimizer.params.amsgrad", "optimizer.params.maximize", "optimizer.params.nesterov"),
        RefusedKey("remove the key"),
    ),
    "optimizer.params.dampening": RefusedKey("remove the key", unless=(0,)),
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
    "scheduler.type": SettingKey("train.schedule", convert_scheduler_type),
    **dict.fromkeys(
        (
            "scheduler.params.warmup_max_lr",
            "scheduler.params.cycle_max_lr",
            "scheduler.params.lr_range_test_min_lr",
        ),
        SettingKey("train.learning_rate", convert_scheduler_param),
    ),
    "scheduler.params.warmup_num_steps": SettingKey("train.warmup_steps", convert_scheduler_param),
    "scheduler.params.total_num_steps": SettingKey("train.steps", convert_scheduler_param),
    "scheduler.params.cos_min_ratio": SettingKey("train.min_learning_rate_ratio", convert_scheduler_param),
    "scheduler.params.last_batch_iteration": RefusedKey(
        "a run starts at its first step, and resumes at its checkpoint's; remove the key", unless=(-1,)
    ),
    "scheduler.params.*": MultiSettingKey(
        ("train.schedule_params",), convert_to_schedule_params, converts_empty_values=True
    ),
    # Recomputation
    "activation_checkpointing.cpu_checkpointing": SettingKey(
        "memory.activation_checkpointing", convert_recomputation
    ),
    "activation_checkpointing.partition_activations": SettingKey(
        "memory.activation_checkpointing",
        build_implied_recomputation_converter(
            "it shards activations over model-parallel ranks, and there is only one"
        ),
    ),
    "activation_checkpointing.contiguous_memory_optimization": SettingKey(
        "memory.activation_checkpointing",
        build_implied_recomputation_converter(
            "it arranges the activations that partition_activations shards"
        ),
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
        ("weight_quantization", "datastates_ckpt"),
        RefusedKey("remove the key"),
    ),
    "tensor_parallel": RefusedKey("set tensor_parallel_size, and strategy to full_shard"),
    "expert_parallel": RefusedKey("set expert_parallel_size, and strategy to full_shard"),
    **dict.fromkeys(
        ("hybrid_engine.enabled", "compile.deepcompile", "checkpoint.writer", "data_efficiency.enabled"),
        RefusedKey("remove the key"),
    ),
}
REFUSED_KEYS = {name for name, key in KEYS.items() if isinstance(key, RefusedKey)}
"""Dotted keys of a DeepSpeed JSON that are refused unless their value is off."""


def complete_deepspeed_settings(file: ForeignFile, num_devices: int) -> None:
    """Add DeepSpeed's defaults and the global batch size to the result.

    At ZeRO stage 0, also add a note about the keys that have no effect there.

    Args:
        file: File whose keys have been converted.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    reason = "default of DeepSpeed"
    kind, scheduler = str(file.get_value("optimizer.type", "")).lower(), str(file.get_value("scheduler.type"))
    params = get_params(file, "optimizer")
    defaults = OPTIMIZER_DEFAULTS.get(kind, {})
    if parse_switch(params.get("torch_adam")) is True:
        defaults = {**defaults, "weight_decay": TORCH_ADAMW_WEIGHT_DECAY}
    for name in defaults.keys() - params.keys():
        if name == "momentum":
            file.set_default_setting("train.betas", [defaults[name], 0.95], reason)
        elif not (name == "lr" and find_scheduler_rate_param(file)):
            (target,) = KEYS[f"optimizer.params.{name}"].targets
            file.set_default_setting(target, defaults[name], reason)
    for name in SCHEDULER_DEFAULTS.get(scheduler, {}).keys() - get_params(file, "scheduler").keys():
        (target,) = KEYS[f"scheduler.params.{name}"].targets
        file.set_default_setting(target, SCHEDULER_DEFAULTS[scheduler][name], reason)
    # Disable the cycling of momentum for SGD, because OneCycle cycles betas, which SGD does not have.
    if scheduler == "OneCycle" and kind == "sgd":
        schedule_params = file.result.values.get("train.schedule_params", {})
        without_momentum = {**schedule_params, "cycle_momentum": False}
        file.set_setting(("scheduler", "type"), "train.schedule_params", without_momentum)
    passed_on = file.result.values.get("deepspeed.config", {})
    if passed_on:
        file.result.differences.append(CHECKED_LATER)
    never_idle = ("fp16", "bf16", "zero_allow_untested_optimizer", "steps_per_print")
    keys_without_effect = [
        key for key, value in passed_on.items() if key not in never_idle and _turns_something_on(value)
    ]
    if get_zero_stage(file) == 0:
        file.add_note(
            ("zero_optimization",),
            "no ZeRO stage: the run uses torch's DDP (strategy no_shard) instead of DeepSpeed's engine"
            + (f"; no effect: {', '.join(keys_without_effect)}" if keys_without_effect else ""),
        )
    file.set_global_batch_size(num_devices)


def _turns_something_on(value: Any) -> bool:
    """Return whether the value of a key or section enables a feature.

    For a section, the value of its key ``enabled`` decides. A section without this key counts as
    enabled if any of its values enables a feature.
    """
    if isinstance(value, dict):
        return (
            _turns_something_on(value["enabled"])
            if "enabled" in value
            else any(map(_turns_something_on, value.values()))
        )
    return value not in (None, False, 0, AUTO)
