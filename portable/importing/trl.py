"""Table of the keys of TRL, transformers' Trainer and transformers' example scripts, with converters.

The files of axolotl and LLaMA-Factory also contain these keys, because both trainers pass most
arguments to transformers' Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.field_types import parse_boolean_word
from portable.config.origins import format_short_value
from portable.importing import accelerate
from portable.importing.foreign_file import NoCounterpart, ProgramDifference, is_off_or_empty
from portable.importing.foreign_keys import (
    CompanionKey,
    IgnoredKey,
    MultiSettingKey,
    PresetKey,
    RefusedKey,
    SettingKey,
    SwitchKey,
    WordSettingKey,
    drop_unset_value,
)
from portable.importing.trainer_conversions import (
    BETA_ARGUMENT,
    BETA_OF_LOSS,
    EVALUATION_PACKED,
    IS_AUTOMATIC,
    NO_LIGER,
    NO_REWARDS,
    NO_SETTING,
    NO_VIDEO,
    PADDED_WITHOUT_PACKING,
    SET_ADAPTER,
    SET_BETAS,
    SET_EVAL,
    SET_EVAL_EVERY,
    SET_FP8,
    SET_HUB,
    SET_RECORD_FORMAT,
    SFT_ARGUMENT,
    SFT_OF_LOSS,
    SHARED_BATCH_SIZE,
    SOURCE_SETTINGS,
    TOKENIZED_ONCE,
    build_interval_converter,
    build_source_settings,
    complete_run_settings,
    convert_dataset_entry,
    convert_module_names,
    convert_push_time,
    format_pair_loss,
    read_loss_types,
)
from portable.importing.words import build_word_converter, translate_setting_word

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignFile, ForeignKey, ForeignKeys
    from portable.importing.foreign_keys import ValueConverter

SET_FSDP = (
    "set strategy, for example to full_shard, and the settings in the section fsdp, or pass an Accelerate "
    "config with --accelerate-config"
)
SET_EVALUATION = (
    "set data.eval_fraction to a fraction such as 0.05, and train.eval_every to a number of steps, or use "
    "--eval-only to evaluate without training"
)
SCRIPT_ARGUMENTS = {
    *("block_size", "do_train", "train_file", "validation_file", "validation_split_percentage", "task_name"),
    *("text_column", "text_column_name", "summary_column", "max_source_length", "source_prefix"),
    *("config_overrides", "max_seq_length", "overwrite_cache", "model_type"),
}
"""Arguments that identify a file of transformers' example scripts, because TRL does not have them."""
PRECISION_SWITCHES = {"fp16": "fp16", "bf16": "bf16", "pure_bf16": "bf16", "tf32": "tf32"}
"""Values of ``precision``, keyed by the switch that selects the value."""
MIXED_PRECISION_KEYS = ("fp16", "bf16", "mixed_precision")
PRECISION_KEYS = (*MIXED_PRECISION_KEYS, "pure_bf16", "dtype", "torch_dtype", "tf32")
"""Keys that select a value of ``precision``. The first key with a value other than ``fp32`` applies."""
SFT_LOSS_TYPES = ("nll", "chunked_nll")
"""Values of ``loss_type`` in TRL's SFT trainer that mean plain cross-entropy."""


def build_betas_converter(default_second_beta: float) -> ValueConverter:
    """Build a converter for ``adam_beta1`` or ``adam_beta2`` that sets both values of ``train.betas``.

    Args:
        default_second_beta: Value of the second beta if the file does not set ``adam_beta2``.
    """
    return lambda _, file: [
        file.get_value("adam_beta1", 0.9),
        file.get_value("adam_beta2", default_second_beta),
    ]


def convert_logging_steps(value: Any, _: ForeignFile) -> int:
    """Convert ``logging_steps``, the logging interval in steps, to an integer of at least 1.

    The Trainer reads a value below 1 as a fraction of all steps. Such a value becomes 1.
    """
    return max(1, int(value))


