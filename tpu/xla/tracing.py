"""Record the graphs of a run in a child process, without executing them.

:mod:`portable.tpu.compile.trace` starts the child process. The process uses the same backend,
engine, loss and optimizer as a run, with two differences. First, tensors have shapes, dtypes and
shardings, but no values, so a model requires no memory. Second, instead of compiling and executing
a graph, the process writes it to a file.
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

# Tensors with at most this many elements keep their values, such as learning rates and counters.
MAX_REAL_ELEMENTS = 1 << 14
GRAPH_FILE_NAMES = {"sampled token": "generation"}
PROMPT_TOKENS = 32


class ValuelessLayout(MeshLayout):
    """Layout that creates tensors without values, for tracing graphs without device memory.

    A tensor without values is the result of a traced operation that is never executed. Instead,
    :func:`turn_pending_into_inputs` turns the tensor into an input of later graphs. Replicated
    tensors with at most ``MAX_REAL_ELEMENTS`` elements are an exception: they keep their values.
    """

    def create_zeros(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        """Create a sharded tensor of zeros that requires no device memory.

        The zeros are the result of a pending operation that is never executed.
        """
        tensor = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        xla.mark_sharding(tensor, self.to_op_sharding(spec))
        return tensor

    def replicate(self, tensor: Tensor) -> Tensor:
        """Replicate a tensor to all devices, or create a placeholder for it if the tensor is large.

        A tensor with more than ``MAX_REAL_ELEMENTS`` elements becomes a placeholder with the same
        shape and dtype, which requires no device memory. Smaller tensors, such as a learning rate,
        keep their values.
        """
        if tensor.numel() <= MAX_REAL_ELEMENTS:
            return super().replicate(tensor)
        return self.create_zeros(tensor.shape, tensor.dtype, self.get_replicated_spec(tensor.dim()))

    def fill_local_shards(self, tensor: Tensor, spec: Spec, source: Any) -> None:
        """Replace the data of ``tensor`` with a sharded placeholder that has no values.

        The shape and dtype remain the same. See :meth:`create_zeros`.

        Args:
            tensor: Tensor to modify in place.
            spec: Mesh axes over which each dim of the tensor is sharded.
            source: Stored tensor. Ignored, because its values are not needed.
        """
        tensor.data = self.create_zeros(tensor.shape, tensor.dtype, spec)

    def cut_graph(self, *, wait: bool = False) -> None:
        """End the current graph without executing it. Pending tensors become inputs of later graphs.

        Args:
            wait: Whether to wait for the results. Ignored, because nothing is executed.
        """
        turn_pending_into_inputs()

    def place_batch_tensor(self, tensor: Tensor) -> Tensor:
        """Create a placeholder for a global batch tensor, with the sharding of real batches.

        Args:
            tensor: Tensor that determines the shape and the dtype. Its values are not read.
        """
        placed = self.create_zeros(tensor.shape, tensor.dtype, self.get_batch_spec(tensor.dim()))
        turn_pending_into_inputs()
        return placed

    def read_to_cpu(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros on the CPU with the shapes and dtypes of ``tensors``.

        Graphs are recorded without being executed, so the tensors have no values that could be
        read.
        """
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


