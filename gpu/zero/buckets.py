"""The sizes of DeepSpeed's buckets and thresholds, in elements."""

from __future__ import annotations

DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
    "offload_optimizer.buffer_count": 4,
    "offload_param.buffer_count": 5,
    "offload_param.max_in_cpu": 1_000_000_000,
}
"""Of DeepSpeed 0.19 (deepspeed/runtime/zero/config.py and offload_config.py)."""

SWAPPED_BYTES = 1 << 20
"""What is smaller stays in memory (MIN_AIO_BYTES in deepspeed/runtime/swap_tensor/utils.py)."""
_ALIGNED_BYTES = 1 << 10
# Swap buffers are laid out in whole blocks: room for the last one, in elements.
_SWAP_BLOCK = 1 << 18


def aligned(elements: int, size: int) -> int:
    """Bytes that ``elements`` of ``size`` bytes take in a swap file, or in a buffer."""
    return -(-elements * size // _ALIGNED_BYTES) * _ALIGNED_BYTES


def swap_buffer(largest_parameter: int, ranks: int) -> int:
    """Elements of a buffer that parameters are swapped through: of one parameter's share each.

    Smaller ones fail in the first step, larger ones are memory lost.
    """
    share = -(-largest_parameter // ranks)
    return (share // _SWAP_BLOCK + 1) * _SWAP_BLOCK


def automatic(hidden_size: int) -> dict[str, int]:
    """What ``auto`` stands for, as in the Trainer, by the model's hidden size."""
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