def drop_overridden_precision_keys(file: ForeignFile, *, is_bf16_default: bool = False) -> None:
    """Remove the keys that select a precision and are overridden by another key of the file.

    As in the Trainer, the first key that selects mixed precision (``fp16``, ``bf16`` or
    ``mixed_precision``) overrides all other keys. Without such a key, the first key of
    :data:`PRECISION_KEYS` that selects a precision other than fp32 overrides the others. If no key
    selects such a precision, all keys are kept.

    Args:
        file: File whose keys have not been converted yet. Its ``values`` are modified in place.
        is_bf16_default: Whether the trainer uses mixed precision with bf16 if ``bf16`` is not set
            and no key selects mixed precision. In this case, only keys that select bf16 are kept.
    """

    def read_precision(key: str) -> Any:
        value = file.get_value(key)
        if key in PRECISION_SWITCHES:
            is_on = parse_boolean_word(value) in ((True,) if key == "tf32" else (True, "auto", "full"))
            return PRECISION_SWITCHES[key] if is_on else None
        return translate_setting_word("precision", value, file)

    precisions = {key: read_precision(key) for key in PRECISION_KEYS}
    mixed = next((key for key in MIXED_PRECISION_KEYS if precisions[key] in ("bf16", "fp16")), None)
    if mixed is None and is_bf16_default and file.get_value("bf16") is None:
        remaining = {key for key in PRECISION_KEYS if precisions[key] == "bf16"}
    else:
        key = mixed or next((key for key in PRECISION_KEYS if precisions[key] not in (None, "fp32")), None)
        remaining = {*PRECISION_KEYS} if key is None else {key}
    for key, precision in precisions.items():
        if precision is not None and key not in remaining:
            del file.values[key]


def drop_overridden_keys(file: ForeignFile) -> None:
    """Remove the keys that select a precision and that TRL or the Trainer overrides."""
    drop_overridden_precision_keys(file, is_bf16_default=not is_example_script(file))


def is_example_script(file: ForeignFile) -> bool:
    """Return whether a file has arguments of transformers' example scripts, and so not TRL's defaults."""
    return any(map(file.get_value, SCRIPT_ARGUMENTS))


def set_precision_without_bf16(file: ForeignFile) -> None:
    """Set ``precision`` to ``fp32`` if the file turns off bf16, which is the default of its trainer."""
    if parse_boolean_word(file.get_value("bf16")) is False:
        reason = f"default of {file.program.name} with bf16: false"
        file.set_default_setting("precision", "fp32", reason)


def convert_tf32(value: Any, _: ForeignFile) -> str | None:
    """Return the precision ``tf32`` if ``value`` is true, otherwise None."""
    return "tf32" if parse_boolean_word(value) is True else None


