"""Tables for converting the config files and environment variables of Accelerate.

The files are written by ``accelerate config``, and the variables are set by ``accelerate launch``.
Both define the launch and the sharding, but not the model, the data or the training. As in
Accelerate, the sections for FSDP and DeepSpeed only apply if ``distributed_type`` selects them.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.field_types import parse_boolean_word
from portable.config.origins import format_short_value
from portable.config.suggestions import format_advice
from portable.config.yaml_text import parse_yaml_value
from portable.importing.deepspeed import (
    build_nvme_path_converter,
    build_offload_device_converter,
    convert_gradient_clipping,
)
from portable.importing.foreign_file import EMPTY_VALUES, ConvertedSettings, NoCounterpart, NoEffect
from portable.importing.foreign_keys import (
    CounterpartlessKey,
    IgnoredKey,
    MultiSettingKey,
    NeverFalseKey,
    PresetKey,
    RefusedKey,
    SettingKey,
    WordSettingKey,
    parse_flag,
    parse_name_list,
    translate_word,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.importing.foreign_file import ForeignFile, ForeignKeys, KeyPath

FSDP_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""FSDP strategies. Accelerate's files may also refer to them by their one-based position in this tuple."""
SHARDING_WORDS = {word: name for n, name in enumerate(FSDP_STRATEGIES, 1) for word in (str(n), name)}
PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}
START_ON_EVERY_HOST = "start portable-train on every host of the TPU slice (see docs/tpu.md)"
SET_BY_LAUNCHER = "remove the key, and pass the option to the launcher"
NO_WRAPPING = "XLA does not wrap modules, and recomputes each transformer layer; remove the key"


def get_distributed_type(file: ForeignFile) -> str:
    """Return the ``distributed_type`` of a file in upper case, or ``NO`` if it is not set."""
    return str(file.values.get("distributed_type", "NO")).upper()


def is_for_xla(file: ForeignFile) -> bool:
    """Return whether an Accelerate config file selects TPU training or enables FSDP on XLA.

    TPU training is selected by the ``distributed_type`` ``XLA`` or ``TPU``. FSDP on XLA is enabled
    if the key ``xla`` is true, either at the top level or in ``fsdp_config``.
    """
    sections = (file.values, file.values.get("fsdp_config"))
    return get_distributed_type(file) in ("XLA", "TPU") or any(
        isinstance(section, dict) and section.get("xla") is True for section in sections
    )


def uses_deepspeed_json(file: ForeignFile) -> bool:
    """Return whether an Accelerate config file refers to a DeepSpeed config in JSON format.

    An empty path and the path ``none`` do not count. The other DeepSpeed keys of the Accelerate
    config file must not contradict the DeepSpeed config.
    """
    return file.get_value("deepspeed_config.deepspeed_config_file") not in (*EMPTY_VALUES, "none")


def get_zero_stage(file: ForeignFile) -> int:
    """Return the ZeRO stage in an Accelerate config file. The default is 2.

    The file may refer to a DeepSpeed JSON, which then sets the stage. This function does not read
    the JSON and returns 3, because stage 3 supports the most settings. It also returns 3 if the
    stage in the file is invalid.
    """
    stage = str(file.get_value("deepspeed_config.zero_stage", 2))
    return int(stage) if stage in ("0", "1", "2", "3") and not uses_deepspeed_json(file) else 3


def parse_quoted_number(value: Any) -> Any:
    """Convert a numeric string, such as ``"0.5"``, to a number. Return other values unchanged.

    The result is an int if the string contains only digits, and otherwise a float. Accelerate
    accepts numeric strings, because it passes all values through environment variables.
    """
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(value) if isinstance(value, str) and value.strip().isdigit() else number


@dataclass(frozen=True)
class TpuLauncherKey(CounterpartlessKey):
    """Table entry for an Accelerate key that applies only to TPUs, such as ``tpu_name``.

    In files for TPUs, the key is rejected. In other files, the key is ignored, with a note. Values
    that turn a feature off, such as false and ``no``, are dropped without a note in all files.

    Attributes:
        advice: Advice at the end of the error message for TPUs.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Raise an exception, because no value of this key is converted.

        Raises:
            NoCounterpart: If the file is for TPUs. The key is then reported as an error.
            NoEffect: If the file is not for TPUs. The key is then ignored, with a note.
        """
        if is_for_xla(file):
            raise NoCounterpart(f"{format_short_value(value)} is not supported{format_advice(self.advice)}")
        raise NoEffect(
            f"{format_short_value(value)} has no effect: this key applies only to TPUs; remove the key"
        )

    @property
    def remedy(self) -> str:
        """Advice at the end of the error message."""
        return self.advice

    @property
    def summary(self) -> str:
        """Advice for docs/keys.md, prefixed with ``not supported on TPUs``."""
        return f"not supported on TPUs{format_advice(self.advice)}"


