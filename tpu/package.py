"""The record of backend ``xla``: see :class:`portable.registry.BackendPackage`.

Imports neither torch nor torch_xla at module level: the rules read a record whenever a config is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.rules import ZERO, ConflictError, nvidia_only
from portable.errors import UserError, require, unsupported
from portable.registry import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.planner.compiled import Compiled
    from portable.planner.device_lookup import Device
    from portable.planner.memory_model import FootprintModule
    from portable.registry import CompileTarget

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""``xla.compute_dtype`` -> ``precision``."""
_ROWS = 512
"""Tokens of attention at a time. The scores of twice as many may fit into a core's vector memory."""


class XlaPackage:
    """One process a host, which drives all its devices."""

    name = "xla"
    extra = "xla"
    typical_device = "v5e"
    runs_cuda = False

    def is_here(self) -> bool:
        from tpu.device_specs import uses_tpu

        return uses_tpu()

    def local_ranks(self) -> int:
        return 1

    def check_ranks(self, ranks: int) -> None:
        if ranks > 1:
            raise UserError(
                "--nproc: XLA runs one process a host, which drives all its devices; leave it out"
            )

    def world(self, ranks: int) -> World:
        from tpu import runtime

        runtime.start()  # only the runtime knows the hosts of a slice
        return World(runtime.hosts(), runtime.local_devices())

    def default_precision(self, *, in_rank: bool) -> str | None:
        from tpu import runtime

        return "bf16" if runtime.on_tpu() else "fp32"

    def defaults(self, config: RunConfig) -> dict[str, Any]:
        if config.precision != "auto" or config.xla.compute_dtype is None:
            return {}
        return {"precision": PRECISIONS[config.xla.compute_dtype]}

    def conflicts(self, config: RunConfig) -> Iterator[ConflictError]:
        yield from nvidia_only(config)
        if config.strategy in ZERO:
            yield ConflictError(
                ("strategy", "backend"),
                f"strategy {config.strategy} is DeepSpeed's, which does not run on backend xla; use "
                "full_shard",
            )
        chunk = config.memory.loss_chunk_tokens
        if isinstance(chunk, int) and chunk > 0:
            yield ConflictError(
                ("memory.loss_chunk_tokens", "backend"),
                f"memory.loss_chunk_tokens {chunk} does not work with backend xla, where logits exist once, "
                "in the compute type; set it to auto",
            )
        computed = config.xla.compute_dtype
        if computed is not None and config.precision not in ("auto", PRECISIONS[computed]):
            yield ConflictError(
                ("xla.compute_dtype", "precision"),
                f"xla.compute_dtype {computed} contradicts precision {config.precision}; remove one of the "
                "two",
            )
        recompute = config.memory.activation_checkpointing
        if config.xla.xla_fsdp_grad_ckpt is False and recompute != "none":
            yield ConflictError(
                ("xla.xla_fsdp_grad_ckpt", "memory.activation_checkpointing"),
                f"xla.xla_fsdp_grad_ckpt false contradicts memory.activation_checkpointing {recompute}; "
                "remove one of the two",
            )

    def adopt(self, config: RunConfig, world: World) -> RunConfig:
        return config  # a DeepSpeed JSON is ignored here, so that one file serves all backends

    def check(self, config: RunConfig, world: World) -> None:
        from tpu import runtime
        from tpu.checks import unsupported_settings
        from tpu.layout import Layout

        unsupported(unsupported_settings(config))
        require(
            config.xla.compilation_cache in ("auto", "none") or runtime.on_tpu(),
            "xla.compilation_cache: graphs for virtual devices cannot be cached; set it to none",
        )
        Layout(config, world.devices)

    def notes(self, config: RunConfig) -> list[str]:
        if config.deepspeed.config is None:
            return []
        return ["deepspeed.config has no effect: DeepSpeed does not run on backend xla"]

    def remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        # Nothing can be offloaded, and the logits exist once, in the compute type.
        if config.memory.activation_checkpointing != "full":
            yield "memory.activation_checkpointing full"
        by_rows = config.xla.attention_rows is not None or config.model.attention == "eager"
        if config.data.longest > 2 * _ROWS and not by_rows:
            yield f"xla.attention_rows {_ROWS}"

    def host_memory_advice(self, config: RunConfig) -> str:
        return "to use less, set data.num_workers or train.micro_batch_size lower"

    def footprint(self) -> FootprintModule:
        from tpu import footprint

        return footprint

    def devices(self) -> tuple[Device, ...]:
        from tpu.device_specs import accelerators

        return tuple(accelerators())

    def compile(self, config: RunConfig, target: CompileTarget) -> Compiled:
        from tpu.compile.compiler import compile_run

        return compile_run(config, target)

    def create(self) -> Backend:
        from tpu.backend import XlaBackend

        return XlaBackend(self.name)


XLA = XlaPackage()
