"""Run training steps of the ``tpu`` backend on a machine without a TPU, using a simulated chip.

``portable-plan --backend tpu --compile`` starts this module in a child process, which acts as the
first rank. The other ranks only exist as entries in a store
(:func:`portable.tpu.torchtpu.torch_tpu_internals.start_simulated_process_group`). The child process
takes a few training steps. libtpu compiles each program in these steps, including collectives, and
:mod:`portable.tpu.torchtpu.dry_chip` counts the memory of the programs and their buffers.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from portable.checks import check_config
from portable.engines.backend import TorchBackend
from portable.engines.torch_device import TorchDevice
from portable.errors import UserError, require, to_one_line
from portable.loop import train_step
from portable.model.parameters import get_state_tensors
from portable.model.weight_sources import ComputedTensor
from portable.planner.compiled_graph import CollectiveStatistics, CompiledGraph, CompiledRun, LargeValue
from portable.temporary_folder import create_scratch_folder
from portable.tpu.compile.child_process import (
    describe_exit,
    read_request,
    run_in_child_process,
    write_answer_and_exit,
)
from portable.tpu.compile.compiler import NO_LARGE_VALUES, find_libtpu, merge_compile_answers
from portable.tpu.compile.libtpu import Libtpu, LibtpuError
from portable.tpu.compile.slices import TpuSlice, select_tpu_slice
from portable.tpu.compile.traced_step import build_step_inputs
from portable.tpu.torchtpu import torch_tpu_internals
from portable.tpu.torchtpu.dry_chip import DryChip

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import RunConfig
    from portable.registry import CompileTarget
    from portable.tpu.compile.libtpu import TpuTopology

_NOTE = (
    "one graph represents the {programs} programs of a step, which libtpu compiled one by one; its "
    "memory is the peak memory of their buffers"
)


class DryRunRequest(NamedTuple):
    """Request to compile the programs of a training step for a TPU slice.

    :func:`compile_torchtpu_step` sends the request to :func:`main` in the child process.
    """

    config: RunConfig
    tpu_slice: TpuSlice
    libtpu_path: Path
    large_value_elements: int
    """Minimum number of elements of reported values."""


def compile_torchtpu_step(config: RunConfig, target: CompileTarget) -> CompiledRun:
    """Compile the programs of a training step in a child process.

    The child process runs the step on a simulated chip. See
    :meth:`portable.registry.BackendPackage.compile_graphs` for the arguments. The result describes
    all programs in the step as one graph. If a program does not fit into device memory, the result
    contains no graph, and its ``problems`` give the reason.

    Raises:
        UserError: If the backend or the simulated chip does not support a setting, or if the step
            does not compile for a reason other than memory. The option ``--only-memory`` is not
            supported. With several devices, only the optimizers ``adamw``, ``adafactor`` and
            ``sgd`` are supported.
    """
    # The other optimizers send parts of different sizes. torch_tpu's ranks exchange these sizes before each
    # collective, but the simulation has no other ranks.
    require(
        config.train.optimizer in ("adamw", "adafactor", "sgd") or target.num_devices == 1,
        f"--compile: train.optimizer {config.train.optimizer} cannot be simulated without the other ranks; "
        "use adamw, adafactor or sgd, or remove --compile",
    )
    require(
        not target.stops_after_memory_report,
        "--only-memory: is not supported with backend tpu, which compiles many small programs; remove "
        "--only-memory",
    )
    check_config(config, is_resolved=True)
    tpu_slice = select_tpu_slice(target.device, target.num_devices, target.topology)
    library = find_libtpu()
    with create_scratch_folder("portable-compile") as folder:
        answer = run_in_child_process(
            "from portable.tpu.torchtpu.dry_run import main; main()",
            folder / "answer.json",
            request=DryRunRequest(
                config, tpu_slice, library.path, target.min_listed_elements or NO_LARGE_VALUES
            ),
            environment=tpu_slice.build_compiler_environment(dict(os.environ))
            | _build_launch_environment(tpu_slice),
            format_failure=lambda *ended: (
                f"--compile: a step of {config.model.setting_key} cannot be traced ({describe_exit(*ended)})"
            ),
        )
    compiled = merge_compile_answers(tpu_slice, library, [answer])
    return (
        replace(compiled, notes=(_NOTE.format(programs=answer["programs"]),)) if compiled.graphs else compiled
    )


def _build_launch_environment(tpu_slice: TpuSlice) -> dict[str, str]:
    """Build the environment variables that torch_tpu expects a launcher to set for rank 0."""
    topology_sides = [*tpu_slice.chip_shape.split("x"), "1", "1"][:3]
    addresses = [f"localhost:{8000 + rank}" for rank in range(tpu_slice.num_devices)]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(tpu_slice.num_devices),
        "LOCAL_WORLD_SIZE": str(min(tpu_slice.num_devices, 4)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(addresses),
        "TORCH_TPU_TOPOLOGY": ",".join(topology_sides),
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",
        "PYTHONWARNINGS": "ignore",
    }


def main() -> None:
    """Run training steps on the simulated chip, and write the answer for the parent process.

    This is the main function of the child process. The answer contains either the statistics of one
    step or an error message. The statistics combine all programs of the step into one graph.
    """
    request: DryRunRequest = read_request()
    config, tpu_slice = request.config, request.tpu_slice
    os.environ["TPU_LIBRARY_PATH"] = str(request.libtpu_path)
    topology = Libtpu(request.libtpu_path).open_topology(tpu_slice.libtpu_name, **tpu_slice.topology_options)
    answer = {"compiler": topology.compiler_version, "hbm_bytes": tpu_slice.get_hbm_bytes(topology)}

    def refuse(error: LibtpuError) -> None:
        graph = {"name": "a program", "error": str(error), "code": error.status_code, "place": ""}
        write_answer_and_exit(answer | {"graphs": [graph]})

    try:
        chip = DryChip(topology, request.large_value_elements, refuse)
        step = run_dry_step(config, topology, chip)
        answer |= {"graphs": [asdict(step)], "programs": len(chip.programs)}
    except Exception as error:  # do not let Python exit, because threads of the runtime still call it
        reason = to_one_line(str(error).strip().splitlines()[0])
        if not isinstance(error, UserError):
            reason = f"--compile: a step of {config.model.setting_key} cannot be traced ({reason})"
        answer = {"refused": reason}
    # Exit immediately, because threads of the runtime would wait for the other ranks.
    write_answer_and_exit(answer)


class DryDevice(TorchDevice):
    """Torch device of the simulated TPU chip."""

    name = "tpu"

    def open_device(self, local_rank: int, local_world_size: int) -> torch.device:
        """Register torch's device ``tpu``, and return it.

        This also makes torch_tpu release the GIL while it waits for the device. Otherwise, it would
        wait forever, because the threads that complete the device's work need the GIL. Both
        arguments are ignored, because the index of the device is always 0.
        """
        torch_tpu_internals.register_tpu_device()
        torch_tpu_internals.wait_without_gil()
        return torch.device("tpu", 0)


def run_dry_step(config: RunConfig, topology: TpuTopology, chip: DryChip) -> CompiledGraph:
    """Run the first rank's training steps on the simulated chip.

    Four steps are run, with 1, 1, 1 and 2 micro-batches. The first two steps create the optimizer
    state and DDP's buckets. In the last two steps, the chip counts the runs of each program. The
    difference between the two counts is the work of one micro-batch, and is used to extrapolate to
    all micro-batches of a complete step. If a complete step has one micro-batch, the last step also
    has one micro-batch.

    Args:
        config: Config of the run.
        topology: TPU slice with one device per rank.
        chip: Simulated chip. It must already have replaced the functions in libtpu's function table
            that require a real chip.

    Returns:
        All programs in one step, combined into one graph.
    """
    start = time.monotonic()
    backend = TorchBackend(DryDevice())
    if backend.world_size > 1:
        torch_tpu_internals.start_simulated_process_group(topology)
    config, model, plan, batch = build_step_inputs(
        config, backend, sequence_parts=config.context_parallel_size
    )
    engine = backend.build_engine(model, config)
    zero = torch.zeros(())
    shapes = {name: tensor.shape for name, tensor in get_state_tensors(model).items()}
    engine.load_weights(
        {name: ComputedTensor.from_tensor(zero.expand(shape)) for name, shape in shapes.items()}
    )
    run_counts = []
    # The first step creates the optimizer state, and the second step DDP's buckets. The difference between
    # the last two steps is the work of one micro-batch.
    for micro_batches in (1, 1, 1, min(2, plan.accumulation_steps)):
        runs = Counter(chip.run_counts)
        train_step(
            backend,
            engine,
            iter([batch] * micro_batches),
            batch_plan=replace(
                plan, global_batch_size=plan.micro_batch_size * micro_batches * plan.world_size
            ),
            first_sample=0,
            learning_rate=config.train.learning_rate,
            max_grad_norm=config.train.max_grad_norm or 0.0,
        )
        torch.accelerator.synchronize()
        run_counts.append(chip.run_counts - runs)
    runs_of_one, runs_of_two = run_counts[-2:]
    repeated = plan.accumulation_steps - 1
    runs = Counter(
        {
            key: runs_of_one[key] + repeated * (runs_of_two[key] - runs_of_one[key])
            for key in runs_of_two | runs_of_one
        }
    )
    return _combine_programs_into_graph(chip, runs, round(time.monotonic() - start, 2))


def _combine_programs_into_graph(chip: DryChip, run_counts: Counter[int], seconds: float) -> CompiledGraph:
    """Combine all programs in a step into one graph.

    The memory of the graph is the peak memory of the chip. FLOPs, accessed bytes, collectives,
    custom calls and large values are summed over all program runs in the step. Code sizes are
    summed once per program, including programs that do not run in the step.

    Args:
        chip: Simulated chip that ran the programs.
        run_counts: Number of runs per step of each program, keyed by program handle. Programs that
            are missing have no runs.
        seconds: Tracing and compilation time in seconds.
    """
    graphs = [(program.graph, run_counts[handle]) for handle, program in chip.programs.items()]
    values: Counter[LargeValue] = Counter()
    calls: Counter[str] = Counter()
    collectives: dict[str, CollectiveStatistics] = {}
    for graph, times in graphs:
        for value in graph.large_values:
            values[replace(value, count=1)] += value.count * times
        for target, count in graph.custom_calls.items():
            calls[target] += count * times
        for kind, collective in graph.collectives.items():
            collectives[kind] = collectives.get(kind, CollectiveStatistics()) + collective * times
    return CompiledGraph(
        name="step",
        argument_bytes=chip.memory.live_bytes,
        output_bytes=0,
        alias_bytes=0,
        temporary_bytes=chip.memory.peak_bytes - chip.memory.live_bytes,
        code_bytes=sum(graph.code_bytes for graph, _ in graphs),
        flops=sum(graph.flops * times for graph, times in graphs),
        bytes_accessed=sum(graph.bytes_accessed * times for graph, times in graphs),
        compile_seconds=seconds,
        collectives=collectives,
        large_values=tuple(
            replace(value, count=count)
            for value, count in sorted(values.items(), key=lambda item: -item[0].bytes * item[1])
            if count
        ),
        custom_calls=dict(+calls),
    )
