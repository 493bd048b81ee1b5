"""Checks for the section ``train``: the length of a run, its batches and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, format_setting_with_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_run_length(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the intervals that are set both in steps and in epochs, and a run without any length."""
    train, checkpoint = config.train, config.checkpoint
    if train.epochs is not None and train.steps is not None:
        yield SettingProblem(
            ("train.epochs", "train.steps"),
            f"train.epochs: {train.epochs:g} and train.steps: {train.steps} both set the length of the "
            "schedule; set only one of the two",
        )
    if train.epochs is None and train.steps is None:
        yield SettingProblem(
            ("train.steps", "train.epochs"),
            "train.steps and train.epochs are both null; set one of the two",
        )
    if train.eval_every_epochs is not None and train.eval_every is not None:
        yield SettingProblem(
            ("train.eval_every_epochs", "train.eval_every"),
            f"train.eval_every_epochs: {train.eval_every_epochs:g} and train.eval_every: "
            f"{train.eval_every} are both set; set only one of the two",
        )
    if checkpoint.every_epochs is not None and checkpoint.every_steps is not None:
        yield SettingProblem(
            ("checkpoint.every_epochs", "checkpoint.every_steps"),
            f"checkpoint.every_epochs: {checkpoint.every_epochs:g} and checkpoint.every_steps: "
            f"{checkpoint.every_steps} are both set; set only one of the two",
        )


def check_loss_and_ema(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the settings that ``train.loss`` makes ineffective, and the settings that need ``train.ema``."""
    if config.train.loss is not None:
        for key in ("train.label_smoothing", "train.z_loss"):
            if config.get(key) > 0:
                yield SettingProblem(
                    (key, "train.loss"),
                    f"{format_setting_with_value(config, key)} changes the cross-entropy, which train.loss "
                    "replaces; remove one of the two",
                )
    if config.train.ema is None:
        for key in ("train.eval_ema", "checkpoint.export_ema"):
            if config.get(key):
                yield SettingProblem(
                    (key,), f"{key}: needs an average of the weights; set train.ema, for example to 0.999"
                )


def check_batch_sizes(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems of ``train.stop_after`` and of the batch sizes.

    The number of ranks determines which micro-batch sizes are possible.
    :func:`portable.batch_plan.compute_batch_plan` checks them.
    """
    train = config.train
    if train.stop_after is not None and train.steps is not None and train.stop_after > train.steps:
        yield SettingProblem(
            ("train.stop_after", "train.steps"),
            f"train.stop_after: {train.stop_after} exceeds train.steps ({train.steps}), after which the "
            "run ends; lower or remove train.stop_after",
        )
    micro_batch = train.micro_batch_size
    if micro_batch != "auto" and micro_batch > train.global_batch_size:
        yield SettingProblem(
            ("train.micro_batch_size", "train.global_batch_size"),
            f"train.micro_batch_size: {micro_batch} exceeds train.global_batch_size "
            f"({train.global_batch_size}); lower train.micro_batch_size",
        )
