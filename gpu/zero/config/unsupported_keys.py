"""Keys that DeepSpeed knows and this trainer refuses, with the reason."""

from __future__ import annotations

import os
from importlib.util import find_spec

from gpu.zero.config.document import Document, shown
from portable.config.importing.deepspeed import NEEDED, UNSUPPORTED
from portable.errors import require


def check_switches(document: Document, strategy: str) -> None:
    """Raise UserError for a switch that the run needs, or does not support."""
    for path, reason in NEEDED.items():
        require(document.get(path) is not False, f"{document.name}: {path} false: {reason}; remove it")
    for path, harmless in UNSUPPORTED.items():
        value = document.get(path)
        require(
            value in (None, False, harmless),
            f"{document.name}: {path} is not supported; remove it",
        )
    reduce_scatter = strategy != "no_shard" and document.get("zero_optimization.reduce_scatter") is not False
    for path, harmless in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        value = document.get(path)
        require(
            value in (None, harmless) or not reduce_scatter,
            f"{document.name}: {path} {shown(value)} needs zero_optimization.reduce_scatter false under "
            "ZeRO; remove it, or set reduce_scatter to false",
        )
    if document.get("zero_optimization.stage") == 1 and document.get("bf16.enabled"):
        require(
            document.get("data_types.grad_accum_dtype") != "fp32",
            f"{document.name}: data_types.grad_accum_dtype fp32 is supported at stages 2 and 3, where "
            "gradients are sharded; use zero_optimization.stage 2",
        )


# DeepSpeed's monitors, and the package that each imports.
_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
# Switches of ZeRO++ whose kernels exist for GPUs only.
_GPU_KERNELS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


def check_installed(document: Document, device_type: str) -> None:
    """Raise UserError if a package or a GPU kernel that the JSON asks for is missing.

    Args:
        document: the JSON.
        device_type: of the run.
    """
    for monitor, package in _MONITORS.items():
        require(
            not document.get(f"{monitor}.enabled") or find_spec(package) is not None,
            f"{document.name}: {monitor}.enabled true: {package} is not installed; run: pip install "
            f"{package}, or set it to false (log.trackers works with any tracker)",
        )
    for switch in _GPU_KERNELS:
        path = f"zero_optimization.{switch}"
        require(
            not document.get(path) or device_type != "cpu",
            f"{document.name}: {path} true: DeepSpeed has quantization kernels for GPUs only; remove it, "
            "or use backend cuda",
        )


def check_one_folder(document: Document, world_size: int) -> None:
    """Raise UserError if each node would keep its part of a checkpoint to itself."""
    several_nodes = world_size > int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    path = "checkpoint.use_node_local_storage"
    require(
        not (several_nodes and document.get(path)),
        f"{document.name}: {path} true: a resume reads the whole checkpoint, so all nodes must see it; "
        "remove it, and set output_dir to shared storage",
    )