class GraphRecorder(GraphRunner):
    """Graph runner that writes each graph to a file instead of compiling and executing it.

    Args:
        folder: Existing folder for the files.

    Attributes:
        skipped_graphs: Names of graphs that are not written.
        written_graphs: Description of each written graph, keyed by name: its file, its tracing time
            in seconds, how many results it has, and how many of its parameters are donated.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda line: print_status(f"warning: {line}"))
        self._folder = folder
        self._last_write_time = time.monotonic()
        self.skipped_graphs: set[str] = set()
        """Names of graphs that are not written."""
        self.written_graphs: dict[str, dict[str, Any]] = {}
        """Description of each written graph, keyed by name: its file, its tracing time, and the numbers of
        its results and donated parameters.
        """

    def run(self, kind: str, results: Sequence[Tensor]) -> None:
        """Write the graph of the pending tensors to a file, instead of executing it.

        Pending tensors are the results of operations that have been traced, but not executed. After
        this call, they count as computed, so later graphs read them as inputs. Only the first graph
        of each kind is written, because the kind determines the graph's name. A graph is not
        written if its name is already in :attr:`written_graphs`, or if it is in
        :attr:`skipped_graphs`.

        Args:
            kind: Kind of the graph, such as ``step``.
            results: Tensors that the graph computes. Ignored, because the graph contains all
                pending tensors.
        """
        name = GRAPH_FILE_NAMES.get(kind, kind)
        if name not in self.written_graphs and name not in self.skipped_graphs:
            self._write_graph(name)
        turn_pending_into_inputs()

    def _write_graph(self, name: str) -> None:
        """Write the graph of the pending tensors to the file ``<name>.hlo.pb``.

        The file also lists the donated parameters, whose buffers the graph may overwrite. A
        description of the graph is added to :attr:`written_graphs`.
        """
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
    """Backend whose tensors have no values, for recording the graphs of a run.

    Args:
        folder: Existing folder for the graphs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("xla")
        self.graphs = GraphRecorder(folder)

    def build_engine(self, model: nn.Module, config: RunConfig) -> XlaEngine:
        """Build the engine with weights that have shapes, dtypes and shardings, but no values.

        The weights are created in the order in which a run loads them. This order determines the
        order of the parameters and results of each compiled graph.
        """
        engine: Any = super().build_engine(model, config)
        # Load weights as a run does, because tensors are parameters and results of a graph in the order in
        # which they were created. One layer of a stack is enough, because all layers are written into the
        # same tensor.
        others = {name for names in engine.device_parameters.stacks.values() for name in names[1:]}
        engine.load_weights(dict.fromkeys(name for name in get_state_tensors(model) if name not in others))
        turn_pending_into_inputs()
        return engine  # type: ignore[no-any-return]

    def _create_layout(self, config: RunConfig) -> MeshLayout:
        return ValuelessLayout(config, self.devices_per_rank)

    def _create_graph_runner(self) -> GraphRunner:
        return self.graphs


def turn_pending_into_inputs() -> None:
    """Make each pending tensor an input of later graphs, without computing its value.

    A pending tensor is the result of an operation that has been traced, but not executed. Later
    graphs do not contain this operation. They treat the tensor as if its value had already been
    computed.
    """
    tensors = list_pending_tensors()
    xla.clear_pending(XLA_DEVICE)
    # An input gets the sharding of its tensor if the tensor first gets an operation, and its sharding is
    # queried after that. The first call creates the operation.
    xla.device_data(tensors, [])
    for tensor in tensors:
        xla.sharding_of(tensor)


XLA_DEVICE = "xla:0"


def list_live_tensors() -> list[Tensor]:
    """List all XLA tensors in this process, in the order of their creation.

    The tensors are found among the objects of the garbage collector. Objects that ``gc.freeze`` has
    excluded from garbage collection are not searched. If several tensor objects have the same ID in
    torch_xla, only one of them is returned.
    """
    tensors: dict[int, Tensor] = {}
    for candidate in gc.get_objects():
        # Check the type, because isinstance reads __class__, which makes lazy modules import themselves.
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "xla":
            tensors.setdefault(xla.tensor_id(candidate), candidate)
    return [tensors[number] for number in sorted(tensors)]


def list_pending_tensors() -> list[Tensor]:
    """List the tensors that ``torch_xla.sync`` would compute, in the order of the graph's results."""
    tensors = list_live_tensors()
    needed = xla.are_pending(tensors)
    return [tensor for tensor, pending in zip(tensors, needed, strict=True) if pending]


def find_donated_parameters(context: Any, pending: Sequence[Tensor]) -> list[int]:
    """Find the parameters of a lowered graph whose buffers the graph may overwrite.

    A buffer may be overwritten if the graph computes a new value for the tensor that owns it.

    Args:
        context: Lowering context that has built the graph.
        pending: Results of the graph.

    Returns:
        Parameter numbers in ascending order.
    """
    replaced = {_read_alias_id(tensor) for tensor in pending}
    owners, data = xla.device_data(list(pending), [])
    return sorted(
        context.tensor_parameter_id(tensor)
        for owner, tensor in zip(owners, data, strict=True)
        if owner in replaced
    )


