"""Train with torch_xla under SPMD, compiling each step into one graph."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable import plugins
from portable.checkpoint.match_to_model import match_checkpoint_to_model
from portable.engines.fsdp.saving import DcpSaver
from portable.engines.transforms import apply_transforms, build_objective
from portable.errors import require
from portable.evaluation.totals import build_zero_totals, compute_new_totals
from portable.model.auxiliary_losses import has_router_loss
from portable.model.layers import find_transformer_layers
from portable.model.loss import forward_loss, scale_loss_by_global_weight
from portable.optim.non_finite_updates import (
    INITIAL_COUNTERS,
    UpdateHealth,
    count_update_and_decide_skip,
    get_max_streak,
)
from portable.optim.weight_average import swap_weights_and_averages
from portable.private.transformers_internals import skip_mask_value_checks
from portable.tpu.xla.activation_checkpointing import enable_layer_recompute
from portable.tpu.xla.activations import shard_activations, shard_batch_and_tokens
from portable.tpu.xla.attention import configure_attention
from portable.tpu.xla.checks import STRATEGIES_GATHERED_ONCE
from portable.tpu.xla.custom_optimizer import build_xla_optimizer
from portable.tpu.xla.functional_call import FunctionalCaller
from portable.tpu.xla.generation import sample_continuation
from portable.tpu.xla.layout import constrain_with_gradient, copy_without_sharding
from portable.tpu.xla.lm_head import shard_head_gradient
from portable.tpu.xla.parameter_gathering import gather_layer_parameters
from portable.tpu.xla.parameters import DeviceParameters
from portable.tpu.xla.saving import StagedPlanner, stage_checkpoint_state
from portable.tpu.xla.scan_layers import LayerSegment, LoopedLayers, find_layer_segments
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from portable.backend import SaveHandle
    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.converters import Checkpoint
    from portable.model.loss import MicroBatchMeasure, StepSums
    from portable.model.weight_sources import ReadableTensor
    from portable.tpu.xla.graphs import GraphRunner
    from portable.tpu.xla.layout import MeshLayout, Spec

DTYPES_BY_NAME = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


class XlaEngine:
    """Training engine on torch_xla. Implements :class:`portable.backend.Engine`.

    With one micro-batch per step, the complete step is one graph. With several, one graph runs the
    forward and backward passes of a micro-batch and accumulates gradients on the devices, and
    another graph updates the parameters. Therefore, the compile time does not depend on the number
    of micro-batches.

    The constructor replaces the parameters and buffers of the model with device tensors. Parameters
    of layers in a loop stay on the meta device, and their values are stacked in
    ``device_parameters``. All parameters are zeros until :meth:`load_weights` or
    :meth:`load_checkpoint` is called. The constructor also replaces forward methods, adds hooks,
    and calls :func:`portable.tpu.xla.attention.configure_attention`, which affects the entire
    process.

    Args:
        model: Model on the meta device. Modified in place.
        config: Config of the run.
        layout: Placement of tensors on the devices.
        graphs: Runner of the compiled graphs.

    Raises:
        UserError: If the config cannot be combined with this model. For example, a router loss does
            not work with ``xla.scan_layers``.
    """

    def __init__(self, model: nn.Module, config: RunConfig, layout: MeshLayout, graphs: GraphRunner) -> None:
        self.model = model
        self.layout = layout
        self.graphs = graphs
        self._compute_dtype = DTYPES_BY_NAME[config.precision]
        buffers = config.xla.buffer_dtype
        self._buffer_dtype = None if buffers is None else DTYPES_BY_NAME[buffers]
        self._gathers_once = config.strategy in STRATEGIES_GATHERED_ONCE
        self._recomputes_layers = config.memory.activation_checkpointing == "full"
        # Some classifiers pad on the left.
        pads_last = config.model.task == "causal-lm"
        configure_attention(model, config.xla.attention_rows, layout, pads_last=pads_last)
        segments = find_layer_segments(model) if config.xla.scan_layers else []
        stacks = [names for segment in segments for names in segment.list_parameter_names(model)]
        self.device_parameters = DeviceParameters(model, layout, {names[0]: names for names in stacks})
        self._parameters = self.device_parameters.by_name
        self._caller = _EngineCaller(model, self.device_parameters)
        shard_activations(model, layout, segments)
        for segment in segments:
            self._build_layer_loop(model, segment, recompute=self._recomputes_layers)
        in_loops = {name for segment in segments for name in segment.layer_names}
        for name, layer in find_transformer_layers(model):
            if name in in_loops:
                continue  # a loop itself gathers and recomputes its layers, and does not interleave them
            if not self._gathers_once:
                gather_layer_parameters(layer, name, self._get_parameter_spec, layout)
            if self._recomputes_layers:
                enable_layer_recompute(layer)
            if config.xla.optimization_barrier_in_backward:
                layer.register_full_backward_hook(_insert_barrier)
        apply_transforms(model, config, ExitStack())
        self.objective = build_objective(model, config)
        if has_router_loss(model.config):
            _check_router_loss_support(segments, recomputed=self._recomputes_layers)
        ends: Any = model
        self._gathered_head = self._find_head_to_gather(ends.get_output_embeddings())
        self._optimizer = build_xla_optimizer(
            config.train, model, layout, self.device_parameters, self._compute_dtype
        )
        self._learning_rate = config.train.learning_rate
        self._custom_optimizer = plugins.is_plugin_name(config.train.optimizer)
        self._accumulated_gradients: dict[str, Tensor] | None = None
        self._saver = DcpSaver(StagedPlanner)
        self._max_streak = get_max_streak(config.train.on_non_finite)
        self._nonfinite_counters = layout.replicate(torch.tensor(INITIAL_COUNTERS))

    # -- setting up --------------------------------------------------------------------------------------

    def _find_head_to_gather(self, head: nn.Module | None) -> Tensor | None:
        """Make the LM head gather its weight, or return the weight if this is not possible.

        If the head is a plain linear layer and there are several devices,
        :func:`shard_head_gradient` replaces its forward method. The head then gathers its weight
        itself. Otherwise, the engine must gather the returned weight in each step, as it does for
        all parameters with a strategy such as ``shard_grad_op``.

        Args:
            head: LM head of the model. None if the model has no head.

        Returns:
            The weight of the head. None if the forward method was replaced, if the model has no head
            with a weight, or if nothing is sharded.
        """
        weight = getattr(head, "weight", None)
        if weight is None:
            return None
        name = next((name for name, parameter in self._parameters.items() if parameter is weight), None)
        spec = self.layout.get_replicated_spec(2) if name is None else self._get_parameter_spec(name, weight)
        return None if shard_head_gradient(head, self.layout, spec) or not self.layout.is_sharded else weight

    def _build_layer_loop(self, model: nn.Module, segment: LayerSegment, *, recompute: bool) -> None:
        """Replace the forward of a segment's layers with a loop.

        A segment is a sequence of consecutive layers with a repeating pattern. For example, layers
        with local attention and layers with global attention take turns. The values of a parameter
        in all repetitions are stored in one tensor, called a stack. The stacks must already exist.
        Each iteration of the loop runs one repetition with one slice of each stack. The complete
        slice is gathered, so that the compiler does not gather it separately for each product.

        Args:
            model: Model that contains the layers.
            segment: Layers to run in the loop.
            recompute: Whether to recompute the activations of each iteration in the backward pass.
        """
        layout, stacks = self.layout, []
        for names in segment.list_parameter_names(model):
            stack = self._parameters[names[0]]
            # Gather the complete parameter. If each product gathered its operand, the compiler might gather
            # it several times, in different shapes.
            shard_sharding = layout.to_op_sharding(self._get_parameter_spec(names[0], stack)[1:])
            unsharded = layout.to_op_sharding(layout.get_replicated_spec(stack.dim() - 1))
            computed = partial(self._caller.get_stack, names[0])
            stacks.append((computed, (unsharded, shard_sharding)))
        LoopedLayers(model, segment, stacks, partial(shard_batch_and_tokens, layout), recompute=recompute)

    # -- the step ----------------------------------------------------------------------------------------

    def begin_step(self, learning_rate: float) -> None:
        """Do nothing, because parameters are updated after the backward pass."""

    def accumulate_gradients(
        self,
        batch: Batch,
        global_weight: Tensor,
        *,
        is_last_micro_batch: bool,
        with_token_metrics: bool = False,
    ) -> StepSums:
        """Trace the forward and backward pass of a micro-batch.

        With one micro-batch per step, the traced operations become part of the graph of the
        complete step. With several, the gradients are added to the accumulated gradients, and the
        micro-batch's graph starts to run. ``with_token_metrics`` is ignored: token metrics are
        always computed, so that only one graph is compiled.
        """

        def run_passes() -> StepSums:
            # The gradients of embedding tables gather tokens. The compiler would fuse this gather with the
            # product that computes the logits. The result of such a fusion is not overwritten, so the logits
            # and their gradients would both exist. Therefore, make the tokens wait for the loss. This is not
            # necessary if layers are recomputed, because tokens are then gathered late anyway. Leave out the
            # document lengths, because they would become an input of the graph, and masks already separate
            # the documents.
            waits = {} if self._recomputes_layers else batch
            waiting = {
                name: copy_without_sharding(rows)
                for name, rows in waits.items()
                if name != "document_lengths"
            }
            output = forward_loss(self.model, {**batch, **waiting}, self.objective)
            loss, sums = scale_loss_by_global_weight(output, global_weight, self.objective.global_batch_size)
            # The backward pass waits for the loss. Otherwise the compiler would delay the loss, and keep the
            # logits for it.
            start = torch.ones_like(loss)
            # Sort the names, so that the order of the tensors in a sample does not change the graph.
            xla.barrier_([loss, start, *(waiting[name] for name in sorted(waiting))])
            loss.backward(start)
            return sums

        with self.graphs.warn_about_value_reads():
            step_sums: StepSums = self._call_with_compute_copies(run_passes)
        if not is_last_micro_batch or self._accumulated_gradients is not None:
            self._accumulate_gradients()
            self.graphs.run("micro-batch", [step_sums.values, *(self._accumulated_gradients or {}).values()])
        return step_sums

    def _accumulate_gradients(self) -> None:
        """Add this micro-batch's gradients to the accumulated gradients on the devices."""
        gradients = self._detach_gradients()
        if self._accumulated_gradients is None:
            self._accumulated_gradients = {
                name: self.layout.create_zeros(
                    gradient.shape, gradient.dtype, self._get_parameter_spec(name, gradient)
                )
                for name, gradient in gradients.items()
            }
        with torch.no_grad():
            for name, gradient in gradients.items():
                self._accumulated_gradients[name].add_(gradient)

    def _detach_gradients(self) -> dict[str, Tensor]:
        """Remove the gradients from the parameters, and return them keyed by parameter name.

        Each gradient is sharded like its parameter.
        """
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
        return self.device_parameters.get_tensor_spec(name, tensor.shape)

    def _get_tensor_spec(self, name: str, tensor: Tensor) -> Spec:
        if isinstance(tensor, nn.Parameter):
            return self._get_parameter_spec(name, tensor)
        return self.layout.get_replicated_spec(tensor.dim())

    def take_optimizer_step(self, learning_rate: float, max_grad_norm: float, loss: Tensor) -> Tensor:
        """Trace the update of the parameters, start executing it, and return the gradient norm.

        If a step has a single micro-batch, its forward and backward passes have been traced but not
        executed. This call then executes the passes and the update as one graph. If a step has
        several micro-batches, the update is a separate graph.

        Args:
            learning_rate: Learning rate for this step.
            max_grad_norm: Maximum global gradient norm for gradient clipping. 0 disables clipping.
            loss: Global loss of this step, a device scalar. If the loss or the gradient norm is not
                finite, the graph skips the update.

        Returns:
            Gradient norm before clipping, as a device scalar.
        """
        self._learning_rate = learning_rate
        norm = self._trace_update_and_clear_gradients(
            self.layout.replicate(torch.tensor(learning_rate)), max_grad_norm, loss
        )
        self.graphs.run(
            "step" if self._accumulated_gradients is None else "update",
            [loss, norm, self._nonfinite_counters],
        )
        return norm

    @torch.no_grad()
    def _trace_update_and_clear_gradients(
        self, learning_rate: Tensor, max_norm: float, loss: Tensor
    ) -> Tensor:
        """Trace the update and return the gradient norm.

        This is a separate function so that temporary tensors are freed before the graph is executed.
        Otherwise, they would become results of the graph.
        """
        gradients = (
            self._detach_gradients() if self._accumulated_gradients is None else self._accumulated_gradients
        )
        norm = torch.stack([g.float().square().sum() for g in gradients.values()]).sum().sqrt()
        scaled = gradients
        if max_norm > 0:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            scaled = {name: gradient * scale for name, gradient in gradients.items()}
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
        account, left_out = count_update_and_decide_skip(
            self._nonfinite_counters, is_non_finite=bad, loss=loss, max_streak=self._max_streak
        )
        self._nonfinite_counters.copy_(account)
        self._optimizer.step(scaled, learning_rate, ~left_out)
        for gradient in (self._accumulated_gradients or {}).values():
            gradient.zero_()
        return norm

    def _call_with_compute_copies(self, function: Callable[[], Any]) -> Any:
        """Call a function with the model's tensors replaced by copies in the compute dtype.

        The copies are differentiable, so gradients reach the master weights. If the strategy gathers
        parameters once for both the forward and the backward pass, the copies are unsharded.
        """
        copies = dict(self._iter_compute_copies())
        # With value checks, every mask function would search for packed sequences, and build one mask per
        # sequence.
        with skip_mask_value_checks():
            if not copies:
                return function()
            return torch.func.functional_call(self._caller, copies, (function,))

    def _iter_compute_copies(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the copies that replace tensors of the model in a forward and backward pass.

        A parameter is copied if it must be cast to the compute dtype, or gathered before the
        forward pass. If ``xla.buffer_dtype`` is set, each floating-point buffer is cast to this
        dtype. Otherwise, buffers are not copied.

        Yields:
            The tensor's name for ``functional_call``, and the copy that replaces it.
        """
        for name, parameter in self._parameters.items():
            copy: Tensor = parameter
            if parameter.is_floating_point() and parameter.dtype != self._compute_dtype:
                copy = parameter.to(self._compute_dtype)
            if self._gathers_once or parameter is self._gathered_head:
                unsharded = self.layout.to_op_sharding(self.layout.get_replicated_spec(parameter.dim()))
                shard_sharding = self.layout.to_op_sharding(self._get_parameter_spec(name, parameter))
                # Reduce the gradient of the head unsharded, because a shard would need the gradients of all
                # logits.
                if parameter is self._gathered_head:
                    copy = constrain_with_gradient(copy, unsharded, unsharded)
                else:
                    copy = constrain_with_gradient(
                        copy,
                        unsharded,
                        shard_sharding,
                        isolate_gradient=self.layout.reduces_gradients_unsharded,
                    )
            if copy is not parameter:
                yield self._caller.get_call_name(name), copy
        if self._buffer_dtype is not None:
            for name, buffer in self.model.named_buffers():
                if buffer.is_floating_point():
                    yield self._caller.get_call_name(name), buffer.to(self._buffer_dtype)

    def read_update_health(self) -> UpdateHealth:
        """Read the counters of skipped updates from the devices."""
        return UpdateHealth.from_counters(
            self.layout.read_to_cpu([self._nonfinite_counters])[0].tolist(), self._max_streak
        )

    def find_nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters whose current or accumulated gradient is not finite.

        Reads the result from the devices, which executes pending operations.
        """
        present = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        gradients = present if self._accumulated_gradients is None else self._accumulated_gradients
        names = [self.device_parameters.get_parameter_names(name) for name in gradients]
        finite = [
            torch.isfinite(gradient).reshape(len(layer_names), -1).all(dim=1)
            for layer_names, gradient in zip(names, gradients.values(), strict=True)
        ]
        finite_flags = self.layout.read_to_cpu(finite)
        pairs = (
            pair
            for layer_names, values in zip(names, finite_flags, strict=True)
            for pair in zip(layer_names, values, strict=True)
        )
        return [name for name, is_finite in pairs if not is_finite]

    @torch.no_grad()
    def find_nonfinite_state(self) -> list[str]:
        """Find trained parameters whose weights or optimizer state on this host are not finite.

        The result contains the names of these parameters. If the same parameter of several layers
        is stacked in one tensor, only the name from the first of these layers is returned. The
        state of a custom optimizer is not checked.
        """
        # Check the shards on the host, because a reduction on the devices would be another graph to compile,
        # and a save copies them to the host anyway. Ignore the state of a custom optimizer, because its
        # initial values may be infinite.
        nonfinite: list[str] = []
        for name, state in self._optimizer.get_state_tensors().items():
            values = [self._parameters[name], *([] if self._custom_optimizer else state.values())]
            shards = self.layout.copy_local_shards([value for value in values if value.is_floating_point()])
            if not all(bool(torch.isfinite(shard.values).all()) for parts in shards for shard in parts):
                nonfinite.append(self.device_parameters.get_parameter_names(name)[0])
        return nonfinite

    @torch.no_grad()
    def evaluate_batch(
        self, batch: Batch, metric_accumulator: MicroBatchMeasure, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Start the evaluation of a micro-batch, and add its metric sums to the totals.

        This method does not wait for the devices, except when the evaluation graph runs for the
        first time.

        Args:
            batch: Micro-batch on the devices.
            metric_accumulator: Function that computes the metric sums of a micro-batch.
            totals: Totals of the previous micro-batches, keyed by metric name. Empty for the first
                micro-batch.

        Returns:
            The new totals, keyed by metric name, as tensors on the devices.
        """
        self.model.eval()
        sums: dict[str, Tensor] = self._call_with_compute_copies(
            partial(self.objective.measure_micro_batch, self.model, batch, metric_accumulator)
        )
        self.model.train()
        # Start from zeros on the device, so that the first micro-batch has the same graph as the others.
        totals = dict(totals) or {
            name: self.layout.replicate(zero) for name, zero in build_zero_totals(sums).items()
        }
        totals = compute_new_totals(totals, sums)
        for total in totals.values():
            unsharded = self.layout.to_op_sharding(self.layout.get_replicated_spec(total.dim()))
            xla.mark_sharding(total, unsharded)
        self.graphs.run(metric_accumulator.pass_name, list(totals.values()))
        return totals

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, *, max_new_tokens: int, seed: int, image_columns: Batch | None = None
    ) -> Tensor:
        """Sample a continuation of a prompt.

        The prompt is first padded to the length of the result. Each token then needs a forward pass
        over the full padded length, but only one graph is compiled. Tokens are sampled with
        temperature 0.8 and top-k 50. Sampling does not stop at an end-of-sequence token.

        Args:
            prompt: Token ids ``[1, length]`` on the CPU.
            max_new_tokens: Number of tokens to sample.
            seed: Random seed for sampling.
            image_columns: Always None, because this backend does not support images.

        Returns:
            Token ids ``[1, length + max_new_tokens]`` on the CPU.
        """
        self.model.eval()

        def compute_logits(tokens: Tensor) -> Tensor:
            passed: Tensor = self._call_with_compute_copies(
                lambda: self.model(input_ids=tokens, use_cache=False).logits
            )
            return passed

        tokens = sample_continuation(prompt, max_new_tokens, seed, compute_logits, self.layout, self.graphs)
        self.model.train()
        result: Tensor = self.layout.read_to_cpu([tokens])[0][:1]
        return result

    # -- weights and checkpoints -------------------------------------------------------------------------

    def swap_ema_weights(self) -> None:
        """Swap the weights with their exponential moving averages.

        A second call swaps them back. This method waits until the devices have completed the swap.
        Parameters without an average are not changed.
        """
        state = self._optimizer.get_state_tensors()
        swap_weights_and_averages((self._parameters[name], values) for name, values in state.items())
        self.layout.cut_graph(wait=True)

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Load this host's shards of parameters and buffers, and initialize the optimizer state."""
        for name, tensor in self.device_parameters.get_state_tensors().items():
            self.device_parameters.fill_tensor(name, tensor, self._get_tensor_spec(name, tensor), weights)
        self._optimizer.initialize_state()

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the model weights and the optimizer state from a checkpoint."""
        stored = match_checkpoint_to_model(checkpoint, self.model)
        self.load_weights(stored.weights)
        self._optimizer.load_state(stored.optimizer, checkpoint.optimizer)

    def save_shards(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write this host's shards of weights and optimizer state in torch.distributed.checkpoint format.

        The shards are copied to the CPU before this method returns, so training can continue.

        Args:
            folder: Folder of the checkpoint.
            background: Whether to write in the background.

        Returns:
            Handle for waiting until the files are written.
        """
        state = stage_checkpoint_state(
            self.layout, self.device_parameters, self._optimizer, self._learning_rate
        )
        return self._saver.save(state, folder, background=background)


class _EngineCaller(FunctionalCaller):
    """Module that lets the engine replace parameters and stacks during a function call.

    The tensors are replaced by ``torch.func.functional_call``, with the names from
    :meth:`get_call_name`. A stack is one tensor that holds the values of a parameter in all
    repetitions of the layer pattern, if a compiled loop runs several layers. For example, one stack
    contains the weights of the first norm of each layer, if all layers have the same structure.
    Stacks are parameters of this module, and :meth:`get_stack` returns their current values.

    Args:
        model: Model that the functions call.
        device_parameters: Parameters of the model on the devices, including the stacks.
    """

    def __init__(self, model: nn.Module, device_parameters: DeviceParameters) -> None:
        super().__init__(model)
        self._stack_attributes = {
            name: f"stack{attribute}" for attribute, name in enumerate(device_parameters.stacks)
        }
        for name, attribute in self._stack_attributes.items():
            self.register_parameter(attribute, device_parameters.by_name[name])

    def get_call_name(self, name: str) -> str:
        """Return the name that ``functional_call`` uses for a tensor of the engine."""
        return self._stack_attributes.get(name, f"module.{name}")

    def get_stack(self, name: str) -> Tensor:
        """Return the current value of a stack.

        A stack is one tensor that holds the same parameter of several layers. During a
        ``torch.func.functional_call`` that replaces the stack, this method returns the replacement.

        Args:
            name: Name of the stack, which is the name of its first parameter.
        """
        value: Tensor = getattr(self, self._stack_attributes[name])
        return value


def _check_router_loss_support(segments: list[LayerSegment], *, recomputed: bool) -> None:
    """Raise UserError if the engine does not support a router loss with the current settings.

    Recomputed layers would not pass on the gradient of a router loss. Layers in a loop do not
    return the outputs of their routers. Call this function only if the model has a router loss.

    Args:
        segments: Segments whose layers run in a loop. Must be empty.
        recomputed: Whether layers are recomputed in the backward pass. Must be False.
    """
    require(
        not recomputed,
        "memory.activation_checkpointing: on XLA, the router loss has no gradient through recomputed "
        "layers; set memory.activation_checkpointing to none, or set model.config.output_router_logits to "
        "false",
    )
    require(
        not segments,
        "xla.scan_layers: the router loss needs the output of every layer's router, which a loop does not "
        "return; set xla.scan_layers or model.config.output_router_logits to false",
    )


def _insert_barrier(_: nn.Module, gradients: Any, __: Any) -> None:
    """Prevent the compiler from interleaving the backward passes of layers. This is a backward hook."""
    xla.barrier_([gradient for gradient in gradients if gradient is not None])
