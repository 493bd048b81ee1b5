"""Table of the config keys of torchtune's recipes, with their converters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.origins import format_short_value
from portable.importing import axolotl, llama_factory, trl
from portable.importing.foreign_file import NoCounterpart, ProgramDifference
from portable.importing.foreign_keys import (
    CompanionKey,
    IgnoredKey,
    MultiSettingKey,
    PresetKey,
    RefusedKey,
    SettingKey,
    WordSettingKey,
)
from portable.importing.trainer_conversions import (
    ALWAYS_SHUFFLED,
    BETA_ARGUMENT,
    BETA_OF_LOSS,
    GAMMA_OF_LOSS,
    NO_REWARDS,
    ONLY_FROZEN_QUANTIZED,
    SCALE_IMAGES,
    SET_EVAL,
    SET_FP8,
    SOURCE_SETTINGS,
    TRAIN_TOWER,
    build_source_settings,
    complete_run_settings,
    format_pair_loss,
)
from portable.importing.words import translate_setting_word

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignFile, ForeignKeys

DATASETS: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"source": "tatsu-lab/alpaca", "format": "alpaca"},
    "alpaca_cleaned_dataset": {"source": "yahma/alpaca-cleaned", "format": "alpaca"},
    "slimorca_dataset": {"source": "Open-Orca/SlimOrca-Dedup", "format": "sharegpt"},
    "stack_exchange_paired_dataset": {"source": "lvwerra/stack-exchange-paired", "format": "preference"},
    "text_completion_dataset": {"format": "text"},
    "chat_dataset": {"format": "messages"},
    "instruct_dataset": {"format": "alpaca", "columns": {"instruction": "input", "output": "output"}},
    "preference_dataset": {"format": "preference"},
}
"""Source settings, without the prefix ``data.``, keyed by the name of torchtune's dataset builder."""


class PairLoss(NamedTuple):
    """Preference loss of torchtune.

    Attributes:
        kind: Name of the loss, as in :func:`format_pair_loss`.
        beta_name: Argument of torchtune's class that corresponds to ``beta``.
        default_beta: Default of this argument.
    """

    kind: str
    beta_name: str
    default_beta: float


PAIR_LOSSES = {
    "DPOLoss": PairLoss("dpo", "beta", 0.1),
    "RSOLoss": PairLoss("hinge", "gamma", 0.1),
    "IPOLoss": PairLoss("ipo", "tau", 0.1),
    "SimPOLoss": PairLoss("simpo", "beta", 2.0),
}
"""Preference losses, keyed by the name of torchtune's loss class."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"adapter.type": "lora"},
    "dora": {"adapter.type": "lora", "adapter.use_dora": True},
    "qlora": {"adapter.type": "lora", "adapter.base": "nf4"},
}
"""Adapter settings, keyed by the prefix of the name of torchtune's model builder."""


def get_component_name(component: Any) -> str:
    """Return the last part of the dotted path of a component, such as ``DPOLoss``."""
    return str(component).rpartition(".")[2]


def check_checkpointer(value: Any, _: ForeignFile) -> None:
    """Raise ``NoCounterpart`` for a checkpointer that reads Meta's original weight format."""
    if "Meta" in str(value):
        raise NoCounterpart(
            f"{format_short_value(value)} is not supported: the checkpointer reads files in Meta's format; "
            "set model.name_or_path to a folder in the format of transformers"
        )


