"""Describe the ``tpu`` backend. See :class:`portable.engines.package.TorchPackage`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from portable.engines.package import TorchPackage
from portable.errors import require
from portable.registry import World
from portable.temporary_folder import create_scratch_folder
from portable.tpu import device_specs
from portable.tpu.compile.child_process import describe_exit, run_in_child_process
from portable.tpu.torchtpu import torch_tpu_internals

if TYPE_CHECKING:
    import torch

    from portable.config import RunConfig
    from portable.planner.compiled_graph import CompiledRun
    from portable.planner.device import Device
    from portable.registry import CompileTarget

_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
_NO_TPU = "backend: tpu needs a TPU, but this machine has none; use --backend cpu"


class TorchTpuPackage(TorchPackage):
    """Description of the ``tpu`` backend: one rank per chip, with TorchTPU's process group."""

    def is_available(self) -> bool:
        """Return whether this machine has a TPU chip and the package torch_tpu."""
        return device_specs.count_tpu_chips() > 0 and find_spec("torch_tpu") is not None

    def count_local_ranks(self) -> int:
        """Return the number of TPU chips in this machine, or 1 if it has none."""
        return max(1, device_specs.count_tpu_chips())

    def check_ranks(self, ranks: int) -> None:
        """Check that torch_tpu is installed and that this machine has one TPU chip per rank."""
        chips = device_specs.count_tpu_chips()
        require(chips > 0, _NO_TPU)  # otherwise torch_tpu would end the process
        torch_tpu_internals.PACKAGE.check_installed("backend", "torchtpu")
        require(
            ranks <= chips,
            f"--nproc: {ranks} ranks need one TPU chip per rank, but this machine has {chips}; start at "
            "most one rank per chip",
        )

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return ``bf16``, both in the launcher and in a rank."""
        return "bf16"

    def list_devices(self) -> tuple[Device, ...]:
        """Return the TPU types that ``portable-plan --device`` accepts for this backend."""
        return tuple(device_specs.list_accelerators())

    def adopt_engine_file(self, config: RunConfig, world: World) -> RunConfig:
        """Replace the default of ``compile_backend`` with TorchTPU's compiler.

        TorchTPU does not have an engine file, such as a DeepSpeed JSON, so no file is read. The
        config is returned unchanged if ``compile`` is not set, or if ``compile_backend`` is not the
        default.
        """
        # torch_tpu refuses inductor, which is the default of the setting, so use the compiler of torch_tpu.
        if config.compile and config.compile_backend == "inductor":
            return config.replaced({"compile_backend": self.default_compile_backend})
        return config

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        """Compile every program in a training step for TPUs, on a machine without a TPU."""
        from portable.tpu.torchtpu.dry_run import compile_torchtpu_step

        return compile_torchtpu_step(self.adopt_engine_file(config, World(target.num_devices)), target)

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        """Return torch_tpu's environment variables, which contain the rank ports and the chip topology.

        Empty for a single rank, or if the variables are already set. Otherwise, a child process computes
        them, because the launcher does not load torch_tpu.

        Raises:
            UserError: If torch_tpu cannot start this number of ranks on this machine.
        """
        if ranks == 1 or _ADDRESSES in os.environ:
            return {}
        with create_scratch_folder("portable-launch") as folder:
            answer = run_in_child_process(
                "from portable.tpu.torchtpu.torch_tpu_internals import write_launch_environment as main; "
                "main()",
                folder / "answer.json",
                request=ranks,
                environment=os.environ,
                format_failure=lambda *ended: (
                    f"backend: tpu: torch_tpu cannot start {ranks} ranks on this machine "
                    f"({describe_exit(*ended)})"
                ),
            )
        return dict(answer["environment"])

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        """Register torch's device ``tpu``, and return this rank's chip, which is always device 0.

        Raises:
            UserError: If this machine has no TPU, or if there are several ranks but the launcher has not
                set torch_tpu's environment variables.
        """
        require(device_specs.count_tpu_chips() > 0, _NO_TPU)
        ranks = os.environ.get("WORLD_SIZE", "1")
        require(
            ranks == "1" or _ADDRESSES in os.environ,
            f"backend: tpu: {ranks} ranks need {_ADDRESSES} and TORCH_TPU_TOPOLOGY, which `python -m "
            "torch.tpu.distributed` prints; set these variables before you start the launcher",
        )
        import torch

        torch_tpu_internals.register_tpu_device()
        return torch.device("tpu", 0)  # each rank sees only its own chip

    def get_peak_flops(self, device: torch.device, precision: str) -> float | None:
        """Return the peak FLOP/s of a chip for a precision, or None if unknown."""
        return device_specs.get_peak_flops(device_specs.detect_accelerator_type(), precision)


TPU = TorchTpuPackage(
    "tpu", extra="torchtpu", typical_device="v6e", runs_zero=False, default_compile_backend="tpu"
)
