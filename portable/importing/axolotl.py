"""Table of axolotl's config keys, and converters for their values.

Keys that axolotl shares with the Trainer are not included. A converter is a function that takes the
value of a key and the :class:`~portable.importing.foreign_file.ForeignFile` that contains it, and
returns settings of a run. See :mod:`portable.importing.foreign_keys`.
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
    ADD_CROSS_ENTROPY,
    BETA_ARGUMENT,
    BETA_OF_LOSS,
    EVALUATION_PACKED,
    GAMMA_ARGUMENT,
    GAMMA_OF_LOSS,
    NO_LIGER,
    NO_SETTING,
    ONLY_FROZEN_QUANTIZED,
    PADDED_WITHOUT_PACKING,
    SCALE_IMAGES,
    SET_ADAPTER,
    SET_EVAL,
    SET_EVAL_EVERY,
    SET_PAIR_LOSS,
    SET_PROCESSOR,
    SET_RECORD_FORMAT,
    SFT_ARGUMENT,
    SFT_OF_LOSS,
    SHARED_BATCH_SIZE,
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
    get_first_value,
    note_missing_cross_entropy,
)
from portable.importing.trl import CUT_LATER, OTHER_ORDER, PACKED_APART, set_precision_without_bf16
from portable.importing.words import build_word_converter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.importing.foreign_file import ForeignFile, ForeignKeys

PAIR_LOSSES = ("dpo", "ipo", "orpo", "simpo")
FORMAT_BY_TYPE = {"completion": "text", "pretrain": "text", "None": "auto"}
"""Values of ``data.format`` for entries of ``datasets`` without keys that name fields, keyed by the entry's
``type``.
"""
QUESTION_FIELDS = {"alpaca_chat.load_qa": "question", "context_qa.load_v2": "question"}
"""Field that contains the question of a record, keyed by the ``type`` of an entry for questions and
answers."""
MESSAGE_FIELDS = {("role", "content"): "messages", ("from", "value"): "conversations"}
"""Field that contains the messages of a record, keyed by a message's keys for the role and the content."""
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
"""Names that a role may have in messages, keyed by this project's name of the role."""
USE_CUSTOM_CODE = "use custom code in train.loss, train.callbacks or model.function instead"
SET_TEMPLATE = "write a chat template to a .jinja file, and set data.chat_template to this file"
CONVERT_RECORDS = "convert the records to messages, alpaca or text, and set data.format to this format"
TURN_END = "the token that ends a turn is trained if the turn is trained; remove the key"


def convert_trained_roles(value: Any, _: ForeignFile) -> list[str] | None:
    """Convert ``roles_to_train``, which is a role or a list of roles.

    The role ``human`` becomes ``user``, and ``gpt`` becomes ``assistant``. Returns None if only the
    assistant is trained, because this is the default.
    """
    names = {"human": "user", "gpt": "assistant"}
    roles = [names.get(role, role) for role in map(str, value if isinstance(value, list) else [value])]
    roles = list(dict.fromkeys(roles))
    return None if roles == ["assistant"] else roles


def check_role_names(value: Any, _: ForeignFile) -> None:
    """Check that ``roles`` has only supported names.

    ``roles`` maps each role to its names in the records.

    Raises:
        NoCounterpart: If a name is not one of the names that :data:`ROLE_NAMES` contains for its
            role.
    """
    others = {
        role: words
        for role, words in value.items()
        if not {*([words] if isinstance(words, str) else words)} <= ROLE_NAMES.get(role, set())
    }
    if others:
        raise NoCounterpart(
            f"{format_short_value(others)} is not supported: the supported role names are user, assistant, "
            "system and tool, or human and gpt in messages with the keys from and value; rename the roles in "
            "the records"
        )


def note_or_refuse_plugins(value: Any, file: ForeignFile) -> None:
    """Add a note for each plugin with faster kernels, and a refusal for each unknown plugin.

    The plugin for expert parallelism is accepted without a note, because the key
    ``expert_parallel_size`` configures it.
    """
    for name in [
        str(item) for item in (value if isinstance(value, list) else [value]) if not is_off_or_empty(item)
    ]:
        if "CutCrossEntropy" in name or "Liger" in name:
            file.add_note(
                file.path,
                f"{name} has no effect: memory.loss_chunk_tokens reduces the memory used for the logits "
                "instead",
            )
        elif "ExpertParallel" not in name:  # accepted, because its setting is the key expert_parallel_size
            file.add_refusal(file.path, f"{format_short_value(name)} is not supported; {USE_CUSTOM_CODE}")


