"""Validate the settings of adapters, quantized base models and their exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, has_adapter, is_not_default, uses_zero_strategy
from portable.registry import import_engine_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig

IA3_ADAPTER_SETTINGS = ("type", "target_modules", "modules_to_save", "base", "name_or_path", "config")
"""Settings of section ``adapter`` that apply to ``adapter.type: ia3``. All other settings are only for LoRA.
"""


def check_adapter(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each invalid setting in the section ``adapter``.

    A setting is also invalid if it has no effect or conflicts with another setting. In addition,
    ``checkpoint.export`` must suit the adapter and the base model. For example, the value
    ``merged`` requires an adapter.
    """
    adapter, export = config.adapter, config.checkpoint.export
    changed_names = [name for name in type(adapter).model_fields if is_not_default(config, f"adapter.{name}")]
    if changed_names and not has_adapter(config):
        yield SettingProblem(
            (f"adapter.{changed_names[0]}", "adapter.type"),
            f"adapter.{changed_names[0]}: has no effect without adapter.type; set adapter.type to lora, or "
            f"remove adapter.{changed_names[0]}",
        )
    if adapter.type == "ia3":
        for name in changed_names:
            if name not in IA3_ADAPTER_SETTINGS:
                yield SettingProblem(
                    (f"adapter.{name}", "adapter.type"),
                    f"adapter.{name}: applies only to LoRA, but adapter.type is ia3; remove adapter.{name}",
                )
    if changed_names and config.train.has_frozen_patterns:
        yield SettingProblem(
            ("train.trainable", "train.frozen"),
            "train.trainable, train.frozen: do not work with an adapter, which freezes all other weights; "
            "use adapter.modules_to_save and adapter.layers instead",
        )
    if adapter.config is not None and adapter.name_or_path is not None:
        yield SettingProblem(
            ("adapter.config", "adapter.name_or_path"),
            f"adapter.config: {adapter.config} has no effect if adapter.name_or_path is set, because an "
            "existing adapter has its own adapter_config.json; remove adapter.config",
        )
    if export == "merged" and not has_adapter(config):
        yield SettingProblem(
            ("checkpoint.export", "adapter.type"),
            "checkpoint.export: merged has no effect without an adapter; set checkpoint.export to true",
        )
    if export == "merged" and adapter.type is not None and config.model.name_or_path is None:
        yield SettingProblem(
            ("checkpoint.export", "model.name_or_path"),
            "checkpoint.export: merged works only with a pretrained base model; set model.name_or_path to "
            "the base model, or checkpoint.export to true",
        )
    if export == "like_base" and config.model.name_or_path is None:
        yield SettingProblem(
            ("checkpoint.export", "model.name_or_path"),
            "checkpoint.export: like_base works only with a quantized base model; set model.name_or_path to "
            "the base model, or checkpoint.export to true",
        )
    if not adapter.target_modules and not adapter.target_parameters:
        yield SettingProblem(
            ("adapter.target_modules", "adapter.target_parameters"),
            "adapter.target_modules: is empty, which is allowed only with adapter.target_parameters; list "
            "the names of modules in adapter.target_modules",
        )
    if uses_zero_strategy(config):
        yield from import_engine_module(config.strategy, "checks").check_adapter(config)
    if adapter.base in ("nf4", "int8"):
        for key in ("adapter.use_dora", "compile"):
            if config.get(key):
                yield SettingProblem(
                    (key, "adapter.base"),
                    f"{key}: does not work with adapter.base: {adapter.base}; set {key} to false, or "
                    "adapter.base to auto",
                )
