"""Validate the section ``model``, and reject URLs in settings that accept only Hub ids or local paths.

These settings may be in any section. Examples are ``data.tokenizer`` (Hub id or local folder) and
``data.cache_dir`` (local folder).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.rules import SettingProblem, uses_zero_strategy
from portable.converters.storage.path_or_url import is_url
from portable.converters.storage.store_errors import parse_hub_page_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig


def check_paths_are_local(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that is a URL but requires a Hub id or a local folder."""
    for key in ("model.name_or_path", "data.tokenizer"):
        if is_url(config.get(key)):
            name = parse_hub_page_url(config.get(key))
            remedy = "copy the files to a local folder" if name is None else f"use the name {name}"
            yield SettingProblem((key,), f"{key}: must be a hub id or a local folder, not a URL; {remedy}")
    for key in ("data.cache_dir", "checkpoint.staging_dir", "memory.nvme_path"):
        if is_url(config.get(key)):
            reason = f"{key}: must be a local folder, not a URL; specify a folder on a disk of this machine"
            yield SettingProblem((key,), reason)


def check_model_source(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem unless the config specifies exactly one source of the model.

    The source is either ``model.name_or_path`` or a ``model.config`` with a ``model_type``.
    """
    name, model_config = config.model.name_or_path, config.model.config or {}
    if name is not None and "model_type" in model_config:
        yield SettingProblem(
            ("model.config", "model.name_or_path"),
            "model.config: contains model_type, but model.name_or_path is set; remove model_type to change "
            "other settings of the pretrained model, or remove model.name_or_path to train a new model",
        )
    if name is None and config.model.config is None:
        yield SettingProblem(
            ("model.config", "model.name_or_path"),
            "model.config: is null, and so is model.name_or_path; set model.name_or_path to a pretrained "
            "model, or model.config to the settings of a new model",
        )
    if name is None and not isinstance(model_config.get("model_type"), str):
        yield SettingProblem(
            ("model.config.model_type",),
            "model.config.model_type: is missing; set model.config.model_type to a model type of "
            "transformers, such as llama or bert",
        )


def check_attention_precision(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem if flash attention is combined with a 32-bit precision."""
    if "flash" in config.model.attention and config.precision in ("fp32", "tf32"):
        yield SettingProblem(
            ("model.attention", "precision"),
            f"model.attention: {config.model.attention} computes in 16 bits, but the precision is "
            f"{config.precision}; set model.attention to sdpa, or precision to bf16",
        )


def check_fp8(config: RunConfig) -> Iterator[SettingProblem]:
    """Yield a problem for each setting that does not work with ``fp8``."""
    if config.fp8 == "none":
        return
    if config.precision not in ("auto", "bf16"):
        yield SettingProblem(
            ("fp8", "precision"),
            f"fp8: {config.fp8} does not work with precision {config.precision}; set precision: bf16",
        )
    if uses_zero_strategy(config) or config.backend in ("xla", "tpu"):
        yield SettingProblem(
            ("fp8", "strategy"),
            f"fp8: {config.fp8} needs FSDP or DDP; use strategy full_shard or no_shard, on backend "
            "cuda or cpu",
        )
    if config.adapter.type is not None:
        yield SettingProblem(
            ("fp8", "adapter.type"),
            f"fp8: {config.fp8} does not work with an adapter, because torchao's fp8 layers would compute "
            "gradients of the frozen weights; set fp8: none",
        )
    if config.tensor_parallel_size > 1:
        yield SettingProblem(
            ("fp8", "tensor_parallel_size"),
            f"fp8: {config.fp8} does not work with tensor parallelism, because the tensor-parallel plans of "
            "transformers cannot shard torchao's fp8 layers; set fp8: none or tensor_parallel_size: 1",
        )
