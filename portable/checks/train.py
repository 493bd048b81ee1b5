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
            "schedule; remove train.epochs or train.steps",
        )
    if train.epochs is None and train.steps is None:
        yield SettingProblem(
            ("train.steps", "train.epochs"),
            "train.steps: is null, and so is train.epochs; set train.steps to a number of steps, or "
            "train.epochs to a number of epochs",
        )
    if train.eval_every_epochs is not None and train.eval_every is not None:
        yield SettingProblem(
            ("train.eval_every_epochs", "train.eval_every"),
            f"train.eval_every_epochs: {train.eval_every_epochs:g} and train.eval_every: "
            f"{train.eval_every} are both set; remove train.eval_every_epochs or train.eval_every",
        )
    if checkpoint.every_epochs is not None and checkpoint.every_steps is not None:
        yield SettingProblem(
            ("checkpoint.every_epochs", "checkpoint.every_steps"),
            f"checkpoint.every_epochs: {checkpoint.every_epochs:g} and checkpoint.every_steps: "
            f"{checkpoint.every_steps} are both set; remove checkpoint.every_epochs or "
            "checkpoint.every_steps",
        )


def check_loss_and_ema(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for settings that do not work with ``train.loss`` or without ``train.ema``.

    - If ``train.loss`` is set, it replaces the cross-entropy, so settings that change the
      cross-entropy are a problem.
    - If ``train.ema`` is not set, settings that use the moving average of the weights are a
      problem.
    """
    if config.train.loss is not None:
        for key in ("train.label_smoothing", "train.z_loss"):
            if config.get(key) > 0:
                yield SettingProblem(
                    (key, "train.loss"),
                    f"{format_setting_with_value(config, key)} changes the cross-entropy, which train.loss "
                    f"replaces; remove {key} or train.loss",
                )
    if config.train.ema is None:
        for key in ("train.eval_ema", "checkpoint.export_ema"):
            if config.get(key):
                yield SettingProblem(
                    (key,),
                    f"{key}: needs a moving average of the weights; set train.ema, for example to 0.999",
                )


def check_fused_backward(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with ``train.fused_backward``.

    With ``train.fused_backward``, a parameter is updated as soon as its own gradient is complete.
    The gradients of some other parameters are not known at this time. Each step must also have a
    single micro-batch. This depends on the number of ranks, so
    :func:`portable.engines.fsdp.checks.check_gradients_complete_in_one_pass` checks it.
    """
    train, key = config.train, "train.fused_backward"
    if not train.fused_backward:
        return
    if train.max_grad_norm:
        yield SettingProblem(
            (key, "train.max_grad_norm"),
            f"{key}: does not work with gradient clipping, which needs all gradients before the first "
            "update; set train.max_grad_norm to null",
        )
    if train.on_non_finite == "skip":
        yield SettingProblem(
            (key, "train.on_non_finite"),
            f"{key}: does not work with train.on_non_finite: skip, because some parameters may already be "
            "updated when a non-finite gradient occurs; set train.on_non_finite to stop",
        )
    if train.micro_batch_size == "auto":
        yield SettingProblem(
            (key, "train.micro_batch_size"),
            f"{key}: needs a single micro-batch per step, so train.micro_batch_size cannot be auto; set "
            "train.micro_batch_size to train.global_batch_size divided by the number of data-parallel ranks",
        )
    if train.optimizer not in OPTIMIZERS_PER_PARAMETER:
        yield SettingProblem(
            (key, "train.optimizer"),
            f"{key}: train.optimizer {train.optimizer} may need the gradients of several parameters at "
            f"once; set train.optimizer to one of {', '.join(OPTIMIZERS_PER_PARAMETER)}",
        )
    if config.precision == "fp16":
        yield SettingProblem(
            (key, "precision"),
            f"{key}: does not work with precision fp16, because all gradients must be checked for overflow "
            "before any parameter is updated; set precision to bf16",
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
            f"{key}: does not work with compile_mode {config.compile_mode}, which captures CUDA graphs; set "
            "compile_mode to default or max-autotune-no-cudagraphs",
        )
    if uses_zero_strategy(config):
        yield SettingProblem(
            (key, "strategy"),
            f"{key}: strategy {config.strategy} updates parameters only after the backward pass; set "
            "strategy to full_shard",
        )
    if config.backend == "xla":
        yield SettingProblem(
            (key, "backend"),
            f"{key}: is not needed on backend xla, which compiles the backward pass and the update into one "
            f"program and frees each gradient early; remove {key}",
        )


OPTIMIZERS_PER_PARAMETER = ("adamw", "adamw_8bit", "adafactor", "sgd")
"""Optimizers that update each parameter with only its own gradient and state."""


def check_master_dtype(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with ``train.master_dtype: bf16``."""
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
            f"{key}: bf16 does not work with an adapter, whose small weights stay in fp32; remove {key}",
        )
    if train.ema is not None:
        yield SettingProblem(
            (key, "train.ema"),
            f"{key}: bf16 does not work with train.ema, because the average would be rounded when it "
            f"replaces the bf16 weights; remove train.ema or {key}",
        )


def check_batch_sizes(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem if ``train.stop_after`` or ``train.micro_batch_size`` is too large.

    ``train.stop_after`` must not exceed ``train.steps``, and ``train.micro_batch_size`` must not
    exceed ``train.global_batch_size``. The remaining rules for the micro-batch size depend on the
    number of ranks, so :func:`portable.batch_plan.compute_batch_plan` checks them.
    """
    train = config.train
    if train.stop_after is not None and train.steps is not None and train.stop_after > train.steps:
        yield SettingProblem(
            ("train.stop_after", "train.steps"),
            f"train.stop_after: {train.stop_after} exceeds train.steps ({train.steps}), so the "
            "run would end earlier; lower or remove train.stop_after",
        )
    micro_batch = train.micro_batch_size
    if micro_batch != "auto" and micro_batch > train.global_batch_size:
        yield SettingProblem(
            ("train.micro_batch_size", "train.global_batch_size"),
            f"train.micro_batch_size: {micro_batch} exceeds train.global_batch_size "
            f"({train.global_batch_size}); lower train.micro_batch_size",
        )
