"""Merge a DeepSpeed JSON into the configuration for ``deepspeed.initialize``, and note ignored values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.origins import format_short_value
from portable.gpu.zero.buckets import compute_auto_bucket_sizes
from portable.gpu.zero.config.document import CONFIG_KEY
from portable.gpu.zero.config.schema import filter_auto_values
from portable.importing.deepspeed import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config import RunConfig
    from portable.gpu.zero.config.document import DeepSpeedDocument


# The run sets these keys. gpu/zero/optimizer.py has already checked the optimizer, which DeepSpeed would do
# otherwise.
_OVERRIDDEN_KEYS = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")


def build_merged_config(
    base: Mapping[str, Any], document: DeepSpeedDocument, hidden_size: int
) -> dict[str, Any]:
    """Return the configuration for DeepSpeed: values of the JSON merged over values of the run.

    Args:
        base: Configuration from the settings of the run.
        document: JSON, already reconciled with the settings.
        hidden_size: Hidden size of the model, which determines bucket sizes that are ``auto``.
    """
    passed_values = {
        k: v for k, v in document.imported.values.get(CONFIG_KEY, {}).items() if k not in _OVERRIDDEN_KEYS
    }
    zero_section = passed_values.get("zero_optimization", {})
    sizes = {
        key: size
        for key, size in compute_auto_bucket_sizes(hidden_size).items()
        if zero_section.get(key) == AUTO
    }
    return _merge_sections(
        _merge_sections(base, filter_auto_values(passed_values)), {"zero_optimization": sizes}
    )


def _merge_sections(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``values``, recursively in each section."""
    result = dict(base)
    for key, value in values.items():
        base_section = result.get(key)
        result[key] = (
            _merge_sections(base_section, value)
            if isinstance(value, dict) and isinstance(base_section, dict)
            else value
        )
    return result


VALUES_SET_BY_SWAPPING = {
    "zero_optimization.offload_param.buffer_size": "the size of the largest parameter's shard",
    "zero_optimization.stage3_max_reuse_distance": "0, because parameters that stay gathered would "
    "occupy all swap buffers",
}
"""Reason for each value that the run sets if parameters are swapped to disk."""


def build_document_notes(config: RunConfig, document: DeepSpeedDocument) -> list[str]:
    """Return notes on the JSON for the user, one line per note.

    Args:
        config: Config of the run, with the values of the JSON.
        document: JSON of the run.
    """
    swapped = config.memory.offload_params == "nvme"
    changed = [
        f"{path} {format_short_value(document.get_value(path))} has no effect: the run uses {why}"
        for path, why in VALUES_SET_BY_SWAPPING.items()
        if swapped and document.get_value(path) is not None
    ]
    return [*document.imported.notes, *(f"{document.name}: {notice}" for notice in changed)]
