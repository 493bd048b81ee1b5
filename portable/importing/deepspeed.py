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
from portable.config.suggestions import format_advice
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
"""Parameters of DeepSpeed's schedulers that set the learning rate."""
TORCH_ADAMW_WEIGHT_DECAY = 0.01
"""Default weight decay of torch's AdamW, which DeepSpeed uses if ``torch_adam`` is true."""
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "adam": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 0.001, "momentum": 0, "weight_decay": 0.0},
}
"""DeepSpeed's defaults of the optimizer parameters that correspond to settings, keyed by optimizer
type in lower case."""
SCHEDULER_DEFAULTS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 1000},
    "WarmupDecayLR": {"warmup_num_steps": 1000, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {"warmup_num_steps": 1000, "cos_min_ratio": 0.0001},
    "OneCycle": {},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001},
}
"""DeepSpeed's defaults of the scheduler parameters that correspond to settings, keyed by scheduler type."""
REMOVE_KEY = "remove the key"
REQUIRED_UPDATE = "the optimizer of a run always uses this option; remove the key"
ONLY_DECOUPLED_DECAY = "only decoupled weight decay is supported; remove the key"
CHECKED_LATER = (
    "The keys in deepspeed.config are passed on to DeepSpeed, which checks them when the run starts."
)
_BOOLEAN = TypeAdapter(bool)


def parse_deepspeed_json(text: str, file_name: str) -> dict[str, Any]:
    """Parse the text of a DeepSpeed config in JSON format.

    If the package hjson is installed, comments and trailing commas (Hjson) are allowed, as in
    DeepSpeed.

    Args:
        text: Text of the file.
        file_name: Name of the file, used in error messages.

    Raises:
        UserError: If the text is not valid JSON or Hjson, is empty, is not a mapping, or has a
            duplicate key.
    """
    require(
        bool(text.strip()), f"{file_name}: is empty; write {{}} for a DeepSpeed JSON that changes nothing"
    )
    problem = ""
    parsed: Any = None
    for package in ("json", "hjson"):  # hjson is a dependency of DeepSpeed
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
    """Build a dict from the key-value pairs of a JSON object, and reject duplicate keys.

    This is the ``object_pairs_hook`` of the JSON parser. Keys that begin with ``_`` or ``//`` serve
    as comments, and may be repeated.

    Args:
        pairs: Keys and values of a JSON object.
        name: Name of the file, used in error messages.

    Raises:
        UserError: If a key occurs twice and does not serve as a comment.
    """
    keys = [key for key, _ in pairs if not _is_comment(key)]
    duplicate_key = next((key for key in keys if keys.count(key) > 1), None)
    require(duplicate_key is None, f"{name}: duplicate key {duplicate_key}; remove one of the two lines")
    return dict(pairs)


