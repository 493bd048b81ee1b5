"""Table of the config keys that axolotl has in addition to the Trainer's keys, and their converters.

A converter is a function that takes the value of a key and the file, and returns settings. See
:mod:`portable.importing.foreign_keys`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.origins import format_short_value
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
)
from portable.importing.trainer_conversions import (
    BETA_OF_LOSS,
    IS_AUTOMATIC,
    NO_LIGER,
    ONLY_16_OR_32_BITS,
    SCALE_IMAGES,
    SET_ADAPTER,
    SET_EVAL,
    SET_EVAL_EVERY,
    SET_PAIR_LOSS,
    SFT_OF_LOSS,
    SOURCE_SETTINGS,
    TOKENIZED_ONCE,
    build_source_settings,
    complete_run_settings,
    convert_chat_template,
    convert_dataset_entry,
    convert_eval_fraction,
    convert_events_per_epoch,
    convert_push_time,
    format_pair_loss,
)
from portable.importing.trl import CUT_LATER, OTHER_ORDER, PACKED_APART
from portable.importing.words import build_word_converter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.importing.foreign_file import ForeignFile, ForeignKeys

PAIR_LOSSES = ("dpo", "ipo", "orpo", "simpo")
FORMAT_BY_TYPE = {"completion": "text", "pretrain": "text", "None": "auto"}
"""Values of ``data.format``, by the ``type`` of an entry of ``datasets``, for types without further keys."""
QUESTION_FIELDS = {"alpaca_chat.load_qa": "question", "context_qa.load_v2": "question"}
"""Field of a record with the question, by the ``type`` of an entry, for questions and answers."""
MESSAGE_FIELDS = {("role", "content"): "messages", ("from", "value"): "conversations"}
"""Field of a record with the messages, by the keys of role and content in a message."""
PAIR_COLUMNS = {
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_messages": "prompt",
}
ROLE_NAMES = {
    "user": {"human", "user"},
    "assistant": {"gpt", "assistant"},
    "system": {"system"},
    "tool": {"tool"},
}
"""Names of roles in messages that are recognized, keyed by the name of the role in this project."""
USE_CUSTOM_CODE = "custom code goes into train.loss, train.callbacks or model.function; remove the key"
SET_TEMPLATE = "write a template into a .jinja file, and name it in data.chat_template"
TURN_END = "the token that ends a trained turn is trained, and no other; remove the key"


def convert_trained_roles(value: Any, _: ForeignFile) -> list[str] | None:
    """Convert ``roles_to_train``, a role or a list of roles.

    The role ``human`` becomes ``user``, and ``gpt`` becomes ``assistant``. Returns None if only the
    assistant is trained, because this is the default.
    """
    names = {"human": "user", "gpt": "assistant"}
    roles = [names.get(role, role) for role in map(str, value if isinstance(value, list) else [value])]
    roles = list(dict.fromkeys(roles))
    return None if roles == ["assistant"] else roles


def check_role_names(value: Any, _: ForeignFile) -> None:
    """Check that ``roles`` contains only role names that this project recognizes.

    The key maps each role to its names in the records.

    Raises:
        NoCounterpart: If a name is not in :data:`ROLE_NAMES`.
    """
    others = {
        role: words
        for role, words in value.items()
        if not {*([words] if isinstance(words, str) else words)} <= ROLE_NAMES.get(role, set())
    }
    if others:
        raise NoCounterpart(
            f"{format_short_value(others)} is not supported: the roles in the records are user, "
            "assistant, system and tool, or human and gpt with from and value; rename the roles in the "
            "records"
        )


def note_or_refuse_plugins(value: Any, file: ForeignFile) -> None:
    """Check ``plugins``: add a note for each plugin with faster kernels, and refuse unknown plugins."""
    for name in [
        str(item) for item in (value if isinstance(value, list) else [value]) if not is_off_or_empty(item)
    ]:
        if "CutCrossEntropy" in name or "Liger" in name:
            file.add_note(
                file.path, f"{name} has no effect: memory.loss_chunk_tokens saves the logits' memory"
            )
        elif "ExpertParallel" not in name:  # expert_parallel_size is a key of this plugin
            file.add_refusal(file.path, f"{format_short_value(name)} is not supported: {USE_CUSTOM_CODE}")


def convert_wandb_project(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert ``wandb_project`` to the project, and select W&B as the tracker.

    Returns an empty dict if the project is empty.
    """
    return {"log.project": value, "log.trackers": ["wandb"]} if value else {}


