"""The sizes of DeepSpeed's buckets and thresholds, in elements."""

from __future__ import annotations

DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""Of DeepSpeed 0.19 (deepspeed/runtime/zero/config.py)."""


def automatic(hidden_size: int) -> dict[str, int]:
    """What ``auto`` stands for, as in the Trainer, by the model's hidden size."""
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
