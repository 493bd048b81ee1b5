"""Table of the keys that LLaMA-Factory adds to the keys of transformers' Trainer, and their converters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.origins import format_short_value
from portable.importing.foreign_file import NoCounterpart
from portable.importing.foreign_keys import (
    CompanionKey,
    IgnoredKey,
    MultiSettingKey,
    NeverFalseKey,
    PresetKey,
    RefusedKey,
    SettingKey,
    SwitchKey,
    WordSettingKey,
    parse_name_list,
)
from portable.importing.trainer_conversions import (
    ADD_SYSTEM_MESSAGE,
    BETA_ARGUMENT,
    BETA_OF_LOSS,
    GAMMA_ARGUMENT,
    GAMMA_OF_LOSS,
    IS_AUTOMATIC,
    NO_LIGER,
    SET_ADAPTER,
    SET_EVAL,
    SET_FP8,
    SET_PAIR_LOSS,
    SET_PROCESSOR,
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
)
from portable.importing.trl import CUT_LATER, OTHER_ORDER, PACKED_APART
from portable.importing.words import build_word_converter

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignFile, ForeignKeys


def convert_dataset_names(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``dataset``, a list of dataset names, to data sources. Only hub datasets are supported.

    The names refer to hub datasets if all of them contain a slash and ``dataset_dir`` is ``ONLINE`` or
    not set.

    Raises:
        NoCounterpart: If the names refer to LLaMA-Factory's ``dataset_info.json``.
    """
    names = parse_name_list(value)
    if file.get_value("dataset_dir", "ONLINE") == "ONLINE" and all("/" in name for name in names):
        return build_source_settings([{"source": name} for name in names])
    raise NoCounterpart(
        f"{format_short_value(value)} is not supported: the names refer to LLaMA-Factory's "
        "dataset_info.json; set data.source to the files or hub datasets"
    )


def convert_stage(value: Any, file: ForeignFile) -> dict[str, Any]:
    """Convert ``stage``, which selects the training method and the kind of data.

    - ``sft`` (conversations) needs no settings, because it is the default for conversations.
    - ``pt`` (text) sets ``data.format`` to ``text``, and turns on ``data.packing``.
    - ``dpo`` (preference pairs) sets ``train.loss``. The arguments of the loss are read from the
      keys ``pref_loss``, ``pref_beta`` and ``pref_ftx``.

    Raises:
        NoCounterpart: If the value is another stage.
    """
    if value == "sft":
        return {}
    if value == "pt":
        return {"data.format": "text", "data.packing": True}
    if value == "dpo":
        kind = file.get_value("pref_loss")
        note_missing_cross_entropy(kind, "pref_ftx", 0.0, file)
        loss = format_pair_loss(
            kind,
            beta=file.get_value("pref_beta", 0.1),
            gamma=file.get_value("simpo_gamma", 0.5),
            sft=file.get_value("pref_ftx"),
        )
        return {"train.loss": loss}
    raise NoCounterpart(f"{format_short_value(value)} is not supported; {SET_PAIR_LOSS}")