def convert_pair_loss(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``rl``, the name of a preference loss, and its beta to ``train.loss``.

    Raises:
        NoCounterpart: If the loss is not supported.
    """
    if value not in PAIR_LOSSES:
        raise NoCounterpart(f"{format_short_value(value)} is not supported: {SET_PAIR_LOSS}")
    return {"train.loss": format_pair_loss(value, file.get_value("rl_beta", file.get_value("dpo_beta")))}


def convert_datasets(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``datasets`` or ``pretraining_dataset``, an entry or a list of entries.

    Returns:
        Settings of the section ``data`` for a single source or for a mixture.

    Raises:
        NoCounterpart: If an entry has no path.
    """
    sources = []
    for number, entry in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(entry, dict) or not entry.get("path"):
            raise NoCounterpart(
                f"{format_short_value(entry)} is not supported: name a file or hub dataset in data.source"
            )
        sources.append(_convert_dataset(entry, number, file))
    return build_source_settings(sources)


def _convert_dataset(entry: dict[str, Any], number: int, file: ForeignFile) -> dict[str, Any]:
    """Convert one entry of ``datasets`` to the settings of a source, without the prefix ``data.``.

    Notes and refusals are added to the result of the file. ``data.chat_template`` is also set in this
    result, because a source has no such setting. Settings without a value are None.

    Args:
        entry: Keys of the entry, with their values.
        number: One-based position of the entry in its list, used in error messages.
        file: File that contains the list.
    """
    kind = entry.get("type")
    if isinstance(kind, dict):  # a custom prompter
        entry = {**kind, **{key: value for key, value in entry.items() if key != "type"}}
        kind = "alpaca"
    settings = convert_dataset_entry(entry, ENTRY_KEYS, number, file)
    template = settings.pop("chat_template", None)
    if template is not None:
        file.set_setting(file.path, "data.chat_template", template)
    data_format: str | None = None
    columns: dict[str, str] = {}
    if file.get_value("rl") in PAIR_LOSSES:
        data_format = "preference"
        columns = {ours: entry[theirs] for theirs, ours in PAIR_COLUMNS.items() if entry.get(theirs)}
    else:
        try:
            record_format = convert_record_format(str(kind), entry)
            data_format, columns = record_format.name, record_format.columns
        except NoCounterpart as reason:
            file.add_refusal(file.path, f"entry {number}: {reason}")
    columns |= {ours: entry[f"field_{ours}"] for ours in ("system", "tools") if entry.get(f"field_{ours}")}
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return {
        "source": entry.get("data_files") or entry["path"],
        "split": "train",
        **settings,
        "format": data_format,
        "columns": columns or None,
    }


class RecordFormat(NamedTuple):
    """Format of the records of a dataset.

    Attributes:
        name: Value of ``data.format``.
        columns: Value of ``data.columns``: field names in the records, keyed by the names that the
            format expects.
    """

    name: str
    columns: dict[str, str]


def convert_record_format(kind: str, entry: Mapping[str, Any]) -> RecordFormat:
    """Convert the ``type`` of an entry of ``datasets``, and the entry's keys that contain field names.

    Args:
        kind: Value of ``type``, such as ``alpaca`` or ``chat_template``.
        entry: Keys of the entry, with their values.

    Raises:
        NoCounterpart: If no value of ``data.format`` corresponds to such records.
    """
    if kind in QUESTION_FIELDS:
        return RecordFormat("alpaca", {"instruction": QUESTION_FIELDS[kind], "output": "answer"})
    base = kind.partition(".")[0]
    if base == "alpaca":
        answer = entry.get("field_output") or entry.get("field_model")
        question = entry.get("field_instruction") or entry.get("field_human")
        fields = {"instruction": question, "input": entry.get("field_input"), "output": answer}
        return RecordFormat("alpaca", {ours: theirs for ours, theirs in fields.items() if theirs})
    if base in ("chat_template", "sharegpt"):
        return _convert_message_format(entry, is_sharegpt=base == "sharegpt")
    if kind not in FORMAT_BY_TYPE:
        reason = "records of this kind are not supported; write the records as messages, alpaca or text"
        raise NoCounterpart(f"{entry['path']}: type {format_short_value(kind)} is not supported: {reason}")
    return RecordFormat(FORMAT_BY_TYPE[kind], {})


def _convert_message_format(entry: Mapping[str, Any], *, is_sharegpt: bool) -> RecordFormat:
    """Convert the keys of an entry of ``datasets`` whose records are conversations.

    Args:
        entry: Keys of the entry, with their values.
        is_sharegpt: Whether the type of the entry makes ``from`` and ``value`` the default keys of a
            message.

    Raises:
        NoCounterpart: If the keys of messages are neither ``role`` and ``content`` nor ``from`` and
            ``value``.
    """
    mapping = entry.get("message_property_mappings") or {}
    role = mapping.get("role") or entry.get("message_field_role") or ("from" if is_sharegpt else "role")
    content = mapping.get("content") or entry.get("message_field_content")
    content = content or ("value" if role == "from" else "content")
    others = {key: name for key, name in mapping.items() if key not in ("role", "content") and key != name}
    if (role, content) not in MESSAGE_FIELDS or others:
        field_names = format_short_value({"role": role, "content": content, **others})
        raise NoCounterpart(
            f"{entry['path']}: messages with the keys {field_names} have no counterpart: write them with "
            "role and content, or with from and value"
        )
    field = MESSAGE_FIELDS[role, content]
    theirs = entry.get("field_messages") or ("conversations" if is_sharegpt else "messages")
    if field == "messages" and theirs == "conversations":
        return RecordFormat("messages", {})
    return RecordFormat("sharegpt" if field == "conversations" else "messages", {field: theirs})


ENTRY_KEYS: ForeignKeys = {
    **dict.fromkeys(("path", "data_files"), CompanionKey("data.source")),
    "name": SettingKey("data.config_name"),
    "split": SettingKey("data.split"),
    **dict.fromkeys(("field", "text_column"), SettingKey("data.text_field")),
    "type": CompanionKey("data.format"),
    **dict.fromkeys(
        ("field_messages", "message_property_mappings", "message_field_role", "message_field_content"),
        CompanionKey("data.format and data.columns"),
    ),
    **dict.fromkeys(("field_instruction", "field_output", "field_input"), CompanionKey("data.columns")),
    **dict.fromkeys(
        ("field_system", "field_human", "field_model", "field_tools"), CompanionKey("data.columns")
    ),
    **dict.fromkeys(("field_prompt", "field_chosen", "field_rejected"), CompanionKey("data.columns")),
    "roles_to_train": SettingKey("data.roles_to_train", convert_trained_roles),
    "roles": MultiSettingKey(
        (), check_role_names, hint="data.format: each format has its own words for roles"
    ),
    "chat_template": SettingKey("data.chat_template", convert_chat_template),
    **dict.fromkeys(("train_on_eos", "train_on_eot"), RefusedKey(TURN_END, unless=("turn",))),
    "message_field_training": RefusedKey(
        "the keys train, training, weight and loss of a message are read; rename the key in the records",
        unless=("train", "training"),
    ),
    "message_field_training_detail": RefusedKey(
        "parts of a message cannot be left out; set weight: 0 in complete messages"
    ),
    **dict.fromkeys(
        ("field_thinking", "template_thinking_key"),
        RefusedKey(
            "the keys reasoning_content, thinking and reasoning of a message are read; rename the key in "
            "the records",
            unless=("reasoning_content", "thinking", "reasoning"),
        ),
    ),
    "split_thinking": RefusedKey("write the reasoning into reasoning_content of each message"),
    "drop_system_message": RefusedKey("remove the system messages from the records"),
    "chat_template_jinja": RefusedKey("write it into a .jinja file, and name it in data.chat_template"),
    **dict.fromkeys(
        ("shards", "shards_idx"),
        RefusedKey("set data.split to a part, such as train[:10%], or data.max_samples"),
    ),
    "skip": RefusedKey("set data.split to a part, such as train[10%:]"),
    "conversation": RefusedKey("name a template in data.chat_template"),
    **dict.fromkeys(
        ("system_prompt", "system_format", "format", "no_input_format"), RefusedKey(SET_TEMPLATE)
    ),
    **dict.fromkeys(
        ("prompt_format", "chosen_format", "rejected_format", "completion_format"), RefusedKey(SET_TEMPLATE)
    ),
    **dict.fromkeys(
        (
            "input_transform",
            "input_format",
            "field_completion",
            "field_label",
            "logprobs_field",
            "temperature",
        ),
        RefusedKey("write the records as messages, alpaca or text"),
    ),
    "revision": RefusedKey(
        "the newest revision is used; name a local folder in data.source for another", unless=("main",)
    ),
    "trust_remote_code": RefusedKey("no code of a dataset is run; name its files in data.source"),
    "ds_type": IgnoredKey(
        "the file extension determines the format; rename the file", unless=("json", "parquet", "csv", "text")
    ),
    "preprocess_shards": IgnoredKey(),
}
"""Table of the keys of an entry of ``datasets`` or ``pretraining_dataset``."""

KEYS: ForeignKeys = {
    # Model and adapter
    "base_model": SettingKey("model.name_or_path"),
    "flash_attention": SwitchKey({"model.attention": "flash_attention_2"}),
    "use_flash_attn": SwitchKey({"model.attention": "flash_attention_2"}),
    **dict.fromkeys(("sdp_attention", "xformers_attention"), SwitchKey({"model.attention": "sdpa"})),
    "adapter": PresetKey(
        {"lora": {"adapter.type": "lora"}, "qlora": {"adapter.type": "lora", "adapter.base": "nf4"}},
        hint=SET_ADAPTER,
    ),
    "lora_model_dir": SettingKey("adapter.name_or_path"),
    "lora_target_linear": SwitchKey({"adapter.target_modules": "all-linear"}),
    "peft_use_dora": SettingKey("adapter.use_dora"),
    "peft_use_rslora": SettingKey("adapter.use_rslora"),
    "processor_type": IgnoredKey(
        "the processor of the model is used, and its image tower is frozen; set train.trainable to train it"
    ),
    "processor_kwargs": RefusedKey("write the arguments into processor_config.json of a local model folder"),
    "image_size": RefusedKey(SCALE_IMAGES),
    "image_resize_algorithm": IgnoredKey("images are scaled with bicubic interpolation; remove the key"),
    **dict.fromkeys(("qat", "quantize_moe_experts"), RefusedKey(ONLY_16_OR_32_BITS)),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), IgnoredKey(NO_LIGER)),
    **dict.fromkeys(("base_model_config", "lora_fan_in_fan_out"), IgnoredKey()),
    # Data
    **dict.fromkeys(
        ("datasets", "pretraining_dataset"),
        MultiSettingKey(SOURCE_SETTINGS, convert_datasets, hint="data.source"),
    ),
    "test_datasets": RefusedKey(SET_EVAL),
    "val_set_size": SettingKey("data.eval_fraction", convert_eval_fraction),
    "sequence_len": SettingKey("data.seq_len"),
    "excess_length_strategy": WordSettingKey("data.truncation", {"drop": "drop", "truncate": "end"}),
    "sample_packing": SwitchKey({"data.packing": "documents"}),
    "eval_sample_packing": IgnoredKey(
        "evaluation samples are packed like training samples; set data.packing"
    ),
    "pad_to_sequence_len": IgnoredKey(
        "set data.packing; if it is false, sequences are padded to data.seq_len"
    ),
    **dict.fromkeys(
        ("group_by_length", "max_packed_sequence_len"),
        IgnoredKey("sequences have one length; set data.packing so that there is no padding"),
    ),
    "train_on_inputs": WordSettingKey(
        "data.train_on",
        {"true": "all", "false": None},
        hint="set data.train_on to all if it is true; false is the default for conversations",
    ),
    "roles_to_train": SettingKey("data.roles_to_train"),
    "chat_template": SettingKey("data.chat_template", convert_chat_template),
    "chat_template_jinja": SettingKey("data.chat_template"),
    "tokenizer_config": SettingKey("data.tokenizer"),
    "tokenizer_type": CompanionKey("data.tokenizer"),
    "special_tokens": IgnoredKey(
        "the special tokens of the tokenizer are used; set data.added_tokens for more"
    ),
    "eot_tokens": IgnoredKey("the token that ends an answer is found in the data; remove the key"),
    "dataset_prepared_path": CompanionKey("data.cache_dir"),
    **dict.fromkeys(("dataset_processes", "skip_prepare_dataset"), IgnoredKey(TOKENIZED_ONCE)),
    "push_dataset_to_hub": IgnoredKey(),
    # Training
    "num_epochs": SettingKey("train.epochs"),
    "micro_batch_size": SettingKey("train.micro_batch_size"),
    "batch_size": SettingKey("train.global_batch_size"),
    "eval_batch_size": IgnoredKey("evaluation takes train.micro_batch_size; remove the key"),
    "optimizer": SettingKey("train.optimizer", build_word_converter("train.optimizer")),
    "lr_scheduler": SettingKey("train.schedule", build_word_converter("train.schedule")),
    "cosine_min_lr_ratio": SettingKey("train.min_learning_rate_ratio"),
    "unfrozen_parameters": SettingKey("train.trainable"),
    "rl": MultiSettingKey(("train.loss",), convert_pair_loss, hint=SET_PAIR_LOSS),
    **dict.fromkeys(("rl_beta", "dpo_beta"), CompanionKey(BETA_OF_LOSS)),
    "rpo_alpha": CompanionKey(SFT_OF_LOSS),
    "early_stop": SettingKey("train.stop_after"),
    "evals_per_epoch": SettingKey(
        "train.eval_every_epochs",
        convert_events_per_epoch,
        hint="set train.eval_every_epochs to one divided by it",
    ),
    "evaluation_strategy": PresetKey(
        {"no": {"train.eval_every": None}, "epoch": {"train.eval_every_epochs": 1}, "steps": {}},
        hint=SET_EVAL_EVERY,
    ),
    **dict.fromkeys(
        ("loss_watchdog_threshold", "loss_watchdog_patience"),
        IgnoredKey("the run stops at a loss that is not finite; remove the key"),
    ),
    "plugins": MultiSettingKey((), note_or_refuse_plugins, hint=USE_CUSTOM_CODE),
    # Output and launch
    "saves_per_epoch": SettingKey(
        "checkpoint.every_epochs",
        convert_events_per_epoch,
        hint="set checkpoint.every_epochs to one divided by it",
    ),
    "save_first_step": IgnoredKey(),
    "wandb_project": MultiSettingKey(
        ("log.project", "log.trackers"), convert_wandb_project, hint="log.project"
    ),
    **dict.fromkeys(("wandb_name", "wandb_run_id"), SettingKey("log.name")),
    "wandb_*": IgnoredKey(
        "set log.trackers; configure the tracker with its environment variables, such as WANDB_ENTITY"
    ),
    **dict.fromkeys(
        ("context_parallel_size", "sequence_parallel_degree"), SettingKey("context_parallel_size")
    ),
    "tensor_parallel_size": SettingKey("tensor_parallel_size"),
    "expert_parallel_token_capacity": RefusedKey("no token is dropped; remove the key"),
    "expert_parallel_*": IgnoredKey("tokens are exchanged with torch.distributed; remove the key"),
    "experts_implementation": WordSettingKey(
        "model.experts",
        {name: name for name in ("eager", "batched_mm", "grouped_mm")},
        hint="set model.experts to eager, batched_mm or grouped_mm",
    ),
    **dict.fromkeys(("strict", "gpu_memory_limit"), IgnoredKey(IS_AUTOMATIC)),
    **dict.fromkeys(("torchdistx_path", "dp_shard_size", "fsdp_version"), IgnoredKey()),
}
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "train.epochs": 1,
    "train.micro_batch_size": 1,
    "train.learning_rate": 5e-05,
    "train.schedule": "cosine",
    "train.warmup_steps": 0,
    "train.betas": [0.9, 0.999],
    "train.weight_decay": 0.0,
    "data.eval_fraction": 0.0,
    "data.packing": False,
    "data.seq_len": 512,
    "train.warmup_ratio": 0.03,
    "adapter.r": 8,
    "adapter.alpha": 16,
}
DIFFERENCES = (
    OTHER_ORDER,
    CUT_LATER,
    PACKED_APART,
    ProgramDifference(
        "Without train_on_inputs, only answers are trained, to the end of their turn.", "data.train_on"
    ),
)


def complete_axolotl_settings(file: ForeignFile, num_devices: int) -> None:
    """Set ``hub.push`` if the file names a repository, and call :func:`complete_run_settings`.

    Args:
        file: A file whose keys have been converted.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    if file.result.values.get("hub.repo") is not None:
        file.set_default_setting("hub.push", convert_push_time(True, file), "axolotl pushes to hub_model_id")
    complete_run_settings(file, num_devices)
