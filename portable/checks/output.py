"""Validate the settings of trackers, checkpoints, uploads, evaluations and the best checkpoint."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, format_setting_with_value, is_not_default
from portable.config.sources import get_training_sources, list_evaluation_source_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_tracker_names(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each tracker that is listed more than once in ``log.trackers``."""
    for name, count in Counter(config.log.trackers).items():
        if count > 1:
            yield SettingProblem(
                ("log.trackers",), f"log.trackers: {name} is listed {count} times; list the tracker once"
            )


def check_resume_counters(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem if a resume counter is set, but ``checkpoint.resume`` is not a path.

    The resume counters are ``checkpoint.resume_step`` and ``checkpoint.resume_samples``. They apply
    only if ``checkpoint.resume`` is the path of a checkpoint, of this or another program. With the
    values ``auto`` and ``never``, they have no effect.
    """
    for key in ("checkpoint.resume_step", "checkpoint.resume_samples"):
        if config.get(key) is not None and config.checkpoint.resume in ("auto", "never"):
            yield SettingProblem(
                (key, "checkpoint.resume"),
                f"{key}: {config.get(key)} applies only to a checkpoint that checkpoint.resume names, but "
                f"checkpoint.resume is {config.checkpoint.resume}; remove {key}, or set checkpoint.resume to "
                "the path of that checkpoint",
            )


def check_hub_settings(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems in the section ``hub``."""
    push = config.hub.push
    if push is not None and config.checkpoint.export is False:
        yield SettingProblem(
            ("hub.push", "checkpoint.export"),
            f"hub.push: {push} uploads the model that checkpoint.export writes, but checkpoint.export is "
            "false; set checkpoint.export to true",
        )
    for key in ("hub.repo", "hub.private"):
        if push is None and is_not_default(config, key):
            yield SettingProblem(
                (key, "hub.push"),
                f"{format_setting_with_value(config, key)} has no effect without hub.push; set hub.push to "
                f"end, or remove {key}",
            )


def check_has_evaluation(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that requires evaluation data, if the run has none.

    Also yields a problem if an early-stopping threshold is set without early stopping.
    """
    train = config.train
    if train.early_stopping_patience is None and is_not_default(config, "train.early_stopping_threshold"):
        yield SettingProblem(
            ("train.early_stopping_threshold", "train.early_stopping_patience"),
            f"train.early_stopping_threshold: {train.early_stopping_threshold:g} has no effect without "
            "train.early_stopping_patience; set train.early_stopping_patience, for example to 3",
        )
    if not list_evaluation_source_names(config.data):
        # A stream cannot hold out samples.
        is_streamed = all(source.stream for source in get_training_sources(config.data).values())
        remedy = "" if is_streamed else ", or data.eval_fraction to a fraction such as 0.05"
        for key in ("train.early_stopping_patience", "checkpoint.export_best", "checkpoint.keep_best"):
            if config.get(key):
                yield SettingProblem(
                    (key, "data.eval_fraction"),
                    f"{format_setting_with_value(config, key)} needs an evaluation, but there is no "
                    "evaluation data; set data.eval to the evaluation data, such as {source: test.jsonl}"
                    f"{remedy}",
                )


def check_best_checkpoint(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems in the settings of early stopping and of the best checkpoint."""
    train, checkpoint = config.train, config.checkpoint
    if checkpoint.export_best and checkpoint.keep_best is None:
        yield SettingProblem(
            ("checkpoint.export_best",),
            "checkpoint.export_best: needs the best checkpoint, but checkpoint.keep_best is not set; set "
            "checkpoint.keep_best to 1",
        )
    compares_evaluations = train.early_stopping_patience or checkpoint.export_best or checkpoint.keep_best
    for key in ("checkpoint.best_metric", "checkpoint.best_mode"):
        if not compares_evaluations and is_not_default(config, key):
            yield SettingProblem(
                (key, "checkpoint.keep_best", "train.early_stopping_patience"),
                f"{format_setting_with_value(config, key)} has no effect without checkpoint.keep_best or "
                f"train.early_stopping_patience; set one of these settings, or remove {key}",
            )
    evaluates = train.eval_every is not None or train.eval_every_epochs is not None
    if train.early_stopping_patience is not None and not evaluates:
        yield SettingProblem(
            ("train.early_stopping_patience",),
            f"train.early_stopping_patience: {train.early_stopping_patience} needs evaluations during "
            "training; set train.eval_every to a number of steps",
        )
