"""The GPU of a rank, and the data sheets of GPUs."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from portable.errors import UserError
from portable.planner.device_catalog import Device

# Dense tensor-core peaks in TFLOP/s (bf16 or fp16, tf32) from NVIDIA's data sheets; half of a peak given with
# 2:4 sparsity. Matched as words of the device name, in this order.
PEAKS: tuple[tuple[str, float, float | None], ...] = (
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
    ("V100", 125.0, None),  # fp16 only
    ("T4", 65.0, None),  # fp16 only
)

MIB = 1 << 20
# As PEAKS, with memory in MiB as the driver shows it, and rates each way in GB/s: NVLink or PCIe to the other
# GPUs of a node, the node's network by GPU as cloud machines of the kind have it, and PCIe to the host; then
# the GPUs of a node. From NVIDIA's data sheets and the clouds' pages on machine types. The sheets give both
# ways together: PCIe x16 of generation 3, 4 and 5 as 32, 64 and 128 GB/s; NVLink-C2C to the host of GH200 as
# 900 GB/s, which two GPUs share in GB200. The bridges of H100 NVL join two cards: a node's collectives go
# over PCIe.
_MACHINES: tuple[tuple[str, str, int, float, float, float, int], ...] = (
    ("gb200", "GB200", 189_471, 900, 50, 225, 4),
    ("b200", "B200", 183_359, 900, 50, 64, 8),
    ("gh200", "GH200", 97_871, 450, 50, 450, 1),
    ("h200", "H200", 143_771, 450, 50, 64, 8),
    ("h100", "H100", 81_559, 450, 50, 64, 8),
    ("h100-pcie", "H100 PCIe", 81_559, 64, 25, 64, 8),
    ("h100-nvl", "H100 NVL", 95_830, 64, 25, 64, 8),
    ("h800", "H800", 81_559, 200, 50, 64, 8),
    ("h20", "H20", 97_871, 450, 50, 64, 8),
    ("a100-80", "A100", 81_920, 300, 25, 32, 8),
    ("a100-40", "A100", 40_960, 300, 12.5, 32, 8),
    ("a800", "A800", 81_920, 200, 25, 32, 8),
    ("a40", "A40", 46_068, 32, 6, 32, 8),
    ("a10g", "A10G", 23_028, 32, 6, 32, 8),
    ("a10", "A10", 23_028, 32, 6, 32, 4),
    ("l40s", "L40S", 46_068, 32, 12.5, 32, 8),
    ("l40", "L40", 46_068, 32, 6, 32, 8),
    ("l4", "L4", 23_034, 32, 6, 32, 8),
    ("v100-32", "V100", 32_768, 150, 12.5, 16, 8),
    ("v100-16", "V100", 16_384, 150, 6, 16, 8),
    ("t4", "T4", 15_360, 16, 6, 16, 4),
)
_ALSO = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "v100": "v100-16"}
_FP16_ONLY = ("V100", "T4")

# srun sets these if each task sees only its own GPUs, which are then numbered from 0.
BOUND_BY_SRUN = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


def index(local_rank: int, visible: int) -> int:
    """The CUDA index of the GPU for ``local_rank``, out of ``visible`` GPUs.

    Raises:
        UserError: if there are fewer GPUs than ranks.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1 and any(name in os.environ for name in BOUND_BY_SRUN):
        return 0
    raise UserError(
        f"--nproc: local rank {local_rank} has no GPU; this process sees {visible}; start at most one rank "
        "per GPU on each node"
    )


def accelerators() -> list[Device]:
    """The GPUs that the planner knows by name."""
    peaks = {name: (half * 1e12, None if tf32 is None else tf32 * 1e12) for name, half, tf32 in PEAKS}
    found = {}
    for name, model, mebibytes, link, network, host, per_node in _MACHINES:
        half, tf32 = peaks[model]
        # fp32 without tensor cores: about an eighth of tf32 on most GPUs.
        flops = {"fp16": half, "fp32": (tf32 or half) / 8}
        flops |= {} if model in _FP16_ONLY else {"bf16": half, "tf32": tf32 or half / 2}
        found[name] = Device(
            name, "cuda", mebibytes * MIB, flops, link * 1e9, network * 1e9, host * 1e9, per_node
        )
    return [*found.values(), *(replace(found[real], name=name) for name, real in _ALSO.items())]


def shape_multiple(capability: tuple[int, int], precision: str) -> int | None:
    """The number of elements that matrix sizes should be a multiple of, for tensor cores at full speed.

    16 bytes; 128 bytes on A100 and later server GPUs. See :mod:`portable.model.shape_hints`.

    Args:
        capability: of the GPU, such as (9, 0).
        precision: of the product; None for fp32, which does not use tensor cores.
    """
    size = {"bf16": 2, "fp16": 2, "tf32": 4}.get(precision)
    oldest = {"fp16": (7, 0)}.get(precision, (8, 0))
    if size is None or capability < oldest:
        return None
    return (128 if capability == (8, 0) or capability >= (9, 0) else 16) // size


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of the GPU called ``device_name`` for ``precision``, or None if unknown."""
    for name, half, tf32 in PEAKS:
        if re.search(rf"\b{name}\b", device_name):  # an RTX A4000 is not an A40
            teraflops = {"bf16": half, "fp16": half, "tf32": tf32}.get(precision)
            return None if teraflops is None else teraflops * 1e12
    return None
