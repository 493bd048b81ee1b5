"""Tables of the keys of ``accelerate config`` files, and of the variables that ``accelerate launch`` sets.

Such a file defines the launch and the sharding, but not the model, the data or the training. As in
Accelerate, the sections for FSDP and DeepSpeed only apply if ``distributed_type`` selects them.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.field_types import parse_boolean_word
from portable.config.origins import format_short_value
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
"""FSDP strategies, in the order of the numbers by which Accelerate's files may name them, from 1."""
SHARDING_WORDS = {word: name for n, name in enumerate(FSDP_STRATEGIES, 1) for word in (str(n), name)}
PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}
START_ON_EVERY_HOST = "start portable-train on every host of the slice, as described in docs/tpu.md"
SET_BY_LAUNCHER = "pass this option to the launcher; remove the key"
ONLY_LAYERS_WRAPPED = (
    "under SPMD nothing is wrapped, and each transformer layer is recomputed; remove the key"
)


def get_distributed_type(file: ForeignFile) -> str:
    """Return the ``distributed_type`` of a file in upper case, or ``NO`` if it is not set."""
    return str(file.values.get("distributed_type", "NO")).upper()


def is_for_xla(file: ForeignFile) -> bool:
    """Return whether a file is for TPUs, or enables XLA for FSDP."""
    sections = (file.values, file.values.get("fsdp_config"))
    return get_distributed_type(file) in ("XLA", "TPU") or any(
        isinstance(section, dict) and section.get("xla") is True for section in sections
    )


def uses_deepspeed_json(file: ForeignFile) -> bool:
    """Return whether a file names a DeepSpeed JSON, which replaces the other DeepSpeed keys of the file."""
    return file.get_value("deepspeed_config.deepspeed_config_file") not in (*EMPTY_VALUES, "none")


def get_zero_stage(file: ForeignFile) -> int:
    """Return the ZeRO stage of a file. The default is 2.

    If the file refers to a DeepSpeed JSON, its stage is not read here. The result is then 3, the stage
    that allows the most settings.
    """
    stage = str(file.get_value("deepspeed_config.zero_stage", 2))
    return int(stage) if stage in "0123" and not uses_deepspeed_json(file) else 3


def parse_quoted_number(value: Any) -> Any:
    """Convert a string that contains a number to the number. Other values are returned unchanged.

    Accelerate accepts such strings, because it passes all values through environment variables.
    """
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(value) if isinstance(value, str) and value.strip().isdigit() else number


@dataclass(frozen=True)
class TpuLauncherKey(CounterpartlessKey):
    """Entry for a key that configures how Accelerate starts TPU hosts.

    The key is refused in files for TPUs, and ignored in other files.

    Attributes:
        advice: Advice at the end of the error message for TPUs.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Raise the exception that refuses or ignores the key, because no value can be converted.

        Raises:
            NoCounterpart: If the file is for TPUs.
            NoEffect: If the file is not for TPUs.
        """
        if is_for_xla(file):
            raise NoCounterpart(f"{format_short_value(value)} is not supported: {self.advice}")
        raise NoEffect(f"{format_short_value(value)} has no effect: this key is for TPUs")

    @property
    def remedy(self) -> str:
        """Advice at the end of the error message."""
        return self.advice


def convert_sharding_strategy(value: Any, file: ForeignFile) -> Any:
    """Convert ``fsdp_sharding_strategy`` (FSDP1) or ``fsdp_reshard_after_forward`` (FSDP2).

    Returns:
        Value of the setting ``strategy``. None if the value is empty.

    Raises:
        NoEffect: If Accelerate ignores the key under the ``fsdp_version`` of the file.
        NoCounterpart: If the value is unknown.
    """
    version = str(file.get_value("fsdp_config.fsdp_version", file.get_value("fsdp_version", 1)))
    is_key_of_fsdp2 = file.path[-1] == "fsdp_reshard_after_forward"
    if (version == "2") != is_key_of_fsdp2 and not is_for_xla(file):
        other = "fsdp_reshard_after_forward" if version == "2" else "fsdp_sharding_strategy"
        raise NoEffect(f"has no effect: with fsdp_version {version} Accelerate reads {other}")
    if is_key_of_fsdp2 and isinstance(parse_boolean_word(value), bool):
        return "full_shard" if parse_boolean_word(value) else "shard_grad_op"
    return None if value in EMPTY_VALUES else translate_word(value, SHARDING_WORDS)


