"""Table of the keys of transformers' Trainer and example scripts and of TRL, with their converters.

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
    BETA_OF_LOSS,
    FP8_IS_A_SETTING,
    IS_AUTOMATIC,
    NO_LIGER,
    NO_REWARDS,
    NO_VIDEO,
    SET_ADAPTER,
    SET_EVAL,
    SET_EVAL_EVERY,
    SET_HUB,
    SFT_OF_LOSS,
    SOURCE_SETTINGS,
    TOKENIZED_ONCE,
    build_interval_converter,
    build_source_settings,
    complete_run_settings,
    convert_dataset_entry,
    convert_module_names,
    convert_push_time,
    format_pair_loss,
)
from portable.importing.words import build_word_converter

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignFile, ForeignKey, ForeignKeys
    from portable.importing.foreign_keys import ValueConverter

SET_FSDP = "set strategy and the section fsdp, or use --accelerate-config with the file of accelerate config"
SCRIPT_ARGUMENTS = {
    *("block_size", "do_train", "train_file", "validation_file", "validation_split_percentage", "task_name"),
    *("text_column", "text_column_name", "summary_column", "max_source_length", "source_prefix"),
    *("config_overrides", "max_seq_length", "overwrite_cache", "model_type"),
}
"""Arguments that identify a file of transformers' example scripts, because TRL does not have them."""


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
    """Convert ``logging_steps``, the logging interval in steps. A fraction of all steps becomes 1."""
    return max(1, int(value))


def convert_tf32(value: Any, file: ForeignFile) -> str | None:
    """Convert the boolean ``tf32`` to the precision. Return None if it is false or ``bf16`` is set."""
    return "tf32" if parse_boolean_word(value) is True and not file.get_value("bf16") else None


