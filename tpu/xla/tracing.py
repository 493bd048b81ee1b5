"""The other side of :mod:`portable.tpu.compile.trace`: a process that records graphs and runs none.

The backend, engine, loss and optimizer are those of a run. Two things differ. The state has shapes, dtypes
and shardings but no values, so a model takes no memory. And where a run would compile and execute a graph,
this process writes it to a file.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from portable.data.samples.classes import SINGLE_LABEL
from portable.data.sources.source import CLASSIFICATION
from portable.errors import UserError, to_one_line
from portable.evaluation.builtin_metrics import MetricSettings, build_metrics
from portable.loop import train_step
from portable.model import build as models
from portable.model.labels import read_problem_type
from portable.model.loss import StepSums
from portable.model.parameters import get_state_tensors
from portable.terminal import print_status
from portable.tpu.compile.child_process import read_request, write_answer_and_exit
from portable.tpu.compile.messages import encode_buffer_donors
from portable.tpu.compile.traced_step import build_step_inputs
from portable.tpu.xla.backend import XlaBackend
from portable.tpu.xla.graphs import GraphRunner
from portable.tpu.xla.layout import MeshLayout
from portable.tpu.xla.torch_xla_internals import lowering_context, xla

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from portable.batch import Batch
    from portable.batch_plan import BatchPlan
    from portable.config import RunConfig
    from portable.tpu.xla.engine import XlaEngine
    from portable.tpu.xla.layout import Spec

MAX_REAL_ELEMENTS = 1 << 14  # tensors up to this size are uploaded: learning rates, counters
GRAPH_FILE_NAMES = {"sampled token": "generation"}
PROMPT_TOKENS = 32


class ValuelessLayout(MeshLayout):
    """A layout whose tensors have no values, but for the smallest.

    Such a tensor starts as an operation. :func:`turn_pending_into_inputs` makes it an input of graphs.
    """

    def create_zeros(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        tensor = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        xla.mark_sharding(tensor, self.to_op_sharding(spec))
        return tensor

    def replicate(self, tensor: Tensor) -> Tensor:
        if tensor.numel() <= MAX_REAL_ELEMENTS:
            return super().replicate(tensor)
        return self.create_zeros(tensor.shape, tensor.dtype, self.get_replicated_spec(tensor.dim()))

    def fill_local_shards(self, tensor: Tensor, spec: Spec, source: Any) -> None:
        tensor.data = self.create_zeros(tensor.shape, tensor.dtype, spec)

    def execute_pending(self, *, wait: bool = False) -> None:
        turn_pending_into_inputs()

    def place_batch_tensor(self, tensor: Tensor) -> Tensor:
        placed = self.create_zeros(tensor.shape, tensor.dtype, self.get_batch_spec(tensor.dim()))
        turn_pending_into_inputs()
        return placed

    def read_to_cpu(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


class GraphRecorder(GraphRunner):
    """Writes each kind of graph where a run would compile and execute it.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda line: print_status(f"warning: {line}"))
        self._folder = folder
        self._last_write_time = time.monotonic()
        self.skipped_graphs: set[str] = set()
        """Kinds that are recorded, but not written."""
        self.written_graphs: dict[str, dict[str, Any]] = {}

    def run(self, kind: str, results: Sequence[Tensor]) -> None:
        name = GRAPH_FILE_NAMES.get(kind, kind)
        if name not in self.written_graphs and name not in self.skipped_graphs:
            self._write_graph(name)
        turn_pending_into_inputs()

    def _write_graph(self, name: str) -> None:
        pending = list_pending_tensors()
        context = lowering_context("SyncTensorsGraph")
        context.build(pending)
        module = context.hlo()
        donors = find_donated_parameters(context, pending)
        path = self._folder / f"{name}.hlo.pb"
        path.write_bytes(module + encode_buffer_donors(donors))
        self.written_graphs[name] = {
            "name": name,
            "file": path.name,
            "results": len(pending),
            "donated": len(donors),
            "seconds": round(time.monotonic() - self._last_write_time, 3),
        }
        self._last_write_time = time.monotonic()


