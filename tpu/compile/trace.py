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

from portable.checks import check_config
from portable.tpu.compile.child_process import describe_exit, run_in_child_process

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import RunConfig

ANSWER_FILE = "traced.json"


@dataclass(frozen=True)
class TracedGraph:
    """A graph of a run, before any compiler has seen it.

    Attributes:
        name: ``step``; or with several micro-batches ``micro-batch`` and ``update``; ``evaluation``,
            ``generation``.
        hlo_path: a serialized HloModuleProto, for one program on all devices.
        num_devices: the number of partitions to compile it for.
        num_donated_parameters: parameters whose buffers the results may reuse.
        trace_seconds: to trace it.
    """

    name: str
    hlo_path: Path
    num_devices: int
    num_donated_parameters: int
    trace_seconds: float


def trace_graphs(
    config: RunConfig, num_devices: int, folder: Path, *, hardware: str = "TPU"
) -> list[TracedGraph]:
    """Trace every graph that a run of ``config`` compiles on ``num_devices`` devices of one slice.

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
    check_config(config, is_resolved=True)
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / ANSWER_FILE
    answer.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED_VARIABLES}
    environment |= {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(num_devices),
        "XLA_HLO_DEBUG": "1",  # the line of code of each operation
    }
    response = run_in_child_process(
        "from portable.tpu.xla.tracing import main; main()",
        answer,
        hardware,
        request=config,
        environment=environment,
        format_failure=lambda *ended: (
            f"{config.model.setting_key}: the graphs of a step cannot be traced ({describe_exit(*ended)})"
        ),
    )
    return [
        TracedGraph(graph["name"], folder / graph["file"], num_devices, graph["donated"], graph["seconds"])
        for graph in response["graphs"]
    ]


# What tells a process that it is a rank of a run, or that it needs no torch_xla.
_DROPPED_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "USE_TORCH_XLA",
    "XLA_FLAGS",
    "PT_XLA_DEBUG",
    "PT_XLA_DEBUG_LEVEL",
}