def note_unused_use_orig_params(value: Any, _: ForeignFile) -> None:
    """Raise ``NoEffect`` if ``fsdp_use_orig_params`` is false.

    The key has no effect, because FSDP2 always keeps the original parameters.
    """
    if parse_boolean_word(value) not in (True, *EMPTY_VALUES):
        raise NoEffect(
            f"{format_short_value(value)} has no effect: FSDP2 always keeps the original parameters"
        )


def convert_group_size(value: Any, _: ForeignFile) -> Any:
    """Convert the number of context-parallel or tensor-parallel ranks. Return None for 1, the default."""
    size = parse_quoted_number(value)
    return None if size == 1 else size


def convert_use_cpu(value: Any, file: ForeignFile) -> str | None:
    """Convert ``use_cpu`` to the backend. Return None if it is false.

    Raises:
        NoEffect: If ``distributed_type`` is ``MULTI_GPU``, because Accelerate then runs on GPUs anyway.
    """
    if not parse_flag(value):
        return None
    if get_distributed_type(file) == "MULTI_GPU":
        raise NoEffect("has no effect: with distributed_type MULTI_GPU Accelerate runs on GPUs")
    return "cpu"


def convert_dynamo_backend(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``dynamo_backend``, the backend of torch.compile.

    Returns:
        The settings ``compile`` and ``compile_backend``. Compilation is off for ``NO``. An empty value
        results in an empty dict.

    Raises:
        NoEffect: If the distributed type is ``DEEPSPEED``, because Accelerate then ignores the key.
    """
    if value in EMPTY_VALUES:
        return {}
    if str(value).upper() in ("NO", "FALSE"):
        return {"compile": False}
    if get_distributed_type(file) == "DEEPSPEED":
        raise NoEffect("has no effect: Accelerate ignores it with DeepSpeed; set compile")
    return {"compile": True, "compile_backend": str(value).lower()}


def store_gpu_ids(value: Any, file: ForeignFile) -> None:
    """Store the ids of the GPUs to use in ``file.result.gpu_ids``, because a run has no such setting.

    Args:
        value: List of ids, or a comma-separated string of ids.
        file: File that contains the key.

    Raises:
        NoEffect: Always. Its message becomes a note about the environment variable that will be set.
    """
    ids = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    file.result.gpu_ids = ids.replace(" ", "")
    raise NoEffect(f"CUDA_VISIBLE_DEVICES is set to {file.result.gpu_ids}, unless it is already set")


def convert_old_fp16(value: Any, file: ForeignFile) -> str | None:
    """Convert ``fp16``, the flag that ``mixed_precision`` replaced in newer versions of Accelerate.

    Returns:
        ``fp16`` or ``fp32``. None if the value is empty, or if ``mixed_precision`` is set as well.
    """
    if value in EMPTY_VALUES or file.get_value("mixed_precision"):
        return None
    return "fp16" if parse_flag(value) else "fp32"


def convert_class_names(value: Any, _: ForeignFile) -> list[str] | None:
    """Convert the class names of the layers to wrap, from a list or a comma-separated string.

    Returns None if there are no names.
    """
    return parse_name_list(value) or None


def convert_min_num_params(value: Any, file: ForeignFile) -> Any:
    """Convert ``fsdp_min_num_params``, the minimum size of a module for size-based wrapping.

    Returns None for other wrap policies, because Accelerate writes the key under every policy.
    """
    policy = str(file.get_value("fsdp_config.fsdp_auto_wrap_policy", "")).upper()
    return parse_quoted_number(value) if policy == "SIZE_BASED_WRAP" else None


def convert_wrap_policy(value: Any, file: ForeignFile) -> str:
    """Convert the FSDP wrap policy to lower case.

    Raises:
        NoCounterpart: If the policy is unknown, or if it is not ``transformer_based_wrap`` in a file for XLA.
    """
    policy = translate_word(
        value, {word: word for word in ("transformer_based_wrap", "size_based_wrap", "no_wrap")}
    )
    if is_for_xla(file) and policy != "transformer_based_wrap":
        raise NoCounterpart(f"{policy}: {ONLY_LAYERS_WRAPPED}")
    return str(policy)


def convert_xla_reshard(value: Any, file: ForeignFile) -> str | None:
    """Convert ``reshard_after_forward`` of FSDP under XLA to ``full_shard`` or ``shard_grad_op``.

    Returns:
        The strategy. None if the value is empty, or if ``fsdp_sharding_strategy`` already determines the
        strategy.

    Raises:
        NoCounterpart: If the value contradicts ``fsdp_sharding_strategy``.
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
            "two"
        )
    return None