def _remove_comments_and_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested mapping without null values and without keys that are comments.

    A key is a comment if it begins with an underscore or two slashes.
    """
    return {
        key: _remove_comments_and_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None and not _is_comment(key)
    }


def _is_comment(key: object) -> bool:
    """Return whether a key is a comment: it begins with an underscore or two slashes."""
    return str(key).startswith(("_", "//"))


def normalize_deepspeed_file(file: ForeignFile) -> None:
    """Bring a DeepSpeed config into the form that the key conversion expects, in place.

    - Comments and null values are removed.
    - Deprecated keys are replaced by their current equivalents, except for keys that DeepSpeed's
      own config classes convert. For example, ``bfloat16`` becomes ``bf16``. If the file also
      contains the current key, the deprecated key is removed.
    - In the section ``aio``, the strings ``true`` and ``false`` are converted to booleans for the
      keys ``single_submit`` and ``overlap_events``.
    - ``optimizer.params`` is removed if ``optimizer.type`` is missing, because DeepSpeed then
      ignores it.

    Notes in ``file.result`` describe the removal of ``optimizer.params`` and the replacement of
    most deprecated keys. ``bfloat16`` and ``allgather_size`` are replaced without a note.

    Args:
        file: File whose keys have not been converted yet.
    """
    file.values = values = _remove_comments_and_nulls(file.values)
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):  # DeepSpeed versions without stages used a boolean
        zero = values["zero_optimization"] = {"stage": int(zero)}
        size = values.pop("allgather_size", None)
        if size is not None and zero["stage"]:
            zero["allgather_bucket_size"] = size
        file.add_note(
            ("zero_optimization",), f"a boolean is deprecated, and is read as stage: {zero['stage']}"
        )
    if isinstance(zero, dict) and "aio" in zero:
        values.setdefault("aio", zero.pop("aio"))
        file.add_note(
            ("aio",), "is deprecated within zero_optimization, and is read as a section of the top level"
        )
    if isinstance(aio := values.get("aio"), dict):
        # DeepSpeed 0.16 and the output of ds_nvme_tune use these names.
        for old in ("thread_count", "num_threads"):
            if old in aio:
                aio.setdefault("intra_op_parallelism", aio.pop(old))
                file.add_note(("aio", old), "is deprecated, and is read as aio.intra_op_parallelism")
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
    """Return the ZeRO stage that a file sets: a number or ``auto``. None if the file does not set it."""
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
    """Entry for a key that is passed through to DeepSpeed unless its value is rejected.

    Attributes:
        check_value: Function that raises ``NoEffect`` or ``NoCounterpart`` for values that must not be
            passed through.
    """

    check_value: Callable[[Any, ForeignFile], None]
    converts_empty_values: bool = field(default=True, kw_only=True)

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return False, because DeepSpeed itself interprets the value.

        For this reason, no value of the key may be ignored, not even false or an empty value. Null
        values do not occur, because :func:`normalize_deepspeed_file` removes them.
        """
        return False

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Add the value to ``deepspeed.config`` in ``file.result``, and return no settings.

        DeepSpeed reads the value there, so no setting of the run is needed.

        Raises:
            NoEffect: If the function :attr:`check_value` finds that the value has no effect.
            NoCounterpart: If :attr:`check_value` rejects the value, or if the key is in the section
                ``optimizer`` or ``scheduler``.
        """
        self.check_value(value, file)
        pass_key_to_deepspeed(file, value)
        return {}

    @property
    def remedy(self) -> str:
        """Description of how the key is treated. Equal to :attr:`docs_text`.

        No setting replaces the key, so this is the same text as :attr:`summary`, which docs/keys.md
        shows.
        """
        return self.docs_text


def keep_value(value: Any, _: ForeignFile) -> Any:
    """Return ``value`` unchanged.

    This is the converter for keys whose negative values must be kept, so that an invalid value is
    reported. The default converter, :func:`drop_unset_value`, drops negative values. The value
    ``auto`` is not passed to this function, because :meth:`ForeignKey.has_no_effect` already drops
    it for DeepSpeed configs.
    """
    return value


def convert_precision(value: Any, file: ForeignFile) -> str | None:
    """Convert ``bf16.enabled`` or ``fp16.enabled`` to a value of the setting ``precision``.

    Returns:
        Name of the section that contains the key, ``bf16`` or ``fp16``, if ``value`` is true.
        ``fp32`` if ``value`` is false, and the other section is neither enabled nor ``auto``. None
        in all other cases.

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

    The conversion depends on ``fp16.enabled``:

    - True: The value is returned.
    - ``auto``: The value is returned, and the parameter is added to ``deepspeed.config``, which is
      passed to DeepSpeed.
    - False or missing: The parameter is only added to ``deepspeed.config``.

    Returns:
        The value. None if ``fp16.enabled`` is false or missing.
    """
    is_on = parse_switch(file.get_value("fp16.enabled", False))
    if is_on is not True:
        pass_key_to_deepspeed(file, value)
    return None if is_on is False else value


def check_fixed_loss_scale(value: Any, file: ForeignFile) -> None:
    """Raise ``NoEffect`` for a fixed loss scale at ZeRO stage 0, which always uses a dynamic scale."""
    if value and parse_switch(file.get_value("fp16.enabled")) is True and get_zero_stage(file) == 0:
        raise NoEffect(
            "has no effect without ZeRO, because the loss scale is then always dynamic; remove the key"
        )


def convert_gradient_clipping(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert the maximum gradient norm to ``train.max_grad_norm``.

    Zero becomes None, which disables clipping. Returns an empty dict for ``auto`` and null.
    """
    return {} if value in (None, AUTO) else {"train.max_grad_norm": float(value) or None}