def convert_sharding_strategy(value: Any, file: ForeignFile) -> Any:
    """Convert ``fsdp_sharding_strategy`` (FSDP1) or ``fsdp_reshard_after_forward`` (FSDP2).

    A strategy is specified by its name or by its position in :data:`FSDP_STRATEGIES`. For
    ``fsdp_reshard_after_forward``, true is converted to ``full_shard``, and false to
    ``shard_grad_op``.

    Returns:
        Value of the setting ``strategy``. None if the value is empty.

    Raises:
        NoEffect: If Accelerate ignores the key, because the file's ``fsdp_version`` uses the other
            key. Not raised in files for XLA.
        NoCounterpart: If the value is unknown.
    """
    version = str(file.get_value("fsdp_config.fsdp_version", file.get_value("fsdp_version", 1)))
    is_key_of_fsdp2 = file.path[-1] == "fsdp_reshard_after_forward"
    if (version == "2") != is_key_of_fsdp2 and not is_for_xla(file):
        other = "fsdp_reshard_after_forward" if version == "2" else "fsdp_sharding_strategy"
        raise NoEffect(
            f"has no effect: with fsdp_version {version}, Accelerate reads {other} instead; remove the key"
        )
    if is_key_of_fsdp2 and isinstance(parse_boolean_word(value), bool):
        return "full_shard" if parse_boolean_word(value) else "shard_grad_op"
    return None if value in EMPTY_VALUES else translate_word(value, SHARDING_WORDS)


def note_unused_use_orig_params(value: Any, _: ForeignFile) -> None:
    """Raise ``NoEffect`` if ``fsdp_use_orig_params`` is false.

    The value false has no effect, because FSDP2 always keeps the original parameters.
    """
    if parse_boolean_word(value) not in (True, *EMPTY_VALUES):
        raise NoEffect(
            f"{format_short_value(value)} has no effect: FSDP2 always keeps the original parameters; remove "
            "the key"
        )


def convert_group_size(value: Any, _: ForeignFile) -> Any:
    """Parse the number of context-parallel or tensor-parallel ranks. Return None for 1, the default."""
    size = parse_quoted_number(value)
    return None if size == 1 else size


def convert_use_cpu(value: Any, file: ForeignFile) -> str | None:
    """Convert ``use_cpu`` to the value of the setting ``backend``.

    Returns:
        ``cpu`` if the value is true, otherwise None.

    Raises:
        NoEffect: If the value is true and ``distributed_type`` is ``MULTI_GPU``, because Accelerate
            then runs on GPUs anyway.
        NoCounterpart: If the value is not a boolean.
    """
    if not parse_flag(value):
        return None
    if get_distributed_type(file) == "MULTI_GPU":
        raise NoEffect(
            "has no effect: with distributed_type MULTI_GPU, Accelerate always uses GPUs; remove the key"
        )
    return "cpu"


