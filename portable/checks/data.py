"""Validate the section ``data``: formats, packing, columns and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.derived_defaults import PADDED_TASKS
from portable.config.rules import SettingProblem, format_setting_with_value, format_value, is_not_default
from portable.config.sources import (
    check_data_sources,
    format_training_source_key,
    get_training_sources,
    list_number_columns,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig

RESERVED_COLUMN_NAMES = (
    "labels",
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "decoder_input_ids",
    "position_ids",
    "source",
)
"""Names of a batch's columns that ``data.columns`` must not use for additional number columns."""

TASK_BY_SETTING = {
    "data.text_pair_field": "sequence-classification",
    "data.source_prefix": "seq2seq-lm",
    "data.target_seq_len": "seq2seq-lm",
    "data.format": "causal-lm",
    "data.chat_template": "causal-lm",
    "data.chat_template_kwargs": "causal-lm",
    "data.train_on": "causal-lm",
    "data.roles_to_train": "causal-lm",
    "data.split_turns": "causal-lm",
    "data.truncation": "causal-lm",
    "data.images": "causal-lm",
}
"""Settings that only apply to a single ``model.task``. The values are the tasks."""


def check_data(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems in the section ``data``, except in ``data.columns`` and in the data sources."""
    data, task = config.data, config.model.task
    if data.packing and task in PADDED_TASKS:
        yield SettingProblem(
            ("data.packing", "model.task"),
            f"{format_setting_with_value(config, 'data.packing')} does not work with model.task: {task}; "
            "set data.packing to false",
        )
    if data.packing == "documents" and task == "masked-lm":
        yield SettingProblem(
            ("data.packing", "model.task"),
            "data.packing: documents is for model.task: causal-lm, not for masked-lm; set data.packing to "
            "false",
        )
    if data.vocab_size is not None and data.tokenizer is not None:
        yield SettingProblem(
            ("data.vocab_size", "data.tokenizer"),
            f"data.vocab_size: {data.vocab_size} is for a tokenizer that is trained on the source, but "
            "data.tokenizer is set; remove one of the two",
        )
    for key, only_task in TASK_BY_SETTING.items():
        is_text = key == "data.format" and data.format == "text"  # every task supports text
        if task != only_task and is_not_default(config, key) and not is_text:
            yield SettingProblem(
                (key, "model.task"),
                f"{format_setting_with_value(config, key)} is for model.task: {only_task}, not for {task}; "
                f"remove {key}",
            )
    yield from _check_format(config)
    if data.images:
        yield from _check_images(config)
    if data.source is None and not data.sources and task in PADDED_TASKS:
        yield SettingProblem(
            ("data.source", "model.task"),
            "data.source: is not set, but the default source has only text, which does not suit "
            f"model.task: {task}; set data.source",
        )


def _check_format(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with ``data.format`` or ``data.train_on``."""
    data, train_on = config.data, config.data.train_on
    if data.format == "text":
        for key in (
            "data.chat_template",
            "data.chat_template_kwargs",
            "data.roles_to_train",
            "data.split_turns",
        ):
            if config.get(key):
                yield SettingProblem(
                    (key, "data.source"),
                    f"{format_setting_with_value(config, key)} is for conversations, but data.format is "
                    f"text; remove {key}",
                )
        if train_on in ("assistant", "completion", "last_assistant"):
            yield SettingProblem(
                ("data.train_on", "data.format"),
                f"data.train_on: {train_on} is for conversations, but data.format is text; remove one of "
                "the two",
            )
    if data.truncation != "end" and data.packing is True and data.format != "auto":
        yield SettingProblem(
            ("data.truncation", "data.packing"),
            f"data.truncation: {data.truncation} has no effect with data.packing: true, which does not "
            "truncate texts; remove one of the two",
        )
    if data.format == "preference":
        if config.train.loss is None:
            yield SettingProblem(
                ("data.format",),
                "data.format: preference needs a preference loss; set train.loss to dpo, ipo, simpo, orpo "
                "or a custom loss",
            )
        for key in ("data.packing", "data.split_turns", "data.roles_to_train"):
            if config.get(key):
                yield SettingProblem(
                    (key, "data.format"),
                    f"{format_setting_with_value(config, key)} does not work with data.format: preference; "
                    f"remove {key}",
                )
        if train_on not in (None, "completion"):
            yield SettingProblem(
                ("data.train_on", "data.format"),
                f"data.train_on: {train_on} does not work with data.format: preference; remove data.train_on",
            )
    if train_on == "completion" and data.split_turns:
        yield SettingProblem(
            ("data.train_on", "data.split_turns"),
            "data.train_on: completion does not work with data.split_turns; set data.train_on to assistant",
        )
    if train_on == "completion" and data.format in ("messages", "sharegpt"):
        yield SettingProblem(
            ("data.train_on", "data.format"),
            f"data.train_on: completion does not work with data.format: {data.format}; set data.train_on "
            "to assistant",
        )


def _check_images(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with images in conversations."""
    data = config.data
    if data.packing is True:
        yield SettingProblem(
            ("data.images", "data.packing"),
            "data.packing: true would split images; set data.packing to documents or false",
        )
    if data.truncation == "start":
        yield SettingProblem(
            ("data.images", "data.truncation"),
            "data.truncation: start does not work with images; set data.truncation to end or drop",
        )
    if data.format in ("text", "preference", "samples"):
        yield SettingProblem(
            ("data.images", "data.format"),
            f"data.images: true is for conversations, not for data.format: {data.format}; remove data.images",
        )
    for key, has_problem in {
        "data.stream": any(source.stream for source in get_training_sources(data).values()),
        "context_parallel_size": config.context_parallel_size > 1,
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "train.neftune_noise_alpha": config.train.neftune_noise_alpha > 0,
    }.items():
        if has_problem:
            yield SettingProblem(
                ("data.images", key), f"{key}: does not work with images in conversations; remove {key}"
            )
    if config.backend in ("xla", "tpu"):
        yield SettingProblem(
            ("data.images", "backend"),
            f"backend: {config.backend} does not support images in conversations, because the number of "
            "pixels differs between batches; set backend to cuda or cpu, or remove the images",
        )


def check_columns(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems with additional numeric columns in ``data.columns``."""
    columns, packing = list_number_columns(config.data), config.data.packing
    if columns and packing:
        yield SettingProblem(
            ("data.columns", "data.packing"),
            "data.columns: selects a column with one number per record, but data.packing: "
            f"{format_value(packing)} joins records; set data.packing to false, or remove the column",
        )
    if columns and config.train.loss is None:
        yield SettingProblem(
            ("data.columns",),
            "data.columns: a column of numbers is only for a custom loss; set train.loss, or remove the "
            "column",
        )
    for name in columns:
        if name in RESERVED_COLUMN_NAMES:
            yield SettingProblem(
                ("data.columns",),
                f"data.columns: {name} is reserved for model inputs; rename the column",
            )


def check_sources(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems with any data source, including mixtures, evaluation sources and streams."""
    yield from check_data_sources(config.data)
    sources = {
        format_training_source_key(name): source for name, source in get_training_sources(config.data).items()
    }
    streams = [key for key, source in sources.items() if source.stream]
    if streams:
        stream = f"{streams[0]}.stream"
        if config.model.task != "causal-lm":
            yield SettingProblem(
                (stream, "model.task"), f"{stream}: works only with model.task: causal-lm; remove {stream}"
            )
        for key in ("train.epochs", "train.eval_every_epochs", "checkpoint.every_epochs"):
            if config.get(key) is not None:
                yield SettingProblem(
                    (key, stream),
                    f"{key}: needs the length of the data, which is unknown with {stream}; use a setting "
                    "that counts steps instead",
                )
        if config.data.eval_fraction and not config.data.sources:
            yield SettingProblem(
                ("data.eval_fraction", "data.stream"),
                "data.eval_fraction: cannot hold out a part of a stream (data.stream); set "
                "data.eval_fraction to 0, and data.eval to separate data",
            )
    for key, source in sources.items():
        if source.roles_to_train and source.train_on not in (None, "assistant"):
            yield SettingProblem(
                (f"{key}.train_on", f"{key}.roles_to_train"),
                f"{key}.train_on: {source.train_on} does not work with {key}.roles_to_train; remove one of "
                "the two",
            )
    for key in streams:
        if sources[key].max_samples is not None:
            yield SettingProblem(
                (f"{key}.max_samples", f"{key}.stream"),
                f"{key}.max_samples: does not work with {key}.stream; remove one of the settings (to limit "
                "the data of a stream, use fewer files, or lower train.steps)",
            )