def build_offload_device_converter(
    offloaded_state: str, stage_getter: Callable[[ForeignFile], Any]
) -> ValueConverter:
    """Build a converter for the offload device of the optimizer state or the parameters.

    The converter returns ``none``, ``cpu`` or ``nvme``, or None for ``auto``. At stages 1 and 2, it
    converts ``nvme`` for the optimizer state to ``cpu``, like DeepSpeed, and adds a note. It raises
    ``NoCounterpart`` if the device is unknown. It raises ``NoEffect`` for ``cpu`` and ``nvme`` if
    the ZeRO stage does not support offloading: stage 0 for the optimizer state, and stages 0 to 2
    for the parameters. Every device is accepted if the stage is ``auto`` or not set.

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
            raise NoEffect(f"{device} has no effect at ZeRO stage {stage}, as in DeepSpeed; remove the key")
        if device == "nvme" and stage in (1, 2):
            file.add_note(
                file.path, f"nvme is read as cpu at ZeRO stage {stage}, because only stage 3 offloads to disk"
            )
            return "cpu"
        return str(device)

    return convert_device


def build_cpu_offload_converter(offloaded_state: str) -> ValueConverter:
    """Build a converter for an old, boolean DeepSpeed key that offloads to the CPU.

    The keys are ``cpu_offload`` for the optimizer state and ``cpu_offload_param`` for the
    parameters. Newer versions specify an offload device instead. The converter returns ``cpu`` if
    the key is true, otherwise None. It raises ``NoEffect`` if the key is true but the ZeRO stage of
    the file does not support this kind of offloading.

    Args:
        offloaded_state: State that the key offloads: ``optimizer`` or ``params``.
    """
    convert_device = build_offload_device_converter(offloaded_state, get_zero_stage)
    return lambda value, file: convert_device("cpu" if parse_switch(value) is True else AUTO, file)


def build_nvme_path_converter(
    device_key: str, stage_getter: Callable[[ForeignFile], Any]
) -> Callable[[Any, ForeignFile], None]:
    """Build a converter that stores the path of an NVMe disk as ``memory.nvme_path``.

    The converter does nothing if the path is ``none`` or ``auto``, or if the offload device is not
    ``nvme``. It raises ``NoCounterpart`` if ``file.result`` already contains a different NVMe path.
    Otherwise, it stores the path in ``file.result`` if the ZeRO stage is 3, ``auto`` or not set.

    Paths differ between machines. The converter therefore marks the setting as assumed, so that the
    user's config can override it.

    Args:
        device_key: Dotted key of the offload device in the file.
        stage_getter: Function that returns the ZeRO stage of a file.
    """

    def convert_path(value: Any, file: ForeignFile) -> None:
        if value in ("none", AUTO) or str(file.get_value(device_key)).lower() != "nvme":
            return
        earlier_path = file.result.values.get("memory.nvme_path", str(value))
        if earlier_path != str(value):
            raise NoCounterpart(
                f"{format_short_value(value)} differs from the other nvme_path, "
                f"{format_short_value(earlier_path)}; use the same folder for both"
            )
        if stage_getter(file) in (None, 3, AUTO):
            file.set_setting(file.path, "memory.nvme_path", str(value))
            file.result.assumed_keys.add("memory.nvme_path")

    return convert_path


def convert_optimizer_type(value: Any, _: ForeignFile) -> str:
    """Convert the optimizer type to ``adamw`` or ``sgd``, ignoring case.

    The supported types are AdamW, Adam and SGD. Adam becomes ``adamw``, because DeepSpeed's Adam
    uses decoupled weight decay by default.

    Raises:
        NoCounterpart: If the optimizer is not supported.
    """
    kind = str(value).lower()
    if kind not in OPTIMIZER_DEFAULTS:
        advice = "use AdamW, Adam or SGD"
        if kind == "lamb":
            advice = (
                f"LAMB needs the norms of complete tensors, but ZeRO divides tensors among ranks; {advice}"
            )
        raise NoCounterpart(f"{format_short_value(value)} is not supported{format_advice(advice)}")
    return "sgd" if kind == "sgd" else "adamw"


def convert_optimizer_rate(value: Any, file: ForeignFile) -> Any:
    """Return the learning rate of the optimizer unchanged.

    Raises:
        NoEffect: If a scheduler parameter overrides the learning rate.
    """
    rate = find_scheduler_rate_param(file)
    if rate is not None:
        raise NoEffect(f"has no effect: scheduler.params.{rate} sets the learning rate; remove the key")
    return value


def find_scheduler_rate_param(file: ForeignFile) -> str | None:
    """Find the scheduler parameter that determines the learning rate.

    This may be a parameter that the file does not contain but for which DeepSpeed has a default.

    Returns:
        Name of the parameter, such as ``warmup_max_lr``. None if the optimizer sets the learning
        rate.
    """
    params = {
        **SCHEDULER_DEFAULTS.get(str(file.get_value("scheduler.type")), {}),
        **get_params(file, "scheduler"),
    }
    return next((name for name in LEARNING_RATE_PARAMS if params.get(name) not in (None, AUTO)), None)


def get_params(file: ForeignFile, section: str) -> dict[str, Any]:
    """Return the dict ``params`` of a section, or an empty dict if there is none.

    Args:
        file: DeepSpeed config file.
        section: Name of the section, ``optimizer`` or ``scheduler``.
    """
    params = file.get_value(f"{section}.params")
    return params if isinstance(params, dict) else {}


def convert_momentum_to_betas(value: Any, _: ForeignFile) -> list[Any]:
    """Convert SGD's momentum to ``train.betas``.

    The trainer uses the first beta as the momentum of SGD, and ignores the second one.
    """
    return [value, 0.95]


def check_adam_w_mode(value: Any, file: ForeignFile) -> None:
    """Raise ``NoCounterpart`` if ``adam_w_mode`` is false, because Adam with L2 decay is not supported.

    Does nothing if the optimizer type is AdamW, because DeepSpeed then ignores ``adam_w_mode``.
    """
    if parse_switch(value) is False and str(file.get_value("optimizer.type")).lower() != "adamw":
        raise NoCounterpart(f"{format_short_value(value)} is not supported: {ONLY_DECOUPLED_DECAY}")


def convert_scheduler_type(value: Any, _: ForeignFile) -> Any:
    """Return the scheduler type unchanged, because ``train.schedule`` uses the same names.

    Raises:
        NoCounterpart: If the scheduler is not supported.
    """
    if value not in SCHEDULER_DEFAULTS:
        remedy = (
            format_name_suggestion(str(value), SCHEDULER_DEFAULTS)
            or "; remove the key, and set train.schedule, for example to cosine"
        )
        raise NoCounterpart(f"{format_short_value(value)} is not supported{remedy}")
    return value


def convert_scheduler_param(value: Any, _: ForeignFile) -> Any:
    """Return the value of a scheduler parameter unchanged.

    Raises:
        NoCounterpart: If the value is a list with one element per parameter group.
    """
    if isinstance(value, list):
        raise NoCounterpart("a list with one value per parameter group is not supported; use one number")
    return value


def convert_to_schedule_params(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert a scheduler parameter, and return the new ``train.schedule_params``.

    Args:
        value: Value of the parameter.
        file: File that is being converted. ``file.path`` ends with the name of the parameter, and
            ``file.result`` contains the parameters that have already been converted.

    Returns:
        A dict with the single key ``train.schedule_params``. Its value is a dict of all parameters
        converted so far.

    Raises:
        NoCounterpart: If the value is a list with one element per parameter group.
    """
    params = file.result.values.get("train.schedule_params", {})
    return {"train.schedule_params": {**params, file.path[-1]: convert_scheduler_param(value, file)}}