class TracingBackend(XlaBackend):
    """The backend of a run, on state without values.

    Args:
        folder: where the graphs go; it exists.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("xla")
        self.graphs = GraphRecorder(folder)

    def build_engine(self, model: nn.Module, config: RunConfig) -> XlaEngine:
        engine: Any = super().build_engine(model, config)
        # As a run does: the order in which tensors were made is that of a graph's parameters and results.
        # One layer of a loop stands for all: they are written into the same tensor.
        others = {name for names in engine.device_parameters.stacks.values() for name in names[1:]}
        engine.load_weights(dict.fromkeys(name for name in get_state_tensors(model) if name not in others))
        turn_pending_into_inputs()
        return engine  # type: ignore[no-any-return]

    def _create_layout(self, config: RunConfig) -> MeshLayout:
        return ValuelessLayout(config, self.devices_per_rank)

    def _create_graph_runner(self) -> GraphRunner:
        return self.graphs


def turn_pending_into_inputs() -> None:
    """Make every tensor that an operation would compute an input of later graphs, without a value."""
    tensors = list_pending_tensors()
    xla.clear_pending(XLA_DEVICE)
    # An input gets the sharding of its tensor when the tensor has an operation and is asked for it, in that
    # order. The first call makes the operation.
    xla.device_data(tensors, [])
    for tensor in tensors:
        xla.sharding_of(tensor)


XLA_DEVICE = "xla:0"


def list_live_tensors() -> list[Tensor]:
    """The tensors on the device, in the order in which they were made."""
    tensors: dict[int, Tensor] = {}
    for candidate in gc.get_objects():
        # By type: an isinstance asks lazy modules for their class, which imports them.
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "xla":
            tensors.setdefault(xla.tensor_id(candidate), candidate)
    return [tensors[number] for number in sorted(tensors)]


def list_pending_tensors() -> list[Tensor]:
    """The tensors that a sync would compute, in its order."""
    tensors = list_live_tensors()
    needed = xla.are_pending(tensors)
    return [tensor for tensor, pending in zip(tensors, needed, strict=True) if pending]


def find_donated_parameters(context: Any, pending: Sequence[Tensor]) -> list[int]:
    """The parameters of a lowered graph whose buffers it may overwrite: those of tensors that it replaces."""
    replaced = {_read_alias_id(tensor) for tensor in pending}
    owners, data = xla.device_data(list(pending), [])
    return sorted(
        context.tensor_parameter_id(tensor)
        for owner, tensor in zip(owners, data, strict=True)
        if owner in replaced
    )


def _read_alias_id(tensor: Tensor) -> int:
    """The number by which a buffer knows its tensor; an update in place keeps it."""
    match = re.search(r"^AliasID: (\d+)$", xla.debug_info(tensor), re.MULTILINE)
    assert match is not None
    return int(match[1])


def record_graphs(config: RunConfig, folder: Path, target_hardware: str) -> list[dict[str, Any]]:
    """Write every graph that a run of ``config`` on this process's devices compiles to ``folder``."""
    backend = TracingBackend(folder)
    # The client is up. What torch_xla asks from here on is for which hardware to lower: layouts, gathers and
    # scatters are others on a TPU.
    os.environ["PJRT_DEVICE"] = target_hardware
    # Whole sequences, which the compiler cuts.
    config, model, plan, batch = build_step_inputs(config, backend, sequence_parts=1)
    engine = backend.build_engine(model, config)
    _record_step_graphs(backend, engine, batch, plan, config)
    if config.data.eval_fraction != 0 or config.data.eval is not None:
        measures = build_metrics(config.train.metrics, _build_metric_settings(config, model.config))
        engine.evaluate_batch(backend.copy_to_device(batch), measures, {})
    bound = models.get_max_positions(model.config)
    tokens = config.log.sample_tokens
    tokens = tokens if bound is None else min(tokens, bound - PROMPT_TOKENS)
    if tokens > 0 and config.model.task == "causal-lm":
        prompt = torch.zeros(1, PROMPT_TOKENS + tokens - 1, dtype=torch.int64)
        engine.generate(prompt, max_new_tokens=1, seed=0)
    return list(backend.graphs.written_graphs.values())


def _build_metric_settings(config: RunConfig, model_config: Any) -> MetricSettings:
    """The classes are the model's; those of the data are not known."""
    if config.model.task != CLASSIFICATION:
        return MetricSettings(config.model.task)
    return MetricSettings(
        read_problem_type(model_config, config.model) or SINGLE_LABEL, tuple(model_config.id2label.values())
    )


def _record_step_graphs(
    backend: TracingBackend, engine: XlaEngine, batch: Batch, plan: BatchPlan, config: RunConfig
) -> None:
    if plan.accumulation_steps > 1:
        # The gradients' sums do not exist until a micro-batch has been recorded.
        backend.graphs.skipped_graphs.add("micro-batch")
        engine.accumulate_gradients(
            backend.copy_to_device(batch), backend.sum_host_numbers(1), is_last_micro_batch=False
        )
        backend.graphs.skipped_graphs.clear()
    train_step(
        backend,
        _FirstMicroBatchEngine(engine),  # type: ignore[arg-type]
        iter([batch] * plan.accumulation_steps),
        batch_plan=plan,
        first_sample=0,
        learning_rate=config.train.learning_rate,
        max_grad_norm=config.train.max_grad_norm or 0.0,
    )


class _FirstMicroBatchEngine:
    """An engine that records the first micro-batch alone; the others of a step have the same graph."""

    def __init__(self, engine: XlaEngine) -> None:
        self._engine = engine
        self.objective = engine.objective
        self._first: StepSums | None = None

    def accumulate_gradients(
        self, batch: Batch, weight: Tensor, *, is_last_micro_batch: bool, with_token_metrics: bool = False
    ) -> StepSums:
        if self._first is not None:
            zeros = self._engine.layout.replicate(torch.zeros(self._first.values.shape))
            return StepSums(zeros, self._first.names)
        self._first = self._engine.accumulate_gradients(
            batch, weight, is_last_micro_batch=is_last_micro_batch, with_token_metrics=with_token_metrics
        )
        return self._first

    def take_optimizer_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._engine.take_optimizer_step(*args, **kwargs)


def main() -> None:
    config: RunConfig = read_request()
    gc.freeze()  # what was imported holds no tensor of a device: no search need visit it
    answer: dict[str, Any]
    try:
        answer = {"graphs": record_graphs(config, Path(sys.argv[1]).parent, sys.argv[2])}
    except UserError as error:
        answer = {"refused": to_one_line(error)}
    write_answer_and_exit(answer)


if __name__ == "__main__":
    main()