def convert_dynamo_backend(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``dynamo_backend``, the backend of torch.compile.

    Returns:
        The settings ``compile`` and ``compile_backend``. For ``NO`` and false, only ``compile``,
        which is False. Empty if the value is empty.

    Raises:
        NoEffect: If the value is the name of a backend and the distributed type is ``DEEPSPEED``,
            because Accelerate then ignores the key.
    """
    if value in EMPTY_VALUES:
        return {}
    if str(value).upper() in ("NO", "FALSE"):
        return {"compile": False}
    if get_distributed_type(file) == "DEEPSPEED":
        raise NoEffect("has no effect: Accelerate ignores this key with DeepSpeed; set compile to true")
    return {"compile": True, "compile_backend": str(value).lower()}


def store_gpu_ids(value: Any, file: ForeignFile) -> None:
    """Store the ids of the GPUs to use in ``file.result.gpu_ids``.

    They cannot be stored in the settings, because no setting exists for them.

    Args:
        value: List of ids, or a comma-separated string of ids.
        file: File that contains the key.

    Raises:
        NoEffect: Always. Its message becomes a note that ``CUDA_VISIBLE_DEVICES`` is set to the
            ids, unless the variable is already set.
    """
    ids = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    file.result.gpu_ids = ids.replace(" ", "")
    raise NoEffect(
        f"CUDA_VISIBLE_DEVICES is set to {file.result.gpu_ids}, unless the variable is already set"
    )


def convert_old_fp16(value: Any, file: ForeignFile) -> str | None:
    """Convert the flag ``fp16``, which older versions of Accelerate use.

    Newer versions use ``mixed_precision`` instead.

    Returns:
        ``fp16`` or ``fp32``. None if the value is empty, or if ``mixed_precision`` is also set.

    Raises:
        NoCounterpart: If the value is not a boolean.
    """
    if value in EMPTY_VALUES or file.get_value("mixed_precision"):
        return None
    return "fp16" if parse_flag(value) else "fp32"


def convert_class_names(value: Any, _: ForeignFile) -> list[str] | None:
    """Convert the class names of the layers to wrap, given as a list or a comma-separated string.

    Returns None if there are no names.
    """
    return parse_name_list(value) or None


def convert_min_num_params(value: Any, file: ForeignFile) -> Any:
    """Convert ``fsdp_min_num_params`` to the setting ``fsdp.min_num_params``.

    The value is the minimum number of parameters of a module that becomes a unit. Accelerate writes
    the key for every wrap policy, but it has an effect only for ``SIZE_BASED_WRAP``. For all other
    policies, the result is None.
    """
    policy = str(file.get_value("fsdp_config.fsdp_auto_wrap_policy", "")).upper()
    return parse_quoted_number(value) if policy == "SIZE_BASED_WRAP" else None


def convert_wrap_policy(value: Any, file: ForeignFile) -> str:
    """Convert the FSDP wrap policy to lower case.

    Raises:
        NoCounterpart: If the policy is unknown, or if the file is for XLA and the policy is not
            ``transformer_based_wrap``.
    """
    policy = translate_word(
        value, {word: word for word in ("transformer_based_wrap", "size_based_wrap", "no_wrap")}
    )
    if is_for_xla(file) and policy != "transformer_based_wrap":
        raise NoCounterpart(f"{policy} is not supported{format_advice(NO_WRAPPING)}")
    return str(policy)


def convert_xla_reshard(value: Any, file: ForeignFile) -> str | None:
    """Convert ``reshard_after_forward`` of FSDP on XLA to ``full_shard`` or ``shard_grad_op``.

    Returns:
        The strategy. None if the value is empty, or if ``fsdp_sharding_strategy`` already
        determines the strategy.

    Raises:
        NoCounterpart: If the value is not a boolean, or contradicts ``fsdp_sharding_strategy``.
            True contradicts ``shard_grad_op`` and ``hybrid_shard_zero2``. False contradicts all
            other strategies.
    """
    if value in EMPTY_VALUES:
        return None
    strategy = "full_shard" if parse_flag(value) else "shard_grad_op"
    sharding = file.get_value("fsdp_config.fsdp_sharding_strategy")
    if sharding is None:
        return strategy
    if parse_flag(value) is (
        translate_word(sharding, SHARDING_WORDS) in ("shard_grad_op", "hybrid_shard_zero2")
    ):
        raise NoCounterpart(
            f"{format_short_value(value)} contradicts fsdp_sharding_strategy {sharding}; remove one of the "
            "two keys"
        )
    return None


def convert_xla_compute_dtype(value: Any, file: ForeignFile) -> str:
    """Convert ``compute_dtype`` of FSDP on XLA to a value of the setting ``precision``.

    The value is the name of a dtype, with or without the prefix ``torch.``.

    Raises:
        NoCounterpart: If the dtype is neither ``float32`` nor ``bfloat16``, or contradicts
            ``mixed_precision``.
    """
    dtypes = {"float32": "fp32", "bfloat16": "bf16"}
    precision = str(translate_word(str(value).removeprefix("torch."), dtypes))
    mixed = file.get_value("mixed_precision")
    if mixed is not None and translate_word(mixed, PRECISIONS) != precision:
        raise NoCounterpart(
            f"{value} contradicts mixed_precision {format_short_value(mixed)}; remove one of the two keys"
        )
    return precision


def convert_xla_buffer_dtype(value: Any, _: ForeignFile) -> str:
    """Convert ``buffer_dtype`` of FSDP on XLA, such as ``torch.bfloat16``, by removing its prefix."""
    return str(value).removeprefix("torch.")


def convert_accumulation_steps(value: Any, file: ForeignFile) -> dict[str, Any] | None:
    """Convert the number of gradient accumulation steps in the section ``deepspeed_config``.

    This section is a short form of a DeepSpeed JSON. The result is therefore the content of such a
    JSON, for example ``{"gradient_accumulation_steps": 4}``.

    Returns:
        Content of the JSON. None if the value is 1 or ``auto``.

    Raises:
        NoCounterpart: If the value is not a positive integer, or if the file also names a DeepSpeed
            JSON.
    """
    steps = int(value) if isinstance(value, str) and value.isdigit() else value
    if steps in (1, "auto"):  # Accelerate writes its default value 1 into every file
        return None
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise NoCounterpart(f"must be a positive whole number or auto, not {format_short_value(value)}")
    if uses_deepspeed_json(file):
        raise NoCounterpart(
            "Accelerate reads this value from deepspeed_config_file; set the value in this file, and remove "
            "the key"
        )
    return {"gradient_accumulation_steps": steps}


def convert_deepspeed_json_path(value: Any, file: ForeignFile) -> Any:
    """Return the path of a DeepSpeed JSON unchanged, after checking that the file exists.

    The path becomes the value of the setting ``deepspeed.config``.

    Args:
        value: Path of the DeepSpeed JSON. It may contain ``~`` and environment variables.
        file: Accelerate config that contains the path.

    Returns:
        The path. None if it is empty or ``none``.

    Raises:
        NoCounterpart: If the file at the path does not exist.
    """
    if not uses_deepspeed_json(file):
        return None
    if not pathlib.Path(os.path.expandvars(str(value))).expanduser().is_file():
        raise NoCounterpart(f"the file {value} does not exist; use the path of a DeepSpeed JSON")
    return value


XLA_KEYS: ForeignKeys = {
    "xla": WordSettingKey("backend", {"true": "xla", "false": None}),
    "xla_fsdp_grad_ckpt": WordSettingKey(
        "memory.activation_checkpointing",
        {"true": "full", "false": None},
        hint="set memory.activation_checkpointing to full",
    ),
    "xla_fsdp_settings.compute_dtype": SettingKey(
        "precision", convert_xla_compute_dtype, hint="set precision to bf16 or fp32"
    ),
    "xla_fsdp_settings.buffer_dtype": SettingKey("xla.buffer_dtype", convert_xla_buffer_dtype),
    "xla_fsdp_settings.shard_param_on_dim_0": WordSettingKey(
        "xla.shard_param_on_dim_0", {"true": True, "false": False}
    ),
    "xla_fsdp_settings.optimization_barrier_in_backward": WordSettingKey(
        "xla.optimization_barrier_in_backward", {"true": True, "false": False}
    ),
    "xla_fsdp_settings.reshard_after_forward": SettingKey(
        "strategy",
        convert_xla_reshard,
        converts_empty_values=True,
        hint="set strategy to full_shard instead of true, or to shard_grad_op instead of false",
    ),
    "xla_fsdp_settings.fp32_reduce_scatter": RefusedKey(
        "gradients are reduced in the dtype of the computation; remove the key, or set precision to fp32"
    ),
    "xla_fsdp_settings.disable_reshard_on_root": RefusedKey(
        "XLA does not wrap modules, so there is no root module; remove the key"
    ),
    "xla_fsdp_settings.flatten_parameters": RefusedKey(
        "parameters are sharded along a dimension, and are not flattened; remove the key"
    ),
    "xla_fsdp_settings.pin_layout_in_collective_ops": RefusedKey(
        "the XLA compiler places the collective operations; remove the key"
    ),
    "xla_fsdp_settings.optimization_barrier_in_forward": RefusedKey(
        "the XLA compiler schedules the all-gathers; remove the key"
    ),
    "xla_fsdp_settings.execute_sharding_on_init": NeverFalseKey(
        "parameters are always sharded when they are created; remove the key"
    ),
    "xla_fsdp_settings.auto_wrap_policy": RefusedKey(NO_WRAPPING, unless=("transformer_based_wrap",)),
}
"""Table entries for the keys of FSDP on XLA.

The keys may be at the top level of a file, as in some guides, or in ``fsdp_config``, as for the Trainer.
"""
XLA_SECTIONS = {name.partition(".")[0] for name in XLA_KEYS}
"""Part before the first dot of each key in :data:`XLA_KEYS`."""
FSDP_KEYS: ForeignKeys = {
    **dict.fromkeys(
        ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"),
        SettingKey("strategy", convert_sharding_strategy, converts_empty_values=True),
    ),
    "fsdp_config.fsdp_auto_wrap_policy": SettingKey("fsdp.auto_wrap_policy", convert_wrap_policy),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": SettingKey(
        "fsdp.transformer_layer_cls_to_wrap", convert_class_names
    ),
    "fsdp_config.fsdp_min_num_params": SettingKey("fsdp.min_num_params", convert_min_num_params),
    "fsdp_config.fsdp_forward_prefetch": WordSettingKey(
        "fsdp.forward_prefetch", {"true": True, "false": None}
    ),
    **dict.fromkeys(
        ("fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_backward_prefetch_policy"),
        WordSettingKey(
            "fsdp.backward_prefetch",
            {"backward_pre": "backward_pre", "backward_post": "backward_post", "no_prefetch": "no_prefetch"},
        ),
    ),
    "fsdp_config.fsdp_state_dict_type": WordSettingKey(
        "checkpoint.export", {"SHARDED_STATE_DICT": None, "FULL_STATE_DICT": True}
    ),
    "fsdp_config.fsdp_offload_params": WordSettingKey(
        "memory.offload_params", {"true": "cpu", "false": "none"}
    ),
    "fsdp_config.fsdp_activation_checkpointing": WordSettingKey(
        "memory.activation_checkpointing", {"true": "full", "false": "none"}
    ),
    "fsdp_config.fsdp_activation_checkpointing_offload": SettingKey("memory.offload_activations"),
    "fsdp_config.fsdp_ignored_modules": RefusedKey("FSDP shards every module; remove the key"),
    "fsdp_config.fsdp_version": PresetKey(
        {"1": {}, "2": {}},
        docs_text="no setting: the version only determines which keys of the file are read",
    ),
    "fsdp_config.fsdp_use_orig_params": MultiSettingKey(
        (),
        note_unused_use_orig_params,
        converts_empty_values=True,
        docs_text="no effect: FSDP2 always keeps the original parameters",
    ),
    **dict.fromkeys(
        ("fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_sync_module_states"), IgnoredKey()
    ),
}
DEEPSPEED_KEYS: ForeignKeys = {
    "deepspeed_config.zero_stage": WordSettingKey(
        "strategy", {"0": "no_shard", "1": "zero1", "2": "zero2", "3": "zero3"}
    ),
    "deepspeed_config.gradient_accumulation_steps": SettingKey(
        "deepspeed.config", convert_accumulation_steps
    ),
    "deepspeed_config.deepspeed_config_file": SettingKey("deepspeed.config", convert_deepspeed_json_path),
    "deepspeed_config.gradient_clipping": MultiSettingKey(
        ("train.max_grad_norm",), convert_gradient_clipping, converts_empty_values=True
    ),
    "deepspeed_config.offload_optimizer_device": SettingKey(
        "memory.offload_optimizer", build_offload_device_converter("optimizer", get_zero_stage)
    ),
    "deepspeed_config.offload_param_device": SettingKey(
        "memory.offload_params", build_offload_device_converter("params", get_zero_stage)
    ),
    "deepspeed_config.offload_optimizer_nvme_path": MultiSettingKey(
        ("memory.nvme_path",),
        build_nvme_path_converter("deepspeed_config.offload_optimizer_device", get_zero_stage),
    ),
    "deepspeed_config.offload_param_nvme_path": MultiSettingKey(
        ("memory.nvme_path",),
        build_nvme_path_converter("deepspeed_config.offload_param_device", get_zero_stage),
    ),
    "deepspeed_config.deepspeed_multinode_launcher": RefusedKey(SET_BY_LAUNCHER, unless=("standard",)),
    **dict.fromkeys(
        (
            "deepspeed_config.deepspeed_hostfile",
            "deepspeed_config.deepspeed_inclusion_filter",
            "deepspeed_config.deepspeed_exclusion_filter",
        ),
        RefusedKey(SET_BY_LAUNCHER),
    ),
    "deepspeed_config.deepspeed_moe_layer_cls_names": IgnoredKey(
        "ZeRO-3 finds the expert layers automatically; remove the key"
    ),
    **dict.fromkeys(
        ("deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model"), IgnoredKey()
    ),
}
PARALLELISM_KEYS: ForeignKeys = {
    **dict.fromkeys(
        ("parallelism_config.parallelism_config_cp_size", "parallelism_config.parallelism_config_sp_size"),
        SettingKey("context_parallel_size", convert_group_size),
    ),
    "parallelism_config.parallelism_config_tp_size": SettingKey("tensor_parallel_size", convert_group_size),
    **dict.fromkeys(
        (
            "parallelism_config.parallelism_config_dp_shard_size",
            "parallelism_config.parallelism_config_dp_replicate_size",
        ),
        IgnoredKey("strategy and the number of ranks determine this size; remove the key", unless=(1,)),
    ),
    **dict.fromkeys(
        (
            "parallelism_config.parallelism_config_cp_comm_strategy",
            "parallelism_config.parallelism_config_cp_backend",
            "parallelism_config.parallelism_config_sp_backend",
            "parallelism_config.parallelism_config_sp_seq_length",
            "parallelism_config.parallelism_config_sp_seq_length_is_variable",
            "parallelism_config.parallelism_config_sp_attn_implementation",
        ),
        IgnoredKey("context parallelism always uses all-to-all, as in DeepSpeed-Ulysses; remove the key"),
    ),
}
KEYS: ForeignKeys = {
    "distributed_type": PresetKey(
        {
            "NO": {"strategy": "no_shard"},
            "false": {"strategy": "no_shard"},
            "MULTI_GPU": {"strategy": "no_shard", "backend": "cuda"},
            "MULTI_CPU": {"strategy": "no_shard", "backend": "cpu"},
            "FSDP": {},
            "DEEPSPEED": {},
            "XLA": {"backend": "xla"},
            "TPU": {"backend": "xla"},
        }
    ),
    "mixed_precision": WordSettingKey("precision", PRECISIONS),
    "fp16": SettingKey("precision", convert_old_fp16, converts_empty_values=True),
    "downcast_bf16": TpuLauncherKey(
        "mixed_precision sets the dtype of the computation; set downcast_bf16 to no"
    ),
    "use_cpu": SettingKey("backend", convert_use_cpu),
    "gpu_ids": MultiSettingKey((), store_gpu_ids, unless=("all",), hint="CUDA_VISIBLE_DEVICES"),
    **dict.fromkeys(
        ("dynamo_backend", "dynamo_config.dynamo_backend"),
        MultiSettingKey(("compile", "compile_backend"), convert_dynamo_backend, converts_empty_values=True),
    ),
    "dynamo_config.dynamo_mode": SettingKey("compile_mode"),
    **dict.fromkeys(
        (
            "dynamo_config.dynamo_use_fullgraph",
            "dynamo_config.dynamo_use_dynamic",
            "dynamo_config.dynamo_use_regional_compilation",
        ),
        IgnoredKey("each layer is compiled separately; remove the key", unless=("default",)),
    ),
    **FSDP_KEYS,
    **XLA_KEYS,
    **{f"fsdp_config.{name}": key for name, key in XLA_KEYS.items()},
    **DEEPSPEED_KEYS,
    **PARALLELISM_KEYS,
    "mpirun_config": RefusedKey(SET_BY_LAUNCHER),
    **dict.fromkeys(("main_process_ip", "main_process_port", "machine_rank", "rdzv_backend"), IgnoredKey()),
    **dict.fromkeys(("main_training_function", "same_network"), IgnoredKey()),
    **dict.fromkeys(("num_processes", "num_machines"), IgnoredKey()),
    "compute_environment": RefusedKey(
        "runs are always started on the local machine; set compute_environment to LOCAL_MACHINE",
        unless=("LOCAL_MACHINE", "TPU"),
    ),
    "tpu_use_cluster": TpuLauncherKey(f"{START_ON_EVERY_HOST}, and set tpu_use_cluster to false"),
    "tpu_use_sudo": TpuLauncherKey("no command needs sudo; set tpu_use_sudo to false"),
    **dict.fromkeys(
        ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "commands", "command_file"),
        TpuLauncherKey(f"{START_ON_EVERY_HOST}, and remove the key"),
    ),
    "debug": IgnoredKey("collective operations are not checked individually; remove the key"),
    "enable_cpu_affinity": IgnoredKey("ranks are not bound to CPU cores; remove the key"),
    "fp8_config": IgnoredKey(
        "the fp8 layers of torchao are used; to enable them, set fp8 to tensorwise or rowwise"
    ),
}
RENAMED_SETTINGS: ForeignKeys = {
    f"xla.{name.removeprefix('xla_fsdp_settings.')}": key
    for name, key in XLA_KEYS.items()
    if name != "xla" and not any(target.startswith("xla.") for target in key.targets)
} | {"xla.xla_fsdp_v2": IgnoredKey("XLA always shards with SPMD; remove the key")}
"""Table entries for settings of previous releases that were removed or renamed. They explain the
replacements."""


def normalize_accelerate_file(file: ForeignFile) -> None:
    """Normalize an Accelerate config file in place to the layout that the key table expects.

    Removes the FSDP or DeepSpeed section if Accelerate does not read this section for the
    ``distributed_type`` of the file. The Megatron-LM section is always removed. However, a
    section that is neither a mapping nor empty is kept, so that the conversion reports it. In the
    sections ``fsdp_config`` and ``dynamo_config``, adds the prefix ``fsdp_`` or ``dynamo_`` to keys
    that lack it, except for the XLA keys in :data:`XLA_SECTIONS`.

    Args:
        file: File whose keys have not been converted yet.
    """
    values = file.values
    for section, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_")):
        if isinstance(inside := values.get(section), dict):
            values[section] = {
                key if key in XLA_SECTIONS or str(key).startswith(prefix[:-1]) else f"{prefix}{key}": value
                for key, value in inside.items()
            }
    is_read = {
        "fsdp_config": get_distributed_type(file) == "FSDP" or is_for_xla(file),
        "deepspeed_config": get_distributed_type(file) == "DEEPSPEED",
        "megatron_lm_config": False,  # because distributed_type refuses Megatron-LM
    }
    for section, read in is_read.items():
        if section in values and (values[section] in EMPTY_VALUES or isinstance(values[section], dict)):
            if not read:
                del values[section]
            elif values[section] in EMPTY_VALUES:
                values[section] = {}


def complete_accelerate_settings(file: ForeignFile, num_devices: int) -> None:
    """Add Accelerate's default strategy and the number of ranks to the converted settings.

    If the file enables FSDP or DeepSpeed and no strategy has been converted, ``strategy`` is set to
    ``full_shard`` or ``zero2``. ``zero2`` is not set if the file refers to a DeepSpeed config file.
    On XLA, the ``fsdp`` settings are removed, and a note is added if the file does not configure
    FSDP.

    The number of ranks is stored in ``file.result.num_processes``. If the file does not contain the
    number, it is 1 for ``distributed_type: NO``, and otherwise nothing is stored. Nothing is stored
    for -1 either. A refusal is added if the number is invalid, or if the file is for several
    machines. On XLA, or if a launcher has already started the ranks (``RANK`` is set), the numbers
    of ranks and machines are ignored.

    Args:
        file: File whose keys have been converted. Its ``result`` is modified in place.
        num_devices: Number of devices. Not used, because the number of ranks comes from the file.
    """
    kind, path, result = get_distributed_type(file), ("distributed_type",), file.result
    if kind == "FSDP" and "strategy" not in result.values:
        file.set_setting(path, "strategy", "full_shard")
    if kind == "DEEPSPEED" and "strategy" not in result.values and not uses_deepspeed_json(file):
        file.set_setting(path, "strategy", "zero2")
    if is_for_xla(file):  # XLA does not wrap or prefetch layers
        for key in [key for key in result.values if key.startswith("fsdp.")]:
            del result.values[key], result.origins[key]
    if is_for_xla(file) and not (
        file.get_value("fsdp_config") or any(key in file.values for key in XLA_SECTIONS)
    ):
        file.add_note(
            path, "without fsdp_config, Accelerate replicates the model; this run shards the model instead"
        )
    # The number of ranks does not apply if one process drives all TPUs, or if a launcher has already started
    # the ranks.
    if is_for_xla(file) or "RANK" in os.environ:
        return
    machines, processes = file.values.get("num_machines", 1), file.values.get("num_processes")
    if machines not in (None, 1):
        file.add_refusal(
            ("num_machines",),
            f"the command does not start {format_short_value(machines)} machines; start the run with "
            "accelerate launch or torchrun on each machine, or set the key to 1",
        )
    if processes is None and file.values.get("distributed_type") in ("NO", False):
        processes = 1
    if type(processes) is int and processes > 0:
        result.num_processes = processes
    elif processes is not None and processes != -1:
        file.add_refusal(("num_processes",), f"must be an integer >= 1, not {format_short_value(processes)}")


# -- environment variables ---------------------------------------------------------------------------------

DISTRIBUTED_TYPES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
"""Values of ``distributed_type``. Each is keyed by the environment variable that selects it if it is true."""


@dataclass(frozen=True)
class LaunchVariable:
    """Config file key that corresponds to an environment variable of ``accelerate launch``.

    :data:`LAUNCH_VARIABLES` maps the names of the variables to these entries. A name that ends with
    a star is a prefix. Its entry applies to all variables with this prefix.

    Attributes:
        key: Dotted key of the Accelerate config file. A star at the end is replaced by the rest of
            the variable's name after the prefix, in lower case. For example, ``FSDP_*`` has the key
            ``fsdp_config.fsdp_*``, so ``FSDP_VERSION`` sets ``fsdp_config.fsdp_version``.
        values_without_meaning: Lower-case values that are ignored, because the launcher also sets
            them if the user has not chosen a value.
    """

    key: str
    values_without_meaning: tuple[str, ...] = ()


LAUNCH_VARIABLES: dict[str, LaunchVariable] = {
    "ACCELERATE_MIXED_PRECISION": LaunchVariable("mixed_precision", ("no",)),
    "ACCELERATE_USE_CPU": LaunchVariable("use_cpu", ("false",)),
    "ACCELERATE_DEBUG_MODE": LaunchVariable("debug"),
    "ACCELERATE_CPU_AFFINITY": LaunchVariable("enable_cpu_affinity"),
    **{
        f"PARALLELISM_CONFIG_{size}_SIZE": LaunchVariable(
            f"parallelism_config.parallelism_config_{size.lower()}_size"
        )
        for size in ("CP", "SP", "TP", "DP_SHARD", "DP_REPLICATE")
    },
    "FSDP_TRANSFORMER_CLS_TO_WRAP": LaunchVariable("fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
    "FSDP_SHARDING_STRATEGY": LaunchVariable("fsdp_config.fsdp_sharding_strategy", ("full_shard", "1")),
    "FSDP_RESHARD_AFTER_FORWARD": LaunchVariable("fsdp_config.fsdp_reshard_after_forward", ("true",)),
    "FSDP_OFFLOAD_PARAMS": LaunchVariable("fsdp_config.fsdp_offload_params", ("false",)),
    "FSDP_ACTIVATION_CHECKPOINTING": LaunchVariable("fsdp_config.fsdp_activation_checkpointing", ("false",)),
    "FSDP_*": LaunchVariable("fsdp_config.fsdp_*"),
    "ACCELERATE_DYNAMO_BACKEND": LaunchVariable("dynamo_config.dynamo_backend", ("no",)),
    "ACCELERATE_DYNAMO_MODE": LaunchVariable("dynamo_config.dynamo_mode", ("default",)),
    "ACCELERATE_DYNAMO_*": LaunchVariable("dynamo_config.dynamo_*"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": LaunchVariable("deepspeed_config.gradient_accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": LaunchVariable("deepspeed_config.gradient_clipping"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": LaunchVariable("deepspeed_config.deepspeed_config_file"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": LaunchVariable("deepspeed_config.zero3_init_flag"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": LaunchVariable(
        "deepspeed_config.deepspeed_moe_layer_cls_names"
    ),
    "ACCELERATE_DEEPSPEED_*": LaunchVariable("deepspeed_config.*"),
}
"""Config file keys of the launcher's variables, keyed by variable name. A name that ends with a star matches
all other variables with this prefix.
"""


def find_variable_key(variable_name: str, value: str) -> str:
    """Find the key of an Accelerate config file that corresponds to an environment variable.

    Args:
        variable_name: Name of the variable.
        value: Value of the variable.

    Returns:
        Dotted key, such as ``fsdp_config.fsdp_version``. An empty string if the variable is not in
        :data:`LAUNCH_VARIABLES`, or if its value is ignored.
    """
    if variable_name in LAUNCH_VARIABLES:
        entry = LAUNCH_VARIABLES[variable_name]
        return "" if value.lower() in entry.values_without_meaning else entry.key
    for name, entry in LAUNCH_VARIABLES.items():
        if name.endswith("*") and variable_name.startswith(name[:-1]):
            return entry.key[:-1] + variable_name.removeprefix(name[:-1]).lower()
    return ""


class LaunchEnvironment(NamedTuple):
    """Environment variables of ``accelerate launch``, converted to the content of a config file.

    Attributes:
        values: Content of the config file.
        variables: Name of the environment variable that sets each key in ``values``. The dict is
            keyed by the path of the key, such as ``("fsdp_config", "fsdp_version")``.
    """

    values: dict[str, Any]
    variables: dict[KeyPath, str]


def parse_launch_variables(environment: Mapping[str, str]) -> LaunchEnvironment:
    """Convert the variables of ``accelerate launch`` to the content of a config file.

    ``distributed_type`` is determined by the variables in :data:`DISTRIBUTED_TYPES`, and is not set
    if none of these variables is true. All other keys are determined by the variables in
    :data:`LAUNCH_VARIABLES`. The values of these variables are parsed as YAML, and the text
    ``None`` becomes null. The values in :attr:`LaunchVariable.values_without_meaning` are omitted,
    and so is the sharding key of the FSDP version that is not used.

    Args:
        environment: Environment of a process that was started by the launcher.
    """
    values: dict[str, Any] = {}
    variables: dict[KeyPath, str] = {}
    for variable, kind in DISTRIBUTED_TYPES.items():
        if parse_boolean_word(environment.get(variable, "").replace("1", "true")) is True and not values:
            values["distributed_type"] = kind
            variables[("distributed_type",)] = variable
    # The launcher sets the keys of both FSDP versions, so the key of the unused version is ignored.
    unread = "sharding_strategy" if environment.get("FSDP_VERSION") == "2" else "reshard_after_forward"
    for variable, text in sorted(environment.items()):
        dotted = find_variable_key(variable, text)
        if not dotted or dotted.endswith(unread):
            continue
        section, _, name = dotted.rpartition(".")
        target = values.setdefault(section, {}) if section else values
        target[name] = None if text == "None" else parse_yaml_value(text)
        variables[tuple(dotted.split("."))] = variable
    return LaunchEnvironment(values, variables)