KEYS: ForeignKeys = {
    # Model and adapter
    "flash_attn": SettingKey("model.attention", build_word_converter("model.attention")),
    "pure_bf16": SwitchKey({"precision": "bf16"}),
    "finetuning_type": PresetKey({"full": {}, "lora": {"adapter.type": "lora"}}, hint=SET_ADAPTER),
    "quantization_bit": PresetKey(
        {"4": {"adapter.base": "nf4"}, "8": {"adapter.base": "int8"}},
        hint="set adapter.type to lora, and adapter.base to nf4 for 4 bits or to int8 for 8 bits",
    ),
    "double_quantization": IgnoredKey(),
    "adapter_name_or_path": SettingKey("adapter.name_or_path"),
    "lora_rank": SettingKey("adapter.r"),
    "lora_target": SettingKey("adapter.target_modules", convert_module_names),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector"), NeverFalseKey(TRAIN_TOWER)),
    "freeze_language_model": RefusedKey(TRAIN_ONLY_TOWER),
    "freeze_trainable_layers": RefusedKey(
        "set train.trainable to patterns that match the names of the layers to train", unless=(2,)
    ),
    "fp8_backend": RefusedKey(SET_FP8, unless=("auto",)),
    **dict.fromkeys(("enable_liger_kernel", "use_v1_kernels"), IgnoredKey(NO_LIGER)),
    # Data
    "dataset": MultiSettingKey(SOURCE_SETTINGS, convert_dataset_names, hint="data.source"),
    "dataset_dir": CompanionKey("data.source"),
    "media_dir": SettingKey("data.image_root"),
    "image_min_pixels": RefusedKey("small images are not scaled up; remove the key", unless=(1024,)),
    **dict.fromkeys(
        ("image_do_pan_and_scan", "crop_to_patches"),
        RefusedKey(SET_PROCESSOR),
    ),
    "eval_dataset": RefusedKey(SET_EVAL),
    "val_size": SettingKey("data.eval_fraction", convert_eval_fraction),
    "max_samples": SettingKey("data.max_samples"),
    **dict.fromkeys(("cutoff_len", "model_max_length"), SettingKey("data.seq_len")),
    "neat_packing": SwitchKey({"data.packing": "documents"}),
    "template": SettingKey("data.chat_template", convert_chat_template),
    "default_system": RefusedKey(ADD_SYSTEM_MESSAGE),
    "mask_history": SwitchKey({"data.train_on": "last_assistant"}),
    "train_on_prompt": SwitchKey({"data.train_on": "all"}),
    "use_fast_tokenizer": IgnoredKey(IS_AUTOMATIC),
    "preprocessing_num_workers": IgnoredKey(TOKENIZED_ONCE),
    "tokenized_path": IgnoredKey(
        "the data is tokenized at the start of the run, and cached in data.cache_dir; remove the key"
    ),
    # Training
    "stage": MultiSettingKey(
        ("data.format", "data.packing", "train.loss"),
        convert_stage,
        hint="remove the key for sft and pt, set train.loss to dpo for dpo, or set model.task to "
        "sequence-classification for a classifier",
    ),
    "pref_loss": CompanionKey(SET_PAIR_LOSS, docs_text="train.loss"),
    "pref_beta": CompanionKey(BETA_OF_LOSS, docs_text=BETA_ARGUMENT),
    "simpo_gamma": CompanionKey(GAMMA_OF_LOSS, docs_text=GAMMA_ARGUMENT),
    "pref_ftx": CompanionKey(SFT_OF_LOSS, docs_text=SFT_ARGUMENT),
    "use_muon": SwitchKey({"train.optimizer": "muon"}),
    **dict.fromkeys(
        ("use_galore", "use_apollo", "use_badam", "use_adam_mini"),
        RefusedKey("set train.optimizer to the import path of an optimizer, such as package.module:name"),
    ),
    "disable_gradient_checkpointing": WordSettingKey(
        "memory.activation_checkpointing", {"true": "none", "false": "full"}
    ),
    "plot_loss": IgnoredKey("report.html always contains the loss plot; remove the key", unless=(True,)),
}
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "train.epochs": 3,
    "train.micro_batch_size": 8,
    "train.learning_rate": 5e-05,
    "train.schedule": "linear",
    "train.warmup_steps": 0,
    "train.betas": [0.9, 0.999],
    "train.weight_decay": 0.0,
    "data.eval_fraction": 0.0,
    "data.packing": False,
    "data.seq_len": 2048,
    "memory.activation_checkpointing": "full",
    "adapter.r": 8,
}
DIFFERENCES = (OTHER_ORDER, CUT_LATER, PACKED_APART)
IMAGE_MAX_PIXELS = 768 * 768
"""Default of LLaMA-Factory's ``image_max_pixels``, in pixels. It is only applied to files that set
``media_dir``, because other files may describe runs without images."""


def complete_llama_factory_settings(file: ForeignFile, num_devices: int) -> None:
    """Add the defaults that depend on other keys, and call :func:`complete_run_settings`.

    With an adapter, the default of ``adapter.alpha`` is twice the rank. In a file that sets
    ``media_dir``, the default of ``data.image_max_pixels`` is :data:`IMAGE_MAX_PIXELS`.

    Args:
        file: File whose keys have been converted. Its ``result`` is modified in place.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    rank = file.result.values.get("adapter.r", DEFAULTS["adapter.r"])
    if file.result.values.get("adapter.type") is not None and isinstance(rank, int):
        file.set_default_setting("adapter.alpha", 2 * rank, "default of LLaMA-Factory")
    if file.get_value("media_dir"):
        file.set_default_setting("data.image_max_pixels", IMAGE_MAX_PIXELS, "default of LLaMA-Factory")
    complete_run_settings(file, num_devices)
