"""A training step of backend ``tpu`` without a TPU: the engine of a run, on chips that compute nothing.

``portable-plan --backend tpu --compile`` starts it in a process of its own, which stands for the first rank.
The other ranks exist as answers of a store (:class:`OtherRanks`). Each program of two steps, collectives
included, goes to libtpu's compiler; :mod:`tpu.torchtpu.dry_chip` counts what they leave in a chip's memory.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from portable.checks import check
from portable.errors import UserError, one_line, require
from portable.planner.compiled import GRAPH, Collective, Compiled, CompiledGraph, LargeValue
from portable.temporary_folder import scratch_folder
from tpu.compile.child import answers, ask, last_words
from tpu.compile.compiler import does_not_fit, exhausted, find_library, named
from tpu.compile.libtpu import CompileError, Libtpu
from tpu.compile.report import analyse
from tpu.compile.slices import Slice, find_slice
from tpu.torchtpu.dry_chip import DryChip

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from portable.config import RunConfig
    from portable.registry import CompileTarget
    from tpu.compile.libtpu import Topology

_NO_VALUES = 1 << 62
_NOTE = (
    "one graph stands for the {programs} programs of a step, which libtpu compiled one by one; its memory is "
    "the most that their buffers took"
)


def compile_run(config: RunConfig, target: CompileTarget) -> Compiled:
    """See :meth:`portable.registry.BackendPackage.compile`."""
    require(
        config.memory.offload_params == "none" and config.memory.offload_optimizer == "none",
        "--compile: on backend tpu it cannot plan host memory, which memory.offload_* uses; leave it out",
    )
    require(
        config.strategy in ("full_shard", "shard_grad_op"),
        f"--compile: strategy {config.strategy} needs all ranks to run; plan full_shard or shard_grad_op, or "
        "leave it out",
    )
    for key, alone in (
        ("context_parallel_size", config.context_parallel_size == 1),
        ("train.optimizer", config.train.optimizer in ("adamw", "adafactor", "sgd")),
    ):
        require(
            alone or target.devices == 1,
            f"--compile: {key} {config.get(key)} needs all ranks to run; leave it out",
        )
    require(not target.only_memory, "--only-memory: backend tpu compiles many small programs; leave it out")
    check(config, late=True)
    wanted = find_slice(target.device, target.devices, target.topology)
    library = find_library()
    with scratch_folder("portable-compile") as folder:
        found = ask(
            "from tpu.torchtpu.dry_run import main; main()",
            folder / "answer.json",
            given=(config, wanted, library.path, target.large),
            environment=wanted.environment(dict(os.environ)) | _launch_environment(wanted),
            failure=lambda *ended: (
                f"--compile: a step of {config.model.key} cannot be traced ({last_words(*ended)})"
            ),
        )
    if "error" in found:
        if not does_not_fit(found["error"], found["code"]):
            raise UserError(f"--compile: libtpu refuses a program: {one_line(found['error'])}")
        problem = f"a program does not fit: {exhausted(found['error'])}"
        return Compiled(wanted.name, named(library, found["compiler"]), found["hbm_bytes"], (), (problem,))
    return Compiled(
        wanted.name,
        named(library, found["compiler"]),
        found["hbm_bytes"],
        (GRAPH.validate_python(found["graph"]),),
        notes=(_NOTE.format(programs=found["programs"]),),
        host_bytes=found["host_bytes"],
    )


def _launch_environment(wanted: Slice) -> dict[str, str]:
    """What torch_tpu asks of the launcher of a rank."""
    sides = [*wanted.chips.split("x"), "1", "1"][:3]
    addresses = [f"localhost:{8000 + rank}" for rank in range(wanted.devices)]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(wanted.devices),
        "LOCAL_WORLD_SIZE": str(min(wanted.devices, 4)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(addresses),
        "TORCH_TPU_TOPOLOGY": ",".join(sides),
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",
        "PYTHONWARNINGS": "ignore",
    }


def main() -> None:
    answer = Path(sys.argv[1])
    config, wanted, library, large = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the parent)
    os.environ["TPU_LIBRARY_PATH"] = str(library)
    topology = Libtpu(library).topology(wanted.name, **wanted.options)

    def end(found: dict[str, Any]) -> None:
        found |= {"compiler": topology.compiler, "hbm_bytes": wanted.hbm(topology)}
        answers(answer, found)
        os._exit(0)  # the runtime's threads would wait for the other ranks

    def refuse(error: CompileError) -> None:
        end({"error": str(error), "code": error.code})

    try:
        end(dry_run(config, topology, DryChip(topology, refuse), large))
    except UserError as error:
        end({"refused": one_line(error)})
    except Exception as error:  # not past here: Python would end beneath threads that call it
        text = one_line(str(error).strip().splitlines()[0])
        end({"refused": f"--compile: a step of {config.model.key} cannot be traced ({text})"})


def dry_run(config: RunConfig, topology: Topology, chip: DryChip, large: int) -> dict[str, Any]:
    """Two steps of the first rank.

    Args:
        config: of the run.
        topology: a device of which is each rank's.
        chip: is in libtpu's table already.
        large: elements from which a value is listed; 0 for none.
    """
    import torch
    import torch.distributed as dist

    from portable.adapters.adapter import training_model
    from portable.adapters.settings import resolved
    from portable.batch_plan import batch_plan
    from portable.engines.backend import TorchBackend
    from portable.loop import train_step
    from portable.model import build as models
    from portable.model.parameters import state_tensors
    from portable.optim.sharded import local
    from portable.planner.activations import fake_batch
    from portable.planner.passes import Request
    from tpu.torchtpu import of_torch_tpu
    from tpu.torchtpu.package import TorchTpuPackage

    class DryPackage(TorchTpuPackage):
        def open(self, local_rank: int, local_world_size: int) -> torch.device:
            of_torch_tpu.load()
            of_torch_tpu.wait_without_the_lock()
            return torch.device("tpu", 0)

    start = time.monotonic()
    backend = TorchBackend(DryPackage("tpu", compiler="tpu"))
    if backend.world_size > 1:
        others = of_torch_tpu.other_ranks(topology)
        dist.init_process_group("tpu:tpu_dist", store=others, rank=0, world_size=backend.world_size)
    model_config = models.model_config(config.model)
    models.check_length(model_config, config)
    config = resolved(config)
    model = training_model(model_config, config)
    plan = batch_plan(config, backend)
    request = Request.of(config, micro_batch=plan.micro_batch_size, compute="cast", on_gpu=True)
    batch = fake_batch(model, request)
    engine = backend.prepare(model, config)
    engine.load_weights({name: Zeros(tuple(tensor.shape)) for name, tensor in state_tensors(model).items()})
    last = list(engine.model.parameters())[-1]
    more = plan.accumulation_steps > 1
    counts = []
    for micro_batches in (1, 1, 2) if more else (1, 1):  # the first makes the optimizer's state
        runs = chip.runs()
        train_step(
            backend,
            engine,
            iter([batch] * micro_batches),
            plan=replace(plan, global_batch_size=plan.micro_batch_size * micro_batches * plan.world_size),
            first_sample=0,
            learning_rate=config.train.learning_rate,
            max_grad_norm=config.train.max_grad_norm or 0.0,
        )
        # Waits for the step. torch.accelerator.synchronize would keep the lock that compiling needs.
        local(last).flatten()[:1].cpu()
        counts.append(chip.runs() - runs)
    once, twice = counts[1], counts[-1]
    repeated = plan.accumulation_steps - 1
    runs = Counter({key: once[key] + repeated * (twice[key] - once[key]) for key in twice | once})
    return {
        "graph": asdict(_graph(chip, runs, large or _NO_VALUES, round(time.monotonic() - start, 2))),
        "programs": len(chip.programs),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _graph(chip: DryChip, runs: Counter[int], large: int, seconds: float) -> CompiledGraph:
    """All programs of a step as one.

    Args:
        chip: that ran them.
        runs: how often each runs in a step.
        large: elements from which a value is listed.
        seconds: that it took.
    """
    collectives: dict[str, Collective] = {}
    values: Counter[LargeValue] = Counter()
    calls: Counter[str] = Counter()
    flops = accessed = 0.0
    for handle, program in chip.programs.items():
        report = analyse(program.executable.program(), program.partitions, large)
        for kind, found in report.collectives.items():
            collectives[kind] = collectives.get(kind, Collective()) + found * runs[handle]
        values.update(report.large_values)
        calls.update(report.custom_calls)
        flops += program.flops * runs[handle]
        accessed += program.accessed * runs[handle]
    return CompiledGraph(
        name="step",
        argument_bytes=chip.live,
        output_bytes=0,
        alias_bytes=0,
        temporary_bytes=chip.peak - chip.live,
        code_bytes=sum(program.code for program in chip.programs.values()),
        flops=flops,
        bytes_accessed=accessed,
        compile_seconds=seconds,
        collectives=collectives,
        large_values=tuple(sorted(values, key=lambda value: -value.bytes)),
        custom_calls=dict(calls),
    )


class Zeros:
    """A :class:`portable.model.tensors.ReadableTensor` of zeros, which takes the memory of what is read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def read(self, index: tuple[slice, ...] | None = None) -> NDArray[Any]:
        whole = np.broadcast_to(np.float32(0), self.shape)
        return np.ascontiguousarray(whole if index is None else whole[index])
