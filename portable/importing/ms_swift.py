"""Table of the keys of ms-swift that transformers' Trainer lacks or interprets differently."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from portable.config.origins import format_short_value
from portable.importing import trl
from portable.importing.foreign_file import NoCounterpart, ProgramDifference
from portable.importing.foreign_keys import (
    CompanionKey,
    IgnoredKey,
    MultiSettingKey,
    NeverFalseKey,
    PresetKey,
    RefusedKey,
    SettingKey,
    WordSettingKey,
)
from portable.importing.trainer_conversions import (
    ADD_CROSS_ENTROPY,
    ADD_SYSTEM_MESSAGE,
    ALWAYS_SHUFFLED,
    BETA_ARGUMENT,
    BETA_OF_LOSS,
    GAMMA_ARGUMENT,
    GAMMA_OF_LOSS,
    NO_REWARDS,
    ONLY_FROZEN_QUANTIZED,
    SET_ADAPTER,
    SET_BETAS,
    SET_EVAL,
    SET_PAIR_LOSS,
    SET_RECORD_FORMAT,
    SFT_ARGUMENT,
    SFT_OF_LOSS,
    SOURCE_SETTINGS,
    TOKENIZED_ONCE,
    TRAIN_ONLY_TOWER,
    TRAIN_TOWER,
    build_source_settings,
    complete_run_settings,
    convert_chat_template,
    convert_eval_fraction,
    convert_module_names,
    format_pair_loss,
    note_missing_cross_entropy,
    read_loss_types,
)
from portable.importing.words import build_word_converter

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignFile, ForeignKeys

SET_PATTERN = "set train.frozen or train.trainable to patterns that match these names"
CUSTOM_CODE = (
    "set train.optimizer, train.callbacks or train.loss to the import path of the code, such as "
    "package.module:name"
)
SEQUENCES_PER_STEP = 16
"""Target number of sequences per optimizer step in ms-swift if the accumulation steps are not set."""
_DATASET = re.compile(r"(?:(?P<hub>hf|ms)::)?(?P<name>[^:#]+)(?::(?P<subsets>[^#]+))?(?:#(?P<count>\d+))?")


def convert_datasets(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert the names in ``dataset`` to data sources.

    A name may contain subsets and a sample count. For example, ``name:subset1/subset2#500`` becomes
    two sources with 500 samples each. ms-swift draws these samples at random, but a run uses the
    first samples. A note about this difference is added to ``file.result``. The prefixes ``hf::``
    and ``ms::``, which select a hub, are removed.

    Raises:
        NoCounterpart: If a name cannot be parsed.
    """
    sources = []
    for text in map(str, value if isinstance(value, list) else [value]):
        match = _DATASET.fullmatch(text.strip())
        if match is None:
            raise NoCounterpart(
                f"{format_short_value(text)} is not supported; set data.source to a file or a hub dataset"
            )
        if match["count"]:
            file.add_note(
                file.path, f"{format_short_value(text)} uses the first samples here, not random samples"
            )
        for subset in (match["subsets"] or "").split("/"):
            sources.append(
                {
                    "source": match["name"].strip(),
                    "config_name": subset.strip() or None,
                    "max_samples": int(match["count"]) if match["count"] else None,
                }
            )
    return build_source_settings(sources)


