"""Combinations of settings that save device memory in addition to the choice of a strategy.

docs/strategies.md (Reduce memory use) lists their costs. ``portable-plan`` and
``portable-train init`` try them if the run only fits with offloading, or does not fit at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.checks import is_valid_with
from portable.registry import load_backend_package

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config import RunConfig

_OFFLOADED = {"memory.offload_activations": True, "memory.activation_checkpointing": "full"}
_ROUNDED = {"train.master_dtype": "bf16"}
_COSTS = {
    "memory.offload_activations": "memory.offload_activations keeps the inputs of layers in host memory. It "
    "does not change the result.",
    "train.master_dtype": "train.master_dtype bf16 changes the result: weights, gradients, and moments are "
    "stored in bf16 and rounded stochastically.",
    "train.max_grad_norm": "train.fused_backward requires train.max_grad_norm null, which changes the "
    "result: gradients are not clipped.",
}
"""Sentence about the cost of each setting, keyed by setting."""


def list_memory_savings(config: RunConfig, num_devices: int) -> list[dict[str, Any]]:
    """List combinations of settings that save device memory, in the order in which to try them.

    The combinations consist of ``train.fused_backward``, ``memory.offload_activations``,
    ``train.master_dtype: bf16``, and the settings that are required for them.
    ``train.fused_backward`` is included only on a single device without an adapter.

    The list has two parts. The combinations in the first part do not change the training result,
    and the combinations in the second part do. Each part begins with the fastest combination, and
    ends with the combination that needs the least memory.

    Args:
        config: Config of the run, with the backend of the planned device.
        num_devices: Number of devices.

    Returns:
        The new values of each combination, keyed by setting. Values that the config already has are
        omitted, and so are combinations that the config does not support. Empty if the backend does
        not use CUDA.
    """
    if not load_backend_package(config.backend).runs_cuda:
        return []
    fused = _build_fused_settings(config) if num_devices == 1 and config.adapter.type is None else {}
    exact = [fused, _OFFLOADED, fused | _OFFLOADED] if not is_result_changed(fused) else [_OFFLOADED]
    combinations = [*exact, _ROUNDED, _ROUNDED | _OFFLOADED, _ROUNDED | _OFFLOADED | fused]
    savings: list[dict[str, Any]] = []
    for combination in combinations:
        settings = {key: value for key, value in combination.items() if config.get(key) != value}
        if settings and settings not in savings and is_valid_with(config, settings):
            savings.append(settings)
    return savings


def is_result_changed(settings: Mapping[str, Any]) -> bool:
    """Return whether a combination of new settings changes the losses and weights of a run.

    The function checks whether the combination contains ``train.master_dtype`` or
    ``train.max_grad_norm``. Other settings that change the result are not recognized, because
    :func:`list_memory_savings` does not return them.

    Args:
        settings: Values keyed by setting, such as an entry of the list that
            :func:`list_memory_savings` returns.
    """
    return bool({"train.master_dtype", "train.max_grad_norm"} & settings.keys())


def describe_saving_costs(settings: Mapping[str, Any]) -> list[str]:
    """Describe the costs of memory-saving settings, one text per setting.

    Args:
        settings: Combination from :func:`list_memory_savings`: new values, keyed by setting.
            Settings without a noteworthy cost are skipped.
    """
    return [sentence for key, sentence in _COSTS.items() if key in settings]


def _build_fused_settings(config: RunConfig) -> dict[str, Any]:
    """Build the settings that enable ``train.fused_backward`` on one device.

    The result also contains the settings that ``train.fused_backward`` requires: a single
    micro-batch per step, and no gradient clipping.
    """
    settings: dict[str, Any] = {
        "train.fused_backward": True,
        "train.micro_batch_size": config.train.global_batch_size,
    }
    if config.train.max_grad_norm:
        settings["train.max_grad_norm"] = None
    return settings
