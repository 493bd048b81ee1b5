"""Table that translates the setting values of other trainers to the values of this project.

For example, ``fa2`` becomes ``flash_attention_2``. For the settings in :data:`TRANSLATED_SETTINGS`,
the table is used to convert values when a file is imported. For all other settings, it is only used
for suggestions in error messages about invalid values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.field_types import parse_boolean_word
from portable.importing.foreign_file import is_off_or_empty

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignFile
    from portable.importing.foreign_keys import ValueConverter


class WordMeaning(NamedTuple):
    """Equivalent in this project of another trainer's setting value, with a remark for the user.

    For example, ``cosine_with_restarts`` becomes ``cosine``, with the remark ``which has no
    restarts``.

    Attributes:
        value: Value of the setting in this project.
        advice: Remark that follows the value in error messages. It names another setting to change,
            or a difference in meaning.
    """

    value: str
    advice: str

    def __str__(self) -> str:
        """Return the value and the advice, for an error message."""
        return f"{self.value}, {self.advice}"


FOREIGN_WORDS: dict[str, dict[str, str | WordMeaning]] = {
    "adapter": {"qlora": "{type: lora, base: nf4}"},
    "adapter.type": {"qlora": "lora, with adapter.base: nf4"},
    "adapter.base": {
        **dict.fromkeys(("4bit", "int4", "fp4", "qlora"), "nf4"),
        **dict.fromkeys(("8bit", "fp8"), "int8"),
    },
    "log.trackers": {"none": "[] for no trackers", "all": "a list of trackers, such as [wandb]"},
    "memory.activation_checkpointing": dict.fromkeys(("true", "block", "offload"), "full"),
    "model.attention": dict.fromkeys(("fa2", "flash_attn", "flash_attention"), "flash_attention_2"),
    "backend": dict.fromkeys(("gpu", "rocm", "nvidia"), "cuda"),
    "precision": {
        "bfloat16": "bf16",
        **dict.fromkeys(("float16", "half"), "fp16"),
        **dict.fromkeys(("float32", "no"), "fp32"),
    },
    "strategy": {
        "ddp": "no_shard",
        "deepspeed": "zero1, zero2 or zero3",
        **dict.fromkeys(("fsdp", "fsdp2"), "full_shard"),
        "full_shard auto_wrap": "full_shard, which wraps layers automatically",
        "hybrid_shard auto_wrap": "hybrid_shard, which wraps layers automatically",
        "shard_grad_op auto_wrap": "shard_grad_op, which wraps layers automatically",
    },
    "train.optimizer": {
        **dict.fromkeys(
            ("adam", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused"), "adamw"
        ),
        **dict.fromkeys(("fused_adam", "paged_adamw", "paged_adamw_32bit", "pagedadamw"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        **dict.fromkeys(("adamw8bit", "pagedadamw8bit", "adamw8bitao"), "adamw_8bit"),
    },
    "train.schedule": {
        "constant_with_warmup": WordMeaning("constant", "which warms up over train.warmup_steps"),
        "cosine_with_restarts": WordMeaning("cosine", "which has no restarts"),
        "cosine_with_min_lr": WordMeaning("cosine", "with train.min_learning_rate_ratio"),
        "linear_with_warmup": WordMeaning("linear", "which warms up over train.warmup_steps"),
        "warmup_stable_decay": "wsd",
        "cosine_with_warmup": WordMeaning("cosine", "which warms up over train.warmup_steps"),
    },
    "data.train_on": {
        **dict.fromkeys(("true", "assistant_only", "answers", "responses"), "assistant"),
        "false": "all",
    },
    "model.task": {
        **dict.fromkeys(("chat", "sft", "instruct", "text-generation", "clm", "causal_lm"), "causal-lm"),
        **dict.fromkeys(("classification", "text-classification", "regression"), "sequence-classification"),
        **dict.fromkeys(("mlm", "fill-mask"), "masked-lm"),
        **dict.fromkeys(("seq2seq", "summarization", "translation"), "seq2seq-lm"),
    },
    "data.format": {
        **dict.fromkeys(("chat", "chatml", "chat_template", "openai"), "messages"),
        **dict.fromkeys(("conversation", "conversational"), "messages"),
        **dict.fromkeys(("completion", "raw", "pretrain", "plain"), "text"),
        **dict.fromkeys(("dpo", "pairs", "rlhf"), "preference"),
        **dict.fromkeys(("instruct", "instruction"), "alpaca"),
    },
}
"""Values in this project, keyed by the dotted setting or section, then by another trainer's value.

For settings that are not in :data:`TRANSLATED_SETTINGS`, a value may contain advice.
"""
TRANSLATED_SETTINGS = ("model.attention", "precision", "train.optimizer", "train.schedule")
"""Settings for which :func:`translate_setting_word` converts values of an imported file."""


def translate_setting_word(setting: str, value: Any, file: ForeignFile) -> Any:
    """Convert a value from another trainer's file to the equivalent value of a setting.

    For ``adafactor``, this function also sets ``train.adafactor_rule`` in ``file.result``, so that
    the update rule stays the same.

    Args:
        setting: Dotted key of the setting, one of :data:`TRANSLATED_SETTINGS`.
        value: Value in the other trainer's file.
        file: File that is being converted.

    Returns:
        The converted value. None if ``value`` is empty, ``auto``, a boolean, or a word for a
        boolean such as ``no``. A value without a known equivalent is not translated, but only
        converted to a string.
    """
    if value == "adafactor":
        file.set_setting(file.path, "train.adafactor_rule", "transformers")
    if is_off_or_empty(value) or isinstance(parse_boolean_word(value), bool) or value == "auto":
        return None
    word = FOREIGN_WORDS[setting].get(str(value).lower(), str(value))
    return word.value if isinstance(word, WordMeaning) else word


def build_word_converter(setting: str) -> ValueConverter:
    """Build a converter that calls :func:`translate_setting_word` for a setting.

    Args:
        setting: Dotted key, one of :data:`TRANSLATED_SETTINGS`.
    """
    return lambda value, file: translate_setting_word(setting, value, file)