def convert_scheduler_arguments(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert ``lr_scheduler_kwargs`` to ``train.min_learning_rate_ratio``.

    The supported arguments are ``min_lr_rate``, the ratio of the minimum learning rate to the learning
    rate, and ``min_lr``, the minimum learning rate. :func:`complete_run_settings` divides ``min_lr`` by
    the learning rate, which may be a default of the trainer.

    Raises:
        NoCounterpart: If there are other arguments.
        TypeError: If ``min_lr`` is not a number.
    """
    arguments = dict(value)
    ratio, lowest = arguments.pop("min_lr_rate", None), arguments.pop("min_lr", None)
    if not isinstance(lowest, int | float | None):
        raise TypeError
    if arguments:
        raise NoCounterpart(
            f"{format_short_value(arguments)} is not supported; set train.schedule_params to the arguments "
            "of train.schedule"
        )
    return {} if ratio is None else {"train.min_learning_rate_ratio": ratio}


def convert_warmup(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert ``warmup_steps`` to one of the two warmup settings.

    A value between 0 and 1 is a fraction of all steps, and becomes ``train.warmup_ratio``. Any
    other value is a number of steps, and becomes ``train.warmup_steps``.
    """
    return {"train.warmup_ratio" if 0 < value < 1 else "train.warmup_steps": value}


def convert_trackers(value: Any, _: ForeignFile) -> list[str] | None:
    """Convert ``report_to``, a tracker or a list of trackers, to a list of trackers.

    Null, false and ``none`` become an empty list, which means no trackers. Returns None if the list
    contains ``all``, because no setting selects all trackers.
    """
    names = [
        str(name) for name in (value if isinstance(value, list) else [value]) if not is_off_or_empty(name)
    ]
    return None if "all" in names else [name for name in names if name != "none"]


def convert_trained_tokens(_: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert TRL's ``assistant_only_loss`` and ``completion_only_loss`` to ``data.train_on``.

    The result sets ``data.train_on`` to one of the following values. The first condition that is
    met applies:

    - ``assistant`` if ``assistant_only_loss`` is true.
    - ``completion`` if ``completion_only_loss`` is true.
    - ``all`` if ``completion_only_loss`` is false.

    If none of these conditions is met, the result is an empty dict.
    """
    if parse_boolean_word(file.get_value("assistant_only_loss")) is True:
        return {"data.train_on": "assistant"}
    if parse_boolean_word(file.get_value("completion_only_loss")) is True:
        return {"data.train_on": "completion"}
    return (
        {"data.train_on": "all"}
        if parse_boolean_word(file.get_value("completion_only_loss")) is False
        else {}
    )


def convert_max_length(value: Any, file: ForeignFile) -> Any:
    """Return ``max_length``, or None if it is not set: null, ``auto`` or a negative number.

    If the value is null, also add a note that recommends setting ``data.seq_len``. Scripts that train
    on images often set ``max_length`` to null, which means no limit, but this has no effect in a run.
    """
    if value is None:
        file.add_note(
            file.path,
            "null, which means no limit, has no effect; set data.seq_len to the length of the longest "
            "conversation",
        )
    return drop_unset_value(value, file)


def convert_mixture(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert TRL's ``dataset_mixture``, or ``dataset_mixer`` of older recipes, to sources.

    The value of ``dataset_mixer`` is a mapping from datasets to fractions of their samples. If the
    mixture sets ``test_split_size``, a note that this key has no effect is added to
    ``file.result``.
    """
    if value.get("test_split_size"):
        file.add_note(file.path, f"test_split_size has no effect; {SET_EVAL}")
    entries = value.get("datasets") or [{"id": name, "weight": share} for name, share in value.items()]
    return convert_mixture_entries(entries, file)


def convert_mixture_entries(entries: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert the dataset list in TRL's ``dataset_mixture`` to data sources.

    If an entry uses only a fraction of its samples, the fraction becomes a slice of the split, such as
    ``train[:10%]``.
    """
    sources = []
    for number, entry in enumerate(entries, start=1):
        convert_dataset_entry(entry, MIXTURE_ENTRY_KEYS, number, file)
        config = entry.get("config") or entry.get("name")
        split, share = entry.get("split") or "train", entry.get("weight", entry.get("fraction"))
        if isinstance(share, int | float) and share < 1:
            split += f"[:{share * 100:g}%]"
        source = entry.get("data_files") or entry.get("id") or entry.get("path")
        sources.append(
            {"source": source, "config_name": None if config == "default" else config, "split": split}
        )
    return build_source_settings(sources)


MIXTURE_ENTRY_KEYS: ForeignKeys = {
    **dict.fromkeys(("id", "path", "data_files"), CompanionKey("data.source")),
    **dict.fromkeys(("config", "name"), CompanionKey("data.config_name")),
    **dict.fromkeys(("split", "weight", "fraction"), CompanionKey("data.split")),
    "columns": IgnoredKey(SET_RECORD_FORMAT),
    "data_dir": RefusedKey("set data.source to the files in this folder"),
}
"""Table of the keys of an entry in TRL's ``dataset_mixture``."""

_MODEL: ForeignKeys = {
    **dict.fromkeys(("model_name_or_path", "model_name"), SettingKey("model.name_or_path")),
    "config_overrides": SettingKey("model.config"),
    "trust_remote_code": SettingKey("model.trust_remote_code"),
    "attn_implementation": SettingKey("model.attention", build_word_converter("model.attention")),
    **dict.fromkeys(
        ("mixed_precision", "dtype", "torch_dtype"),
        SettingKey("precision", build_word_converter("precision")),
    ),
    "bf16": SwitchKey({"precision": "bf16"}),
    "fp16": SwitchKey({"precision": "fp16"}),
    "tf32": SettingKey(
        "precision", convert_tf32, hint="set precision to tf32, or to bf16, which is faster and less precise"
    ),
    **dict.fromkeys(("use_cpu", "no_cuda"), SwitchKey({"backend": "cpu"})),
    "torch_compile": SettingKey("compile"),
    "torch_compile_backend": SettingKey("compile_backend"),
    "torch_compile_mode": SettingKey("compile_mode"),
    "model_revision": RefusedKey(
        "only the newest revision is used; for another revision, set model.name_or_path to a local folder",
        unless=("main",),
    ),
    "model_type": IgnoredKey(
        "the config of the model defines its class; remove the key, or set model.config to the settings "
        "of a new model",
        unless=("AutoModelForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    ),
    "router_aux_loss_coef": RefusedKey(
        "in model.config, set router_aux_loss_coef to this value, and output_router_logits to true"
    ),
    "fp8": RefusedKey(SET_FP8),
    "image_max_pixels": SettingKey("data.image_max_pixels"),
    "video_max_pixels": RefusedKey(NO_VIDEO),
    **dict.fromkeys(
        ("expert_parallel_size", "expert_model_parallel_size"), SettingKey("expert_parallel_size")
    ),
    "expert_tensor_parallel_size": RefusedKey(
        "the weights of a single expert cannot be sharded across ranks; remove the key, and set "
        "expert_parallel_size to the number of ranks that share the experts of a layer",
        unless=(1,),
    ),
    "tensor_model_parallel_size": SettingKey("tensor_parallel_size"),
    "pipeline_model_parallel_size": RefusedKey(
        "pipeline parallelism is not available; remove the key, and set strategy to full_shard", unless=(1,)
    ),
    "low_cpu_mem_usage": IgnoredKey(IS_AUTOMATIC),
    **dict.fromkeys(("use_cache", "quantization_method", "gptq_groupsize", "gptq_model_v1"), IgnoredKey()),
}
_ADAPTER: ForeignKeys = {
    "use_peft": PresetKey({"true": {"adapter.type": "lora"}, "false": {}}, hint=SET_ADAPTER),
    "peft_config": RefusedKey(
        "set adapter.config to an adapter_config.json, or configure the adapter in the adapter section"
    ),
    "lora_r": SettingKey("adapter.r"),
    "lora_alpha": SettingKey("adapter.alpha"),
    "lora_dropout": SettingKey("adapter.dropout"),
    "use_dora": SettingKey("adapter.use_dora"),
    "use_rslora": SettingKey("adapter.use_rslora"),
    "lora_target_modules": SettingKey("adapter.target_modules", convert_module_names),
    "lora_target_parameters": SettingKey("adapter.target_parameters", convert_module_names),
    "lora_modules_to_save": SettingKey("adapter.modules_to_save", convert_module_names),
    "load_in_4bit": SwitchKey({"adapter.base": "nf4", "adapter.type": "lora"}),
    "load_in_8bit": SwitchKey({"adapter.base": "int8", "adapter.type": "lora"}),
    "bnb_4bit_*": IgnoredKey("set adapter.base to nf4 and adapter.type to lora"),
    "lora_task_type": RefusedKey(
        "set model.task to the task of the model, such as sequence-classification", unless=("CAUSAL_LM",)
    ),
    "loraplus_lr_ratio": RefusedKey(
        "set a higher learning rate for lora_B in train.parameter_groups, such as [{pattern: lora_B, "
        "learning_rate: 1.6e-3}]"
    ),
    "lora_*": RefusedKey(SET_ADAPTER),
    **dict.fromkeys(
        ("task_type", "peft_type", "inference_mode"),
        IgnoredKey("model.task and adapter.type determine this value; remove the key"),
    ),
}
_DATA: ForeignKeys = {
    **dict.fromkeys(("dataset_name", "train_file", "train_dataset"), SettingKey("data.source")),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), SettingKey("data.config_name")),
    "dataset_train_split": SettingKey("data.split"),
    **dict.fromkeys(
        ("dataset_mixture", "dataset_mixer"),
        MultiSettingKey(SOURCE_SETTINGS, convert_mixture, hint="data.source"),
    ),
    "datasets": MultiSettingKey(SOURCE_SETTINGS, convert_mixture_entries, hint="data.source"),
    "max_train_samples": SettingKey("data.max_samples"),
    "max_length": SettingKey("data.seq_len", convert_max_length, converts_empty_values=True),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "max_source_length", "block_size"), SettingKey("data.seq_len")
    ),
    "max_target_length": SettingKey("data.target_seq_len"),
    "max_prompt_length": IgnoredKey(
        "only the length of prompt and answer together is limited; set data.seq_len and data.truncation"
    ),
    "truncation_mode": WordSettingKey("data.truncation", {"keep_start": "end", "keep_end": "start"}),
    "source_prefix": SettingKey("data.source_prefix"),
    **dict.fromkeys(("dataset_text_field", "text_column", "text_column_name"), SettingKey("data.text_field")),
    "summary_column": SettingKey("data.target_field"),
    "source_lang": SettingKey("data.source_language"),
    "target_lang": SettingKey("data.target_language"),
    "tokenizer_name": SettingKey("data.tokenizer"),
    "chat_template_path": SettingKey("data.chat_template"),
    "dataset_streaming": SettingKey("data.stream"),
    "streaming": WordSettingKey("data.stream", {"true": True, "false": None}),
    "dataloader_num_workers": SettingKey("data.num_workers"),
    "packing": WordSettingKey("data.packing", {"true": "documents", "false": False}),
    "packing_strategy": IgnoredKey(
        "for bfd, set data.packing to documents; for wrapped, set data.packing to true"
    ),
    "padding_free": IgnoredKey("set data.packing to documents, which needs almost no padding"),
    "eval_packing": IgnoredKey(EVALUATION_PACKED),
    "pad_to_max_length": IgnoredKey(PADDED_WITHOUT_PACKING),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        MultiSettingKey(("data.train_on",), convert_trained_tokens, converts_empty_values=True),
    ),
    **dict.fromkeys(
        ("formatting_func", "field_messages", "message_field_role", "roles"),
        RefusedKey("convert the records to messages or sharegpt, and set data.format to this format"),
    ),
    "eos_token": RefusedKey(
        "the eos_token of the tokenizer is used; set data.tokenizer to a folder with another eos_token"
    ),
    "validation_file": RefusedKey(SET_EVAL),
    "dataset_test_split": RefusedKey(SET_EVAL, unless=("test",)),
    "validation_split_percentage": RefusedKey("set data.eval_fraction to a fraction such as 0.05"),
    "test_split_size": IgnoredKey(SET_EVAL),
    **dict.fromkeys(("dataset_kwargs", "dataset_num_proc", "overwrite_cache"), IgnoredKey(TOKENIZED_ONCE)),
    "remove_unused_columns": IgnoredKey(
        "fields that the run does not need are not read; remove the key", unless=(True,)
    ),
    **dict.fromkeys(("dataloader_drop_last", "dataloader_pin_memory"), IgnoredKey(IS_AUTOMATIC)),
    **dict.fromkeys(
        ("dataloader_persistent_workers", "dataloader_prefetch_factor", "pad_to_multiple_of"), IgnoredKey()
    ),
}
_TRAINING: ForeignKeys = {
    **dict.fromkeys(("seed", "data_seed"), SettingKey("seed")),
    "num_train_epochs": SettingKey("train.epochs"),
    # axolotl treats 0 as unset, and the other programs -1.
    "max_steps": SettingKey("train.steps", unless=(0, -1)),
    "per_device_train_batch_size": SettingKey("train.micro_batch_size"),
    "train_batch_size": SettingKey("train.global_batch_size"),
    "auto_find_batch_size": SwitchKey({"train.micro_batch_size": "auto"}),
    "gradient_accumulation_steps": CompanionKey(
        "set train.global_batch_size to micro-batch size x devices x accumulation steps, which determines "
        "the accumulation",
        docs_text="a factor of train.global_batch_size: micro-batch size x devices x accumulation steps",
    ),
    **dict.fromkeys(("learning_rate", "lr"), SettingKey("train.learning_rate")),
    **dict.fromkeys(
        ("optim", "optim_args"), SettingKey("train.optimizer", build_word_converter("train.optimizer"))
    ),
    "weight_decay": SettingKey("train.weight_decay"),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2"),
        SettingKey(
            "train.betas",
            build_betas_converter(0.999),
            converts_empty_values=True,
            hint=SET_BETAS,
        ),
    ),
    "adam_epsilon": SettingKey("train.eps"),
    "lr_scheduler_type": SettingKey("train.schedule", build_word_converter("train.schedule")),
    "lr_scheduler_kwargs": MultiSettingKey(
        ("train.min_learning_rate_ratio",),
        convert_scheduler_arguments,
        hint="set train.min_learning_rate_ratio to the lowest learning rate divided by the highest, or "
        "train.schedule_params to the arguments of train.schedule",
    ),
    "warmup_ratio": SettingKey("train.warmup_ratio"),
    "warmup_steps": MultiSettingKey(
        ("train.warmup_steps", "train.warmup_ratio"), convert_warmup, hint="train.warmup_steps"
    ),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), SettingKey("train.max_grad_norm")),
    "label_smoothing_factor": SettingKey("train.label_smoothing"),
    "neftune_noise_alpha": SettingKey("train.neftune_noise_alpha"),
    "ema_decay": SettingKey("train.ema"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing"),
        WordSettingKey(
            "memory.activation_checkpointing",
            {"true": "full", "unsloth": "full", "offload": "full", "false": "none"},
            hint="set memory.activation_checkpointing to full or selective",
        ),
    ),
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        IgnoredKey(
            "layers are always recomputed as with use_reentrant=False; remove the key",
            unless=({"use_reentrant": False},),
        ),
    ),
    "activation_offloading": WordSettingKey(
        "memory.offload_activations", {"true": True, "legacy": True, "false": False}
    ),
    "disable_dropout": IgnoredKey(
        "dropout is inactive for preference losses; set train.dropout to true to use dropout", unless=(True,)
    ),
    "do_train": IgnoredKey(
        "a run always trains; use --eval-only to evaluate without training", unless=(True,)
    ),
    **dict.fromkeys(
        ("cut_cross_entropy", "unsloth_cross_entropy_loss"),
        IgnoredKey(NO_LIGER),
    ),
    "use_kernels": IgnoredKey(NO_LIGER),
    **dict.fromkeys(
        ("liger_*", "use_liger_*"),
        IgnoredKey(NO_LIGER),
    ),
    "torch_empty_cache_steps": IgnoredKey(),
}
_PAIRS: ForeignKeys = {
    "beta": CompanionKey(BETA_OF_LOSS, docs_text=BETA_ARGUMENT),
    "loss_type": CompanionKey(
        "specify loss_type as an argument of train.loss, such as dpo(loss_type='hinge'), or set "
        "train.loss to ipo, simpo or orpo",
        docs_text="train.loss, or its argument `loss_type`, such as dpo(loss_type='hinge')",
    ),
    "loss_weights": CompanionKey(SFT_OF_LOSS, docs_text=SFT_ARGUMENT),
    "ld_alpha": RefusedKey(
        "the preference losses do not have this argument; remove the key, or set train.loss to a custom loss"
    ),
    "ref_model": RefusedKey(
        "specify the reference model as an argument of train.loss, such as dpo(reference='folder')"
    ),
    "precompute_ref_log_probs": IgnoredKey(IS_AUTOMATIC),
    **dict.fromkeys(
        ("max_completion_length", "missing_eos_penalty", "num_generations", "reward_funcs"),
        RefusedKey(NO_REWARDS),
    ),
    **dict.fromkeys(("reward_model_path", "temperature", "vllm_*"), RefusedKey(NO_REWARDS)),
}
_EVALUATION: ForeignKeys = {
    "eval_steps": MultiSettingKey(
        ("train.eval_every", "train.eval_every_epochs"),
        build_interval_converter(
            "train.eval_every", "train.eval_every_epochs", "eval_strategy", "evaluation_strategy"
        ),
        hint="train.eval_every",
    ),
    "eval_strategy": PresetKey(
        {"no": {"train.eval_every": None}, "epoch": {"train.eval_every_epochs": 1}, "steps": {}},
        hint=SET_EVAL_EVERY,
    ),
    "eval_delay": RefusedKey(SET_EVAL_EVERY),
    "max_eval_samples": SettingKey("train.eval_batches"),
    "early_stopping": RefusedKey("set train.early_stopping_patience to a number of evaluations, such as 3"),
    "early_stopping_patience": SettingKey("train.early_stopping_patience"),
    "early_stopping_threshold": SettingKey("train.early_stopping_threshold"),
    "metric_for_best_model": SettingKey("checkpoint.best_metric"),
    "greater_is_better": WordSettingKey(
        "checkpoint.best_mode",
        {"true": "max", "false": "min"},
        hint="set checkpoint.best_mode to max if greater is better, otherwise to min",
    ),
    "load_best_model_at_end": SettingKey("checkpoint.export_best"),
    "do_eval": IgnoredKey(SET_EVALUATION, unless=(True,)),
    "do_predict": IgnoredKey(SET_EVALUATION),
    "per_device_eval_batch_size": IgnoredKey(SHARED_BATCH_SIZE),
    **dict.fromkeys(("eval_accumulation_steps", "eval_do_concat_batches"), IgnoredKey()),
}
_OUTPUT: ForeignKeys = {
    "output_dir": SettingKey("output_dir"),
    "overwrite_output_dir": IgnoredKey(
        "a run resumes by default; choose another output_dir to start a new run", unless=(True,)
    ),
    "save_steps": MultiSettingKey(
        ("checkpoint.every_steps", "checkpoint.every_epochs"),
        build_interval_converter("checkpoint.every_steps", "checkpoint.every_epochs", "save_strategy"),
        hint="checkpoint.every_steps",
    ),
    "save_strategy": PresetKey(
        {"no": {"checkpoint.every_steps": None}, "epoch": {"checkpoint.every_epochs": 1}, "steps": {}},
        hint="set checkpoint.every_steps to a number of steps, or checkpoint.every_epochs to a number of "
        "epochs",
    ),
    "save_total_limit": SettingKey("checkpoint.keep"),
    "save_only_model": IgnoredKey(
        "checkpoints always contain the optimizer state; set checkpoint.export to export only the model"
    ),
    "save_safetensors": IgnoredKey("models are always exported as safetensors; remove the key"),
    "resume_from_checkpoint": SettingKey("checkpoint.resume"),
    "ignore_data_skip": SettingKey("checkpoint.resume_samples"),
    "push_to_hub": SettingKey("hub.push", convert_push_time, hint=SET_HUB),
    "hub_model_id": SettingKey("hub.repo", hint=SET_HUB),
    "hub_private_repo": WordSettingKey("hub.private", {"true": True, "false": False}, hint=SET_HUB),
    "hub_strategy": CompanionKey(SET_HUB, docs_text="hub.push"),
    **dict.fromkeys(("hub_*", "push_to_hub*"), RefusedKey(SET_HUB)),
    "logging_steps": SettingKey("log.every_steps", convert_logging_steps),
    "logging_first_step": IgnoredKey("the first step is always logged; remove the key", unless=(True,)),
    "logging_strategy": IgnoredKey(
        "metrics are always logged after a number of steps; set log.every_steps", unless=("steps",)
    ),
    "logging_dir": IgnoredKey("logs are written to output_dir; remove the key"),
    "report_to": SettingKey("log.trackers", convert_trackers, converts_empty_values=True),
    "run_name": SettingKey("log.name"),
    "project": SettingKey("log.project"),
    "include_num_input_tokens_seen": IgnoredKey("report.html always contains this number; remove the key"),
    "disable_tqdm": IgnoredKey(NO_SETTING),
    "log_level": IgnoredKey(NO_SETTING, unless=("info",)),
    **dict.fromkeys(("logging_nan_inf_filter", "log_on_each_node", "skip_memory_metrics"), IgnoredKey()),
}
_LAUNCH: ForeignKeys = {
    "sharding_strategy": SettingKey("strategy"),
    "fsdp": RefusedKey(SET_FSDP, unless=(["full_shard", "auto_wrap"], ["auto_wrap", "full_shard"])),
    "fsdp_config": RefusedKey(SET_FSDP),
    "fsdp_transformer_layer_cls_to_wrap": SettingKey("fsdp.transformer_layer_cls_to_wrap"),
    "deepspeed": SettingKey("deepspeed.config"),
    "num_processes": IgnoredKey(
        "start the run with this number of ranks, for example with the option --nproc"
    ),
    "local_rank": IgnoredKey("the launcher sets the rank of each process; remove the key", unless=(-1,)),
    "ddp_timeout": IgnoredKey("a watchdog ends a run that hangs; set log.hang_timeout", unless=(1800,)),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), IgnoredKey()
    ),
    **dict.fromkeys(("fsdp_config.fsdp_limit_all_gathers", "fsdp_config.limit_all_gathers"), IgnoredKey()),
}


