"""A model in training under SPMD: each step is traced lazily, compiled once, and run as one graph."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable import plugins
from portable.checkpoint.match_to_model import match_stored_state
from portable.engines.fsdp.saving import Saver
from portable.engines.transforms import apply_transforms, build_objective
from portable.errors import require
from portable.evaluation.totals import add_to_totals, build_zero_totals
from portable.model.auxiliary_losses import has_router_loss
from portable.model.layers import find_transformer_layers
from portable.model.loss import divide_by_global_weight, forward_loss
from portable.optim.non_finite_updates import NEW_COUNTERS, Health, count_update, get_allowed_streak
from portable.optim.weight_average import exchange
from portable.private.transformers_internals import disable_value_checks
from portable.tpu.xla.activation_checkpointing import recompute
from portable.tpu.xla.activations import constrain_activations, shard_along_batch
from portable.tpu.xla.attention import attend_by_rows
from portable.tpu.xla.checks import GATHERED_ONCE
from portable.tpu.xla.custom_optimizer import build_xla_optimizer
from portable.tpu.xla.functional_call import Caller
from portable.tpu.xla.generation import sample_tokens
from portable.tpu.xla.layout import constrain, copy_tensor
from portable.tpu.xla.lm_head import shard_gradient
from portable.tpu.xla.parameter_gathering import gather_matrices
from portable.tpu.xla.parameters import Parameters
from portable.tpu.xla.saving import StagedPlanner, stage_state
from portable.tpu.xla.scan_layers import LoopedLayers, Segment, find_segments
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from portable.backend import SaveHandle
    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.converters import Checkpoint
    from portable.model.loss import MetricAccumulator, StepSums
    from portable.model.weight_sources import ReadableTensor
    from portable.tpu.xla.graphs import Graphs
    from portable.tpu.xla.layout import MeshLayout, Spec

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


class XlaEngine:
    """Implements :class:`portable.backend.Engine`; see there for the contracts.

    With one micro-batch per step, the whole step is one graph. With more, the micro-batch is one graph, which
    accumulates gradients on the devices, and the update another, so that compile time does not grow with the
    number of micro-batches.
    """

    def __init__(self, model: nn.Module, config: RunConfig, layout: MeshLayout, graphs: Graphs) -> None:
        self.model = model
        self.layout = layout
        self.graphs = graphs
        self._compute = DTYPES[config.precision]
        buffers = config.xla.buffer_dtype
        self._buffer_dtype = None if buffers is None else DTYPES[buffers]
        self._gather_once = config.strategy in GATHERED_ONCE
        self._recomputed = config.memory.activation_checkpointing == "full"
        # Of classifiers, some have it on the left.
        pads_last = config.model.task == "causal-lm"
        attend_by_rows(model, config.xla.attention_rows, layout, pads_last=pads_last)
        segments = find_segments(model) if config.xla.scan_layers else []
        stacks = [names for segment in segments for names in segment.list_parameter_names(model)]
        self.device_parameters = Parameters(model, layout, {names[0]: names for names in stacks})
        self._parameters = self.device_parameters.by_name
        self._caller = _Caller(model, self.device_parameters)
        constrain_activations(model, layout, segments)
        for segment in segments:
            self._build_loop(model, segment, recompute=self._recomputed)
        in_loops = {name for segment in segments for name in segment.names}
        for name, layer in find_transformer_layers(model):
            if name in in_loops:
                continue  # a loop gathers and recomputes its layers itself, and does not interleave them
            if not self._gather_once:
                gather_matrices(layer, name, self._get_parameter_spec, layout)
            if self._recomputed:
                recompute(layer)
            if config.xla.optimization_barrier_in_backward:
                layer.register_full_backward_hook(_insert_barrier)
        apply_transforms(model, config, ExitStack())
        self.objective = build_objective(model, config)
        if has_router_loss(model.config):
            _check_routers(segments, recomputed=self._recomputed)
        ends: Any = model
        self._head = self._find_gathered_head(ends.get_output_embeddings())
        self._optimizer = build_xla_optimizer(
            config.train, model, layout, self.device_parameters, self._compute
        )
        self._rate = config.train.learning_rate
        self._custom_optimizer = plugins.names_code(config.train.optimizer)
        self._accumulated: dict[str, Tensor] | None = None
        self._saver = Saver(StagedPlanner)
        self._limit = get_allowed_streak(config.train.on_non_finite)
        self._account = layout.replicate(torch.tensor(NEW_COUNTERS))

    # -- setting up --------------------------------------------------------------------------------------

    def _find_gathered_head(self, head: nn.Module | None) -> Tensor | None:
        """The matrix that makes the logits, where it is gathered like those of ``shard_grad_op``."""
        weight = getattr(head, "weight", None)
        if weight is None:
            return None
        name = next((name for name, parameter in self._parameters.items() if parameter is weight), None)
        spec = self.layout.get_replicated_spec(2) if name is None else self._get_parameter_spec(name, weight)
        return None if shard_gradient(head, self.layout, spec) or not self.layout.is_sharded else weight

    def _build_loop(self, model: nn.Module, segment: Segment, *, recompute: bool) -> None:
        """Make the layers of ``segment`` one loop over the stacks of their parameters."""
        layout, stacks = self.layout, []
        for names in segment.list_parameter_names(model):
            stack = self._parameters[names[0]]
            # Gathered as a whole. Where each product gathers its operand, the compiler may do so in several
            # shapes, and so again and again.
            cut = layout.to_op_sharding(self._get_parameter_spec(names[0], stack)[1:])
            unsharded = layout.to_op_sharding(layout.get_replicated_spec(stack.dim() - 1))
            computed = partial(self._caller.stack, names[0])
            stacks.append((computed, (unsharded, cut)))
        LoopedLayers(model, segment, stacks, partial(shard_along_batch, layout), recompute=recompute)

    # -- the step ----------------------------------------------------------------------------------------

    def accumulate(
        self, batch: Batch, weight: Tensor, *, last: bool, with_token_metrics: bool = False
    ) -> StepSums:
        """See the protocol. Token metrics are always computed, because they decide the graph."""

        def run_passes() -> StepSums:
            # The gradients of lookup tables gather tokens. The compiler would do so inside the product that
            # makes the logits, and what comes out of such a fusion is not overwritten: logits would lie
            # beside their gradients. So tokens wait for the loss. If layers are recomputed, they are gathered
            # late anyway. Lengths would become an input of the graph; here, masks keep documents apart.
            waits = {} if self._recomputed else batch
            waiting = {name: copy_tensor(rows) for name, rows in waits.items() if name != "document_lengths"}
            output = forward_loss(self.model, {**batch, **waiting}, self.objective)
            loss, sums = divide_by_global_weight(output, weight, self.objective.global_batch_size)
            # The backward pass waits for the loss. The compiler would put it off, and keep the logits for it.
            start = torch.ones_like(loss)
            # Sorted: the graph is one, in whatever order a sample has its tensors.
            xla.barrier_([loss, start, *(waiting[name] for name in sorted(waiting))])
            loss.backward(start)
            return sums

        with self.graphs.watch_reads():
            step_sums: StepSums = self._with_compute_copies(run_passes)
        if not last or self._accumulated is not None:
            self._add_gradients()
            self.graphs.run("micro-batch", [step_sums.values, *(self._accumulated or {}).values()])
        return step_sums

    def _add_gradients(self) -> None:
        """Add this micro-batch's gradients to those accumulated on the devices."""
        gradients = self._take_gradients()
        if self._accumulated is None:
            self._accumulated = {
                name: self.layout.create_zeros(
                    gradient.shape, gradient.dtype, self._get_parameter_spec(name, gradient)
                )
                for name, gradient in gradients.items()
            }
        with torch.no_grad():
            for name, gradient in gradients.items():
                self._accumulated[name].add_(gradient)

    def _take_gradients(self) -> dict[str, Tensor]:
        """Detach the gradients from the parameters; each is sharded like its parameter."""
        gradients = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                xla.mark_sharding(
                    gradient, self.layout.to_op_sharding(self._get_parameter_spec(name, gradient))
                )
                gradients[name] = gradient
        return gradients

    def _get_parameter_spec(self, name: str, tensor: Tensor) -> Spec:
        return self.device_parameters.get_spec(name, tensor.shape)

    def _get_spec(self, name: str, tensor: Tensor) -> Spec:
        if isinstance(tensor, nn.Parameter):
            return self._get_parameter_spec(name, tensor)
        return self.layout.get_replicated_spec(tensor.dim())

    def update(self, learning_rate: float, max_norm: float, loss: Tensor) -> Tensor:
        self._rate = learning_rate
        norm = self._trace_update(self.layout.replicate(torch.tensor(learning_rate)), max_norm, loss)
        self.graphs.run("step" if self._accumulated is None else "update", [loss, norm, self._account])
        return norm

    @torch.no_grad()
    def _trace_update(self, rate: Tensor, max_norm: float, loss: Tensor) -> Tensor:
        """Trace the update. In its own function, so that no temporary lives on as a result of the graph."""
        gradients = self._take_gradients() if self._accumulated is None else self._accumulated
        norm = torch.stack([g.float().square().sum() for g in gradients.values()]).sum().sqrt()
        scaled = gradients
        if max_norm > 0:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            scaled = {name: gradient * scale for name, gradient in gradients.items()}
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
        account, left_out = count_update(self._account, bad=bad, loss=loss, limit=self._limit)
        self._account.copy_(account)
        self._optimizer.step(scaled, rate, ~left_out)
        for gradient in (self._accumulated or {}).values():
            gradient.zero_()
        return norm

    def _with_compute_copies(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with tensors cast to the compute type; gradients reach the master weights.

        If the strategy gathers parameters once for forward and backward pass, the copies are unsharded.
        """
        copies = dict(self._compute_copies())
        # Without it, every mask would look for packed sequences, and exist for each sequence by itself.
        with disable_value_checks():
            if not copies:
                return function()
            return torch.func.functional_call(self._caller, copies, (function,))

    def _compute_copies(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            copy: Tensor = parameter
            if parameter.is_floating_point() and parameter.dtype != self._compute:
                copy = parameter.to(self._compute)
            if self._gather_once or parameter is self._head:
                unsharded = self.layout.to_op_sharding(self.layout.get_replicated_spec(parameter.dim()))
                cut = self.layout.to_op_sharding(self._get_parameter_spec(name, parameter))
                # The head's gradient is reduced unsharded: a shard would need the gradients of all logits.
                if parameter is self._head:
                    copy = constrain(copy, unsharded, unsharded)
                else:
                    copy = constrain(copy, unsharded, cut, alone=self.layout.reduces_unsharded)
            if copy is not parameter:
                yield self._caller.name(name), copy
        if self._buffer_dtype is not None:
            for name, buffer in self.model.named_buffers():
                if buffer.is_floating_point():
                    yield self._caller.name(name), buffer.to(self._buffer_dtype)

    def read_health(self) -> Health:
        return Health.from_counters(self.layout.read([self._account])[0].tolist(), self._limit)

    def find_nonfinite_gradients(self) -> list[str]:
        present = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        gradients = present if self._accumulated is None else self._accumulated
        names = [self.device_parameters.get_names(name) for name in gradients]
        finite = [
            torch.isfinite(gradient).reshape(len(layer_names), -1).all(dim=1)
            for layer_names, gradient in zip(names, gradients.values(), strict=True)
        ]
        sound = self.layout.read(finite)
        pairs = (
            pair
            for layer_names, values in zip(names, sound, strict=True)
            for pair in zip(layer_names, values, strict=True)
        )
        return [name for name, is_finite in pairs if not is_finite]

    @torch.no_grad()
    def find_nonfinite_state(self) -> list[str]:
        """See :class:`portable.backend.Engine`."""
        # The shards are checked on the host, because a reduction on the devices would be another graph to
        # compile, and the save copies them to the host anyway. A custom optimizer may start from infinity.
        nonfinite: list[str] = []
        for name, state in self._optimizer.tensors().items():
            values = [self._parameters[name], *([] if self._custom_optimizer else state.values())]
            shards = self.layout.copy_local_shards([value for value in values if value.is_floating_point()])
            if not all(bool(torch.isfinite(shard.data).all()) for parts in shards for shard in parts):
                nonfinite.append(self.device_parameters.get_names(name)[0])
        return nonfinite

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, measure: MetricAccumulator, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self.model.eval()
        sums: dict[str, Tensor] = self._with_compute_copies(
            partial(self.objective.evaluate, self.model, batch, measure)
        )
        self.model.train()
        # Zeros are buffers like later totals, so the first micro-batch has the graph of all others.
        totals = dict(totals) or {
            name: self.layout.replicate(zero) for name, zero in build_zero_totals(sums).items()
        }
        totals = add_to_totals(totals, sums)
        for total in totals.values():
            unsharded = self.layout.to_op_sharding(self.layout.get_replicated_spec(total.dim()))
            xla.mark_sharding(total, unsharded)
        self.graphs.run(measure.kind, list(totals.values()))
        return totals

    @torch.no_grad()
    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        """See the protocol. One graph over the full length samples every token: one compilation."""
        self.model.eval()

        def compute_logits(tokens: Tensor) -> Tensor:
            passed: Tensor = self._with_compute_copies(
                lambda: self.model(input_ids=tokens, use_cache=False).logits
            )
            return passed

        tokens = sample_tokens(prompt, max_new_tokens, seed, compute_logits, self.layout, self.graphs)
        self.model.train()
        result: Tensor = self.layout.read([tokens])[0][:1]
        return result

    # -- weights and checkpoints -------------------------------------------------------------------------

    def swap_ema_weights(self) -> None:
        state = self._optimizer.tensors()
        exchange((self._parameters[name], values) for name, values in state.items())
        self.layout.execute(wait=True)

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        for name, tensor in self.device_parameters.get_state().items():
            self.device_parameters.fill(name, tensor, self._get_spec(name, tensor), weights)
        self._optimizer.begin()

    def load(self, checkpoint: Checkpoint) -> None:
        stored = match_stored_state(checkpoint, self.model)
        self.load_weights(stored.weights)
        self._optimizer.load(stored.optimizer, checkpoint.optimizer)

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        state = stage_state(self.layout, self.device_parameters, self._optimizer, self._rate)
        return self._saver.save(state, folder, background=background)


class _Caller(Caller):
    """A module around model and stacks, whose tensors may both be replaced."""

    def __init__(self, model: nn.Module, device_parameters: Parameters) -> None:
        super().__init__(model)
        self._places = {name: f"stack{place}" for place, name in enumerate(device_parameters.stacks)}
        for name, place in self._places.items():
            self.register_parameter(place, device_parameters.by_name[name])

    def name(self, name: str) -> str:
        """What ``functional_call`` calls the tensor that the engine calls ``name``."""
        return self._places.get(name, f"module.{name}")

    def stack(self, name: str) -> Tensor:
        """The stack called ``name``, as it is at present."""
        value: Tensor = getattr(self, self._places[name])
        return value


def _check_routers(segments: list[Segment], *, recomputed: bool) -> None:
    """Refuse what a router loss has no gradient through."""
    require(
        not recomputed,
        "memory.activation_checkpointing: on XLA, the router loss has no gradient through recomputed "
        "layers; use none, or set model.config.output_router_logits to false",
    )
    require(
        not segments,
        "xla.scan_layers: the router loss needs what every layer's router returns, which a loop does not "
        "return; set it to false, or model.config.output_router_logits",
    )


def _insert_barrier(_: nn.Module, gradients: Any, __: Any) -> None:
    """Keep the compiler from interleaving the backward passes of layers."""
    xla.barrier_([gradient for gradient in gradients if gradient is not None])