def convert_scheduler_arguments(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``lr_scheduler_kwargs`` to ``train.min_learning_rate_ratio``.

    The supported arguments are ``min_lr``, the minimum learning rate, and ``min_lr_rate``, its ratio to
    the learning rate.

    Raises:
        NoCounterpart: If there are other arguments.
    """
    arguments = dict(value)
    ratio, lowest = arguments.pop("min_lr_rate", None), arguments.pop("min_lr", None)
    ratio = lowest / file.get_value("learning_rate", 5e-5) if lowest else ratio
    if arguments:
        raise NoCounterpart(f"{format_short_value(arguments)} is not supported: set train.schedule_params")
    return {} if ratio is None else {"train.min_learning_rate_ratio": ratio}


def convert_warmup(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert ``warmup_steps``, a number of steps or, if it is below 1, a fraction of all steps."""
    return {"train.warmup_ratio" if 0 < value < 1 else "train.warmup_steps": value}


def convert_trackers(value: Any, _: ForeignFile) -> list[str] | None:
    """Convert ``report_to``, a tracker or a list of trackers. ``none`` becomes an empty list.

    Returns None if the list contains ``all``, because no setting selects all trackers.
    """
    names = [
        str(name) for name in (value if isinstance(value, list) else [value]) if not is_off_or_empty(name)
    ]
    return None if "all" in names else [name for name in names if name != "none"]


def convert_trained_tokens(_: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert TRL's ``assistant_only_loss`` and ``completion_only_loss`` to ``data.train_on``.

    If both are true, ``assistant_only_loss`` takes precedence. If neither is true, the result is
    ``all`` if ``completion_only_loss`` is false, or an empty dict if it is not set.
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
    """Return ``max_length``. If it is null, as in scripts for images, add a note and return None.

    The note recommends setting ``data.seq_len``.
    """
    if value is None:
        file.add_note(
            file.path,
            "null means no limit: set data.seq_len to the number of tokens of the longest conversation",
        )
    return drop_unset_value(value, file)


def convert_mixture(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert TRL's ``dataset_mixture``, or ``dataset_mixer`` of older recipes, to data sources.

    The value of ``dataset_mixer`` is a mapping from datasets to fractions of their samples.
    """
    if value.get("test_split_size"):
        file.add_note(file.path, f"test_split_size has no effect: {SET_EVAL}")
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
    "columns": IgnoredKey("set data.format and data.columns"),
    "data_dir": RefusedKey("name the files in data.source"),
}
"""Table of the keys of an entry in TRL's ``dataset_mixture``."""

_MODEL: ForeignKeys = {
    **dict.fromkeys(("model_name_or_path", "model_name"), SettingKey("model.name_or_path")),
    "config_overrides": SettingKey("model.config"),
    "trust_remote_code": SettingKey("model.trust_remote_code"),
    "attn_implementation": SettingKey("model.attention", build_word_converter("model.attention")),
    **dict.fromkeys(
        ("dtype", "torch_dtype", "mixed_precision"),
        SettingKey("precision", build_word_converter("precision")),
    ),
    "bf16": SwitchKey({"precision": "bf16"}),
    "fp16": SwitchKey({"precision": "fp16"}),
    "tf32": SettingKey(
        "precision", convert_tf32, hint="set precision to tf32; bf16 is faster if its precision suffices"
    ),
    **dict.fromkeys(("use_cpu", "no_cuda"), SwitchKey({"backend": "cpu"})),
    "torch_compile": SettingKey("compile"),
    "torch_compile_backend": SettingKey("compile_backend"),
    "torch_compile_mode": SettingKey("compile_mode"),
    "model_revision": RefusedKey(
        "the newest revision is used; name a local folder in model.name_or_path for another",
        unless=("main",),
    ),
    "model_type": IgnoredKey(
        "the model's config defines its class; remove the key, or set model.config for a new model",
        unless=("AutoModelForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    ),
    "router_aux_loss_coef": RefusedKey("set router_aux_loss_coef and output_router_logits in model.config"),
    "fp8": RefusedKey(FP8_IS_A_SETTING),
    "image_max_pixels": SettingKey("data.image_max_pixels"),
    "video_max_pixels": RefusedKey(NO_VIDEO),
    **dict.fromkeys(
        ("expert_parallel_size", "expert_model_parallel_size"), SettingKey("expert_parallel_size")
    ),
    "expert_tensor_parallel_size": RefusedKey(
        "each expert is complete on its rank; set expert_parallel_size, and remove the key", unless=(1,)
    ),
    "tensor_model_parallel_size": SettingKey("tensor_parallel_size"),
    "pipeline_model_parallel_size": RefusedKey(
        "pipeline parallelism is not supported; set strategy to full_shard, and remove the key", unless=(1,)
    ),
    "low_cpu_mem_usage": IgnoredKey(IS_AUTOMATIC),
    **dict.fromkeys(("use_cache", "quantization_method", "gptq_groupsize", "gptq_model_v1"), IgnoredKey()),
}
_ADAPTER: ForeignKeys = {
    "use_peft": PresetKey({"true": {"adapter.type": "lora"}, "false": {}}, hint=SET_ADAPTER),
    "peft_config": RefusedKey("set adapter.config to a file, or the section adapter"),
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
    "bnb_4bit_*": IgnoredKey("set adapter.base to nf4, and adapter.type to lora"),
    "lora_task_type": RefusedKey("set model.task", unless=("CAUSAL_LM",)),
    "loraplus_lr_ratio": RefusedKey(
        "set train.parameter_groups to [{pattern: lora_B, learning_rate: 1.6e-3}]"
    ),
    "lora_*": RefusedKey(SET_ADAPTER),
    **dict.fromkeys(
        ("task_type", "peft_type", "inference_mode"),
        IgnoredKey("model.task and adapter.type decide it; remove the key"),
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
    "max_prompt_length": CompanionKey("data.seq_len and data.truncation"),
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
    "packing_strategy": IgnoredKey("set data.packing to documents, as bfd does, or to true, as wrapped does"),
    "padding_free": IgnoredKey("set data.packing to documents, which leaves hardly any padding"),
    "eval_packing": IgnoredKey("set data.packing to documents"),
    "pad_to_max_length": IgnoredKey("set data.packing; if it is false, sequences are padded to data.seq_len"),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        MultiSettingKey(("data.train_on",), convert_trained_tokens, converts_empty_values=True),
    ),
    **dict.fromkeys(
        ("formatting_func", "field_messages", "message_field_role", "roles"),
        RefusedKey(
            "set data.format to messages or sharegpt, whose keys are recognized; "
            "convert other records to one of them"
        ),
    ),
    "eos_token": RefusedKey(
        "the eos_token of the tokenizer is used; change the eos_token in the folder of data.tokenizer"
    ),
    "validation_file": RefusedKey(SET_EVAL),
    "dataset_test_split": RefusedKey(SET_EVAL, unless=("test",)),
    "validation_split_percentage": RefusedKey("set data.eval_fraction, a share of 1"),
    "test_split_size": IgnoredKey(SET_EVAL),
    **dict.fromkeys(("dataset_kwargs", "dataset_num_proc", "overwrite_cache"), IgnoredKey(TOKENIZED_ONCE)),
    "remove_unused_columns": IgnoredKey(
        "only the fields in data.text_field etc. are read; remove the key", unless=(True,)
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
        "set train.global_batch_size to the product of micro-batch, devices and accumulation steps; how "
        "often to accumulate follows from it"
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
            hint="set train.betas, a list of both",
        ),
    ),
    "adam_epsilon": SettingKey("train.eps"),
    "lr_scheduler_type": SettingKey("train.schedule", build_word_converter("train.schedule")),
    "lr_scheduler_kwargs": MultiSettingKey(
        ("train.min_learning_rate_ratio",),
        convert_scheduler_arguments,
        hint="set train.min_learning_rate_ratio or train.schedule_params",
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
        CompanionKey("memory.activation_checkpointing"),
    ),
    "activation_offloading": WordSettingKey(
        "memory.offload_activations", {"true": True, "legacy": True, "false": False}
    ),
    "disable_dropout": IgnoredKey(
        "dropout is off with losses of pairs; train.dropout: true switches it on", unless=(True,)
    ),
    "do_train": IgnoredKey("training is the default; remove the key", unless=(True,)),
    **dict.fromkeys(
        ("cut_cross_entropy", "unsloth_cross_entropy_loss"),
        IgnoredKey("memory.loss_chunk_tokens computes the loss in parts, without all logits"),
    ),
    "use_kernels": IgnoredKey(NO_LIGER),
    **dict.fromkeys(
        ("liger_*", "use_liger_*"),
        IgnoredKey(
            "Liger kernels are not used; memory.loss_chunk_tokens saves the logits' memory, as Liger's "
            "fused loss does"
        ),
    ),
    "torch_empty_cache_steps": IgnoredKey(),
}
_PAIRS: ForeignKeys = {
    "beta": CompanionKey(BETA_OF_LOSS),
    "loss_type": CompanionKey(
        "an argument of the loss: train.loss: dpo(loss_type='hinge'); or ipo, simpo, orpo"
    ),
    "loss_weights": CompanionKey(SFT_OF_LOSS),
    "ld_alpha": RefusedKey(
        "the losses of pairs do not have this argument; remove the key, or set train.loss to a custom class"
    ),
    "ref_model": RefusedKey("an argument of the loss: train.loss: dpo(reference='folder')"),
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
        build_interval_converter("train.eval_every", "train.eval_every_epochs", "eval_strategy"),
        hint="train.eval_every",
    ),
    "eval_strategy": PresetKey(
        {"no": {"train.eval_every": None}, "epoch": {"train.eval_every_epochs": 1}, "steps": {}},
        hint=SET_EVAL_EVERY,
    ),
    "eval_delay": RefusedKey(SET_EVAL_EVERY),
    "max_eval_samples": SettingKey("train.eval_batches"),
    "early_stopping": RefusedKey("set train.early_stopping_patience, and train.early_stopping_threshold"),
    "early_stopping_patience": SettingKey("train.early_stopping_patience"),
    "early_stopping_threshold": SettingKey("train.early_stopping_threshold"),
    "metric_for_best_model": SettingKey("checkpoint.best_metric"),
    "greater_is_better": WordSettingKey(
        "checkpoint.best_mode",
        {"true": "max", "false": "min"},
        hint="set checkpoint.best_mode: max if greater is better, otherwise min",
    ),
    "load_best_model_at_end": SettingKey("checkpoint.export_best"),
    "do_eval": IgnoredKey(
        "set data.eval_fraction and train.eval_every; to evaluate without training, use --eval-only",
        unless=(True,),
    ),
    "do_predict": IgnoredKey(
        "set data.eval_fraction and train.eval_every; to evaluate without training, use --eval-only"
    ),
    "per_device_eval_batch_size": IgnoredKey("evaluation takes train.micro_batch_size; remove the key"),
    **dict.fromkeys(("eval_accumulation_steps", "eval_do_concat_batches"), IgnoredKey()),
}
_OUTPUT: ForeignKeys = {
    "output_dir": SettingKey("output_dir"),
    "overwrite_output_dir": IgnoredKey(
        "a run resumes by default (checkpoint.resume); choose another output_dir", unless=(True,)
    ),
    "save_steps": MultiSettingKey(
        ("checkpoint.every_steps", "checkpoint.every_epochs"),
        build_interval_converter("checkpoint.every_steps", "checkpoint.every_epochs", "save_strategy"),
        hint="checkpoint.every_steps",
    ),
    "save_strategy": PresetKey(
        {"no": {"checkpoint.every_steps": None}, "epoch": {"checkpoint.every_epochs": 1}, "steps": {}},
        hint="set checkpoint.every_steps or checkpoint.every_epochs",
    ),
    "save_total_limit": SettingKey("checkpoint.keep"),
    "save_only_model": IgnoredKey("set checkpoint.export; checkpoints always contain the optimizer"),
    "save_safetensors": IgnoredKey(IS_AUTOMATIC),
    "resume_from_checkpoint": SettingKey("checkpoint.resume"),
    "ignore_data_skip": SettingKey("checkpoint.resume_samples"),
    "push_to_hub": SettingKey("hub.push", convert_push_time, hint=SET_HUB),
    "hub_model_id": SettingKey("hub.repo", hint=SET_HUB),
    "hub_private_repo": WordSettingKey("hub.private", {"true": True, "false": False}, hint=SET_HUB),
    "hub_strategy": CompanionKey(SET_HUB),
    **dict.fromkeys(("hub_*", "push_to_hub*"), RefusedKey(SET_HUB)),
    "logging_steps": SettingKey("log.every_steps", convert_logging_steps),
    **dict.fromkeys(("logging_first_step", "logging_strategy"), CompanionKey("log.every_steps")),
    "logging_dir": IgnoredKey("logs are written to output_dir; remove the key"),
    "report_to": SettingKey("log.trackers", convert_trackers, converts_empty_values=True),
    "run_name": SettingKey("log.name"),
    "project": SettingKey("log.project"),
    "include_num_input_tokens_seen": IgnoredKey("report.html always contains it; remove the key"),
    "disable_tqdm": IgnoredKey(IS_AUTOMATIC),
    "log_level": IgnoredKey(IS_AUTOMATIC, unless=("info",)),
    **dict.fromkeys(("logging_nan_inf_filter", "log_on_each_node", "skip_memory_metrics"), IgnoredKey()),
}
_LAUNCH: ForeignKeys = {
    "sharding_strategy": SettingKey("strategy"),
    "fsdp": RefusedKey(SET_FSDP, unless=(["full_shard", "auto_wrap"], ["auto_wrap", "full_shard"])),
    "fsdp_config": RefusedKey(SET_FSDP),
    "fsdp_transformer_layer_cls_to_wrap": SettingKey("fsdp.transformer_layer_cls_to_wrap"),
    "deepspeed": SettingKey("deepspeed.config"),
    "num_processes": IgnoredKey("start the run with this number of ranks"),
    "local_rank": IgnoredKey("the launcher sets each process's rank; remove the key", unless=(-1,)),
    "ddp_timeout": CompanionKey("log.hang_timeout"),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), IgnoredKey()
    ),
    **dict.fromkeys(("fsdp_config.fsdp_limit_all_gathers", "fsdp_config.limit_all_gathers"), IgnoredKey()),
}


def _build_fsdp_config_keys() -> dict[str, ForeignKey]:
    """Build the table of the keys in the Trainer's ``fsdp_config`` from Accelerate's table.

    Each key is added with and without the prefix ``fsdp_``, because the Trainer accepts both.
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


KEYS: ForeignKeys = {
    **_MODEL,
    **_ADAPTER,
    **_DATA,
    **_TRAINING,
    **_PAIRS,
    **_EVALUATION,
    **_OUTPUT,
    **_LAUNCH,
}
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
    "Samples come in a different random order: losses agree in the mean, not step by step."
)
CUT_LATER = ProgramDifference(
    "A text longer than data.seq_len is cut one token later: its last token is a label here, and not an "
    "input.",
    "data.seq_len",
)
PACKED_APART = ProgramDifference(
    "Packed texts never attend to each other, and are packed in another order: an epoch may have a few more "
    "or fewer steps.",
    "data.packing",
)
DIFFERENCES = (
    OTHER_ORDER,
    CUT_LATER,
    ProgramDifference(
        "TRL trains all tokens of a conversation without assistant_only_loss, and only the completion of a "
        "record with a prompt. For such records, remove data.train_on.",
        "data.train_on",
    ),
    PACKED_APART,
)


def complete_trl_settings(file: ForeignFile, num_devices: int) -> None:
    """Add the preference loss and TRL's default for conversations to the result of a file.

    Then call :func:`complete_run_settings`.

    Args:
        file: File whose keys have been converted.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    _set_pair_loss(file)
    if "train.loss" not in file.result.values and not any(map(file.get_value, SCRIPT_ARGUMENTS)):
        reason = "default of TRL for conversations: no assistant_only_loss"
        file.set_default_setting("data.train_on", "all", reason)
    complete_run_settings(file, num_devices)


def _set_pair_loss(file: ForeignFile) -> None:
    """Set ``train.loss`` and TRL's default learning rate for DPO if the file belongs to a DPO trainer.

    A file does not name its TRL trainer. It counts as a DPO file, with a note, if it contains a key
    that only TRL's preference trainers have. A loss that combines several formulas becomes a refusal.
    """
    key = next(
        (key for key in ("beta", "max_prompt_length", "loss_weights") if file.get_value(key) is not None),
        None,
    )
    if key is None:
        return
    kinds, weights = file.get_value("loss_type", "sigmoid"), file.get_value("loss_weights")
    kinds = [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    weights = [1] * len(kinds) if weights is None else weights
    fits = isinstance(weights, list) and len(weights) == len(kinds)
    weight_of = dict(zip(kinds, weights, strict=True)) if fits else {}
    sft = weight_of.pop("sft", file.get_value("rpo_alpha"))
    if [*weight_of.values()] == [1]:
        file.set_setting(
            (key,), "train.loss", format_pair_loss(next(iter(weight_of)), file.get_value("beta"), sft)
        )
    else:
        file.add_refusal(
            ("loss_type",),
            f"{format_short_value(kinds)} is not supported: only one formula, with weight 1, and sft are "
            "trained; set train.loss to dpo",
        )
    file.set_default_setting("train.learning_rate", 1e-6, "default of TRL's DPO")
    file.add_note((key,), "read as TRL's DPO; of another of its trainers, such as ORPO, change train.loss")
