"""Choose the GPU for each rank, and look up GPU specifications from data sheets."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TypeVar

from portable.errors import UserError
from portable.planner.device import KEPT_FOR_COLLECTIVES, NOT_MEASURED, Device, ReachedUtilization

Value = TypeVar("Value")

# Dense tensor-core peaks (bf16 or fp16 with fp32 accumulation, and TF32) from the vendors' data sheets and
# white papers. Peaks that are specified with 2:4 sparsity are divided by 2. The order matters, because the
# first name that occurs as complete words in the device name is used.
GPU_PEAK_TERAFLOPS: tuple[tuple[str, float, float | None], ...] = (
    ("GB200", 2500.0, 1250.0),
    ("B200", 2250.0, 1100.0),
    ("GH200", 989.4, 494.7),
    ("H200", 989.4, 494.7),
    ("H100 PCIe", 756.0, 378.0),
    ("H100 NVL", 835.0, 417.5),
    ("H100", 989.4, 494.7),
    ("H800", 989.4, 494.7),
    ("H20", 148.0, 74.0),
    ("A100", 312.0, 156.0),
    ("A800", 312.0, 156.0),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 62.5),
    ("A40", 149.7, 74.8),
    ("L40S", 362.0, 183.0),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 60.0),
    ("RTX A6000", 154.8, 77.4),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("MI300X", 1307.4, 653.7),
    ("V100", 125.0, None),  # fp16 only
    ("T4", 65.0, None),  # fp16 only
)
"""Name to search for in the device name, dense peak in TFLOP/s for bf16 and fp16, and dense peak in
TFLOP/s for TF32. The last is None if the tensor cores support only fp16.
"""

NO_GPU_MESSAGE = "backend: cuda needs a GPU, but torch finds none; use --backend cpu"

MIB = 1 << 20
# Name, memory in MiB as the driver reports it, and number of GPUs per node.
_GPU_MEMORY_AND_NODES: tuple[tuple[str, int, int], ...] = (
    ("gb200", 189_471, 4),
    ("b200", 183_359, 8),
    ("gh200", 97_871, 1),
    ("h200", 143_771, 8),
    ("h100", 81_559, 8),
    ("h100-pcie", 81_559, 8),
    ("h100-nvl", 95_830, 8),
    ("h800", 81_559, 8),
    ("h20", 97_871, 8),
    ("a100-80", 81_920, 8),
    ("a100-40", 40_960, 8),
    ("a800", 81_920, 8),
    ("a40", 46_068, 8),
    ("a10g", 23_028, 8),
    ("a10", 23_028, 4),
    ("l40s", 46_068, 8),
    ("l40", 46_068, 8),
    ("l4", 23_034, 8),
    ("a6000", 49_140, 4),
    ("6000-ada", 49_140, 4),
    ("5090", 32_607, 4),
    ("4090", 24_564, 4),
    ("3090", 24_576, 4),
    ("mi300x", 196_592, 8),
    ("v100-32", 32_768, 8),
    ("v100-16", 16_384, 8),
    ("t4", 15_360, 4),
)
# Model FLOPs utilization. The low end is from complete runs, the high end from tables of short runs. The
# sources are in tests/portable/test_planner.py.
_A100 = ReachedUtilization((0.42, 0.58), "A100: Llama 2, TinyLlama, torchtitan")
_H100 = ReachedUtilization((0.31, 0.39), "H100: Llama 3, SmolLM3, torchtitan")
_REACHED_MFU = {"a100": _A100, "a800": _A100, "h100": _H100, "h800": _H100, "h200": _H100, "gh200": _H100}
# Bytes per second in one direction over NVLink, or PCIe without NVLink, from the data sheets.
_LINK_BYTES_PER_SECOND = {
    "gb200": 9e11, "b200": 9e11, "gh200": 4.5e11, "h200": 4.5e11, "h100-pcie": 6.4e10, "h100-nvl": 3e11,
    "h100": 4.5e11, "h800": 2e11, "h20": 4.5e11, "a100": 3e11, "a800": 2e11, "mi300x": 4.48e11,
    "v100": 1.5e11, "5090": 6.4e10, "a40": 3.2e10, "a10": 3.2e10, "l40": 3.2e10, "l4": 3.2e10,
    "a6000": 3.2e10, "6000-ada": 3.2e10, "4090": 3.2e10, "3090": 3.2e10, "t4": 1.6e10,
}  # fmt: skip
_ALIASES = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "v100": "v100-16"}
_FP16_ONLY = ("v100-32", "v100-16", "t4")

# Variables that srun sets if each task sees only its own GPUs. In every task, these GPUs are numbered from 0.
SRUN_BINDING_VARIABLES = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


def choose_gpu_index(local_rank: int, num_visible_gpus: int) -> int:
    """Choose the CUDA device index for a local rank.

    The index equals the local rank, or is 0 if srun restricts each task to one GPU. This is assumed
    if exactly one GPU is visible and a variable in :data:`SRUN_BINDING_VARIABLES` is set.

    Args:
        local_rank: Index of the rank among the ranks of this node.
        num_visible_gpus: Number of GPUs that are visible to this process.

    Raises:
        UserError: If no GPU is available for the rank.
    """
    if local_rank < num_visible_gpus:
        return local_rank
    if num_visible_gpus == 1 and any(name in os.environ for name in SRUN_BINDING_VARIABLES):
        return 0
    raise UserError(
        f"--nproc: local rank {local_rank} has no GPU, because the number of GPUs that this process sees is "
        f"{num_visible_gpus}; start at most one rank per GPU on each node"
    )


def list_gpus() -> list[Device]:
    """List the GPUs with built-in specifications. Aliases such as ``a100`` come last."""
    devices = {
        name: Device(
            name,
            ("cuda",),
            mebibytes * MIB,
            name not in _FP16_ONLY,
            per_node,
            KEPT_FOR_COLLECTIVES,
            _list_peak_flops(name),
            _look_up_by_prefix(_REACHED_MFU, name) or NOT_MEASURED,
            _look_up_by_prefix(_LINK_BYTES_PER_SECOND, name),
        )
        for name, mebibytes, per_node in _GPU_MEMORY_AND_NODES
    }
    return [*devices.values(), *(replace(devices[real], name=name) for name, real in _ALIASES.items())]


def _look_up_by_prefix(table: dict[str, Value], name: str) -> Value | None:
    """Look up a GPU in a table whose keys are prefixes of GPU names.

    Returns:
        The value for the longest matching prefix, or None if no prefix matches.
    """
    keys = sorted(filter(name.startswith, table), key=len)
    return table[keys[-1]] if keys else None


def _list_peak_flops(name: str) -> tuple[tuple[str, float], ...]:
    """List the dense peak FLOP/s of a GPU for each precision.

    Args:
        name: Planner's name for the GPU, such as ``a100-80``.

    Returns:
        Pairs of precision and peak. Precisions without tensor core support are omitted. Empty if the
        GPU is not in :data:`GPU_PEAK_TERAFLOPS`.
    """
    for card, half, tf32 in GPU_PEAK_TERAFLOPS:
        key = card.lower().removeprefix("rtx ").replace(" ", "-")
        if name == key or name.startswith(f"{key}-"):
            peaks = {"bf16": None if name in _FP16_ONLY else half, "fp16": half, "tf32": tf32}
            return tuple((precision, tera * 1e12) for precision, tera in peaks.items() if tera is not None)
    return ()


def get_shape_multiple(capability: tuple[int, int], precision: str) -> int | None:
    """Return the number of elements to which matrix dimensions should be aligned.

    For full tensor core speed, a dimension should be a multiple of 16 bytes, or of 128 bytes with
    compute capability 8.0 (A100), or 9.0 and later. See :mod:`portable.model.flops`.

    Args:
        capability: Compute capability of the GPU, such as (9, 0).
        precision: Precision of the matrix product, such as ``bf16``.

    Returns:
        The number of elements. None if the tensor cores do not support the precision, such as fp32.
    """
    size = {"bf16": 2, "fp16": 2, "tf32": 4}.get(precision)
    oldest = {"fp16": (7, 0)}.get(precision, (8, 0))
    if size is None or capability < oldest:
        return None
    return (128 if capability == (8, 0) or capability >= (9, 0) else 16) // size


def get_peak_flops(device_name: str, precision: str) -> float | None:
    """Return the dense peak FLOP/s of a GPU for a precision.

    Args:
        device_name: Name of the GPU from ``torch.cuda.get_device_name``.
        precision: ``bf16``, ``fp16`` or ``tf32``. The result is None for any other precision.

    Returns:
        The peak. None if the GPU is unknown, or if its tensor cores do not support the precision.
    """
    for name, half, tf32 in GPU_PEAK_TERAFLOPS:
        if re.search(rf"\b{name}\b", device_name):  # an RTX A4000 is not an A40
            # The tensor cores before Ampere support neither bf16 nor TF32.
            bf16 = None if tf32 is None else half
            teraflops = {"bf16": bf16, "fp16": half, "tf32": tf32}.get(precision)
            return None if teraflops is None else teraflops * 1e12
    return None