def convert_xla_compute_dtype(value: Any, file: ForeignFile) -> str:
    """Convert ``compute_dtype`` of FSDP under XLA, such as ``torch.bfloat16``, to the precision.

    Raises:
        NoCounterpart: If the dtype is unknown, or contradicts ``mixed_precision``.
    """
    dtypes = {"float32": "fp32", "bfloat16": "bf16"}
    precision = str(translate_word(str(value).removeprefix("torch."), dtypes))
    mixed = file.get_value("mixed_precision")
    if mixed is not None and translate_word(mixed, PRECISIONS) != precision:
        raise NoCounterpart(
            f"{value} contradicts mixed_precision {format_short_value(mixed)}; remove one of the two"
        )
    return precision


def convert_xla_buffer_dtype(value: Any, _: ForeignFile) -> str:
    """Remove the prefix from the name of a torch dtype: ``torch.bfloat16`` becomes ``bfloat16``."""
    return str(value).removeprefix("torch.")


def convert_accumulation_steps(value: Any, file: ForeignFile) -> dict[str, Any] | None:
    """Convert the number of gradient accumulation steps in the section ``deepspeed_config``.

    The number becomes a key of a DeepSpeed JSON, because the section is a short form of such a JSON.

    Returns:
        Content of the JSON. None if the value is 1 or ``auto``.

    Raises:
        NoCounterpart: If the value is not a positive integer, or the file also names a DeepSpeed JSON.
    """
    steps = int(value) if isinstance(value, str) and value.isdigit() else value
    if steps in (1, "auto"):  # Accelerate writes its default 1 into every file
        return None
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise NoCounterpart(f"must be a positive whole number or auto, not {format_short_value(value)}")
    if uses_deepspeed_json(file):
        raise NoCounterpart(
            "Accelerate reads this value from deepspeed_config_file; set the value there, and remove the "
            "key here"
        )
    return {"gradient_accumulation_steps": steps}


def convert_deepspeed_json_path(value: Any, file: ForeignFile) -> Any:
    """Convert the path of a DeepSpeed JSON. Return None if the value is empty or ``none``.

    Raises:
        NoCounterpart: If the JSON does not exist.
    """
    if not uses_deepspeed_json(file):
        return None
    if not pathlib.Path(os.path.expandvars(str(value))).expanduser().is_file():
        raise NoCounterpart(f"{value} does not exist; use the path of a DeepSpeed JSON")
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
        hint="set strategy to full_shard if it is true, and to shard_grad_op if not",
    ),
    "xla_fsdp_settings.fp32_reduce_scatter": RefusedKey(
        "under SPMD gradients are reduced in the compute type; remove the key, or set precision to fp32"
    ),
    "xla_fsdp_settings.disable_reshard_on_root": RefusedKey(
        "under SPMD there are no units and no root; remove the key"
    ),
    "xla_fsdp_settings.flatten_parameters": RefusedKey(
        "under SPMD parameters are sharded along a dim; remove the key"
    ),
    "xla_fsdp_settings.pin_layout_in_collective_ops": RefusedKey(
        "under SPMD the compiler places the collectives; remove the key"
    ),
    "xla_fsdp_settings.optimization_barrier_in_forward": RefusedKey(
        "under SPMD the compiler schedules the gathers; remove the key"
    ),
    "xla_fsdp_settings.execute_sharding_on_init": NeverFalseKey(
        "parameters are always sharded on creation; remove the key"
    ),
    "xla_fsdp_settings.auto_wrap_policy": RefusedKey(ONLY_LAYERS_WRAPPED, unless=("transformer_based_wrap",)),
}
"""Keys of FSDP under XLA.

They may be at the top level of a file, as in some guides, or in ``fsdp_config``, as for the Trainer."""
XLA_SECTIONS = {name.partition(".")[0] for name in XLA_KEYS}
"""First parts of the dotted keys in :data:`XLA_KEYS`."""
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
    "fsdp_config.fsdp_ignored_modules": RefusedKey("every module is sharded; remove the key"),
    "fsdp_config.fsdp_version": PresetKey(
        {"1": {}, "2": {}}, hint="1 or 2, the version that decides which keys Accelerate reads"
    ),
    "fsdp_config.fsdp_use_orig_params": MultiSettingKey(
        (),
        note_unused_use_orig_params,
        converts_empty_values=True,
        hint="no effect if false: FSDP2 always keeps the original parameters",
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
        "ZeRO-3 finds the expert blocks automatically"
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
        IgnoredKey("strategy and the number of ranks determine it", unless=(1,)),
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
        IgnoredKey("context-parallel ranks exchange tokens for heads"),
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
    "downcast_bf16": TpuLauncherKey("mixed_precision sets the compute dtype; set the key to no"),
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
        IgnoredKey("each layer is compiled separately", unless=("default",)),
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
        "runs are always local; set compute_environment to LOCAL_MACHINE", unless=("LOCAL_MACHINE", "TPU")
    ),
    "tpu_use_cluster": TpuLauncherKey(f"{START_ON_EVERY_HOST}; set the key to false"),
    "tpu_use_sudo": TpuLauncherKey("no command needs sudo; set the key to false"),
    **dict.fromkeys(
        ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "commands", "command_file"),
        TpuLauncherKey(f"{START_ON_EVERY_HOST}; remove the key"),
    ),
    "debug": IgnoredKey("collectives are not checked one by one"),
    "enable_cpu_affinity": IgnoredKey("ranks are not bound to cores"),
    "fp8_config": IgnoredKey("fp8 is not part of this version"),
}
RENAMED_SETTINGS: ForeignKeys = {
    f"xla.{name.removeprefix('xla_fsdp_settings.')}": key
    for name, key in XLA_KEYS.items()
    if name != "xla" and not any(target.startswith("xla.") for target in key.targets)
} | {"xla.xla_fsdp_v2": IgnoredKey("sharding is always by SPMD; remove the key")}
"""Settings of previous releases that were removed or renamed. The entries explain their replacements."""