def convert_recomputation(value: Any, file: ForeignFile) -> str | None:
    """Convert ``cpu_checkpointing`` to activation checkpointing, which it implies.

    At ZeRO stage 0, adds a note that nothing is offloaded to the CPU.

    Returns:
        ``full`` if the value is true, otherwise None.
    """
    is_on = parse_switch(value) is True
    if is_on and get_zero_stage(file) == 0:
        file.add_note(
            file.path,
            "has no effect without ZeRO, because the inputs of recomputed layers then stay on the device",
        )
    return "full" if is_on else None


def build_implied_recomputation_converter(reason: str) -> ValueConverter:
    """Build a converter for a key that enables activation checkpointing and has another effect.

    The key is a boolean, and its other effect is not supported. If the value is true, the converter
    returns ``full``, a value of ``memory.activation_checkpointing``, and adds a note about the
    other effect. Otherwise, it returns None.

    Args:
        reason: Reason why the other effect is not supported, used in the note.
    """

    def convert_switch(value: Any, file: ForeignFile) -> str | None:
        if parse_switch(value) is not True:
            return None
        file.add_note(file.path, f"has no effect: {reason}")
        return "full"

    return convert_switch


def note_full_weights_export(value: Any, file: ForeignFile) -> None:
    """Add a note that the key has no effect, because the full weights are always exported.

    The note is added only if the value is true and the ZeRO stage is 3.
    """
    if parse_switch(value) is True and get_zero_stage(file) == 3:
        file.add_note(
            file.path,
            "has no effect: final/ always contains the full weights in fp32; use portable-convert --dtype "
            "for 16 bits",
        )