def _build_fsdp_config_keys() -> dict[str, ForeignKey]:
    """Build the table of the keys in the Trainer's ``fsdp_config`` from Accelerate's table.

    Each key with the prefix ``fsdp_`` is also added without the prefix, because the Trainer accepts
    both keys. The two keys share one entry, except for ``reshard_after_forward``. Without the
    prefix, this key gets the entry for FSDP on XLA, because its value is always a boolean.
    """
    keys = {
        name.replace(".fsdp_", start): key
        for name, key in accelerate.KEYS.items()
        if name.startswith("fsdp_config.")
        for start in (".fsdp_", ".")
    }
    # Use the entry for XLA, because the Trainer's key without the prefix always has a boolean value.
    keys["fsdp_config.reshard_after_forward"] = accelerate.KEYS["xla_fsdp_settings.reshard_after_forward"]
    return keys


KEYS_BY_TOPIC: dict[str, ForeignKeys] = {
    "Model": _MODEL,
    "Adapter": _ADAPTER,
    "Data": _DATA,
    "Training": _TRAINING,
    "Preference losses": _PAIRS,
    "Evaluation": _EVALUATION,
    "Output and logging": _OUTPUT,
    "Launch and sharding": _LAUNCH,
}
"""Table of keys for each topic. Each topic is a section of docs/keys.md."""
KEYS: ForeignKeys = {name: key for table in KEYS_BY_TOPIC.values() for name, key in table.items()}
FSDP_KEYS: ForeignKeys = _build_fsdp_config_keys()
"""Table of the keys in the Trainer's ``fsdp_config``."""
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "train.epochs": 3,
    "train.micro_batch_size": 8,
    "train.learning_rate": 2e-05,
    "train.schedule": "linear",
    "train.warmup_steps": 0,
    "train.betas": [0.9, 0.999],
    "train.weight_decay": 0.0,
    "data.eval_fraction": 0.0,
    "data.packing": False,
    "data.seq_len": 1024,
    "adapter.dropout": 0.05,
    "memory.activation_checkpointing": "full",
}
OTHER_ORDER = ProgramDifference(
    "Samples are in a different random order, so losses agree on average, but not step by step."
)
CUT_LATER = ProgramDifference(
    "A text longer than data.seq_len is truncated one token later, because its last token is only a label "
    "here, and not an input.",
    "data.seq_len",
)
PACKED_APART = ProgramDifference(
    "Packed texts never attend to each other, and are packed in a different order, so an epoch may have a "
    "few more or fewer steps.",
    "data.packing",
)
DIFFERENCES = (
    OTHER_ORDER,
    CUT_LATER,
    ProgramDifference(
        "Without assistant_only_loss, TRL trains all tokens of a conversation, but only the completion of a "
        "record with a prompt. For records with a prompt, remove data.train_on.",
        "data.train_on",
    ),
    PACKED_APART,
)


