"""Merge the user's DeepSpeed JSON into the DeepSpeed config of a run, and report ignored values."""

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


# Ignore these keys in the JSON, because the run sets them. They control how DeepSpeed checks the optimizer,
# but gpu/zero/optimizer.py has already checked it.
_OVERRIDDEN_KEYS = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")


def build_merged_config(
    base: Mapping[str, Any], document: DeepSpeedDocument, hidden_size: int
) -> dict[str, Any]:
    """Build DeepSpeed's configuration from the run settings and the DeepSpeed JSON.

    Values in the JSON have priority. A value ``auto`` is not copied, so the value in ``base`` is
    kept, with two exceptions: bucket sizes in the section ``zero_optimization`` are computed from
    ``hidden_size``, and ``auto`` for ``data_types.keep_in_fp32_modules`` is copied. The keys
    ``zero_allow_untested_optimizer`` and ``zero_force_ds_cpu_optimizer`` in the JSON are ignored.

    Args:
        base: Configuration built from the run settings.
        document: DeepSpeed JSON. Its values that have an equivalent run setting are already in the
            run config. Its other values are merged into ``base``.
        hidden_size: Hidden size of the model. It determines the bucket sizes that are ``auto`` in
            the JSON.
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
    """Return a copy of ``base``, recursively updated with ``values``."""
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
"""Keys that the run sets if parameters are swapped to disk, each with a description of its value."""


def build_document_notes(config: RunConfig, document: DeepSpeedDocument) -> list[str]:
    """Build notes about values in the DeepSpeed JSON that are ignored or have a different meaning here.

    Args:
        config: Config of the run, after it has adopted the values from the JSON.
        document: DeepSpeed JSON of the run.

    Returns:
        One-line notes.
    """
    swapped = config.memory.offload_params == "nvme"
    changed = [
        f"{path} {format_short_value(document.get_value(path))} has no effect: the run uses {why}"
        for path, why in VALUES_SET_BY_SWAPPING.items()
        if swapped and document.get_value(path) is not None
    ]
    return [*document.imported.notes, *(f"{document.name}: {notice}" for notice in changed)]
