"""The record of backend ``tpu``: see :class:`portable.engines.package.TorchPackage`."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from typing import TYPE_CHECKING

from portable.config.derived import ZERO
from portable.engines.package import TorchPackage
from portable.errors import UserError, one_line, require
from portable.plugins import new_python
from portable.registry import World
from tpu import device_specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from portable.checks import Check, Several
    from portable.config import RunConfig
    from portable.planner.compiled import Compiled
    from portable.planner.device_lookup import Device
    from portable.planner.memory_model import FootprintModule
    from portable.registry import CompileTarget

_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
_NO_TPU = "backend: tpu needs a TPU, and this machine has none; use --backend cpu"
_ASK = (
    "import json, sys; from tpu.torchtpu.of_torch_tpu import launch_environment; "
    "print(json.dumps(launch_environment(int(sys.argv[1]))))"
)


class TorchTpuPackage(TorchPackage):
    """A rank a chip, with TorchTPU's process group."""

    def is_here(self) -> bool:
        return device_specs.chips() > 0 and find_spec("torch_tpu") is not None

    def local_ranks(self) -> int:
        return max(1, device_specs.chips())

    def check_ranks(self, ranks: int) -> None:
        chips = device_specs.chips()
        require(chips > 0, _NO_TPU)  # torch_tpu would end the process
        if ranks > chips:
            raise UserError(f"--nproc: {ranks} ranks need as many TPU chips, and this machine has {chips}")

    def default_precision(self, *, in_rank: bool) -> str | None:
        return "bf16"

    def devices(self) -> tuple[Device, ...]:
        return tuple(device_specs.accelerators())

    def checks(self) -> Sequence[Check | Several]:
        from portable.checks import Check

        of_zero = Check(
            "strategy backend",
            lambda c: c.strategy in ZERO,
            ": {strategy} is DeepSpeed's, which does not run on backend tpu; use full_shard",
        )
        return (of_zero, *super().checks())

    def adopt(self, config: RunConfig, world: World) -> RunConfig:
        # torch_tpu refuses inductor; its own compiler is what the default means there.
        if config.compile and config.compile_backend == "inductor":
            return config.replaced({"compile_backend": self.compiler})
        return config

    def notes(self, config: RunConfig) -> list[str]:
        if config.deepspeed.config is None:
            return []
        return ["deepspeed.config has no effect: DeepSpeed does not run on backend tpu"]

    def footprint(self) -> FootprintModule:
        from tpu.torchtpu import footprint

        return footprint

    def compile(self, config: RunConfig, target: CompileTarget) -> Compiled:
        from tpu.torchtpu.dry_run import compile_run

        return compile_run(self.adopt(config, World(target.devices)), target)

    def launch_environment(self, ranks: int) -> dict[str, str]:
        if ranks == 1 or _ADDRESSES in os.environ:
            return {}
        # In a process of its own: it loads torch_tpu, which the launcher has no use for.
        asked = subprocess.run(new_python(_ASK, str(ranks)), capture_output=True, text=True, check=False)
        lines = asked.stdout.splitlines()
        if asked.returncode or not lines:
            said = one_line((asked.stderr.strip().splitlines() or ["it ended without a word"])[-1])
            raise UserError(f"backend: tpu: torch_tpu cannot start {ranks} ranks here ({said})")
        environment: dict[str, str] = json.loads(lines[-1])
        return environment

    def open(self, local_rank: int, local_world_size: int) -> torch.device:
        require(device_specs.chips() > 0, _NO_TPU)
        ranks = os.environ.get("WORLD_SIZE", "1")
        require(
            ranks == "1" or _ADDRESSES in os.environ,
            f"backend: tpu: {ranks} ranks need {_ADDRESSES} and TORCH_TPU_TOPOLOGY, which "
            "`python -m torch.tpu.distributed` prints; set them before the launcher",
        )
        import torch

        from tpu.torchtpu import of_torch_tpu

        of_torch_tpu.load()
        return torch.device("tpu", 0)  # a rank sees its own chip alone

    def peak_flops(self, device: torch.device, precision: str) -> float | None:
        kind = device_specs.accelerator_type()
        return None if kind is None else device_specs.peak_flops(kind, precision)


TPU = TorchTpuPackage("tpu", extra="torchtpu", typical_device="v6e", compiler="tpu")