def convert_model_builder(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert the model builder, such as ``lora_llama3_8b``, to adapter settings.

    Returns an empty dict if the builder does not use an adapter.
    """
    kind, _underscore, model = get_component_name(value).partition("_")
    return ADAPTERS.get(kind, {}) if model else {}


def convert_adapted_modules(value: Any, file: ForeignFile) -> list[str]:
    """Convert torchtune's ``lora_attn_modules`` to transformers' module names.

    The value lists the attention modules that LoRA adapts. For example, ``output_proj`` becomes
    ``o_proj``. If ``apply_lora_to_mlp`` is true, the MLP modules are added.
    """
    names = ["o_proj" if name == "output_proj" else name for name in value or ()]
    adapts_mlp = file.get_value("model.apply_lora_to_mlp") is True
    return names + (["gate_proj", "up_proj", "down_proj"] if adapts_mlp else [])


def convert_dataset_builder(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert a torchtune dataset builder, such as ``alpaca_dataset``, to data source settings.

    The arguments of the builder are read from the section ``dataset`` of the file.

    Raises:
        NoCounterpart: If the builder is not supported.
    """
    name, arguments = get_component_name(value), file.get_value("dataset")
    if name not in DATASETS:
        raise NoCounterpart(
            f"{format_short_value(name)} is not supported; set data.source to a file or a hub dataset, and "
            "data.format to the format of the records"
        )
    settings = {**DATASETS[name], "split": arguments.get("split"), "config_name": arguments.get("name")}
    if source := arguments.get("data_files") or arguments.get("source"):
        settings["source"] = source
    if name == "chat_dataset":
        turns = arguments.get("conversation_column", "conversations")
        is_sharegpt = arguments.get("conversation_style") == "sharegpt"
        settings["format"] = "sharegpt" if is_sharegpt else "messages"
        if turns != "conversations" and (is_sharegpt or turns != "messages"):
            settings["columns"] = {"conversations" if is_sharegpt else "messages": turns}
    names = {"input": "instruction"} if name == "instruct_dataset" else {}
    columns = dict(settings.get("columns") or {})
    columns |= {names.get(key, key): column for key, column in (arguments.get("column_map") or {}).items()}
    settings["columns"] = {key: column for key, column in columns.items() if key != column} or None
    if settings["format"] == "text":
        settings["text_field"] = arguments.get("column")
    # torchtune's alpaca datasets train on the prompt by default.
    elif arguments.get("train_on_input", name.startswith("alpaca")):
        settings["train_on"] = "all"
    return build_source_settings([settings])


def convert_optimizer_class(value: Any, file: ForeignFile) -> Any:
    """Convert the dotted path of an optimizer class to a value of ``train.optimizer``."""
    return translate_setting_word("train.optimizer", get_component_name(value).lower(), file)


def convert_schedule_function(value: Any, _: ForeignFile) -> str:
    """Convert the dotted path of a learning rate scheduler to a value of ``train.schedule``.

    Only torchtune's cosine schedule is renamed. Other names are returned unchanged, so that the config
    validation reports unknown names.
    """
    name = get_component_name(value)
    return "cosine" if name == "get_cosine_schedule_with_warmup" else name


def convert_loss_class(value: Any, file: ForeignFile) -> str | None:
    """Convert the dotted path of a preference loss to ``train.loss``. Return None for cross-entropies.

    The arguments of the loss are read from the section ``loss`` of the file.

    Raises:
        NoCounterpart: If the loss is neither a preference loss nor a cross-entropy, or if it has an
            argument that ``train.loss`` does not have.
    """
    name = get_component_name(value)
    if "CrossEntropy" in name or name.startswith("CE"):
        return None
    if name not in PAIR_LOSSES:
        raise NoCounterpart(f"{format_short_value(value)} is not supported; set train.loss to a custom loss")
    kind, beta_name, default_beta = PAIR_LOSSES[name]
    smoothing = file.get_value("loss.label_smoothing")
    if smoothing and kind != "dpo":
        raise NoCounterpart(
            f"{name} with label_smoothing: {format_short_value(smoothing)} is not supported; set train.loss "
            "to a custom loss"
        )
    return format_pair_loss(
        kind,
        beta=file.get_value(f"loss.{beta_name}", default_beta),
        gamma=file.get_value("loss.gamma", 0.5),
        label_smoothing=smoothing,
    )


def convert_metric_logger(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert the dotted path of the logger class to ``log.trackers``.

    Only the W&B logger is converted. Returns an empty dict for other loggers.
    """
    return {"log.trackers": ["wandb"]} if "WandB" in str(value) else {}


def convert_to_bool(value: Any, _: ForeignFile) -> bool:
    """Convert any value, including null, to a boolean, as Python's ``bool`` does.

    Non-empty strings and mappings therefore become True, even the string ``false``.
    """
    return bool(value)


def convert_to_lower_case(value: Any, _: ForeignFile) -> str:
    """Convert a value to a lower-case string."""
    return str(value).lower()


KEYS: ForeignKeys = {
    # Include the keys with a star, such as wandb_*, because they have the same meaning in the files of all
    # programs.
    **{
        name: key
        for keys in (trl.KEYS, axolotl.KEYS, llama_factory.KEYS)
        for name, key in keys.items()
        if name.endswith("*")
    },
    # Model and adapter
    "checkpointer.checkpoint_dir": SettingKey("model.name_or_path"),
    "checkpointer._component_": MultiSettingKey((), check_checkpointer, hint="model.name_or_path"),
    "model._component_": MultiSettingKey(
        ("adapter.type", "adapter.use_dora", "adapter.base"), convert_model_builder, hint="adapter.type"
    ),
    "model.lora_rank": SettingKey("adapter.r"),
    "model.lora_alpha": SettingKey("adapter.alpha"),
    "model.lora_dropout": SettingKey("adapter.dropout"),
    "model.use_dora": SettingKey("adapter.use_dora"),
    "model.lora_attn_modules": SettingKey(
        "adapter.target_modules", convert_adapted_modules, converts_empty_values=True
    ),
    "model.apply_lora_to_mlp": IgnoredKey(),
    "model.apply_lora_to_output": RefusedKey(
        "the output head gets no adapter by default; add lm_head to adapter.target_modules"
    ),
    "model.quantize_base": PresetKey({"true": {"adapter.base": "nf4"}, "false": {}}, hint="adapter.base"),
    **dict.fromkeys(
        ("model.decoder_trainable", "model.encoder_trainable", "model.fusion_trainable"),
        RefusedKey(TRAIN_TOWER),
    ),
    **dict.fromkeys(("model.image_size", "tokenizer.image_size"), RefusedKey(SCALE_IMAGES)),
    "device": WordSettingKey(
        "backend", {"cuda": "cuda", "cpu": "cpu", "mps": None, "xpu": None, "npu": None}
    ),
    "dtype": WordSettingKey("precision", {"bf16": "bf16", "fp32": "fp32", "fp16": "fp16"}),
    "compile": SettingKey("compile", convert_to_bool, converts_empty_values=True),
    **dict.fromkeys(
        ("fp8_recipe_name", "enable_fp8_training"),
        RefusedKey(SET_FP8),
    ),
    "quantizer": RefusedKey(ONLY_FROZEN_QUANTIZED),
    # Data
    "dataset._component_": MultiSettingKey(
        SOURCE_SETTINGS,
        convert_dataset_builder,
        hint="set data.source to a file or a hub dataset, and data.format to the format of the records",
        docs_text="data.source, and the other settings of the source, such as data.format",
    ),
    **dict.fromkeys(("dataset.source", "dataset.data_files", "dataset.split", "dataset.name"), IgnoredKey()),
    **dict.fromkeys(("dataset.column", "dataset.conversation_style", "dataset.train_on_input"), IgnoredKey()),
    **dict.fromkeys(("dataset.column_map", "dataset.conversation_column"), CompanionKey("data.columns")),
    "dataset.packed": WordSettingKey("data.packing", {"true": "documents", "false": False}),
    "dataset.split_across_pack": RefusedKey("set data.packing to true, which splits texts"),
    "dataset.new_system_prompt": RefusedKey("add a system message, or a field named system, to each record"),
    "dataset.filter_fn": RefusedKey("set data.source to custom code that filters the records"),
    "dataset.image_dir": SettingKey("data.image_root"),
    "dataset.image_tag": RefusedKey(
        "mark each image with <image> in the text of the record", unless=("<image>",)
    ),
    "dataset_val": RefusedKey(SET_EVAL),
    "shuffle": IgnoredKey(ALWAYS_SHUFFLED, unless=(True,)),
    "tokenizer.max_seq_len": SettingKey("data.seq_len"),
    **dict.fromkeys(("tokenizer._component_", "tokenizer.path", "tokenizer.prompt_template"), IgnoredKey()),
    **dict.fromkeys(("tokenizer.merges_file", "tokenizer.merges_path", "tokenizer.vocab_path"), IgnoredKey()),
    "collate_fn": IgnoredKey(),
    # Training
    "seed": SettingKey("seed"),
    "epochs": SettingKey("train.epochs"),
    "max_steps_per_epoch": RefusedKey("set train.steps or train.stop_after to a number of steps"),
    "batch_size": SettingKey("train.micro_batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "batch_size_val"), IgnoredKey()),
    "optimizer._component_": SettingKey("train.optimizer", convert_optimizer_class),
    "optimizer.lr": SettingKey("train.learning_rate"),
    "optimizer.weight_decay": SettingKey("train.weight_decay"),
    "optimizer.betas": SettingKey("train.betas"),
    "optimizer.eps": SettingKey("train.eps"),
    "optimizer.fused": IgnoredKey(),
    "optimizer_in_bwd": SettingKey("train.fused_backward"),
    "lr_scheduler._component_": SettingKey("train.schedule", convert_schedule_function),
    "lr_scheduler.num_warmup_steps": SettingKey("train.warmup_steps"),
    "clip_grad_norm": SettingKey("train.max_grad_norm"),
    "loss._component_": SettingKey("train.loss", convert_loss_class),
    "loss.num_output_chunks": IgnoredKey(),
    **dict.fromkeys(("loss.beta", "loss.tau"), CompanionKey(BETA_OF_LOSS, docs_text=BETA_ARGUMENT)),
    "loss.gamma": CompanionKey(
        GAMMA_OF_LOSS,
        docs_text="the argument `gamma` of train.loss, such as simpo(gamma=0.5), or `beta` for RSOLoss",
    ),
    "loss.label_smoothing": CompanionKey(
        "specify label_smoothing as an argument of train.loss, such as dpo(label_smoothing=0.1)",
        docs_text="the argument `label_smoothing` of train.loss, such as dpo(label_smoothing=0.1)",
    ),
    "enable_activation_checkpointing": WordSettingKey(
        "memory.activation_checkpointing", {"true": "full", "false": "none"}
    ),
    "enable_activation_offloading": SettingKey("memory.offload_activations"),
    "run_val_every_n_steps": SettingKey("train.eval_every"),
    **dict.fromkeys(
        ("teacher_model", "teacher_checkpointer", "kd_loss", "kd_ratio"),
        RefusedKey("set train.loss to a custom loss for distillation, as in examples/distillation.py"),
    ),
    **dict.fromkeys(
        ("tasks", "prompt", "max_new_tokens", "top_k", "limit", "enable_kv_cache"),
        RefusedKey("this is not a training config; use another file"),
    ),
    **dict.fromkeys(
        ("grpo_samples", "reward_and_value_model", "ppo_epochs", "temperature", "orchestration"),
        RefusedKey(NO_REWARDS),
    ),
    # Output and launch
    "output_dir": SettingKey("output_dir"),
    "resume_from_checkpoint": IgnoredKey("a run resumes by default (see checkpoint.resume); remove the key"),
    **dict.fromkeys(("checkpointer.checkpoint_files", "checkpointer.recipe_checkpoint"), IgnoredKey()),
    **dict.fromkeys(("checkpointer.output_dir", "checkpointer.model_type"), IgnoredKey()),
    **dict.fromkeys(("checkpointer.safe_serialization", "checkpointer.adapter_checkpoint"), IgnoredKey()),
    **dict.fromkeys(("keep_last_n_checkpoints", "save_adapter_weights_only"), IgnoredKey()),
    "enable_async_checkpointing": IgnoredKey(),
    "log_every_n_steps": SettingKey("log.every_steps"),
    "log_level": IgnoredKey(),
    "log_peak_memory_stats": IgnoredKey(),
    "metric_logger._component_": MultiSettingKey(("log.trackers",), convert_metric_logger),
    "metric_logger.project": SettingKey("log.project"),
    **dict.fromkeys(
        ("metric_logger.log_dir", "metric_logger.output_dir", "metric_logger.name"), IgnoredKey()
    ),
    **dict.fromkeys(("profiler", "name"), IgnoredKey()),
    "context_parallel_dim": SettingKey("context_parallel_size"),
    "tensor_parallel_dim": SettingKey("tensor_parallel_size"),
    "tensor_parallel_plan": RefusedKey("the tensor-parallel plan of transformers is used; remove the key"),
    "fsdp_sharding_strategy": SettingKey("strategy", convert_to_lower_case),
    "fsdp_reshard_after_forward": WordSettingKey(
        "strategy", {"true": "full_shard", "false": "shard_grad_op"}
    ),
    "fsdp_cpu_offload": WordSettingKey("memory.offload_params", {"true": "cpu", "false": None}),
    **dict.fromkeys(("custom_sharded_layers", "low_cpu_ram"), IgnoredKey()),
}
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "train.epochs": 3,
    "train.micro_batch_size": 1,
    "train.learning_rate": 0.001,
    "train.schedule": "constant",
    "train.warmup_steps": 0,
    "train.betas": [0.9, 0.999],
    "train.weight_decay": 0.01,
    "data.eval_fraction": 0.0,
    "data.packing": False,
    "data.seq_len": 2048,
    "adapter.r": 8,
    "adapter.alpha": 16,
    "train.max_grad_norm": None,
}
DIFFERENCES = (
    trl.OTHER_ORDER,
    trl.CUT_LATER,
    trl.PACKED_APART,
    ProgramDifference("Without tokenizer.max_seq_len, torchtune does not truncate texts.", "data.seq_len"),
    ProgramDifference(
        "torchtune stores the weights in the dtype of its config. Here, the trained weights are in fp32, and "
        "precision is the dtype of the computation.",
        "precision",
    ),
)
complete_torchtune_settings = complete_run_settings
