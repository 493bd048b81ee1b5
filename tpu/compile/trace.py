"""Write the graphs that a run would compile for a TPU. Needs no TPU, no weights, and not the model's memory.

The graphs come from a process of its own with as many virtual devices as the slice has
(:mod:`portable.tpu.xla.tracing`). They are those of the run, sharding annotations and donated buffers
included. One difference is left: torch_xla passes 3200 or more arguments as one tuple, and here they stay
apart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.checks import check
from portable.tpu.compile.child_process import ask, explain_exit

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import RunConfig

ANSWER = "traced.json"


@dataclass(frozen=True)
class Traced:
    """A graph of a run, before any compiler has seen it.

    Attributes:
        name: ``step``; or with several micro-batches ``micro-batch`` and ``update``; ``evaluation``,
            ``generation``.
        path: a serialized HloModuleProto, for one program on all devices.
        devices: the number of partitions to compile it for.
        donated: parameters whose buffers the results may reuse.
        seconds: to trace it.
    """

    name: str
    path: Path
    devices: int
    donated: int
    seconds: float


def trace_graphs(config: RunConfig, devices: int, folder: Path, *, hardware: str = "TPU") -> list[Traced]:
    """Trace every graph that a run of ``config`` compiles on ``devices`` devices of one slice.

    Args:
        config: of the run. Data and weights need not exist.
        folder: is made, and gets ``<name>.hlo.pb``.
        hardware: ``TPU``, or ``CPU`` for the graphs of virtual devices. torch_xla lowers some operations in
            another way for a TPU.

    Raises:
        UserError: if the run would refuse the config, or the model cannot be traced.
    """
    resolved = {} if config.precision != "auto" else {"precision": "bf16" if hardware == "TPU" else "fp32"}
    config = config.replaced({"backend": "xla", **resolved})
    check(config, late=True)
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / ANSWER
    answer.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_RUNS}
    environment |= {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "XLA_HLO_DEBUG": "1",  # the line of code of each operation
    }
    response = ask(
        "from portable.tpu.xla.tracing import main; main()",
        answer,
        hardware,
        request=config,
        environment=environment,
        failure=lambda *ended: (
            f"{config.model.key}: the graphs of a step cannot be traced ({explain_exit(*ended)})"
        ),
    )
    return [
        Traced(graph["name"], folder / graph["file"], devices, graph["donated"], graph["seconds"])
        for graph in response["graphs"]
    ]


# What tells a process that it is a rank of a run, or that it needs no torch_xla.
_OTHER_RUNS = {"RANK", "WORLD_SIZE", "USE_TORCH_XLA", "XLA_FLAGS", "PT_XLA_DEBUG", "PT_XLA_DEBUG_LEVEL"}
