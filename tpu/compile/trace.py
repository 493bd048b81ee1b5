"""Trace the graphs that a run would compile for a TPU, and write them to files.

This requires no TPU, no weights, and no memory for the model. The graphs are traced in a child
process with one virtual device per device in the slice (:mod:`portable.tpu.xla.tracing`). The
traced graphs equal the graphs in a run, including sharding annotations and donated buffers, with
one exception. If a graph has 3200 or more arguments, torch_xla combines them in a tuple in a run.
Here they remain separate.
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
    """Graph of a run before compilation.

    Attributes:
        name: Name of the graph. With one micro-batch per step, a step is one graph, ``step``. With
            several, it consists of the graphs ``micro-batch`` and ``update``. Other graphs are
            ``evaluation`` and ``generation``.
        hlo_path: File that contains a serialized ``HloModuleProto``, the program for all devices.
        num_devices: Number of devices over which the graph is partitioned.
        num_donated_parameters: Number of parameters whose buffers the results may reuse.
        trace_seconds: Tracing time in seconds.
    """

    name: str
    hlo_path: Path
    num_devices: int
    num_donated_parameters: int
    trace_seconds: float


def trace_graphs(
    config: RunConfig, num_devices: int, folder: Path, *, hardware: str = "TPU"
) -> list[TracedGraph]:
    """Trace every graph that a run would compile for a TPU slice, in a child process.

    Args:
        config: Config of the run. The data and weights need not exist. The backend is replaced with
            ``xla``, and the precision ``auto`` with ``bf16`` for a TPU or ``fp32`` for a CPU.
        num_devices: Number of devices in the slice.
        folder: Folder for the files ``<name>.hlo.pb``, which is created if it does not exist.
        hardware: ``TPU``, or ``CPU`` for virtual devices. torch_xla lowers some operations
            differently for a TPU.

    Raises:
        UserError: If the run does not support the config, or if the model cannot be traced.
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
        "XLA_HLO_DEBUG": "1",  # record the line of code of each operation
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


# Variables that would make the process a rank of a run, or disable or debug torch_xla in it.
_DROPPED_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "USE_TORCH_XLA",
    "XLA_FLAGS",
    "PT_XLA_DEBUG",
    "PT_XLA_DEBUG_LEVEL",
}
