"""Validate the section ``train``: run length, batches and loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, format_setting_with_value, uses_zero_strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_run_length(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each interval set in both steps and epochs, and for a missing run length."""
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
    """Yield a problem for each setting that conflicts with ``train.loss`` or requires ``train.ema``."""
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


def check_fused_backward(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the settings that do not work with ``train.fused_backward``.

    The setting updates a parameter when the gradients of other parameters are not known yet. The number of
    ranks determines whether a step has several micro-batches.
    :func:`portable.engines.fsdp.checks.check_gradients_complete_in_one_pass` checks this.
    """
    train, key = config.train, "train.fused_backward"
    if not train.fused_backward:
        return
    if train.max_grad_norm:
        yield SettingProblem(
            (key, "train.max_grad_norm"),
            f"{key}: clipping needs the gradients of all parameters before the first update; set "
            "train.max_grad_norm to null",
        )
    if train.on_non_finite == "skip":
        yield SettingProblem(
            (key, "train.on_non_finite"),
            f"{key}: parameters may be updated before a non-finite gradient is computed; set "
            "train.on_non_finite to stop",
        )
    if train.micro_batch_size == "auto":
        yield SettingProblem(
            (key, "train.micro_batch_size"),
            f"{key}: a step must have a single micro-batch; set train.micro_batch_size to a number",
        )
    if train.optimizer not in OPTIMIZERS_PER_PARAMETER:
        yield SettingProblem(
            (key, "train.optimizer"),
            f"{key}: optimizer {train.optimizer} may need several gradients at once; use "
            f"{', '.join(OPTIMIZERS_PER_PARAMETER)}",
        )
    if config.precision == "fp16":
        yield SettingProblem(
            (key, "precision"),
            f"{key}: fp16 skips the complete update if any gradient overflows; use precision bf16",
        )
    for name in ("memory.offload_optimizer", "memory.offload_params"):
        if config.get(name) != "none":
            yield SettingProblem(
                (key, name), f"{key}: does not work with offloading; set {name} to none, or remove {key}"
            )
    for name in ("tensor_parallel_size", "expert_parallel_size"):
        if config.get(name) > 1:
            yield SettingProblem(
                (key, name), f"{key}: does not work with {name} above 1; set {name} to 1, or remove {key}"
            )
    if config.compile and config.compile_mode in ("reduce-overhead", "max-autotune"):
        yield SettingProblem(
            (key, "compile_mode"),
            f"{key}: does not work with compile_mode {config.compile_mode}, which captures CUDA graphs; use "
            "default or max-autotune-no-cudagraphs",
        )
    if uses_zero_strategy(config):
        yield SettingProblem(
            (key, "strategy"),
            f"{key}: strategy {config.strategy} updates parameters after the backward pass; use full_shard",
        )
    if config.backend == "xla":
        yield SettingProblem(
            (key, "backend"),
            f"{key}: xla compiles the backward pass and the update into one program, which frees gradients "
            f"already; remove {key}",
        )


OPTIMIZERS_PER_PARAMETER = ("adamw", "adamw_8bit", "adafactor", "sgd")
"""Optimizers whose update of a parameter depends only on this parameter, its gradient and its state."""


def check_master_dtype(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the settings that do not work with ``train.master_dtype: bf16``."""
    key, train = "train.master_dtype", config.train
    if train.master_dtype == "fp32":
        return
    if config.precision not in ("auto", "bf16"):
        yield SettingProblem(
            (key, "precision"),
            f"{key}: bf16 weights do not work with precision {config.precision}; set precision: bf16",
        )
    if train.optimizer not in ("adamw", "adamw_8bit"):
        yield SettingProblem(
            (key, "train.optimizer"),
            f"{key}: train.optimizer {train.optimizer} does not round bf16 weights stochastically; use "
            "adamw or adamw_8bit",
        )
    if uses_zero_strategy(config) or config.backend in ("xla", "tpu"):
        yield SettingProblem(
            (key, "strategy"),
            f"{key}: bf16 weights need FSDP or DDP; use strategy full_shard or no_shard, on backend cuda "
            "or cpu",
        )
    if config.adapter.type is not None:
        yield SettingProblem(
            (key, "adapter.type"),
            f"{key}: the weights of an adapter are small and stay fp32; remove {key}",
        )
    if train.ema is not None:
        yield SettingProblem(
            (key, "train.ema"),
            f"{key}: bf16 weights cannot be swapped with their average without rounding; remove train.ema",
        )


def check_batch_sizes(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield the problems with ``train.stop_after`` and with the batch sizes.

    The valid micro-batch sizes also depend on the number of ranks. They are checked by
    :func:`portable.batch_plan.compute_batch_plan`.
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
