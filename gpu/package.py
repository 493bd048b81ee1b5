"""The records of backends ``cpu`` and ``cuda``: see :class:`portable.registry.BackendPackage`.

Imports neither torch nor DeepSpeed at module level: the rules read a record whenever a config is built.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gpu import memory_advice
from portable.config.derived import ZERO
from portable.errors import UserError, require
from portable.registry import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.backend import Backend
    from portable.checks import Check, Several
    from portable.config import RunConfig
    from portable.planner.compiled import Compiled
    from portable.planner.device_lookup import Device
    from portable.planner.memory_model import FootprintModule
    from portable.registry import CompileTarget

_RANKS_PER_CORE = 4


@dataclass(frozen=True)
class TorchPackage:
    """What the two backends on torch.distributed have in common."""

    name: str
    extra: str | None = None
    typical_device: str = "h100"
    runs_cuda: bool = False

    def world(self, ranks: int) -> World:
        return World(max(ranks, int(os.environ.get("WORLD_SIZE", "1"))))

    def checks(self) -> Sequence[Check | Several]:
        from gpu import checks  # which knows optimizers, and so torch

        return (*checks.CHECKS, *(checks.OF_CPU if self.name == "cpu" else ()))

    def adopt(self, config: RunConfig, world: World) -> RunConfig:
        if config.deepspeed.config is None:
            return config
        from gpu.zero import engine as zero  # DeepSpeed takes seconds to import

        return zero.adopt(config, self.name, world.ranks)

    def check(self, config: RunConfig, world: World) -> None:
        from gpu.common import compiling
        from gpu.fsdp.sharding import shard_group_size

        require(
            config.model.attention != "flash_attention_2" or _installed("flash_attn"),
            "model.attention: flash_attention_2 needs the package flash-attn, which is not installed "
            "(pip install "
            "flash-attn --no-build-isolation); use sdpa",
        )
        compiling.check(config, world.ranks)
        if config.strategy in ZERO:
            from gpu.zero import engine as zero

            zero.check(config, self.name)
        # The ranks that this process will start are all on this node.
        shard_group_size(config, world.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", world.ranks)))

    def notes(self, config: RunConfig) -> list[str]:
        if config.deepspeed.config is None:
            return []
        from gpu.zero import engine as zero  # DeepSpeed takes seconds to import

        return zero.notes(config, self.name)

    def remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        memory = config.memory
        sharded = "zero3" if config.strategy in ZERO else "full_shard"
        if memory.activation_checkpointing != "full":
            yield "memory.activation_checkpointing full"
        if memory.loss_chunk_tokens == 0:
            yield "memory.loss_chunk_tokens auto"
        if config.strategy != sharded and ranks > 1:
            yield f"strategy {sharded}"
        if memory.offload_optimizer == "none" and memory.offload_params == "none":
            strategy = " with full_shard" if config.strategy == "no_shard" else ""
            yield f"memory.offload_optimizer cpu{strategy}"
        if memory.offload_params == "none":
            yield "memory.offload_params cpu" + ("" if config.strategy == sharded else f" with {sharded}")

    def host_memory_advice(self, config: RunConfig) -> str:
        return memory_advice.advice(config)

    def footprint(self) -> FootprintModule:
        from gpu import footprint

        return footprint

    def compile(self, config: RunConfig, target: CompileTarget) -> Compiled:
        raise UserError(
            f"--compile: backend {self.name} has no compiler that works without its device; name a TPU with "
            "--device"
        )

    def create(self) -> Backend:
        from gpu.backend import TorchBackend

        return TorchBackend(self.name)


class CpuPackage(TorchPackage):
    """CPU ranks with gloo."""

    def is_here(self) -> bool:
        return True

    def local_ranks(self) -> int:
        return 1

    def check_ranks(self, ranks: int) -> None:
        cores = os.cpu_count() or 1
        if ranks > _RANKS_PER_CORE * cores:
            raise UserError(
                f"--nproc: {ranks} ranks on {cores} cores would only wait for each other; "
                f"use at most {_RANKS_PER_CORE * cores}"
            )

    def default_precision(self, *, in_rank: bool) -> str | None:
        from gpu.device_specs import cpu_multiplies_bf16

        return "bf16" if cpu_multiplies_bf16() else "fp32"

    def devices(self) -> tuple[Device, ...]:
        return ()


class CudaPackage(TorchPackage):
    """A rank a GPU, with NCCL."""

    def is_here(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def local_ranks(self) -> int:
        import torch

        return torch.cuda.device_count()

    def check_ranks(self, ranks: int) -> None:
        from gpu.device_specs import NO_GPU

        if ranks > (devices := self.local_ranks()):
            raise UserError(f"--nproc: {ranks} ranks need as many GPUs, and this machine has {devices}")
        require(devices > 0, NO_GPU)

    def default_precision(self, *, in_rank: bool) -> str | None:
        if not in_rank:  # a launcher must not open a GPU: its context would stay there throughout the run
            return None
        import torch

        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"

    def devices(self) -> tuple[Device, ...]:
        from gpu.device_specs import accelerators

        return tuple(accelerators())


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # imported, and without a description of itself
        return False


CPU = CpuPackage("cpu")
CUDA = CudaPackage("cuda", runs_cuda=True)