def normalize_accelerate_file(file: ForeignFile) -> None:
    """Normalize a file in place to the layout that the table of keys expects.

    Removes the sections that Accelerate ignores under the file's ``distributed_type``. In the FSDP and
    dynamo sections, adds the missing prefixes ``fsdp_`` and ``dynamo_`` to the keys.

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
    """Add the default strategy of Accelerate, and store the number of ranks in ``file.result.num_processes``.

    Args:
        file: A file whose keys have been converted.
        num_devices: Number of devices. Not used, because the file contains the number of ranks.
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
        file.add_note(path, "without fsdp_config Accelerate replicates the model; here it is sharded")
    # Do not set the number of ranks if one process drives all TPUs, or if a launcher has already started the
    # ranks.
    if is_for_xla(file) or "RANK" in os.environ:
        return
    machines, processes = file.values.get("num_machines", 1), file.values.get("num_processes")
    if machines not in (None, 1):
        file.add_refusal(
            ("num_machines",),
            f"{format_short_value(machines)} machines need accelerate launch or torchrun on each of them, "
            "which this process then joins; set the key to 1, or start the ranks that way",
        )
    if processes is None and file.values.get("distributed_type") in ("NO", False):
        processes = 1
    if isinstance(processes, int) and processes > 0:
        result.num_processes = processes
    elif processes is not None and processes != -1:
        file.add_refusal(("num_processes",), f"must be an integer >= 1, not {format_short_value(processes)}")


# -- the environment ---------------------------------------------------------------------------------------

DISTRIBUTED_TYPES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
"""Values of ``distributed_type``, keyed by the environment variable that selects them if it is true."""


@dataclass(frozen=True)
class LaunchVariable:
    """Config file key that corresponds to an environment variable of ``accelerate launch``.

    Attributes:
        key: Dotted key of a config file. A star is replaced by the rest of the variable's name in lower
            case.
        values_without_meaning: Lower-case values that are ignored, because the launcher also sets them
            as a default if the user has not set the variable.
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
"""Variables, keyed by name. A name that ends with a star matches all other variables with this prefix."""


def find_variable_key(variable_name: str, value: str) -> str:
    """Find the config file key that corresponds to an environment variable.

    Args:
        variable_name: Name of the variable.
        value: Value of the variable.

    Returns:
        Dotted key. An empty string if the value is ignored, or if Accelerate does not set such a
        variable.
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
        variables: Names of the environment variables, keyed by the path of the key in ``values``.
    """

    values: dict[str, Any]
    variables: dict[KeyPath, str]


def parse_launch_variables(environment: Mapping[str, str]) -> LaunchEnvironment:
    """Convert the variables of ``accelerate launch`` to the content of a config file.

    Args:
        environment: Environment of a process that was started by the launcher.
    """
    values: dict[str, Any] = {}
    variables: dict[KeyPath, str] = {}
    for variable, kind in DISTRIBUTED_TYPES.items():
        if parse_boolean_word(environment.get(variable, "").replace("1", "true")) is True and not values:
            values["distributed_type"] = kind
            variables[("distributed_type",)] = variable
    # Ignore the key of the FSDP version that is not used, because the launcher sets the keys of both
    # versions.
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
