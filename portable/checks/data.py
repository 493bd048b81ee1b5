"""Validate the section ``data``: formats, packing, columns and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.derived_defaults import PADDED_TASKS
from portable.config.rules import SettingProblem, format_setting_with_value, format_value, is_not_default
from portable.config.sources import (
    check_data_sources,
    format_eval_source_key,
    format_training_source_key,
    get_evaluation_sources,
    get_training_sources,
    list_number_columns,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.config import RunConfig

RESERVED_COLUMN_NAMES = (
    "labels",
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "decoder_input_ids",
    "position_ids",
    "document_lengths",
    "source",
    "part_positions",
    "text_tokens",
)
"""Column names of a batch that ``data.columns`` must not use for additional numeric columns."""

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
"""The only ``model.task`` to which a setting applies, keyed by setting."""


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
            "data.packing: documents works only with model.task: causal-lm, but model.task is masked-lm; set "
            "data.packing to false",
        )
    if data.vocab_size is not None and data.tokenizer is not None:
        yield SettingProblem(
            ("data.vocab_size", "data.tokenizer"),
            f"data.vocab_size: {data.vocab_size} applies only to a tokenizer that is trained on the "
            "dataset, but data.tokenizer is set; remove data.vocab_size or data.tokenizer",
        )
    for key, only_task in TASK_BY_SETTING.items():
        is_text = key == "data.format" and data.format == "text"  # every task supports text
        if task != only_task and is_not_default(config, key) and not is_text:
            yield SettingProblem(
                (key, "model.task"),
                f"{format_setting_with_value(config, key)} works only with model.task: {only_task}, but "
                f"model.task is {task}; remove {key}",
            )
    yield from _check_format(config)
    if data.images:
        yield from _check_images(config)
    if data.source is None and not data.sources and task in PADDED_TASKS:
        yield SettingProblem(
            ("data.source", "model.task"),
            "data.source: is not set, and the default dataset contains only text, without the labels or "
            f"targets that model.task: {task} needs; set data.source to a dataset for this task",
        )


def _check_format(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems of ``data.format``, ``data.train_on`` and ``data.truncation``.

    A problem is a setting that does not work with ``data.format`` or ``data.train_on``, or the
    format ``preference`` without ``train.loss``. If the format is not ``auto``, ``data.truncation``
    must also be ``end`` if ``data.packing`` is true.
    """
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
                    f"{format_setting_with_value(config, key)} applies only to conversations, but "
                    f"data.format is text; remove {key}",
                )
        if train_on in ("assistant", "completion", "last_assistant"):
            yield SettingProblem(
                ("data.train_on", "data.format"),
                f"data.train_on: {train_on} applies only to conversations, but data.format is text; remove "
                "data.train_on, or set data.format to the format of the conversations",
            )
    if data.truncation != "end" and data.packing is True and data.format != "auto":
        yield SettingProblem(
            ("data.truncation", "data.packing"),
            f"data.truncation: {data.truncation} has no effect with data.packing: true, which splits "
            "long texts instead of truncating them; remove data.truncation, or set data.packing to false",
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
            f"data.images: true works only with conversations, but data.format is {data.format}; remove "
            "data.images",
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
    """Check the additional numeric columns of all sources, and yield a problem for each error.

    Numeric columns require a custom loss and one record per sample. Names of model inputs are
    reserved. A source that inherits ``data.columns`` is not checked separately.
    """
    training = {
        format_training_source_key(name): source for name, source in get_training_sources(config.data).items()
    }
    evaluation = {
        format_eval_source_key(name): source for name, source in get_evaluation_sources(config.data).items()
    }
    yield from _check_number_columns(config, "data.columns", list_number_columns(config.data))
    for key, source in {**training, **evaluation}.items():
        if source.columns != config.data.columns:
            yield from _check_number_columns(config, f"{key}.columns", list_number_columns(source))


def _check_number_columns(config: RunConfig, key: str, columns: Sequence[str]) -> Iterator[SettingProblem]:
    """Yield the problems with the additional numeric columns of one setting.

    Args:
        config: Config of the run.
        key: Dotted key of the setting, such as ``data.columns``.
        columns: Names of the numeric columns.
    """
    packing = config.data.packing
    if columns and packing:
        yield SettingProblem(
            (key, "data.packing"),
            f"{key}: {columns[0]} has one number per record, but data.packing: "
            f"{format_value(packing)} joins several records into one sample; set data.packing to false, "
            f"or remove {columns[0]} from {key}",
        )
    if columns and config.train.loss is None:
        yield SettingProblem(
            (key,),
            f"{key}: {columns[0]} is a column of numbers, which only a custom loss can use; set "
            f"train.loss to a custom loss, or remove {columns[0]} from {key}",
        )
    for name in columns:
        if name in RESERVED_COLUMN_NAMES:
            yield SettingProblem((key,), f"{key}: {name} is reserved for model inputs; rename the column")


def check_sources(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems with the settings of data sources.

    This covers training sources, mixtures, evaluation sources and streams.
    """
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
        for key, key_in_steps in {
            "train.epochs": "train.steps",
            "train.eval_every_epochs": "train.eval_every",
            "checkpoint.every_epochs": "checkpoint.every_steps",
        }.items():
            if config.get(key) is not None:
                yield SettingProblem(
                    (key, stream),
                    f"{key}: needs the length of the data, which is unknown with {stream}; remove {key}, and "
                    f"set {key_in_steps} to a number of steps instead",
                )
        if config.data.eval_fraction and not config.data.sources:
            yield SettingProblem(
                ("data.eval_fraction", "data.stream"),
                "data.eval_fraction: cannot hold out a part of a stream (data.stream) for evaluation; set "
                "data.eval_fraction to 0, and set data.eval to separate evaluation data",
            )
    for key, source in sources.items():
        if source.roles_to_train and source.train_on not in (None, "assistant"):
            yield SettingProblem(
                (f"{key}.train_on", f"{key}.roles_to_train"),
                f"{key}.train_on: {source.train_on} does not work with {key}.roles_to_train; remove "
                f"{key}.train_on or {key}.roles_to_train",
            )
    for key in streams:
        if sources[key].max_samples is not None:
            yield SettingProblem(
                (f"{key}.max_samples", f"{key}.stream"),
                f"{key}.max_samples: does not work with {key}.stream; remove {key}.max_samples or "
                f"{key}.stream (to limit the data of a stream, use fewer files, or lower train.steps)",
            )
