"""Describe the ``xla`` backend. See :class:`portable.registry.BackendPackage`.

This module does not import torch or torch_xla at module level, because config checks read the
description whenever a config is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.errors import UserError, require
from portable.registry import BackendPackage, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.config.rules import SettingProblem
    from portable.planner.compiled_graph import CompiledRun
    from portable.planner.device import Device
    from portable.planner.memory_model import FootprintModule
    from portable.registry import CompileTarget

_ATTENTION_ROWS = 512
"""Suggested value of ``xla.attention_rows``, the number of query tokens that attention processes at
a time.

It is only suggested for sequences with more than twice this number of tokens. The scores of shorter
sequences may fit into the vector memory of a core.
"""


class XlaPackage(BackendPackage):
    """Description of the ``xla`` backend: one process per host, which controls all devices of the host."""

    name = "xla"
    extra = "xla"
    typical_device = "v5e"
    runs_cuda = runs_zero = False

    def is_available(self) -> bool:
        """Return whether the runtime would use a TPU on this host.

        If ``PJRT_DEVICE`` is set, the result is True if its value is ``TPU``. Otherwise, the result
        is True if the host has a TPU among its PCI devices. Whether torch_xla is installed is not
        checked.
        """
        from portable.tpu.device_specs import is_tpu_selected

        return is_tpu_selected()

    def count_local_ranks(self) -> int:
        """Return 1, because there is one rank per host."""
        return 1

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError if more than one rank is requested."""
        if ranks > 1:
            raise UserError(
                "--nproc: XLA runs one process per host, which drives all its devices; remove --nproc"
            )

    def get_launch_environment(self, ranks: int) -> dict[str, str]:
        """Return an empty dict, because there is only one rank per host."""
        return {}

    def get_world(self, ranks: int) -> World:
        """Return the number of ranks (one per host in the slice) and of devices per host.

        This starts torch_xla's runtime.

        Args:
            ranks: Number of ranks that this process will start. Ignored, because only the runtime
                can count the hosts of a slice.
        """
        from portable.tpu.xla import runtime

        runtime.start_xla_runtime()  # only the runtime can count the hosts of a slice
        return World(runtime.count_hosts(), runtime.count_local_devices())

    def choose_default_precision(self, *, in_rank: bool) -> str | None:
        """Return ``bf16`` on a TPU, and ``fp32`` on virtual CPU devices. This imports torch_xla.

        Args:
            in_rank: Whether this process is a rank. Ignored, because the precision does not depend
                on it.
        """
        from portable.tpu.xla import runtime

        return "bf16" if runtime.is_on_tpu() else "fp32"

    def find_problems(self, config: RunConfig, *, late: bool) -> Iterator[SettingProblem]:
        """Yield a problem for each setting that XLA does not support.

        Args:
            config: Config of a run on XLA.
            late: Whether all defaults of the config, such as ``auto``, have been replaced with
                their final values. If False, the checks that need these values are skipped.
        """
        from portable.tpu.xla import checks

        return checks.find_problems(config, late=late)

    def adopt_engine_file(self, config: RunConfig, world: World) -> RunConfig:
        """Return the config unchanged.

        A DeepSpeed JSON is ignored, so that the same config works with all backends.
        """
        return config

    def check_config(self, config: RunConfig, world: World) -> None:
        """Check the graph cache, the metrics, and the division of the devices into groups.

        The dims of the parameters are not checked.

        Raises:
            UserError: In the following cases:

                - A graph cache is used with virtual devices.
                - Metrics of generated text are used with several hosts.
                - The devices cannot be divided into shard groups, a shard group cannot be divided
                  into groups of ``context_parallel_size`` devices, or a hybrid strategy needs
                  ``fsdp.shard_group_size``.
                - A pattern in ``xla.sharding`` is not a valid regular expression.
        """
        from portable.tpu.xla import checks, runtime
        from portable.tpu.xla.layout import MeshLayout

        require(
            config.xla.compilation_cache in ("auto", "none") or runtime.is_on_tpu(),
            "xla.compilation_cache: graphs for virtual CPU devices cannot be cached; set "
            "xla.compilation_cache to none",
        )
        checks.check_text_metrics(config, num_hosts=world.ranks)
        MeshLayout(config, world.devices)

    def build_notes(self, config: RunConfig) -> list[str]:
        """Return a note if the config sets a DeepSpeed JSON, which has no effect."""
        if config.deepspeed.config is None:
            return []
        return ["deepspeed.config: has no effect, because DeepSpeed does not run on backend xla"]

    def iter_memory_remedies(self, config: RunConfig, ranks: int) -> Iterator[str]:
        """Yield settings that would reduce the device memory of a run.

        Each result is a setting and its value, like ``memory.activation_checkpointing full``.
        Settings that are already used, or that would not help, are omitted.
        """
        # Do not suggest offloading, which XLA does not support, or a chunked loss. The latter would not help,
        # because the logits exist only once, in the compute dtype.
        if config.memory.activation_checkpointing != "full":
            yield "memory.activation_checkpointing full"
        by_rows = config.xla.attention_rows is not None or config.model.attention == "eager"
        if config.data.max_sequence_length > 2 * _ATTENTION_ROWS and not by_rows:
            yield f"xla.attention_rows {_ATTENTION_ROWS}"

    def get_host_memory_advice(self, config: RunConfig) -> str:
        """Return advice for an error message: which settings to lower to use less host memory."""
        return "to use less, lower data.num_workers or train.micro_batch_size"

    def load_footprint(self) -> FootprintModule:
        """Import and return the module that estimates a run's device memory and communication.

        This does not import torch_xla.
        """
        from portable.tpu.xla import footprint

        return footprint

    def list_devices(self) -> tuple[Device, ...]:
        """Return the TPU devices that ``portable-plan --device`` accepts, one per generation."""
        from portable.tpu.device_specs import list_accelerators

        return tuple(list_accelerators())

    def compile_graphs(self, config: RunConfig, target: CompileTarget) -> CompiledRun:
        """Compile every graph of a run for a TPU slice, on a machine without a TPU."""
        from portable.tpu.compile.compiler import compile_xla_graphs

        return compile_xla_graphs(config, target)

    def create_backend(self) -> Backend:
        """Create the backend of this process.

        This imports torch_xla, starts its runtime, and registers kernels for ``aten::dropout`` and
        ``aten::histc`` on XLA in this process.
        """
        from portable.tpu.xla.backend import XlaBackend

        return XlaBackend(self.name)


XLA = XlaPackage()