def _read_alias_id(tensor: Tensor) -> int:
    """Return the alias ID of a tensor, which does not change when the tensor is updated in place."""
    match = re.search(r"^AliasID: (\d+)$", xla.debug_info(tensor), re.MULTILINE)
    assert match is not None
    return int(match[1])


def record_graphs(config: RunConfig, folder: Path, target_hardware: str) -> list[dict[str, Any]]:
    """Write every graph that a run would compile on the devices of this process.

    This sets the environment variable ``PJRT_DEVICE`` to ``target_hardware`` for the rest of the
    process, so call it in a separate process.

    Args:
        config: Config of the run.
        folder: Existing folder for the graphs.
        target_hardware: Hardware for which operations are lowered: ``TPU``, or ``CPU`` for virtual
            devices.

    Returns:
        One dict per graph, as in :attr:`GraphRecorder.written_graphs`.

    Raises:
        UserError: If the config is not supported, or if the model or the loss cannot be traced.
    """
    backend = TracingBackend(folder)
    # The client has started, so from now on torch_xla reads this variable only to choose the hardware to
    # lower for. The lowering for a TPU uses other layouts, gathers and scatters.
    os.environ["PJRT_DEVICE"] = target_hardware
    # Use complete sequences, because the compiler splits them.
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
    """Build the settings for the metrics of the run.

    For a classification task, the class names are read from the model's config instead of the data.
    """
    if config.model.task != CLASSIFICATION:
        return MetricSettings(config.model.task)
    return MetricSettings(
        read_problem_type(model_config, config.model) or SINGLE_LABEL, tuple(model_config.id2label.values())
    )


def _record_step_graphs(
    backend: TracingBackend, engine: XlaEngine, batch: Batch, plan: BatchPlan, config: RunConfig
) -> None:
    """Record the graph of a training step.

    With several micro-batches per step, record the graphs of a micro-batch and of the update.
    """
    if plan.accumulation_steps > 1:
        # Trace one micro-batch without writing it, because the accumulated gradients only exist after the
        # first micro-batch.
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
    """Engine that only records the first micro-batch of a step, because the others have the same graph."""

    def __init__(self, engine: XlaEngine) -> None:
        self._engine = engine
        self.objective = engine.objective
        self._first: StepSums | None = None

    def begin_step(self, learning_rate: float) -> None:
        """Do nothing, because parameters are updated after the backward pass."""

    def accumulate_gradients(
        self, batch: Batch, weight: Tensor, *, is_last_micro_batch: bool, with_token_metrics: bool = False
    ) -> StepSums:
        """Trace the first micro-batch of a step. For the other micro-batches, only return zeros.

        The engine records graphs and does not execute them. All micro-batches have the same graph,
        so tracing one of them is enough.
        """
        if self._first is not None:
            zeros = self._engine.layout.replicate(torch.zeros(self._first.values.shape))
            return StepSums(zeros, self._first.names)
        self._first = self._engine.accumulate_gradients(
            batch, weight, is_last_micro_batch=is_last_micro_batch, with_token_metrics=with_token_metrics
        )
        return self._first

    def take_optimizer_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record the graph of the optimizer update, and return the gradient norm.

        If a step has only one micro-batch, the graph covers the complete step. The arguments are
        passed to ``XlaEngine.take_optimizer_step``.
        """
        return self._engine.take_optimizer_step(*args, **kwargs)


def main() -> None:
    """Record the graphs of the requested config, and write the answer for the parent process.

    This is the main function of the child process. It ends the process and does not return. The
    parent process sends the config through standard input. The command-line arguments are the path
    of the answer file and the target hardware. The graphs are written to the folder of the answer
    file. The answer contains either a list of the recorded graphs or an error message.
    """
    config: RunConfig = read_request()
    gc.freeze()  # imported modules reference no device tensors, so searches can skip their objects
    answer: dict[str, Any]
    try:
        answer = {"graphs": record_graphs(config, Path(sys.argv[1]).parent, sys.argv[2])}
    except UserError as error:
        answer = {"refused": to_one_line(error)}
    write_answer_and_exit(answer)


if __name__ == "__main__":
    main()