def convert_wandb_project(value: Any, _: ForeignFile) -> dict[str, Any]:
    """Convert ``wandb_project`` to the name of the project, and select W&B as the tracker.

    Returns an empty dict if the name is empty.
    """
    return {"log.project": value, "log.trackers": ["wandb"]} if value else {}


def convert_pair_loss(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert the value of ``rl``, the name of a preference loss, to ``train.loss``.

    The arguments of the loss are read from other keys, such as ``rl_beta`` and ``rpo_alpha``. Without
    these keys, they have the defaults of TRL's trainers, which axolotl uses.

    Raises:
        NoCounterpart: If the loss is not in :data:`PAIR_LOSSES`.
    """
    if value not in PAIR_LOSSES:
        raise NoCounterpart(f"{format_short_value(value)} is not supported; {SET_PAIR_LOSS}")
    if value == "simpo":
        note_missing_cross_entropy(value, "cpo_alpha", 1.0, file)
    return {
        "train.loss": format_pair_loss(
            value,
            beta=get_first_value(file, ("rl_beta", "dpo_beta", "orpo_alpha"), 0.1),
            gamma=file.get_value("simpo_gamma", 0.5),
            sft=file.get_value("rpo_alpha"),
        )
    }


def convert_datasets(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert Axolotl's ``datasets`` or ``pretraining_dataset`` to settings of ``data``.

    Args:
        value: Value of the key. It is a single entry or a list of entries. An entry is a dict that
            describes one dataset.
        file: File that contains the key.

    Returns:
        Settings of the section ``data`` for a single source or for a mixture.

    Raises:
        NoCounterpart: If an entry is not a dict, or has no ``path``.
    """
    sources = []
    for number, entry in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(entry, dict) or not entry.get("path"):
            raise NoCounterpart(
                f"{format_short_value(entry)} is not supported; set data.source to a file or a hub dataset"
            )
        sources.append(_convert_dataset(entry, number, file))
    return build_source_settings(sources)


def _convert_dataset(entry: dict[str, Any], number: int, file: ForeignFile) -> dict[str, Any]:
    """Convert one entry of ``datasets`` to the settings of a source, without the prefix ``data.``.

    Notes and refusals are added to ``file.result``. So is ``data.chat_template``, because it is a
    setting of the run and not of a source.

    Args:
        entry: Keys of the entry, with their values.
        number: One-based position of the entry in its list, used in error messages.
        file: File that contains the list.

    Returns:
        Settings of the source, keyed by name. Settings without a value are None.
    """
    kind = entry.get("type")
    if isinstance(kind, dict):  # the type is a custom prompter
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
    """Convert the record format of an Axolotl dataset to ``data.format`` and ``data.columns``.

    Axolotl describes each dataset by an entry in ``datasets``. The key ``type`` of the entry names
    the record format. Other keys of the entry, such as ``field_output``, contain field names.

    Args:
        kind: Value of ``type``, such as ``alpaca`` or ``chat_template``.
        entry: Entry of the dataset in ``datasets``.

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
        raise NoCounterpart(
            f"{entry['path']}: type {format_short_value(kind)} is not supported; {CONVERT_RECORDS}"
        )
    return RecordFormat(FORMAT_BY_TYPE[kind], {})


def _convert_message_format(entry: Mapping[str, Any], *, is_sharegpt: bool) -> RecordFormat:
    """Convert the record format of a dataset of conversations to ``data.format`` and ``data.columns``.

    Args:
        entry: Keys of the dataset's entry in ``datasets``, with their values.
        is_sharegpt: Whether the entry's type is ``sharegpt``, for which the default keys of a
            message are ``from`` and ``value``.

    Raises:
        NoCounterpart: If the keys of messages are neither ``role`` and ``content`` nor ``from`` and
            ``value``, or if ``message_property_mappings`` renames other keys.
    """
    mapping = entry.get("message_property_mappings") or {}
    role = mapping.get("role") or entry.get("message_field_role") or ("from" if is_sharegpt else "role")
    content = mapping.get("content") or entry.get("message_field_content")
    content = content or ("value" if role == "from" else "content")
    others = {key: name for key, name in mapping.items() if key not in ("role", "content") and key != name}
    if (role, content) not in MESSAGE_FIELDS or others:
        field_names = format_short_value({"role": role, "content": content, **others})
        raise NoCounterpart(
            f"{entry['path']}: messages with the keys {field_names} are not supported; rename the keys "
            "in the records to role and content, or to from and value"
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
        CompanionKey(SET_RECORD_FORMAT, docs_text="data.format, data.columns"),
    ),
    **dict.fromkeys(("field_instruction", "field_output", "field_input"), CompanionKey("data.columns")),
    **dict.fromkeys(
        ("field_system", "field_human", "field_model", "field_tools"), CompanionKey("data.columns")
    ),
    **dict.fromkeys(("field_prompt", "field_chosen", "field_rejected"), CompanionKey("data.columns")),
    "roles_to_train": SettingKey("data.roles_to_train", convert_trained_roles),
    "roles": MultiSettingKey(
        (),
        check_role_names,
        docs_text="no setting: each format has its own role names, such as user and assistant; rename other "
        "roles in the records",
    ),
    "chat_template": SettingKey("data.chat_template", convert_chat_template),
    **dict.fromkeys(("train_on_eos", "train_on_eot"), RefusedKey(TURN_END, unless=("turn",))),
    "message_field_training": RefusedKey(
        "the weight of a message must have the key train, training, weight or loss; rename the key in the "
        "records",
        unless=("train", "training"),
    ),
    "message_field_training_detail": RefusedKey(
        "only complete messages can be excluded from training; set weight: 0 in these messages"
    ),
    **dict.fromkeys(
        ("field_thinking", "template_thinking_key"),
        RefusedKey(
            "the reasoning of a message must have the key reasoning_content, thinking or reasoning; rename "
            "the key in the records",
            unless=("reasoning_content", "thinking", "reasoning"),
        ),
    ),
    "split_thinking": RefusedKey("store the reasoning under the key reasoning_content of each message"),
    "drop_system_message": RefusedKey("remove the system messages from the records"),
    "chat_template_jinja": RefusedKey(SET_TEMPLATE),
    **dict.fromkeys(
        ("shards", "shards_idx"),
        RefusedKey(
            "set data.split to a part of the data, such as train[:10%], or data.max_samples to a number of "
            "records"
        ),
    ),
    "skip": RefusedKey("set data.split to a part of the data, such as train[10%:]"),
    "conversation": RefusedKey(SET_TEMPLATE),
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
        RefusedKey(CONVERT_RECORDS),
    ),
    "revision": RefusedKey(
        "only the newest revision is used; for another revision, set data.source to a local folder",
        unless=("main",),
    ),
    "trust_remote_code": RefusedKey(
        "code in a dataset is not run; set data.source to the files of the dataset"
    ),
    "ds_type": IgnoredKey(
        "the file extension determines the format; give the file the extension of its format, such as "
        ".jsonl, and remove the key",
        unless=("json", "parquet", "csv", "text"),
    ),
    "preprocess_shards": IgnoredKey(),
}
"""Table entries for the keys of an entry of ``datasets`` or ``pretraining_dataset``."""

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
        "the processor of the model is used, and the image tower is frozen; to train the image tower, too, "
        "set train.trainable to [.], which matches all parameters"
    ),
    "processor_kwargs": RefusedKey(SET_PROCESSOR),
    "image_size": RefusedKey(SCALE_IMAGES),
    "image_resize_algorithm": IgnoredKey("images are scaled with bicubic interpolation; remove the key"),
    **dict.fromkeys(("qat", "quantize_moe_experts"), RefusedKey(ONLY_FROZEN_QUANTIZED)),
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
    "eval_sample_packing": IgnoredKey(EVALUATION_PACKED),
    "pad_to_sequence_len": IgnoredKey(PADDED_WITHOUT_PACKING),
    **dict.fromkeys(
        ("group_by_length", "max_packed_sequence_len"),
        IgnoredKey("all sequences have the same length; set data.packing to documents to avoid padding"),
    ),
    "train_on_inputs": WordSettingKey(
        "data.train_on",
        {"true": "all", "false": None},
        hint="set data.train_on to all to train on the inputs, too",
    ),
    "roles_to_train": SettingKey("data.roles_to_train"),
    "chat_template": SettingKey("data.chat_template", convert_chat_template),
    "chat_template_jinja": SettingKey("data.chat_template"),
    "tokenizer_config": SettingKey("data.tokenizer"),
    "tokenizer_type": IgnoredKey(
        "the files of the tokenizer determine its class; remove the key", unless=("AutoTokenizer",)
    ),
    "special_tokens": IgnoredKey(
        "the special tokens of the tokenizer are used; to add tokens, list the tokens in data.added_tokens"
    ),
    "eot_tokens": IgnoredKey(
        "the tokens that end an answer are determined from the chat template; remove the key"
    ),
    "dataset_prepared_path": IgnoredKey(
        "tokens are cached in data.cache_dir; remove the key", unless=("last_run_prepared",)
    ),
    **dict.fromkeys(("dataset_processes", "skip_prepare_dataset"), IgnoredKey(TOKENIZED_ONCE)),
    "push_dataset_to_hub": IgnoredKey(),
    # Training
    "num_epochs": SettingKey("train.epochs"),
    "micro_batch_size": SettingKey("train.micro_batch_size"),
    "batch_size": SettingKey("train.global_batch_size"),
    "eval_batch_size": IgnoredKey(SHARED_BATCH_SIZE),
    "optimizer": SettingKey("train.optimizer", build_word_converter("train.optimizer")),
    "lr_scheduler": SettingKey("train.schedule", build_word_converter("train.schedule")),
    "cosine_min_lr_ratio": SettingKey("train.min_learning_rate_ratio"),
    "unfrozen_parameters": SettingKey("train.trainable"),
    "rl": MultiSettingKey(("train.loss",), convert_pair_loss, hint=SET_PAIR_LOSS),
    **dict.fromkeys(
        ("rl_beta", "dpo_beta", "orpo_alpha"), CompanionKey(BETA_OF_LOSS, docs_text=BETA_ARGUMENT)
    ),
    "simpo_gamma": CompanionKey(GAMMA_OF_LOSS, docs_text=GAMMA_ARGUMENT),
    "cpo_alpha": CompanionKey(ADD_CROSS_ENTROPY),
    "rpo_alpha": CompanionKey(SFT_OF_LOSS, docs_text=SFT_ARGUMENT),
    "early_stop": SettingKey("train.stop_after"),
    "evals_per_epoch": SettingKey(
        "train.eval_every_epochs",
        convert_events_per_epoch,
        hint="set train.eval_every_epochs to 1 divided by this value",
    ),
    "evaluation_strategy": PresetKey(
        {"no": {"train.eval_every": None}, "epoch": {"train.eval_every_epochs": 1}, "steps": {}},
        hint=SET_EVAL_EVERY,
    ),
    **dict.fromkeys(
        ("loss_watchdog_threshold", "loss_watchdog_patience"),
        IgnoredKey("train.on_non_finite handles a NaN or infinite loss; remove the key"),
    ),
    "plugins": MultiSettingKey(
        (),
        note_or_refuse_plugins,
        hint=USE_CUSTOM_CODE,
        docs_text="not supported, except for plugins for kernels and expert parallelism; instead, use custom "
        "code in train.loss, train.callbacks or model.function",
    ),
    # Output and launch
    "saves_per_epoch": SettingKey(
        "checkpoint.every_epochs",
        convert_events_per_epoch,
        hint="set checkpoint.every_epochs to 1 divided by this value",
    ),
    "save_first_step": IgnoredKey(),
    "wandb_project": MultiSettingKey(
        ("log.project", "log.trackers"), convert_wandb_project, hint="log.project"
    ),
    **dict.fromkeys(("wandb_name", "wandb_run_id"), SettingKey("log.name")),
    "wandb_*": IgnoredKey(
        "set log.trackers to [wandb], and configure the tracker with environment variables such as "
        "WANDB_ENTITY"
    ),
    **dict.fromkeys(
        ("context_parallel_size", "sequence_parallel_degree"), SettingKey("context_parallel_size")
    ),
    "tensor_parallel_size": SettingKey("tensor_parallel_size"),
    "expert_parallel_token_capacity": RefusedKey("experts never drop tokens; remove the key"),
    "expert_parallel_*": IgnoredKey("ranks exchange tokens with torch.distributed; remove the key"),
    "experts_implementation": WordSettingKey(
        "model.experts",
        {name: name for name in ("eager", "batched_mm", "grouped_mm")},
        hint="set model.experts to eager, batched_mm or grouped_mm",
    ),
    **dict.fromkeys(("strict", "gpu_memory_limit"), IgnoredKey(NO_SETTING)),
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
        "Without train_on_inputs, only the answers are trained, including the end of the turn.",
        "data.train_on",
    ),
)


def complete_axolotl_settings(file: ForeignFile, num_devices: int) -> None:
    """Set ``precision`` and ``hub.push``, and call :func:`complete_run_settings`.

    Args:
        file: File whose keys have been converted.
        num_devices: Number of all devices of the original run. 0 if it is unknown.
    """
    set_precision_without_bf16(file)
    if file.result.values.get("hub.repo") is not None:
        file.set_default_setting("hub.push", convert_push_time(True, file), "axolotl pushes to hub_model_id")
    complete_run_settings(file, num_devices)
