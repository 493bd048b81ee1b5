"""A model in training under SPMD: each step is traced lazily, compiled once, and run as one graph."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable.checkpoint.match_to_model import stored_state
from portable.errors import require
from portable.model.layers import transformer_layers
from portable.model.loss import Objective, added
from portable.model.parameters import replace_tensors, state_tensors
from portable.optim.non_finite import NEW_COUNTERS, Health, allowed_streak, count_update
from tpu.activation_checkpointing import recompute
from tpu.checks import GATHERED_ONCE, recomputed
from tpu.layout import constrain
from tpu.optim import Optimizer
from tpu.runtime import xla
from tpu.saving import Saver, Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from converters import Checkpoint
    from portable.backend import Batch, SaveHandle
    from portable.config import RunConfig
    from portable.model.loss import Measure
    from portable.model.tensors import ReadableTensor
    from tpu.graphs import Graphs
    from tpu.layout import Layout, Spec

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

    def __init__(self, model: nn.Module, config: RunConfig, layout: Layout, graphs: Graphs) -> None:
        self.model = model
        self._layout = layout
        self.graphs = graphs
        self._compute = DTYPES[config.precision]
        buffers = config.xla.buffer_dtype
        self._buffer_dtype = None if buffers is None else DTYPES[buffers]
        self._gather_once = config.strategy in GATHERED_ONCE
        self._place(model)
        self._constrain_activations(model)
        for _, layer in transformer_layers(model):
            if recomputed(config):
                recompute(layer)
            if config.xla.optimization_barrier_in_backward:
                layer.register_full_backward_hook(_barrier)
        self._objective = Objective(model, config.train.global_batch_size)
        require(
            not (self._objective.of_routers and recomputed(config)),
            "memory.activation_checkpointing: on XLA, the router loss has no gradient through recomputed "
            "layers; use none, or set output_router_logits: false in the model's config",
        )
        self._caller = _Caller(model)
        self._parameters = dict(model.named_parameters())
        ends: Any = model
        self._head = getattr(ends.get_output_embeddings(), "weight", None) if layout.shards else None
        self._optimizer = Optimizer(config.train, model, layout)
        self._rate = config.train.learning_rate
        self._accumulated: dict[str, Tensor] | None = None
        self._saver = Saver()
        self._limit = allowed_streak(config.train.on_non_finite)
        self._account = layout.whole(torch.tensor(NEW_COUNTERS))

    # -- setting up --------------------------------------------------------------------------------------

    def _place(self, model: nn.Module) -> None:
        """Allocate the meta-device model: each device its shards, the host one shard at a time."""
        layout = self._layout

        def parameter(name: str, meta: nn.Parameter) -> nn.Parameter:
            placed = layout.zeros(meta.shape, meta.dtype, layout.parameter(name, meta.shape))
            return nn.Parameter(placed, requires_grad=meta.requires_grad)

        def buffer(name: str, value: Tensor) -> Tensor:
            return layout.whole(value)

        replace_tensors(model, parameter, buffer)
        layout.check_rules()

    def _constrain_activations(self, model: nn.Module) -> None:
        """Keep activations and logits sharded along the batch. Propagation from the parameters would choose
        otherwise: with a tied table, each device would hold the logits of all tokens."""
        whole: Any = model
        layers = [layer for _, layer in transformer_layers(model)]
        for layer in layers:  # the first input may be a sum with a replicated tensor
            layer.register_forward_pre_hook(self._constrain_input)
        for module in (*layers, whole.get_input_embeddings(), whole.get_output_embeddings()):
            if module is not None:
                module.register_forward_hook(self._constrain_output)

    def _constrain_input(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._along_batch(arguments[0]), *arguments[1:]) if arguments else arguments

    def _constrain_output(self, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._along_batch(output[0]), *output[1:])
        return self._along_batch(output)

    def _along_batch(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            return tensor
        sharding = self._layout.sharding(self._layout.batch(tensor.dim()))
        return constrain(tensor, sharding, sharding)

    # -- the step ----------------------------------------------------------------------------------------

    def accumulate(self, batch: Batch, valid: Tensor, *, last: bool) -> Tensor:
        def passes() -> Tensor:
            loss = self._objective(self.model, batch, valid)
            loss.backward()
            return loss.detach()

        with self.graphs.recording():
            loss: Tensor = self._with_compute_copies(passes)
        if not last or self._accumulated is not None:
            self._add_gradients()
            self.graphs.run("micro-batch", [loss, *(self._accumulated or {}).values()])
        return loss

    def _add_gradients(self) -> None:
        """Add this micro-batch's gradients to those accumulated on the devices."""
        gradients = self._take_gradients()
        if self._accumulated is None:
            self._accumulated = {
                name: self._layout.zeros(gradient.shape, gradient.dtype, self._spec_of(name, gradient))
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
                xla._xla_mark_sharding(gradient, self._layout.sharding(self._spec_of(name, gradient)))
                gradients[name] = gradient
        return gradients

    def _spec_of(self, name: str, tensor: Tensor) -> Spec:
        return self._layout.parameter(name, tensor.shape)

    def _spec(self, name: str, tensor: Tensor) -> Spec:
        if isinstance(tensor, nn.Parameter):
            return self._spec_of(name, tensor)
        return self._layout.replicated(tensor.dim())

    def update(
        self,
        learning_rate: float,
        max_norm: float,
        loss: Tensor,
        *,
        betas: tuple[float, float] | None = None,
    ) -> Tensor:
        # betas are constants of the graph: the backend refuses a schedule that changes them.
        self._rate = learning_rate
        norm = self._updated(self._layout.whole(torch.tensor(learning_rate)), max_norm, loss)
        self.graphs.run("step" if self._accumulated is None else "update", [loss, norm, self._account])
        return norm

    @torch.no_grad()
    def _updated(self, rate: Tensor, max_norm: float, loss: Tensor) -> Tensor:
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
        if not copies:
            return function()
        return torch.func.functional_call(self._caller, copies, (function,))

    def _compute_copies(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            copy: Tensor = parameter
            if parameter.is_floating_point() and parameter.dtype != self._compute:
                copy = parameter.to(self._compute)
            if self._gather_once or parameter is self._head:
                whole = self._layout.sharding(self._layout.replicated(parameter.dim()))
                cut = self._layout.sharding(self._layout.parameter(name, parameter.shape))
                # The head's gradient is reduced unsharded: a shard would need the gradients of all logits.
                copy = constrain(copy, whole, whole if parameter is self._head else cut)
            if copy is not parameter:
                yield f"model.{name}", copy
        if self._buffer_dtype is not None:
            for name, buffer in self.model.named_buffers():
                if buffer.is_floating_point():
                    yield f"model.{name}", buffer.to(self._buffer_dtype)

    def health(self) -> Health:
        return Health.of(xla._xla_get_cpu_tensors([self._account])[0].tolist(), self._limit)

    def unsound_gradients(self) -> list[str]:
        present = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        gradients = present if self._accumulated is None else self._accumulated
        sound = xla._xla_get_cpu_tensors([torch.isfinite(gradient).all() for gradient in gradients.values()])
        return [name for name, finite in zip(gradients, sound, strict=True) if not finite]

    @torch.no_grad()
    def evaluate(self, batch: Batch, measure: Measure, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.model.eval()
        sums: dict[str, Tensor] = self._with_compute_copies(
            partial(self._objective.evaluated, self.model, batch, measure)
        )
        self.model.train()
        self.graphs.run(measure.kind, list(sums.values()))
        # Added in a graph of its own, which is small: the first micro-batch has no totals yet.
        first, totals = not totals, added(totals, sums)
        kind = f"{'first ' * first}{measure.kind} total"
        self.graphs.run(kind, list(totals.values()))
        return totals

    @torch.no_grad()
    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        """See the protocol. One graph over the full length samples every token: one compilation."""
        self.model.eval()
        start = prompt.shape[1]
        padded = torch.nn.functional.pad(prompt, (0, max_new_tokens))
        # One identical row per device: activations are sharded along the batch.
        tokens = self._layout.whole(padded.repeat(self._layout.devices, 1))
        draws = torch.Generator().manual_seed(seed)
        for position in range(start, start + max_new_tokens):
            noise = -torch.log(-torch.log(torch.rand(1, 50, generator=draws).clamp(1e-9, 1 - 1e-7)))
            tokens = self._with_sampled_token(tokens, self._layout.whole(torch.tensor([position])), noise)
            self.graphs.run("sampled token", [tokens])
        self.model.train()
        result: Tensor = xla._xla_get_cpu_tensors([tokens])[0][:1]
        return result

    def _with_sampled_token(self, tokens: Tensor, position: Tensor, noise: Tensor) -> Tensor:
        """``tokens`` with a sampled token at ``position``: temperature 0.8, top-k 50."""
        logits = self._with_compute_copies(lambda: self.model(input_ids=tokens, use_cache=False).logits)
        before = logits.index_select(1, position - 1).squeeze(1).float()
        top = torch.topk(before, min(noise.shape[1], before.shape[1]))
        chosen = (top.values / 0.8 + self._layout.whole(noise)[:, : top.values.shape[1]]).argmax(
            dim=1, keepdim=True
        )
        drawn = top.indices.gather(1, chosen)
        here = torch.arange(tokens.shape[1], device=tokens.device)[None, :] == position
        extended = torch.where(here, drawn, tokens)
        xla._xla_mark_sharding(extended, self._layout.sharding(self._layout.replicated(2)))
        return extended

    # -- weights and checkpoints -------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        for name, tensor in state_tensors(self.model).items():
            if name in weights:
                self._layout.fill(tensor, self._spec(name, tensor), weights[name])

    def load(self, checkpoint: Checkpoint) -> None:
        stored = stored_state(checkpoint, self.model)
        self.load_weights(stored.weights)
        self._optimizer.load(stored.optimizer)

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        steps = self._optimizer.steps()
        moments = {
            name: {**self._staged(tensors), **({"step": steps[name]} if name in steps else {})}
            for name, tensors in self._optimizer.tensors().items()
        }
        state = {
            "model": self._staged(state_tensors(self.model)),
            "optim": {"state": moments, "param_groups": self._optimizer.groups(self._rate)},
        }
        return self._saver.save(state, folder, background=background)

    def _staged(self, tensors: Mapping[str, Tensor]) -> dict[str, Staged]:
        if not tensors:
            return {}
        shards = self._layout.local_shards(list(tensors.values()))
        return {
            name: Staged(tensor.shape, tensor.dtype, parts)
            for (name, tensor), parts in zip(tensors.items(), shards, strict=True)
        }


class _Caller(nn.Module):
    """A module around the model, so that ``functional_call`` can replace its tensors around any function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


def _barrier(_: nn.Module, gradients: Any, __: Any) -> None:
    """Keep the compiler from interleaving the backward passes of layers."""
    xla._xla_optimization_barrier_([gradient for gradient in gradients if gradient is not None])