def convert_pair_loss(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``rlhf_type`` and the keys of its arguments to ``train.loss``.

    The supported losses are ``dpo``, ``orpo`` and ``simpo``. Their arguments are read from other keys,
    such as ``beta``, and for ``dpo`` also from ``loss_type``, ``loss_weights`` and ``rpo_alpha``.

    Raises:
        NoCounterpart: If the loss is not supported, or if there is not exactly one preference loss with
            weight 1, because a run has only one.
    """
    if value not in ("dpo", "orpo", "simpo"):
        raise NoCounterpart(f"{format_short_value(value)} is not supported; {SET_PAIR_LOSS}")
    if value == "simpo":
        note_missing_cross_entropy(value, "cpo_alpha", 1.0, file)
    kind, sft = read_loss_types(file) if value == "dpo" else (value, None)
    beta = file.get_value("beta", 2.0 if value == "simpo" else 0.1)
    return {
        "train.loss": format_pair_loss(kind, beta=beta, gamma=file.get_value("simpo_gamma", 1.0), sft=sft)
    }


def convert_deepspeed_name(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert ``deepspeed``, a DeepSpeed config or the name of a config built into ms-swift.

    The names are ``zero0`` to ``zero3``, optionally with the suffix ``_offload``. A name is
    converted to the strategy. The suffix offloads the optimizer state, and at stage 3 also the
    parameters. Any other value, such as the path of a config, becomes ``deepspeed.config``.
    """
    match = re.fullmatch(r"zero([0-3])(_offload)?", str(value))
    if match is None:
        return {"deepspeed.config": value}
    settings = {"strategy": f"zero{match[1]}" if match[1] != "0" else "no_shard"}
    if match[2]:
        settings["memory.offload_optimizer"] = "cpu"
    if match[2] and match[1] == "3":
        settings["memory.offload_params"] = "cpu"
    return settings


def convert_environment(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert ``ENV``, a mapping of environment variables. Only ``MAX_PIXELS`` is supported.

    Raises:
        NoCounterpart: If there are other variables.
    """
    variables = dict(value)
    max_pixels = variables.pop("MAX_PIXELS", None)
    if variables:
        raise NoCounterpart(
            f"{format_short_value(variables)} is not supported; export these environment variables before "
            "you start the run"
        )
    return {} if max_pixels is None else {"data.image_max_pixels": int(max_pixels)}


KEYS: ForeignKeys = {
    # Model and adapter
    "model": SettingKey("model.name_or_path"),
    "use_hf": IgnoredKey(
        "a name that is not a folder refers to the Hugging Face Hub; remove the key", unless=(True,)
    ),
    "task_type": WordSettingKey(
        "model.task", {"causal_lm": "causal-lm", "seq_cls": "sequence-classification"}
    ),
    "attn_impl": SettingKey("model.attention", build_word_converter("model.attention")),
    **dict.fromkeys(
        ("tuner_type", "train_type"),
        PresetKey({"full": {}, "lora": {"adapter.type": "lora"}}, hint=SET_ADAPTER),
    ),
    "tuner_backend": RefusedKey(SET_ADAPTER, unless=("peft",)),
    "adapters": RefusedKey("set adapter.name_or_path to the folder or hub id of the adapter"),
    "lora_rank": SettingKey("adapter.r"),
    "lora_bias": RefusedKey(SET_ADAPTER, unless=("none",)),
    "init_weights": RefusedKey(SET_ADAPTER, unless=("true", True)),
    "target_modules": SettingKey("adapter.target_modules", convert_module_names),
    "target_regex": SettingKey("adapter.target_modules"),
    "target_parameters": SettingKey("adapter.target_parameters", convert_module_names),
    "modules_to_save": SettingKey("adapter.modules_to_save", convert_module_names),
    "quant_bits": PresetKey(
        {"4": {"adapter.base": "nf4"}, "8": {"adapter.base": "int8"}},
        hint="set adapter.type to lora, and adapter.base to nf4 for 4 bits or to int8 for 8 bits",
    ),
    "quant_method": RefusedKey(ONLY_FROZEN_QUANTIZED, unless=("bnb",)),
    **dict.fromkeys(("freeze_parameters", "trainable_parameters"), RefusedKey(SET_PATTERN)),
    "freeze_parameters_regex": SettingKey("train.frozen"),
    "trainable_parameters_regex": RefusedKey(
        "set train.trainable to patterns that match the parameters to train, and remove train.frozen"
    ),
    "freeze_parameters_ratio": RefusedKey(
        "set train.frozen to patterns that match the names of the layers to freeze"
    ),
    **dict.fromkeys(("freeze_vit", "freeze_aligner"), NeverFalseKey(TRAIN_TOWER)),
    "freeze_llm": RefusedKey(TRAIN_ONLY_TOWER),
    **dict.fromkeys(
        ("vit_lr", "aligner_lr"),
        RefusedKey(
            "set train.trainable to patterns that match the names of these parameters, and set their "
            "learning rate in train.parameter_groups"
        ),
    ),
    "max_pixels": SettingKey("data.image_max_pixels"),
    "new_special_tokens": RefusedKey("set data.added_tokens to the new tokens"),
    # Data
    "dataset": MultiSettingKey((*SOURCE_SETTINGS, "data.max_samples"), convert_datasets, hint="data.source"),
    **dict.fromkeys(("val_dataset", "eval_dataset"), RefusedKey(SET_EVAL)),
    **dict.fromkeys(
        ("cached_dataset", "cached_val_dataset"),
        RefusedKey("set data.source to the file or hub dataset of the original records"),
    ),
    "split_dataset_ratio": SettingKey("data.eval_fraction", convert_eval_fraction),
    "columns": RefusedKey(SET_RECORD_FORMAT),
    "interleave_prob": RefusedKey("list the sources in data.sources, with a weight for each source"),
    "truncation_strategy": WordSettingKey(
        "data.truncation", {"delete": "drop", "left": "start", "right": "end"}
    ),
    "loss_scale": WordSettingKey(
        "data.train_on", {"default": "assistant", "last_round": "last_assistant", "all": "all"}
    ),
    "template": SettingKey("data.chat_template", convert_chat_template),
    "system": RefusedKey(ADD_SYSTEM_MESSAGE),
    **dict.fromkeys(
        ("model_name", "model_author"),
        IgnoredKey("only the dataset swift/self-cognition uses this name; remove the key"),
    ),
    **dict.fromkeys(
        ("dataset_num_proc", "packing_num_proc", "lazy_tokenize", "load_from_cache_file"),
        IgnoredKey(TOKENIZED_ONCE),
    ),
    **dict.fromkeys(
        ("dataset_shuffle", "train_dataloader_shuffle"),
        RefusedKey(ALWAYS_SHUFFLED, unless=(True,)),
    ),
    # Training
    "max_epochs": SettingKey("train.epochs"),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2"),
        SettingKey(
            "train.betas",
            trl.build_betas_converter(0.95),
            converts_empty_values=True,
            hint=SET_BETAS,
        ),
    ),
    **dict.fromkeys(("optimizer", "callbacks", "external_plugins"), RefusedKey(CUSTOM_CODE)),
    "custom_register_path": RefusedKey(CUSTOM_CODE),
    **dict.fromkeys(
        ("use_galore", "lisa_activated_layers"),
        RefusedKey("set train.optimizer to another optimizer, such as adamw"),
    ),
    "early_stop_interval": SettingKey("train.early_stopping_patience"),
    "rlhf_type": MultiSettingKey(("train.loss",), convert_pair_loss, hint=SET_PAIR_LOSS),
    "beta": CompanionKey(BETA_OF_LOSS, docs_text=BETA_ARGUMENT),
    "simpo_gamma": CompanionKey(GAMMA_OF_LOSS, docs_text=GAMMA_ARGUMENT),
    "cpo_alpha": CompanionKey(ADD_CROSS_ENTROPY),
    "rpo_alpha": CompanionKey(SFT_OF_LOSS, docs_text=SFT_ARGUMENT),
    **dict.fromkeys(("reward_model", "reward_funcs", "teacher_model", "use_vllm"), RefusedKey(NO_REWARDS)),
    # Distributed training and environment
    "sequence_parallel_size": SettingKey("context_parallel_size"),
    "deepspeed": MultiSettingKey(
        ("strategy", "memory.offload_optimizer", "memory.offload_params", "deepspeed.config"),
        convert_deepspeed_name,
        hint="set strategy to zero1, zero2 or zero3, or deepspeed.config to a file",
    ),
    "fsdp": WordSettingKey("strategy", {"fsdp2": "full_shard"}, hint="set strategy to full_shard"),
    "zero_hpz_partition_size": RefusedKey(
        "set zero_hpz_partition_size in the file that deepspeed.config specifies"
    ),
    "deepspeed_autotp_size": RefusedKey(
        "set tensor_parallel_size to the number of devices per copy of the model, and set strategy to "
        "full_shard"
    ),
    **dict.fromkeys(
        ("use_ray", "device_groups"), RefusedKey("start the ranks with torchrun, or with the option --nproc")
    ),
    "ENV": MultiSettingKey(
        ("data.image_max_pixels",),
        convert_environment,
        hint="set data.image_max_pixels instead of MAX_PIXELS, and export other variables before "
        "you start the run",
        docs_text="data.image_max_pixels for MAX_PIXELS; export other variables before you start the run",
    ),
    # Output
    **dict.fromkeys(("add_version", "create_checkpoint_symlink", "check_model"), IgnoredKey()),
    "resume_only_model": RefusedKey("set model.name_or_path to the checkpoint"),
    "swanlab_*": RefusedKey(
        "set log.trackers to [swanlab], and set log.project and log.name to the names in SwanLab"
    ),
}
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "train.epochs": 3,
    "train.micro_batch_size": 1,
    "train.schedule": "cosine",
    "train.min_learning_rate_ratio": 0.0,
    "train.warmup_steps": 0,
    "train.betas": [0.9, 0.95],
    "train.weight_decay": 0.1,
    "data.eval_fraction": 0.0,
    "data.packing": False,
    "data.truncation": "drop",
    "adapter.r": 8,
    "adapter.alpha": 32,
    "adapter.dropout": 0.05,
    "adapter.target_modules": "all-linear",
    "memory.activation_checkpointing": "full",
}
DIFFERENCES = (
    trl.OTHER_ORDER,
    ProgramDifference(
        "ms-swift renders conversations with its own templates. Here, the template of the tokenizer is used."
    ),
    ProgramDifference(
        "Names of models and datasets are looked up on the Hugging Face Hub, as ms-swift does with use_hf."
    ),
    trl.PACKED_APART,
)


def complete_ms_swift_settings(file: ForeignFile, num_devices: int) -> None:
    """Add the defaults that depend on other keys, and call :func:`complete_run_settings`.

    The default adapter type is ``lora``, unless the file selects another tuner. The default
    learning rate is 1e-4 with an adapter and 1e-5 without an adapter.

    If the file has no ``gradient_accumulation_steps``, the default of this key is added to
    ``file.values``. The default is the smallest number with at least :data:`SEQUENCES_PER_STEP`
    sequences per optimizer step. Nothing is added if the micro-batch size or the number of devices
    is unknown.

    Args:
        file: File whose keys have been converted. Its ``values`` and ``result`` are modified in
            place.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    values = file.result.values
    if file.get_value("tuner_type", file.get_value("train_type", "lora")) == "lora":
        file.set_default_setting("adapter.type", "lora", "default of ms-swift")
    rate = 1e-4 if values.get("adapter.type") else 1e-5
    file.set_default_setting("train.learning_rate", rate, "default of ms-swift")
    if "gradient_accumulation_steps" not in file.values and num_devices:
        micro = values.get("train.micro_batch_size", DEFAULTS["train.micro_batch_size"])
        if isinstance(micro, int) and micro > 0:
            steps = max(1, math.ceil(SEQUENCES_PER_STEP / micro / num_devices))
            file.values["gradient_accumulation_steps"] = steps
    complete_run_settings(file, num_devices)
