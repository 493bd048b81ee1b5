"""The record of backend ``tpu``: see :class:`portable.engines.package.TorchPackage`."""

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
_NO_TPU = "backend: tpu needs a TPU, and this machine has none; use --backend cpu"


class TorchTpuPackage(TorchPackage):
    """A rank a chip, with TorchTPU's process group."""

    def is_available(self) -> bool:
        return device_specs.count_tpu_chips() > 0 and find_spec("torch_tpu") is not None

    def count_local_ranks(self) -> int:
        return max(1, device_specs.count_tpu_chips())

    def check_ranks(self, ranks: int) -> None:
        chips = device_specs.count_tpu_chips()
        require(chips > 0, _NO_TPU)  # torch_tpu would end the process
        torch_tpu_internals.PACKAGE.check_installed("backend: tpu", "torchtpu")
        require(
            ranks <= chips,
            f"--nproc: {ranks} ranks need one TPU chip per rank, and this machine has {chips}; start at most "
            "one rank per chip",
        )

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        return "bf16"

    def list_devices(self) -> tuple[Device, ...]:
        return tuple(device_specs.list_accelerators())

    def adopt_engine_file(self, config: RunConfig, world: World) -> RunConfig:
        # torch_tpu refuses inductor; its own compiler is what the default means there.
        if config.compile and config.compile_backend == "inductor":
            return config.replaced({"compile_backend": self.default_compile_backend})
        return config

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        from portable.tpu.torchtpu.dry_run import compile_torchtpu_step

        return compile_torchtpu_step(self.adopt_engine_file(config, World(target.num_devices)), target)

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        if ranks == 1 or _ADDRESSES in os.environ:
            return {}
        # In a process of its own: it loads torch_tpu, which the launcher has no use for.
        with create_scratch_folder("portable-launch") as folder:
            answer = run_in_child_process(
                "from portable.tpu.torchtpu.torch_tpu_internals import write_launch_environment as main; "
                "main()",
                folder / "answer.json",
                request=ranks,
                environment=os.environ,
                format_failure=lambda *ended: (
                    f"backend: tpu: torch_tpu cannot start {ranks} ranks here ({describe_exit(*ended)})"
                ),
            )
        return dict(answer["environment"])

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        require(device_specs.count_tpu_chips() > 0, _NO_TPU)
        ranks = os.environ.get("WORLD_SIZE", "1")
        require(
            ranks == "1" or _ADDRESSES in os.environ,
            f"backend: tpu: {ranks} ranks need {_ADDRESSES} and TORCH_TPU_TOPOLOGY, which `python -m "
            "torch.tpu.distributed` prints; set these variables before the launcher",
        )
        import torch

        torch_tpu_internals.register_tpu_device()
        return torch.device("tpu", 0)  # a rank sees its own chip alone

    def get_peak_flops(self, device: torch.device, precision: str) -> float | None:
        return device_specs.get_peak_flops(device_specs.detect_accelerator_type(), precision)


TPU = TorchTpuPackage(
    "tpu", extra="torchtpu", typical_device="v6e", runs_zero=False, default_compile_backend="tpu"
)
