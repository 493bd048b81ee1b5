"""Measure the memory of a training step with XLA's compiler, for comparison with the plan.

After compiling a graph, torch_xla writes the memory of the graph to the file in
``PT_XLA_DEBUG_FILE``. This variable must be set before the first graph is compiled.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.model import build as models
from portable.planner.activations import build_fake_batch
from portable.planner.pass_cost import PassRequest
from portable.registry import create_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config import RunConfig

_SIZES = re.compile(
    r"Graph input size: ([\d.]+) GB.*?Graph output size: ([\d.]+) GB.*?Aliased Input size: ([\d.]+) GB"
    r".*?Intermediate tensor size: ([\d.]+) GB",
    re.DOTALL,
)
GIB = 1 << 30


def told_in(file: Path) -> dict[str, str]:
    """Return environment variables that make torch_xla report the memory of every graph to ``file``.

    The variables must be set before the first graph is compiled.
    """
    # The compiler for CPUs drops barriers, and then merges recomputed operations with the original ones.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_disable_hlo_passes=cse_barrier_expander"
    return {
        "PT_XLA_DEBUG_LEVEL": "1",
        "PT_XLA_DEBUG_FILE": str(file),
        # Compile and report a graph for each case, even if two cases have it in common.
        "XLA_COMPILATION_CACHE_SIZE": "1",
        "XLA_FLAGS": flags.strip(),
    }


@dataclass(frozen=True)
class Graph:
    """Sizes of one compiled graph on one device in bytes, rounded to about a KiB."""

    arguments: int
    results: int
    aliased: int
    """Bytes of results that reuse the buffer of an argument."""
    temporary: int

    @property
    def beside_arguments(self) -> int:
        return self.temporary + self.results - self.aliased


def graph_of(compiled: Callable[[], object]) -> Graph:
    """Call ``compiled``, and return the reported sizes of the graph that it compiles.

    Raises:
        AssertionError: If the call does not compile exactly one graph.
    """
    log = Path(os.environ["PT_XLA_DEBUG_FILE"])
    before = log.stat().st_size if log.exists() else 0
    compiled()
    found = _SIZES.findall(log.read_text("utf-8")[before:])
    assert len(found) == 1, f"{len(found)} graphs, where there should be one"
    return Graph(*(int(float(size) * GIB) for size in found[0]))


@dataclass(frozen=True)
class Step:
    """Memory of a step on one device, in bytes."""

    resident: int
    """Bytes that exist between graphs, which are the arguments of the update."""
    in_passes: int
    """Additional bytes while the graph of a micro-batch runs."""
    in_update: int
    """Additional bytes while the graph of the update runs."""

    @property
    def peak(self) -> int:
        return self.resident + max(self.in_passes, self.in_update)


def measure(config: RunConfig) -> Step:
    """Compile the two graphs of a step on this process's devices, run them once, and return their memory."""
    from portable.tpu.xla.torch_xla_internals import xla

    backend = create_backend("xla")
    devices = backend.devices_per_rank
    backend.start()
    try:
        model = models.build_model_on_meta(models.load_model_config(config.model), config.model)
        micro_batch = int(config.train.micro_batch_size) * devices
        request = PassRequest.from_config(config, micro_batch=micro_batch, compute="cast", on_gpu=False)
        engine: Any = backend.build_engine(model, config)
        batch = backend.copy_to_device(build_fake_batch(model, request))
        valid = backend.sum_host_numbers(micro_batch * config.data.seq_len)
        losses = []

        def passes() -> None:
            losses.append(engine.accumulate_gradients(batch, valid, is_last_micro_batch=False).values[0])
            xla.wait([])

        def update() -> None:
            engine.take_optimizer_step(1e-4, 1.0, losses[-1])
            xla.wait([])

        in_passes, in_update = graph_of(passes), graph_of(update)
    finally:
        backend.stop()
    return Step(in_update.arguments, in_passes.beside_arguments, in_update.beside_arguments)