def check_is_step_count(value: Any, _: ForeignFile) -> None:
    """Check that the number of gradient accumulation steps is a positive integer.

    The number is not converted here. :meth:`ForeignFile.set_global_batch_size` uses it later.

    Raises:
        NoCounterpart: If the value is not a positive integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NoCounterpart(f"must be a positive whole number or auto, not {format_short_value(value)}")


def check_gradient_scaling(value: Any, file: ForeignFile) -> None:
    """Check the value of ``prescale_gradients`` or ``gradient_predivide_factor``.

    Raises:
        NoCounterpart: If the value enables gradient scaling, the ZeRO stage is not 0, and
            ``zero_optimization.reduce_scatter`` is not false. ZeRO's reduce-scatter does not
            support gradient scaling.
    """
    scatters = get_zero_stage(file) != 0 and file.get_value("zero_optimization.reduce_scatter") is not False
    if scatters and (value is True or value not in (None, AUTO, False, 1)):
        raise NoCounterpart(
            f"{format_short_value(value)} does not work with ZeRO's reduce-scatter; remove the key, or set "
            "zero_optimization.reduce_scatter to false"
        )


def check_accumulation_dtype(value: Any, file: ForeignFile) -> None:
    """Raise ``NoCounterpart`` for fp32 gradient accumulation in bf16 training at ZeRO stage 1."""
    if value == "fp32" and get_zero_stage(file) == 1 and parse_switch(file.get_value("bf16.enabled")) is True:
        raise NoCounterpart(
            "fp32 is only supported at ZeRO stages 2 and 3; set zero_optimization.stage to 2 or 3"
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
    "managed_gradient_accumulation": NeverFalseKey(
        "otherwise, DeepSpeed does not detect the end of a step; remove the key"
    ),
    "gradient_clipping": MultiSettingKey(
        ("train.max_grad_norm",), convert_gradient_clipping, converts_empty_values=True
    ),
    "gradient_allreduce_op": RefusedKey(REMOVE_KEY, unless=("mean",)),
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"),
        PassThroughKey(
            check_gradient_scaling, docs_text="passed on if zero_optimization.reduce_scatter is false"
        ),
    ),
    "data_types.grad_accum_dtype": PassThroughKey(
        check_accumulation_dtype, docs_text="passed on, but fp32 is only supported at stages 2 and 3"
    ),
    # Precision
    **dict.fromkeys(
        ("bf16.enabled", "fp16.enabled"),
        SettingKey("precision", convert_precision, converts_empty_values=True),
    ),
    "bf16.check_grad_overflow": NeverFalseKey(
        "otherwise, NaN and infinite gradients would not be detected; remove the key"
    ),
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
    "fp16.loss_scale": PassThroughKey(
        check_fixed_loss_scale, docs_text="passed on, but without ZeRO the loss scale is always dynamic"
    ),
    **dict.fromkeys(
        (
            "fp16.fp16_master_weights_and_grads",
            "bf16.bf16_master_weights_and_grads",
            "torch_autocast.enabled",
        ),
        RefusedKey(REMOVE_KEY),
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
    "zero_optimization.offload_optimizer.ratio": RefusedKey(REMOVE_KEY, unless=(1.0,)),
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
    "zero_optimization.cpu_offload_use_pin_memory": IgnoredKey(
        "DeepSpeed has removed this option; remove the key"
    ),
    "zero_optimization.compute_grad_norm": NeverFalseKey(
        "the gradient norm is needed for clipping and metrics; remove the key"
    ),
    **dict.fromkeys(
        (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        PassThroughKey(
            note_full_weights_export,
            docs_text="passed on, but has no effect at stage 3: final/ always contains the full weights",
        ),
    ),
    **dict.fromkeys(
        ("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
        RefusedKey(REMOVE_KEY),
    ),
    # The optimizer
    "optimizer.type": SettingKey("train.optimizer", convert_optimizer_type),
    "optimizer.params.lr": SettingKey("train.learning_rate", convert_optimizer_rate),
    "optimizer.params.betas": SettingKey("train.betas", keep_value),
    "optimizer.params.momentum": SettingKey(
        "train.betas", convert_momentum_to_betas, hint="set the first value of train.betas"
    ),
    "optimizer.params.eps": SettingKey("train.eps", keep_value),
    "optimizer.params.weight_decay": SettingKey("train.weight_decay", keep_value),
    "optimizer.params.adam_w_mode": MultiSettingKey(
        (),
        check_adam_w_mode,
        converts_empty_values=True,
        docs_text="cannot be false for Adam: only decoupled weight decay is supported",
    ),
    **dict.fromkeys(
        (
            "optimizer.params.bias_correction",
            "optimizer.params.adamw_mode",
            "optimizer.params.fp32_optimizer_states",
        ),
        NeverFalseKey(REQUIRED_UPDATE),
    ),
    **dict.fromkeys(
        ("optimizer.params.amsgrad", "optimizer.params.maximize", "optimizer.params.nesterov"),
        RefusedKey(REMOVE_KEY),
    ),
    "optimizer.params.dampening": RefusedKey(REMOVE_KEY, unless=(0,)),
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
        "the checkpoint of a run determines the first step; remove the key", unless=(-1,)
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
            "this key divides activations among model-parallel ranks, but there is only one such rank"
        ),
    ),
    "activation_checkpointing.contiguous_memory_optimization": SettingKey(
        "memory.activation_checkpointing",
        build_implied_recomputation_converter(
            "this key applies only to activations that partition_activations divides among ranks"
        ),
    ),
    "activation_checkpointing.number_checkpoints": IgnoredKey(
        "this key only sets the buffer size of contiguous_memory_optimization; remove the key"
    ),
    "activation_checkpointing.synchronize_checkpoint_boundary": IgnoredKey(
        "no synchronization is needed when layers are recomputed; remove the key"
    ),
    "activation_checkpointing.profile": IgnoredKey(
        "use portable-train --profile, which records the time of each layer"
    ),
    # Other sections
    "sequence_parallel_size": RefusedKey("set context_parallel_size to this value", unless=(1,)),
    **dict.fromkeys(
        ("weight_quantization", "datastates_ckpt"),
        RefusedKey(REMOVE_KEY),
    ),
    "tensor_parallel": RefusedKey(
        "set tensor_parallel_size to the number of devices per copy of the model, and set strategy to "
        "full_shard"
    ),
    "expert_parallel": RefusedKey(
        "set expert_parallel_size to the number of ranks that share the experts of a layer, and set "
        "strategy to full_shard"
    ),
    **dict.fromkeys(
        ("hybrid_engine.enabled", "compile.deepcompile", "checkpoint.writer", "data_efficiency.enabled"),
        RefusedKey(REMOVE_KEY),
    ),
}
REFUSED_KEYS = {name for name, key in KEYS.items() if isinstance(key, RefusedKey)}
"""Dotted keys of a DeepSpeed JSON that are refused unless their value is off."""


def complete_deepspeed_settings(file: ForeignFile, num_devices: int) -> None:
    """Add DeepSpeed's defaults and the global batch size to the settings in ``file.result``.

    Defaults are added only for parameters of the optimizer in ``optimizer.type`` and the scheduler
    in ``scheduler.type``. For OneCycle with SGD, ``cycle_momentum`` is set to False. If keys are
    passed on to DeepSpeed, a sentence about this is added to ``differences``. At ZeRO stage 0, a
    note explains that the run uses DDP instead of DeepSpeed, and lists passed-on keys that are
    therefore ignored.

    Args:
        file: File whose keys have been converted.
        num_devices: Number of all devices of the original run. 0 if it is unknown.
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
            "no ZeRO stage is enabled, so the run uses torch's DDP (strategy no_shard) instead of DeepSpeed"
            + (f", and ignores {', '.join(keys_without_effect)}" if keys_without_effect else ""),
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
