"""Compute the sizes of DeepSpeed's buckets and buffers."""

from __future__ import annotations

DEEPSPEED_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
    "offload_optimizer.buffer_count": 4,
    "offload_param.buffer_count": 5,
    "offload_param.max_in_cpu": 1_000_000_000,
}
"""Default values in the section ``zero_optimization`` of DeepSpeed 0.19, keyed by setting. Buffer
counts are numbers of buffers, and all other values are numbers of elements. Source:
``deepspeed/runtime/zero/config.py`` and ``offload_config.py``.
"""

MIN_SWAPPED_BYTES = 1 << 20
"""Size in bytes of the smallest tensor that is swapped to disk. Smaller tensors stay in memory
(``MIN_AIO_BYTES`` in ``deepspeed/runtime/swap_tensor/utils.py``).
"""
_ALIGNED_BYTES = 1 << 10
# Number of elements per block. The size of a swap buffer is a multiple of it.
_SWAP_BLOCK = 1 << 18


def compute_aligned_bytes(num_elements: int, element_bytes: int) -> int:
    """Compute the aligned size of a tensor in a swap file or swap buffer, in bytes.

    The size is rounded up to a multiple of 1024 bytes.

    Args:
        num_elements: Number of elements.
        element_bytes: Bytes per element.
    """
    return -(-num_elements * element_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def compute_swap_buffer_elements(largest_parameter_elements: int, num_ranks: int) -> int:
    """Compute the size of a swap buffer that can contain the shard of any parameter.

    The result is the smallest multiple of 2**18 elements that is larger than the largest shard. If
    a buffer were smaller than the largest shard, the first step would fail. A larger buffer would
    waste memory.

    Args:
        largest_parameter_elements: Number of elements in the largest parameter.
        num_ranks: Number of ranks over which each parameter is sharded.
    """
    share = -(-largest_parameter_elements // num_ranks)
    return (share // _SWAP_BLOCK + 1) * _SWAP_BLOCK


def compute_auto_bucket_sizes(hidden_size: int) -> dict[str, int]:
    """Compute the bucket sizes that replace the value ``auto``, as in the Hugging Face Trainer.

    Args:
        hidden_size: Hidden size of the model.

    Returns:
        Sizes in elements, keyed by setting in the section ``zero_optimization``.
    """
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