def complete_trl_settings(file: ForeignFile, num_devices: int) -> None:
    """Add a preference loss and TRL's defaults to the settings that were converted from a file.

    If the file belongs to a DPO trainer, ``train.loss`` is set; see :func:`_set_pair_loss`. If
    ``train.loss`` remains unset, ``data.train_on`` gets TRL's default, ``all``. Files of
    transformers' example scripts are excepted from this default. Finally,
    :func:`complete_run_settings` adds the other defaults and removes settings without effect.

    Args:
        file: File whose keys have been converted. Its ``result`` is modified in place.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    _set_pair_loss(file)
    if not is_example_script(file):
        set_precision_without_bf16(file)
    if "train.loss" not in file.result.values and not is_example_script(file):
        reason = "default of TRL for conversations, without assistant_only_loss"
        file.set_default_setting("data.train_on", "all", reason)
    complete_run_settings(file, num_devices)


def _set_pair_loss(file: ForeignFile) -> None:
    """Set ``train.loss`` and TRL's default learning rate for DPO if the file belongs to a DPO trainer.

    A file does not name its TRL trainer. If it contains a key that only TRL's preference trainers
    have, such as ``beta``, or a type of DPO loss, it is assumed to belong to the DPO trainer, and a note
    about this assumption is added to ``file.result``. Otherwise, nothing is set.

    Only one preference loss with weight 1 can be converted, optionally combined with ``sft``. For
    any other combination, and for a ``loss_type`` of the SFT trainer that has no counterpart,
    ``train.loss`` is not set, and an error message is added to ``file.result.refusals``.
    """
    names = ("beta", "max_prompt_length", "loss_weights", "rpo_alpha", "loss_type")
    key = next((name for name in names if file.get_value(name) not in (None, *SFT_LOSS_TYPES)), None)
    if key is None:
        return
    if key == "loss_type" and file.get_value(key) == "dft":
        file.add_refusal((key,), "dft is not supported; remove the key, or set train.loss to a custom loss")
        return
    try:
        kind, sft = read_loss_types(file)
        file.set_setting((key,), "train.loss", format_pair_loss(kind, beta=file.get_value("beta"), sft=sft))
    except NoCounterpart as reason:
        file.add_refusal(("loss_type",), str(reason))
    file.set_default_setting("train.learning_rate", 1e-6, "default of TRL's DPO")
    file.add_note(
        (key,),
        "the file is read as a config of DPOTrainer; for another trainer, set train.loss, for example to "
        "orpo",
    )
