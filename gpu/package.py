"""Describe the ``cuda`` backend to the backend-independent code.

See :class:`portable.registry.BackendPackage`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from portable.engines.package import TorchPackage
from portable.errors import UserError, require

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from portable.backend import Diagnostics
    from portable.planner.device import Device

# Variables that enable NCCL's flight recorder. Older and newer versions of torch use different names.
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDED_COLLECTIVES = "2000"


class CudaPackage(TorchPackage):
    """Description of the ``cuda`` backend: one rank per GPU, with NCCL."""

    def is_available(self) -> bool:
        """Return whether torch detects a GPU."""
        import torch

        return torch.cuda.is_available()

    def count_local_ranks(self) -> int:
        """Return the number of GPUs that are visible to this process."""
        import torch

        return torch.cuda.device_count()

    def check_ranks(self, ranks: int) -> None:
        """Check that this machine has one GPU per rank.

        Raises:
            UserError: If this machine has no GPU, or fewer GPUs than ranks.
        """
        from portable.gpu.device_specs import NO_GPU_MESSAGE

        if ranks > (devices := self.count_local_ranks()):
            raise UserError(
                f"--nproc: {ranks} needs one GPU per rank, but the number of visible GPUs is {devices}; "
                "lower --nproc, or use --backend cpu"
            )
        require(devices > 0, NO_GPU_MESSAGE)

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return the default ``precision`` for the current GPU.

        Args:
            in_rank: Whether this process is a rank. Only ranks may open a GPU.

        Returns:
            ``bf16`` if the GPU supports it natively, otherwise ``fp32``. None if this process is not a
            rank.
        """
        # A launcher must not open a GPU, because its CUDA context would exist during the entire run.
        if not in_rank:
            return None
        import torch

        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"

    def list_devices(self) -> tuple[Device, ...]:
        """Return the GPU types that the planner supports by name, with their specifications."""
        from portable.gpu.device_specs import list_gpus

        return tuple(list_gpus())

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        """Return the GPU for a rank.

        Its index is the local rank, or 0 if srun restricts each task to one GPU.
        ``local_world_size`` is ignored.

        Raises:
            UserError: If torch detects no GPU, or no GPU for this rank.
        """
        import torch

        from portable.gpu import device_specs

        require(torch.cuda.is_available(), device_specs.NO_GPU_MESSAGE)
        return torch.device("cuda", device_specs.choose_gpu_index(local_rank, torch.cuda.device_count()))

    def make_current(self, device: torch.device) -> None:
        """Make ``device`` current, and enable NCCL's flight recorder.

        The recorder is enabled through environment variables, unless the user has set them. NCCL's
        process group reads the variables at startup, so this method must be called before the group
        is created.
        """
        super().make_current(device)
        for variable in _FLIGHT_RECORDER:
            os.environ.setdefault(variable, _RECORDED_COLLECTIVES)

    def build_diagnostics(self, device: torch.device, rank: int, world_size: int) -> Diagnostics:
        """Return the diagnostic tools for a rank's GPU."""
        from portable.gpu.memory import CudaDiagnostics

        return CudaDiagnostics(device, rank, world_size)

    def build_memory_limit(self, device: torch.device, world_size: int) -> AbstractContextManager[None]:
        """Return a context manager that limits allocations to the memory available to a run."""
        from portable.gpu.memory import limit_gpu_memory

        return limit_gpu_memory(device, world_size)

    def get_shape_multiple(self, device: torch.device, precision: str) -> int | None:
        """Return the number by which matrix dimensions should be divisible.

        Tensor cores reach their full speed only if each dimension is divisible by this number of
        elements. None if the tensor cores do not support the precision.
        """
        import torch

        from portable.gpu import device_specs

        return device_specs.get_shape_multiple(torch.cuda.get_device_capability(device), precision)

    def get_peak_flops(self, device: torch.device, precision: str) -> float | None:
        """Return the peak FLOP/s of the GPU for a precision, or None if unknown."""
        import torch

        from portable.gpu import device_specs

        return device_specs.get_peak_flops(torch.cuda.get_device_name(device), precision)


CUDA = CudaPackage("cuda", runs_cuda=True)
